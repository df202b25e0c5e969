"""A report's sections, for every output alike."""

from math import nan, sqrt

import pytest

from tests.results import folders
from toolkit.files import write_json
from toolkit.format import DASH
from toolkit.results import paired_difference
from toolkit.results.report import SECTIONS, build_report
from toolkit.results.report_page import Command, Figure, Page, Table, Text
from toolkit.results.runs import read_runs

FOLDER = {"_target_": "toolkit.training.data.image_folder"}


def built(path):
    return build_report(read_runs([path]), "Title")


def blocks(report, section, kind):
    """The blocks of a kind in a section."""
    found = next(s for s in report.sections if s.title == section)
    return [block for block in found.blocks if isinstance(block, kind)]


def table(report, section, caption):
    """The rows of the table whose caption has these words."""
    return next(t.rows for t in blocks(report, section, Table) if caption in t.caption)


def texts(report, section):
    return " ".join(block.text for block in blocks(report, section, Text))


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Three rules with three seeds; one run more has failed, one is damaged."""
    path = tmp_path_factory.mktemp("sweep")
    tops = {"dp": (0.9, 0.92, 0.91), "cdp_v1": (0.8, 0.85, 0.81), "cdp_v2": (0.89, 0.92, 0.92)}
    jobs = [(rule, seed, top) for rule, of_rule in tops.items() for seed, top in enumerate(of_rule)]
    command = "python experiments/train.py -m seed=0,1,2 hydra.sweep.dir=/home/me/x"
    for number, (rule, seed, top) in enumerate(jobs):
        sizes = {"stages": 4, "microbatches": 4}
        folders.train(path / str(number), rule, seed, top, command, **sizes)
    options = folders.config(schedule=folders.schedule("cdp_v2", 4), seed=3, **sizes)
    folders.job(path / "9", options, status={"state": "failed", "message": "the loss is NaN"})
    folders.train(path / "10")
    (path / "10" / "result.json").write_text("{")
    folders.measured(path / "6")
    return path


@pytest.fixture(scope="module")
def report(sweep):
    return built(sweep)


def test_sections(report):
    assert report.title == "Title"
    assert tuple(section.title for section in report.sections) == SECTIONS
    for section in report.sections:
        assert section.blocks


def test_summary_names_unfinished_runs(report, sweep):
    assert texts(report, "Summary") == "11 runs: 9 finished, 1 failed, 1 damaged."
    (row,) = table(report, "Summary", "What was trained")
    assert (row["training"], row["rules"]) == ("resnet8 on digits", "DP, CDP-v1, CDP-v2")
    assert (row["micro-batches"], row["lr"], row["seeds"]) == ("4", "0.1", "4")
    failed, damaged = table(report, "Summary", "Not finished")
    assert failed["folder"] == str(sweep / "9")
    assert (failed["rule"], failed["seed"]) == ("CDP-v2", "3")
    assert (failed["state"], failed["reason"]) == ("failed", "the loss is NaN")
    assert damaged["reason"].startswith("result.json cannot be read")


def test_notes_are_shown_once(tmp_path):
    folders.compare(tmp_path / "a", {"dp": [0.9], "cdp_v1": [0.8]})
    path = tmp_path / "a" / "result.json"
    path.write_text(path.read_text().replace("{", '{"notes": ["steps differ"], ', 1))
    rows = table(built(tmp_path), "Summary", "Notes of the runs")
    assert rows == [{"folder": str(tmp_path / "a"), "note": "steps differ"}]


def test_differences_are_paired_by_seed_with_the_first_rule(report):
    dp, v1, v2 = table(report, "Accuracy", "accuracy after the last epoch")
    assert (dp["rule"], dp["seeds"], dp["accuracy (%)"]) == ("DP", "3", "91.00")
    assert (dp["sd"], dp["difference"], dp["95 % interval"]) == ("1.00", DASH, DASH)
    expected = paired_difference([80, 85, 81], [90, 92, 91])
    assert v1["difference"] == f"{expected.mean:+.2f}" == "-9.00"
    assert v1["95 % interval"] == f"± {expected.half_width:.2f}"
    assert expected.half_width == pytest.approx(4.302653 * sqrt(3) / sqrt(3), rel=1e-5)
    assert v2["difference"] == "+0.00"
    (figure,) = blocks(report, "Accuracy", Figure)
    assert "DP 91.0 %, CDP-v1 82.0 %, CDP-v2 91.0 %" in figure.alt
    assert len(figure.figure.axes[0].lines) == 3


def test_metric_is_that_of_the_result(tmp_path):
    result = folders.train(tmp_path / "0", data={"_target_": "mine.tokens"})
    write_json(tmp_path / "0" / "result.json", result | {"judged_by": "loss"})
    (row,) = table(built(tmp_path), "Accuracy", "loss after the last epoch")
    assert row["loss (nats)"] == "0.100"


@pytest.mark.parametrize("data", ["text", "token_files"])
def test_language_models_are_judged_by_their_loss(tmp_path, data):
    of_text = {"data": {"_target_": f"toolkit.training.data.{data}"}}
    folders.compare(tmp_path / "a", {"dp": [0.5, 0.7], "cdp_v1": [0.25, 0.375]}, **of_text)
    report = built(tmp_path)
    dp, v1 = table(report, "Accuracy", "loss after the last epoch, mean and standard deviation")
    assert (dp["loss (nats)"], dp["accuracy (%)"]) == ("0.400", "60.00")
    expected = paired_difference([0.75, 0.625], [0.5, 0.3])
    assert v1["difference"] == f"{expected.mean:+.3f}" == "+0.287"
    assert v1["95 % interval"] == f"± {expected.half_width:.3f}"
    (figure,) = blocks(report, "Accuracy", Figure)
    assert "test loss over epochs" in figure.alt
    assert "at the end DP 0.40 nats, CDP-v1 0.69 nats" in figure.alt
    assert figure.figure.axes[0].get_ylabel() == "test loss (nats)"
    (tmp_path / "a" / "runs.csv").unlink()
    dp, v1 = table(built(tmp_path), "Accuracy", "loss after the last epoch")
    assert (v1["loss (nats)"], v1["sd"], v1["accuracy (%)"]) == ("0.688", "0.125", "31.25")
    assert (v1["difference"], v1["95 % interval"]) == ("+0.250", "± 0.062")


def test_baseline_is_the_rule_without_delay(tmp_path):
    """Even if the options of a late rule do not say so."""
    folders.compare(tmp_path / "a", {"published": [0.8], "dp": [0.9], "cdp_v1": [0.7]})
    dp, published, v1 = table(built(tmp_path), "Accuracy", "the difference from DP")
    assert (dp["rule"], published["rule"], v1["rule"]) == ("DP", "CDP-v2 as published", "CDP-v1")
    assert (published["difference"], v1["difference"]) == ("-10.00", "-20.00")


def test_one_seed_has_no_interval(tmp_path):
    folders.compare(tmp_path / "a", {"dp": [0.9], "cdp_v1": [0.8]})
    report = built(tmp_path)
    _, v1 = table(report, "Accuracy", "accuracy after the last epoch")
    assert (v1["difference"], v1["95 % interval"], v1["sd"]) == ("-10.00", DASH, DASH)
    assert "Each rule ran with one seed: there is no spread" in texts(report, "Accuracy")


def test_only_shared_seeds_are_paired(tmp_path):
    for rule, seed, top in (("dp", 0, 0.5), ("dp", 1, 0.9), ("cdp_v1", 1, 0.8), ("cdp_v1", 2, 0.2)):
        folders.train(tmp_path / f"{rule}{seed}", rule, seed, top)
    report = built(tmp_path)
    rows = {row["rule"]: row for row in table(report, "Accuracy", "the difference from DP")}
    late = rows["CDP-v1"]
    assert (late["accuracy (%)"], late["difference"]) == ("50.00", "-10.00")
    assert late["95 % interval"] == DASH
    assert "CDP-v1: not the seeds of DP" in texts(report, "Accuracy")


def test_without_a_shared_seed_there_is_no_difference(tmp_path):
    for rule, seed in (("dp", 0), ("cdp_v1", 1)):
        folders.train(tmp_path / rule, rule, seed)
    _, late = table(built(tmp_path), "Accuracy", "the difference from DP")
    assert (late["difference"], late["95 % interval"]) == (DASH, DASH)


def test_memory_and_traffic_are_those_of_the_schedules(report):
    held = table(report, "Memory", "Activations that a schedule keeps")
    peaks = {row["schedule"]: row["peak, all ranks"] for row in held}
    assert peaks == {"DP": "4", "CDP-v1": "2.5", "CDP-v2": "2.5"}
    assert [row["steps late, mean"] for row in held] == ["0.00", "1.00", "0.38"]
    sent = table(report, "Communication", "in a slot of the steady state")
    slots = {row["schedule"]: (row["mean in a slot"], row["largest in a slot"]) for row in sent}
    assert slots == {"DP": ("3", "6"), "CDP-v1": ("3", "4"), "CDP-v2": ("3", "4")}
    grids = blocks(report, "Memory", Figure)
    assert len(grids) == 3
    for panel in (0, 1):  # on one scale, though each is a figure of its own
        axes = [grid.figure.axes[panel] for grid in grids]
        assert len({axis.get_xlim() for axis in axes}) == 1
    assert len({axis.get_ylim() for axis in axes}) == 1
    (explored,) = blocks(report, "Memory", Page)
    assert [name in explored.html for name in ("<h3>DP<", "<h3>CDP-v1<", "<h3>CDP-v2<")] == [
        True
    ] * 3
    assert explored.caption.endswith("what it frees")


def test_names_schedules_too_large_to_explore(tmp_path):
    for n in (2, 9):
        folders.train(tmp_path / str(n), stages=n, microbatches=n)
    (explored,) = blocks(built(tmp_path), "Memory", Page)
    assert explored.caption.endswith("what it frees (not DP, 9 stages, 9 micro-batches)")


def test_measurements_are_shown(report, sweep):
    first, second = table(report, "Memory", "as measured")
    assert (first["folder"], first["rank"], second["rank"]) == (str(sweep / "6"), "0", "1")
    assert (first["activations (MB)"], first["device (MB)"]) == ("2.000", DASH)
    first, _ = table(report, "Communication", "as measured")
    assert (first["messages sent"], first["MB sent"]) == ("2000000", "2.000")
    (figure,) = blocks(report, "Communication", Figure)
    assert figure.alt.startswith("Timeline of CDP-v2")
    assert figure.source.startswith("data:image/png;base64,")
    assert figure.pixels[0] == 2 * figure.pixels[1]


def test_commands_are_shown_once(report, sweep):
    (command,) = blocks(report, "Reproduce", Command)
    assert command.command == "python experiments/train.py -m seed=0,1,2"
    assert command.note == (
        f"9 runs in {sweep / '0'} and 8 more; commit 0123456789, with changes, python 3.11.7,"
        " torch 2.15.0, a processor, 2 threads"
    )


@pytest.mark.parametrize(
    "resumed", ["resume=/a/b", "'resume=/my runs/b'", "resume='/my runs/b'", "'hydra.run.dir=/a b'"]
)
def test_commands_have_no_folders_of_this_machine(tmp_path, resumed):
    """They repeat what was trained, from the start."""
    command = f"python experiments/train.py {resumed} seed=1"
    folders.train(tmp_path / "0", command=command)
    (found,) = blocks(built(tmp_path), "Reproduce", Command)
    assert found.command == "python experiments/train.py seed=1"


def test_diverged_runs_are_counted(tmp_path):
    folders.compare(tmp_path / "a", {"dp": [0.9, 0.8], "cdp_v1": [nan, nan], "cdp_v2": [nan, 0.95]})
    report = built(tmp_path)
    dp, v1, v2 = table(report, "Accuracy", "accuracy after the last epoch")
    assert [row["seeds"] for row in (dp, v1, v2)] == ["2", "0 (2 diverged)", "1 (1 diverged)"]
    assert [row["accuracy (%)"] for row in (dp, v1, v2)] == ["85.00", DASH, "95.00"]
    assert "Of CDP-v2 only one seed did not diverge" in texts(report, "Accuracy")
    assert "ran with one seed" not in texts(report, "Accuracy")


def test_settings_are_compared_within_themselves(tmp_path):
    """Rules by options, and one configuration on its own."""
    number = 0
    for lr in (0.1, 0.2):
        for rule in ("dp", "cdp_v2"):
            optimizer = {"_target_": "torch.optim.SGD", "lr": lr}
            top = 0.5 + lr + (0.1 if rule == "dp" else 0)
            folders.train(tmp_path / str(number), rule, top1=top, optimizer=optimizer)
            number += 1
    folders.train(tmp_path / "8", "cdp_v1", batch=32)
    report = built(tmp_path)
    for lr in (0.1, 0.2):
        _, v2 = table(report, "Accuracy", f"resnet8 on digits, lr {lr}: accuracy")
        assert v2["difference"] == "-10.00"
    (alone,) = table(report, "Accuracy", "other options: accuracy")
    assert (alone["rule"], alone["difference"]) == ("CDP-v1", DASH)


@pytest.mark.parametrize(
    "ways",
    [
        ({"num_workers": 1}, {"num_workers": 8, "prefetch_factor": 4}),
        ({"root": "/here/flowers"}, {"root": "/there/flowers/"}),
    ],
)
def test_options_that_change_no_result_are_ignored(tmp_path, ways):
    """Runs that read their data elsewhere or faster are compared, and averaged over seeds."""
    jobs = [("dp", 0, ways[0]), ("dp", 1, ways[1]), ("cdp_v2", 0, ways[1]), ("cdp_v2", 1, ways[0])]
    for number, (rule, seed, way) in enumerate(jobs):
        folders.train(tmp_path / str(number), rule, seed, data=FOLDER | way)
    rows = table(built(tmp_path), "Accuracy", "resnet8 on image_folder: accuracy")
    assert [(row["rule"], row["seeds"]) for row in rows] == [("DP", "2"), ("CDP-v2", "2")]


@pytest.mark.parametrize(
    ("options", "labels"),
    [
        ([{"data": FOLDER | {"root": f"/here/{name}"}} for name in ("flowers", "pets")],
         ["DP, root flowers", "DP, root pets"]),
        # They train alike, and differ in their speed.
        ([{"runtime": {"_target_": f"toolkit.runtime.{name}"}}
          for name in ("SingleProcess", "Distributed")],
         ["DP, runtime SingleProcess", "DP, runtime Distributed"]),
        ([{"optimizer": {"_target_": "torch.optim.SGD", "lr": lr}} for lr in (0.1, 0.2, 0.4)],
         ["DP, lr 0.1", "DP, lr 0.2", "DP, lr 0.4"]),
    ],
)  # fmt: skip
def test_a_sweep_of_options_is_one_comparison(tmp_path, options, labels):
    for number, own in enumerate(options):
        folders.train(tmp_path / str(number), top1=0.6 + number / 10, **own)
    rows = table(built(tmp_path), "Accuracy", "accuracy after the last epoch")
    assert [row["rule"] for row in rows] == labels
    differences = [row["difference"] for row in rows]
    assert differences == [DASH, "+10.00", "+20.00"][: len(labels)]


def test_many_curves_make_several_figures(tmp_path):
    for number in range(9):
        folders.train(tmp_path / str(number), batch=number + 1)
    figures = blocks(built(tmp_path), "Accuracy", Figure)
    assert [len(figure.figure.axes[0].lines) for figure in figures] == [7, 2]


def test_repeated_seed_counts_once(tmp_path):
    for name, top, year in (("a", 0.5, 2026), ("b", 0.7, 2025)):
        result = folders.train(tmp_path / name, top1=top)
        result["provenance"]["started"] = f"{year}-01-01T00:00:00+00:00"
        folders.write_json(tmp_path / name / "result.json", result)
    report = built(tmp_path)
    (row,) = table(report, "Accuracy", "accuracy after the last epoch")
    assert (row["seeds"], row["accuracy (%)"]) == ("1", "50.00")
    assert "1 run with the seed of another" in texts(report, "Accuracy")


def test_means_without_runs_are_shown(tmp_path):
    folders.compare(tmp_path / "a", {"dp": [0.9, 0.8], "cdp_v1": [0.7, 0.6]})
    (tmp_path / "a" / "runs.csv").unlink()
    report = built(tmp_path)
    dp, v1 = table(report, "Accuracy", "accuracy after the last epoch")
    assert (dp["seeds"], dp["accuracy (%)"], dp["sd"]) == ("2", "85.00", "0.50")
    assert (v1["difference"], v1["95 % interval"]) == ("-1.25", "± 0.75")
    assert "only means over seeds were kept" in texts(report, "Accuracy")


def test_delays_are_a_row_per_rule(tmp_path):
    folders.compare(tmp_path / "a", {"dp": [0.9, 0.8], "cdp_v1": [0.7, 0.6]})
    rows = table(built(tmp_path), "Accuracy", "What the delay does")
    assert rows[1] == {
        "rule": "CDP-v1",
        "steps late": "1.00",
        "moved": "1.00 %",
        "stage 0": "0.900",
        "stage 1": "0.910",
    }


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"_target_": "os.system"}, "'os.system' is not a schedule of the catalogue"),
        (folders.schedule("dp", 128), "it is too large to count"),
    ],
)
def test_names_schedules_that_cannot_be_shown(tmp_path, options, why):
    result = folders.train(tmp_path / "a")
    result["provenance"]["config"]["schedule"] = options
    folders.write_json(tmp_path / "a" / "result.json", result)
    report = built(tmp_path)
    assert f"The schedule of DP is left out: {why}." in texts(report, "Memory")
    assert "No run has a schedule." in texts(report, "Communication")


def test_a_damaged_result_is_named(tmp_path):
    result = folders.train(tmp_path / "a")
    folders.write_json(tmp_path / "a" / "result.json", result | {"metrics": []})
    report = built(tmp_path)
    (row,) = table(report, "Summary", "Not finished")
    assert (row["state"], row["rule"]) == ("damaged", "DP")
    assert texts(report, "Accuracy") == "No run has finished with an accuracy."


def test_a_training_without_a_schedule_is_left_out(tmp_path):
    result = folders.train(tmp_path / "a")
    del result["provenance"]["config"]["schedule"]
    folders.write_json(tmp_path / "a" / "result.json", result)
    (row,) = table(built(tmp_path), "Summary", "left out of tables and figures")
    assert row["folder"] == str(tmp_path / "a")
