"""The explorer shows what the toolkit computes, and says a schedule in ways that mean the same."""

import gzip
import json
import re
import shlex
import subprocess
import sys
from base64 import b64decode
from xml.etree import ElementTree

import pytest
from hydra import compose, initialize_config_dir

import toolkit.schedule
from tests.cli.test_presets import CONF
from toolkit.cli import build_schedule, schema
from toolkit.cli.check_options import check_given
from toolkit.cli.help import choices
from toolkit.cost import UNIT, Hardware, StageCost, simulate, unit_costs
from toolkit.figures.explorer import ScheduleSpec
from toolkit.figures.explorer.inspection import analyse, predict, verdict
from toolkit.figures.explorer.op_texts import texts, waits
from toolkit.figures.explorer.page import draw, frame_of, steps
from toolkit.figures.explorer.picture import in_seconds, in_slots
from toolkit.figures.explorer.site import site_page
from toolkit.schedule import RandomDelay, steady_state
from toolkit.schedule.catalog import METHODS
from toolkit.schedule.plain_options import RANK_ORDERS
from toolkit.schedule.steady_state import footprint

OURS = ScheduleSpec(RANK_ORDERS, orders=("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"))
SPECS = [
    *(ScheduleSpec(name, 4, 8) for name in METHODS),
    ScheduleSpec("cdp_v2", 3, 6),
    ScheduleSpec("cdp_v2", 4, 4, delay=1, placement="one", state="sharded"),
    ScheduleSpec("dp", 2, 3, delay=2, placement="per_stage_and_microbatch"),
    ScheduleSpec("zero_dp", 3, 3, state="replicated"),
    ScheduleSpec("interleaved_1f1b", 8, 8, n_ranks=4),
    ScheduleSpec("zero_cdp_v1", 3, 3, accumulate=2),
    ScheduleSpec("cdp_v1", 2, 4, chains="rotated"),
    ScheduleSpec("cdp_v2", 2, 4, groups=2, placement="one"),
    ScheduleSpec("pipedream_2bw", 3, 3, correction="extrapolate"),
    ScheduleSpec("dp", 2, 3, delay=[1, 2]),
    ScheduleSpec("cdp_v1", 2, 2, delay=[[1, 2], [2, 1]]),
    ScheduleSpec("dp", 2, 2, delay=RandomDelay("geometric", most=4, p=0.5, seed=3)),
]
SVG = "{http://www.w3.org/2000/svg}"


def drawn(spec, n_steps=2):
    """The drawing, as XML."""
    picture = in_slots(analyse(spec, n_steps))
    return ElementTree.fromstring(f"<page>{draw(picture, frame_of([picture]))}</page>")


def made(line):
    return eval(line, vars(toolkit.schedule))


def composed(overrides, experiment="simulate"):
    schema.register()
    given = shlex.split(overrides)
    check_given(experiment, given)
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return build_schedule(compose(experiment, given).schedule)


def test_the_schedules_are_the_choices_of_the_configuration():
    assert sorted(METHODS) == sorted(choices([CONF], "schedule"))


@pytest.mark.parametrize("spec", SPECS, ids=ScheduleSpec.python)
def test_a_line_of_python_and_overrides_make_the_same_schedule(spec):
    schedule = spec.build()
    assert made(spec.python()) == schedule == composed(spec.overrides())
    if spec.delay is None or isinstance(spec.delay, int):
        assert ScheduleSpec.of(schedule).build() == schedule


@pytest.mark.parametrize(
    ("spec", "python", "overrides"),
    [
        (
            ScheduleSpec("cdp_v2", delay="freshest", state="replicated"),
            "cyclic(n=4, n_stages=4)",
            "",
        ),
        (ScheduleSpec("dp", accumulate=1), "data_parallel(n=4, n_stages=4)", ""),
        (
            ScheduleSpec("cdp_v1", 3, 6, placement="one", correction="extrapolate"),
            "cyclic(n=6, delay=1, placement='one', n_stages=3, correction='extrapolate')",
            " schedule.correction=extrapolate schedule.placement=one",
        ),
    ],
)
def test_lines_are_as_short_as_they_can_be(spec, python, overrides):
    sizes = f"stages={spec.stages} microbatches={spec.microbatches}"
    assert spec.python() == f"catalog.{python}"
    assert spec.overrides() == f"schedule={spec.method} {sizes}{overrides}"
    assert composed(spec.overrides(), "train") == spec.build()


