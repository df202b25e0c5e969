"""A report's sections, for every output alike."""

import json
from math import nan

import pytest

from tests.results import folders
from toolkit.results import paired_difference
from toolkit.results.report import build_report
from toolkit.results.report_page import Command, Figure, Table, Text, to_html
from toolkit.results.runs import read_runs

FOLDER = {"_target_": "toolkit.training.data.image_folder"}
DIFFERENCE = "paired difference from DP"


def built(path):
    return build_report(read_runs([path]), "Title")


def blocks(report, section, kind):
    """The blocks of a kind in a section."""
    return [block for block in report.sections[section] if isinstance(block, kind)]


def table(report, section, column):
    """The rows of the first table with this column."""
    return next(t.rows for t in blocks(report, section, Table) if column in t.rows[0])


def final(report, *columns, metric="accuracy (%)"):
    """Columns of the table of final metrics, a tuple a row."""
    rows = table(report, "Accuracy", f"test {metric}")
    return [tuple(row[column] for column in columns) for row in rows]


def texts(report, section):
    return " ".join(block.text for block in blocks(report, section, Text))


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Three rules with three seeds; one run more has failed, one is damaged."""
    path = tmp_path_factory.mktemp("sweep")
    tops = {
        "dp": (0.9, 0.92, 0.91),
        "cdp_v1": (0.8, 0.85, 0.81),
        "cdp_v2": (0.89, 0.92, 0.92),
    }
    jobs = [
        (rule, seed, top)
        for rule, of_rule in tops.items()
        for seed, top in enumerate(of_rule)
    ]
    command = "python experiments/train.py -m seed=0,1,2 hydra.sweep.dir=/home/me/x"
    sizes = {"stages": 4, "microbatches": 4}
    for number, (rule, seed, top) in enumerate(jobs):
        folders.train(path / str(number), rule, seed, top, command, **sizes)
    options = folders.config(schedule=folders.schedule("cdp_v2", 4), seed=3, **sizes)
    folders.job(
        path / "9", options, status={"state": "failed", "message": "the loss is NaN"}
    )
    folders.train(path / "10")
    (path / "10" / "result.json").write_text("{")
    folders.measured(path / "6")
    return path


@pytest.fixture(scope="module")
def report(sweep):
    return built(sweep)


def test_summary_names_unfinished_runs(report, sweep):
    assert report.title == "Title"
    assert [*report.sections] == [
        "Summary",
        "Accuracy",
        "Memory",
        "Communication",
        "Reproduce",
    ]
    assert all(report.sections.values())
    *rules, states = (block.text for block in blocks(report, "Summary", Text))
    assert states == "11 runs: 9 finished, 1 failed, 1 damaged."
    for said, part in zip(
        rules, ("CDP-v1 ends 9.00 points below DP", "CDP-v2 ends"), strict=True
    ):
        assert part in said
    (row,) = table(report, "Summary", "training")
    assert (row["training"], row["rules"]) == (
        "resnet8 on digits",
        "DP, CDP-v1, CDP-v2",
    )
    assert (row["microbatches"], row["optimizer.lr"], row["seeds"]) == (
        "4",
        "0.1",
        "0, 1, 2, 3",
    )
    failed, damaged = table(report, "Summary", "reason")
    assert failed == {
        "folder": f"{sweep.name}/9",
        "experiment": "train",
        "state": "failed",
        "reason": "the loss is NaN",
        "rule": "CDP-v2",
        "seed": "3",
    }
    assert damaged["reason"].startswith("result.json cannot be read")


def test_differences_are_paired_by_seed_with_the_first_rule(report):
    dp, v1, v2 = final(report, "rule", "seeds", "test accuracy (%)", DIFFERENCE)
    assert dp == ("DP", "0, 1, 2", "91.00 ± 1.00", "+0.00")
    expected = paired_difference([80, 85, 81], [90, 92, 91])
    assert v1[3] == f"{expected.mean:+.2f} ± {expected.half_width:.2f}"
    assert v2[3].startswith("+0.00 ± ")
    (figure,) = blocks(report, "Accuracy", Figure)
    assert "DP 91.0 %, CDP-v1 82.0 %, CDP-v2 91.0 %" in figure.alt
    assert len(figure.figure.axes[0].lines) == 3


def test_memory_and_traffic_are_those_of_the_schedules(report):
    late = "mean staleness (largest)"
    held = table(report, "Memory", "peak, all ranks")
    assert [(row["schedule"], row["peak, all ranks"], row[late]) for row in held] == [
        ("DP", "4", "0.00 (0)"),
        ("CDP-v1", "2.5", "1.00 (1)"),
        ("CDP-v2", "2.5", "0.38 (1)"),
    ]
    sent = table(report, "Communication", "mean in a slot")
    slots = {
        row["schedule"]: (row["mean in a slot"], row["largest in a slot"])
        for row in sent
    }
    assert slots == {"DP": ("3", "6"), "CDP-v1": ("3", "4"), "CDP-v2": ("3", "4")}
    (grids,) = blocks(report, "Memory", Figure)
    assert "DP, CDP-v1, CDP-v2" in grids.alt


def test_measurements_are_shown(report, sweep):
    first, second = table(report, "Communication", "sent (MB)")
    assert (first["rank"], second["rank"]) == ("0", "1")
    assert (first["peak activations (MB)"], first["messages sent"]) == (
        "2.000",
        "2000000",
    )
    (figure,) = blocks(report, "Communication", Figure)
    assert f" {sweep.name}/6:" in figure.caption
    assert figure.alt.startswith("Timeline of CDP-v2")
    assert figure.source.startswith("data:image/png;base64,")


def test_commands_are_shown_once(report, sweep):
    (command,) = blocks(report, "Reproduce", Command)
    assert command.command == "python experiments/train.py -m seed=0,1,2"
    assert command.note == (
        f"9 runs in {sweep.name}/0 and 8 more; commit 0123456789+, python 3.11.7, torch 2.15.0,"
        " a processor, 2 threads"
    )


def test_commands_have_no_folders_of_this_machine(tmp_path):
    """They repeat what was trained, from the start."""
    places = (
        "resume=/a/b",
        "'resume=/my runs/b'",
        "resume='/my runs/b'",
        "'hydra.run.dir=/a b'",
    )
    for number, place in enumerate(places):
        command = f"python experiments/train.py {place} seed=1"
        folders.train(tmp_path / str(number), command=command)
    (found,) = blocks(built(tmp_path), "Reproduce", Command)
    assert found.command == "python experiments/train.py seed=1"


@pytest.mark.parametrize("data", ["text", "token_files", "mine"])
def test_language_models_are_judged_by_their_loss(tmp_path, data):
    of_text = {"data": {"_target_": f"toolkit.training.data.{data}"}}
    folders.compare(
        tmp_path / "a", {"dp": [0.5, 0.7], "cdp_v1": [0.25, 0.375]}, **of_text
    )
    if data == "mine":
        folders.change(tmp_path / "a", judged_by="loss")
    report = built(tmp_path)
    columns = "test loss (nats)", "test accuracy (%)", DIFFERENCE
    dp, v1 = final(report, *columns, metric="loss (nats)")
    assert dp[0].startswith("0.400 ± ")
    assert dp[1] == "60.00"
    expected = paired_difference([0.75, 0.625], [0.5, 0.3])
    assert v1[2] == f"{expected.mean:+.3f} ± {expected.half_width:.3f}"
    (figure,) = blocks(report, "Accuracy", Figure)
    assert "at the end DP 0.40 nats, CDP-v1 0.69 nats" in figure.alt
    assert figure.figure.axes[0].get_ylabel() == "test loss (nats)"


def test_baseline_is_the_rule_without_delay(tmp_path):
    """Even if the options of a late rule do not say so; one seed has no interval."""
    folders.compare(tmp_path / "a", {"published": [0.8], "dp": [0.9], "cdp_v1": [0.7]})
    assert final(built(tmp_path), "rule", "test accuracy (%)", DIFFERENCE) == [
        ("DP", "90.00", "+0.00"),
        ("CDP-v2 as published", "80.00", "-10.00"),
        ("CDP-v1", "70.00", "-20.00"),
    ]


@pytest.mark.parametrize(
    ("seeds", "mean", "difference"),
    [((1, 2), "50.00 ± 42.43", "-10.00"), ((2,), "20.00", "-")],
)
def test_only_shared_seeds_are_paired(tmp_path, seeds, mean, difference):
    jobs = [("dp", 0, 0.5), ("dp", 1, 0.9)]
    jobs += [("cdp_v1", seed, {1: 0.8, 2: 0.2}[seed]) for seed in seeds]
    for rule, seed, top in jobs:
        folders.train(tmp_path / f"{rule}{seed}", rule, seed, top)
    _, late = final(built(tmp_path), "test accuracy (%)", DIFFERENCE)
    assert late == (mean, difference)


def test_diverged_runs_are_counted_and_notes_shown_once(tmp_path):
    folders.compare(
        tmp_path / "a", {"dp": [0.9, 0.8], "cdp_v1": [nan, nan], "cdp_v2": [nan, 0.95]}
    )
    folders.change(tmp_path / "a", notes=["steps differ"])
    report = built(tmp_path)
    assert final(report, "seeds", "test accuracy (%)")[1:] == [
        ("none (2 diverged)", "-"),
        ("1 (1 diverged)", "95.00"),
    ]
    rows = table(report, "Summary", "note")
    assert rows == [{"folder": "a", "note": "steps differ"}]


@pytest.mark.parametrize(("stated", "given"), [(0.6, None), (None, 0.6), (5.0, 0.6)])
def test_equivalence_is_tested_at_a_margin(tmp_path, stated, given):
    """The margin of the report, or of the comparison."""
    tops = {
        "dp": [0.9, 0.8, 0.7],
        "cdp_v2": [0.903, 0.799, 0.7],
        "cdp_v1": [0.8, 0.71, 0.6],
    }
    folders.compare(tmp_path / "a", tops, margin=stated)
    report = build_report(read_runs([tmp_path]), "Runs", given)
    assert final(report, "rule", "at a margin of 0.6", "p (equivalence)") == [
        ("DP", "-", "-"),
        ("CDP-v2", "equivalent within 0.6", "0.024"),
        ("CDP-v1", "worse by at least 8.23", "0.999"),
    ]
    folders.compare(tmp_path / "b" / "a", tops)
    report = build_report(read_runs([tmp_path / "b"]), "Runs")
    assert not any(
        "margin" in heading for heading in table(report, "Accuracy", "rule")[0]
    )


def test_a_repeated_seed_counts_as_it_ran_last(tmp_path):
    for name, top, year in (("a", 0.5, 2026), ("b", 0.7, 2025)):
        source = folders.train(tmp_path / name, top1=top)["provenance"]
        folders.change(
            tmp_path / name, provenance=source | {"started": f"{year}-01-01"}
        )
    assert final(built(tmp_path), "seeds", "test accuracy (%)") == [("0", "50.00")]


def test_rules_are_compared_with_the_first_of_their_options(tmp_path):
    """One configuration alone is compared with the first of all."""
    rates = {lr: {"_target_": "torch.optim.SGD", "lr": lr} for lr in (0.1, 0.2)}
    for lr, optimizer in rates.items():
        for rule, top in (("dp", 0.6 + lr), ("cdp_v2", 0.5 + lr)):
            folders.train(tmp_path / f"{rule}{lr}", rule, top1=top, optimizer=optimizer)
    folders.train(tmp_path / "8", "cdp_v1", batch=32)
    column = "paired difference from the first rule with these options"
    assert dict(final(built(tmp_path), "rule", column)) == {
        "DP, lr 0.1, batch 16": "+0.00",
        "DP, lr 0.2, batch 16": "+0.00",
        "CDP-v2, lr 0.1, batch 16": "-10.00",
        "CDP-v2, lr 0.2, batch 16": "-10.00",
        "CDP-v1, lr 0.1, batch 32": "+20.00",
    }


def test_rules_with_options_of_their_own_are_compared_with_the_first_rule(tmp_path):
    """Their rates differ, and what all of them share is the same."""
    tops = {
        "dp": [0.9],
        "cdp_v2": [0.8],
        "dp-nesterov": [0.7],
        "cdp_v2-nesterov": [0.6],
    }
    own = {
        "cdp_v2": {"optimizer": {"lr": 0.2}},
        "dp-nesterov": {"optimizer": {"nesterov": True}},
        "cdp_v2-nesterov": {"optimizer": {"_target_": "torch.optim.NAdam", "lr": 0.3}},
    }
    sgd = {"_target_": "torch.optim.SGD", "lr": 0.1, "nesterov": False}
    folders.compare(tmp_path / "a", tops, own=own, optimizer=sgd)
    first = "DP, optimizer SGD, lr 0.1, nesterov False"
    assert final(built(tmp_path), "rule", f"paired difference from {first}") == [
        (first, "+0.00"),
        ("DP, optimizer SGD, lr 0.1, nesterov True", "-20.00"),
        ("CDP-v2, optimizer SGD, lr 0.2, nesterov False", "-10.00"),
        ("CDP-v2, optimizer NAdam, lr 0.3", "-30.00"),
    ]
    # The rates that were found are in runs.yaml before there is a result.
    kept = {"own": {"dp": {"optimizer": {"lr": 0.7}}}}
    (tmp_path / "a" / "runs.yaml").write_text(json.dumps(kept))
    found = {run.rule: run.config["optimizer"]["lr"] for run in read_runs([tmp_path])}
    assert found == {
        "dp": 0.7,
        "cdp_v2": 0.2,
        "dp-nesterov": 0.1,
        "cdp_v2-nesterov": 0.3,
    }


@pytest.mark.parametrize(
    "own", [3, {"dp": 3}, {"dp": {"optimizer": {"lr": 1}, "x": {"y": 1}}}]
)
def test_options_of_a_rule_that_cannot_be_read_are_damaged(tmp_path, own):
    folders.compare(tmp_path / "a", {"dp": [0.9]}, own=own)
    assert [run.state for run in read_runs([tmp_path])] == ["damaged"]


@pytest.mark.parametrize(
    "ways",
    [
        ({"num_workers": 1}, {"num_workers": 8, "prefetch_factor": 4}),
        ({"root": "/here/flowers"}, {"root": "/there/flowers/"}),
    ],
)
def test_options_that_change_no_result_are_ignored(tmp_path, ways):
    """Runs that read their data elsewhere or faster are compared, and averaged over seeds."""
    jobs = [
        ("dp", 0, ways[0]),
        ("dp", 1, ways[1]),
        ("cdp_v2", 0, ways[1]),
        ("cdp_v2", 1, ways[0]),
    ]
    for number, (rule, seed, way) in enumerate(jobs):
        folders.train(tmp_path / str(number), rule, seed, data=FOLDER | way)
    assert final(built(tmp_path), "rule", "seeds") == [
        ("DP", "0, 1"),
        ("CDP-v2", "0, 1"),
    ]


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
    found = final(built(tmp_path), "rule", f"paired difference from {labels[0]}")
    assert found == [*zip(labels, ["+0.00", "+10.00", "+20.00"], strict=False)]


def test_many_curves_make_several_figures(tmp_path):
    for number in range(9):
        folders.train(tmp_path / str(number), batch=number + 1)
    figures = blocks(built(tmp_path), "Accuracy", Figure)
    assert [len(figure.figure.axes[0].lines) for figure in figures] == [7, 2]


def test_delays_are_a_row_per_rule_and_stage(tmp_path):
    folders.compare(tmp_path / "a", {"dp": [0.9, 0.8], "cdp_v1": [0.7, 0.6]})
    *_, last = table(built(tmp_path), "Accuracy", "cosine")
    assert last == {
        "training": "resnet8 on digits",
        "rule": "CDP-v1",
        "stage": "1",
        "steps late": "1.00",
        "moved": "1.00 %",
        "cosine": "0.910",
    }


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"_target_": "os.system"}, "'os.system'"),
        (folders.schedule("dp", 128), "too large"),
    ],
)
def test_names_schedules_that_cannot_be_shown(tmp_path, options, why):
    result = folders.train(tmp_path / "a")
    result["provenance"]["config"]["schedule"] = options
    folders.write_json(tmp_path / "a" / "result.json", result)
    report = built(tmp_path)
    assert why in texts(report, "Memory")
    assert not blocks(report, "Communication", Table)


def test_runs_that_do_not_count_are_named(tmp_path):
    damaged, unknown = (folders.train(tmp_path / name) for name in "ab")
    folders.write_json(tmp_path / "a" / "result.json", damaged | {"metrics": []})
    del unknown["provenance"]["config"]["schedule"]
    folders.write_json(tmp_path / "b" / "result.json", unknown)
    report = built(tmp_path)
    rows = table(report, "Summary", "reason")
    assert [(row["folder"], row["state"]) for row in rows] == [
        (f"{tmp_path.name}/a", "damaged"),
        (f"{tmp_path.name}/b", "finished"),
    ]
    assert not blocks(report, "Accuracy", Table)


def test_a_report_can_be_passed_on(tmp_path):
    """It names what it compares, no folder of this machine, and which speeds mean nothing."""
    for rule in ("dp", "cdp_v1"):
        folders.train(
            tmp_path / "runs" / rule,
            rule,
            command=f"cyclic-dp train data.root={tmp_path}/images",
        )
    report = build_report(read_runs([str(tmp_path)]))
    assert report.title == "DP and CDP-v1: resnet8 on digits"
    page = to_html(report)
    assert str(tmp_path) not in page
    assert "2 runs in runs/cdp_v1 and 1 more" in page
    assert "data.root=images" in page
    (accuracies,) = [
        block
        for block in blocks(report, "Accuracy", Table)
        if "samples/s" in block.rows[0]
    ]
    assert "runtime=single_process" in accuracies.caption