@pytest.mark.parametrize("spec", [*SPECS, OURS], ids=ScheduleSpec.python)
def test_every_op_is_drawn_once_in_its_place(spec):
    """A row: the ops that it names; of each cell its colour, place, stage and staleness."""
    schedule, n_steps = spec.build(), 2
    program = schedule.lower(n_steps)
    what = "micro-batch" if schedule.layout.name == "one" else "rank"
    page = drawn(spec, n_steps)
    (slot,) = {float(r.get("width")) + 1 for r in page.iter(f"{SVG}rect") if r.get("x")}
    name = next(text.text for text in page.iter(f"{SVG}text"))
    assert name == ("mb 0" if what == "micro-batch" else "rank 0")
    expected = {}
    for rank, instructions in enumerate(program.ranks):
        for i in sorted(instructions, key=lambda i: i.tick):
            if i.action.computes:
                stale = schedule.delays(i.step)[i.stage][i.microbatch] > 0
                x = i.tick / schedule.timing.ticks_per_slot * slot + 0.5
                cell = (
                    f"cdp-{i.action.name.lower()}",
                    pytest.approx(x, abs=0.6),
                    i.stage,
                    stale,
                )
                row = i.microbatch if what == "micro-batch" else rank
                expected.setdefault(f"{what} {row}", []).append((str(i.op), cell))
    found = [row for row in page.iter(f"{SVG}g") if row.get("class") == "cdp-row"]
    assert [row.get("aria-label") for row in found] == [
        f"{name}: {' '.join(op for op, _ in cells)}"
        for name, cells in sorted(expected.items())
    ]
    for row, (_, cells) in zip(found, sorted(expected.items()), strict=True):
        assert [cell for _, cell in cells] == [
            (
                cell.get("class").split()[1],
                float(cell.find(f"{SVG}rect").get("x")),
                int(cell.find(f"{SVG}text").text),
                cell.find(f"{SVG}path") is not None,
            )
            for cell in row
        ]


def test_charts_have_the_heights_that_the_program_counts():
    assert (
        steps([(0, 1), (1, 3), (2, 0)], end=3, width=10, scale=5)
        == "M0 0V-5H10V-15H20V0H30V0Z"
    )
    page = drawn(ScheduleSpec("dp", 2, 2), n_steps=1)
    paths = {path.get("class"): path.get("d") for path in page.iter(f"{SVG}path")}
    _, *levels = paths["cdp-memory"].split("V")[:-1]
    per_slot = [-float(level.split("H")[0]) for level in levels]
    assert max(per_slot) == pytest.approx(62)  # the room of a chart
    assert per_slot == pytest.approx(
        [x / 2 * max(per_slot) for x in (1, 2, 2, 1)], abs=0.02
    )
    said = " ".join(text.text for text in page.iter(f"{SVG}text"))
    assert "peak 2 micro-batches" in said
    assert "most 2 stage-parameters a slot" in said


def test_drawings_side_by_side_have_one_scale():
    """Memory of 2.5 is not drawn as high as memory of 4, nor 24 slots as long as 30."""
    pictures = [
        in_slots(analyse(ScheduleSpec(name, 4, 4), 3)) for name in ("dp", "cdp_v2")
    ]
    frame = frame_of(pictures)
    assert (frame.end, frame.memory, frame.sent) == (30, 4, 6)
    tops, widths = [], set()
    for picture in pictures:
        svg = ElementTree.fromstring(draw(picture, frame))[0]
        widths.add(svg.get("viewBox").split()[2])
        (path,) = [p for p in svg.iter(f"{SVG}path") if p.get("class") == "cdp-memory"]
        tops.append(
            min(float(word.split("H")[0]) for word in path.get("d").split("V")[1:-1])
        )
    assert len(widths) == 1
    assert tops[1] / tops[0] == pytest.approx(2.5 / 4, abs=0.01)
    for n, slot in ((8, 8), (16, 13)):  # 16 are scrolled, with room for two digits
        pair = [
            in_slots(analyse(ScheduleSpec(name, n, n), 3)) for name in ("cdp_v2", "dp")
        ]
        assert frame_of(pair).scale == slot


def test_a_model_on_a_machine_is_drawn_in_seconds_and_bytes():
    """Some steady steps: each op as long as its stage takes, and what a rank holds and sends."""
    costs = [StageCost(1, 3, activation_bytes=2.0**20, parameter_bytes=2.0**20)] * 4
    slow, found = Hardware("slow", 1.0, 2.0**40, 2.0**18), []
    for name in ("cdp_v2", "dp"):
        analysis = analyse(ScheduleSpec(name, 4, 4), 2)
        found.append((analysis, predict(analysis, costs, slow)))
    dp = in_seconds(*found[1])
    assert {round(cell.end - cell.start, 2) for cell in dp.cells} == {1, 3}
    assert len(dp.cells) == 2 * 32
    assert dp.end == pytest.approx(2 * found[1][1].step_time)
    assert max(value for _, value in dp.memory.curve) == found[1][1].peak_memory()
    assert (dp.axis, [*dp.ticks(10)][:2]) == ((1.0, "s"), [(0, "0"), (5, "5")])
    said = verdict(*found, in_slots=False)
    for part in (
        "CDP-v2 compared with DP",
        "times as long",
        "MiB saved on all ranks",
        "38%",
        "1 step",
    ):
        assert part in said
    assert "fresh" in verdict(found[1], found[1], in_slots=True)


def test_an_op_waits_for_its_rank_its_input_and_its_weights():
    program = analyse(ScheduleSpec("cdp_v2", 2, 2), 2).drawn
    found = {
        (str(i.op), i.step): {(str(o.op), o.step) for o in others}
        for i, others in waits(program).items()
    }
    assert found["0F0", 0] == set()
    assert found["1F0", 0] == {("0F0", 0)}
    assert found["0B0", 0] == {("0F0", 0), ("1B0", 0)}
    assert found["0F0", 1] == {("0B0", 0)}  # its weights are those of the first step
    assert found["1F1", 1] == {("0F1", 1), ("1B1", 0)}


def test_the_page_of_the_site_has_every_schedule_and_verdict():
    page = site_page(
        "cdp_v2",
        ["dp", "cdp_v1", "cdp_v2", "gpipe", "one_f_one_b", "zero_dp"],
        [2],
        ["uniform"],
    )
    packed = json.loads(re.search('id="cdp-data">(.*?)</script>', page)[1])["2/uniform"]
    text = {
        name: gzip.decompress(b64decode(value)).decode()
        for name, value in packed.items()
    }
    assert {name for name in text if " " not in name} == {*METHODS}
    assert "catalog.gpipe(" in text["gpipe"]
    assert text["cdp_v2 dp"].startswith("CDP-v2 compared with DP: ")
    assert 'role="alert"' in text["hanayo"]  # it needs more micro-batches


def test_an_op_says_what_it_waits_for_and_frees():
    def said(spec, op, n_steps=2):
        found = texts(analyse(spec, n_steps).drawn)
        return next(text for i, text in found.items() if (str(i.op), i.step) == (op, 0))

    assert said(ScheduleSpec("cdp_v2", 2, 2), "0B0").splitlines() == [
        "0B0 of step 0: backward of stage 0 on micro-batch 0; rank 0, slot 3; weights 0 (the"
        " newest)",
        "waits for: 0F0 of step 0; 1B0 of step 0",
        "frees: activation stage 0 microbatch 0 step 0",
    ]
    assert "keeps its activations until slot 5" in said(
        ScheduleSpec("gpipe", 2, 2), "1F1"
    )
    # Weights come anew for each op.
    sharded = said(ScheduleSpec("zero_cdp_v2", 4, 4), "1B1", 3)
    assert "weights stage 1 version 0 from rank 3" in sharded
    assert (
        "frees: activation stage 1 microbatch 1 step 0; weights stage 1 version 0"
        in sharded
    )
    assert "broadcast weights" in said(ScheduleSpec("zero_dp", 4, 4), "1F0")


@pytest.mark.parametrize(
    "spec", [ScheduleSpec("zero_bubble", 3, 4), ScheduleSpec("cdp_v1", 3, 3)]
)
def test_hover_text_agrees_with_the_program(spec):
    """Each activation is freed by one op, and each message of a boundary is waited for by one."""
    text = "\n".join(title.text for title in drawn(spec).iter(f"{SVG}title"))
    instructions = [str(i) for rank in analyse(spec, 2).drawn.ranks for i in rank]
    frees = sum(i.startswith("FREE activation") for i in instructions)
    receives = sum(i.startswith("RECV activation") for i in instructions)
    assert text.count("frees: activation stage") == frees
    assert (
        len(re.findall("activation (?:gradient )?stage [^;]* from rank", text))
        == receives
    )


def numbers_of(spec):
    """Key numbers by name, as (value, unit), of uniform stages."""
    analysis = analyse(spec, 1)
    timeline = predict(analysis, unit_costs(spec.stages), UNIT)
    return {
        n.name: (n.value, n.unit) for n in analysis.numbers(timeline, in_slots=True)
    }


@pytest.mark.parametrize(
    ("spec", "peak"),
    [
        (ScheduleSpec("dp"), 4),
        (ScheduleSpec("cdp_v1"), 2.5),
        (ScheduleSpec("cdp_v2", correction="extrapolate"), 2.5),
        (ScheduleSpec("cdp_v2", placement="per_stage"), 2.5),
        (ScheduleSpec("zero_dp"), 4),
        (ScheduleSpec("gpipe"), 4),
    ],
)
def test_key_numbers_are_those_of_the_steady_state(spec, peak):
    schedule = spec.build()
    steady, busy = (
        steady_state(schedule),
        len(schedule.timing.starts) / schedule.n_ranks,
    )
    found, sent = numbers_of(spec), steady.units_by_slot
    assert found["step time"][1] == "slots"
    assert {k: float(value) for k, (value, _) in found.items()} == {
        "ranks": schedule.n_ranks,
        "peak activations": peak,
        "of the fullest rank": max(map(max, steady.activations)) / 4,
        "weights of the fullest rank": pytest.approx(
            float(footprint(schedule).weights), rel=1e-3
        ),
        "mean staleness": pytest.approx(schedule.mean_staleness, rel=1e-2),
        "largest staleness": schedule.max_staleness,
        "mean sent in a slot": pytest.approx(float(sum(sent)) / len(sent), rel=1e-3),
        "most sent in a slot": max(sent),
        "step time": schedule.period,
        "idle": pytest.approx(100 * (1 - busy / schedule.period), abs=0.05),
    }


@pytest.mark.parametrize("placement", ["one", "per_stage"])
def test_the_step_time_is_that_of_the_steady_state(placement):
    """Though the last step ends early."""
    assert (
        numbers_of(ScheduleSpec("zero_bubble", 3, 3))["step time"][1]
        == "slots, half a backward 0.5"
    )
    analysis = analyse(ScheduleSpec("cdp_v2", 8, 8, placement=placement), 1)
    busy = len(analysis.schedule.timing.starts) / analysis.schedule.n_ranks
    assert predict(analysis, unit_costs(8), UNIT).step_time == max(16, busy)


@pytest.mark.parametrize(("n", "bandwidth"), [(4, 0.25), (6, 0.25)])
def test_where_messages_take_time_the_first_steps_do_not_count(n, bandwidth):
    """They are not as long as those of a long training."""
    analysis = analyse(ScheduleSpec("zero_cdp_v1", n, n), 1)
    costs = [
        StageCost(1 + j / 4, 2 + j / 2, parameter_bytes=1.0 + 3 * j) for j in range(n)
    ]
    slow = Hardware("slow", 1.0, 1.0, bandwidth)
    found = predict(analysis, costs, slow).step_time
    long = simulate(analysis.schedule.lower(60), costs, slow).step_time
    assert found == pytest.approx(long, 0.02)
    assert simulate(analysis.schedule.lower(3), costs, slow).step_time > 1.15 * found


def test_widgets_load_with_the_explorer_only():
    code = "import sys, toolkit.figures; print('ipywidgets' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "False"


def test_a_sentence_says_why_an_op_starts_no_earlier():
    spec = ScheduleSpec("cdp_v2", 2, 2)
    analysis = analyse(spec, 2)
    reasons = {
        str(i.op) + f" of step {i.step}": text
        for i, text in in_slots(analysis).reasons().items()
    }
    assert reasons["0F0 of step 0"] == "It waits for no op in the drawing."
    assert (
        reasons["1F0 of step 0"] == "It waits for what 0F0 of step 0 makes, on rank 0."
    )
    assert (
        reasons["0F1 of step 1"]
        == "It waits for its rank, which runs 0B1 of step 0 until then."
    )
    parallel = analyse(
        ScheduleSpec("dp", 2, 2, placement="per_stage_and_microbatch"), 2
    )
    weights = [
        text for text in in_slots(parallel).reasons().values() if "weights" in text
    ]
    assert weights
    pattern = r".* weights \d of stage \d: .* of \dB\d of step \d, on rank \d\."
    assert all(re.fullmatch(pattern, text) for text in weights)
    ethernet = Hardware("slow", 1.0, 1.0, 0.25)
    timeline = predict(analysis, unit_costs(2), ethernet)
    texts_in_seconds = in_seconds(analysis, timeline).reasons().values()
    assert any("Messages and updates take" in text for text in texts_in_seconds)
