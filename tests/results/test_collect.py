"""Runs of every kind and state become rows; damage is a state, never an exception."""

import json
import math

import pytest

from tests.results import folders
from toolkit.errors import UserError
from toolkit.results import collect, learning_curves
from toolkit.results.run_schedule import rebuild_schedule
from toolkit.results.runs import read_runs

CYCLIC = "toolkit.schedule.catalog.cyclic"


def with_rates(path, *rates, rules=("dp",) * 9):
    for number, (lr, rule) in enumerate(zip(rates, rules, strict=False)):
        optimizer = {"_target_": "torch.optim.SGD", "lr": lr}
        folders.train(path / str(number), rule, top1=0.9 + lr / 10, optimizer=optimizer)


def test_a_sweep_is_a_row_per_job(tmp_path):
    with_rates(tmp_path, 0.1, 0.1, 0.2, rules=("dp", "cdp_v2", "cdp_v2"))
    found = collect(tmp_path)
    columns = [
        "folder",
        "kind",
        "state",
        "schedule",
        "optimizer.lr",
        "schedule.delay",
        "seed",
    ]
    assert found[columns].values.tolist() == [
        [str(tmp_path / "0"), "train", "finished", "DP", 0.1, 0, 0],
        [str(tmp_path / "1"), "train", "finished", "CDP-v2", 0.1, "freshest", 0],
        [str(tmp_path / "2"), "train", "finished", "CDP-v2", 0.2, "freshest", 0],
    ]
    assert found.top1.tolist() == pytest.approx([91, 91, 92])  # per cent
    assert "runtime.order" not in found  # all runs have the same
    columns = [
        "model",
        "data",
        "runtime",
        "commit",
        "torch",
        "seconds",
        "device",
        "command",
    ]
    assert found[columns].iloc[0].tolist() == [
        *("resnet8", "digits", "SingleProcess", "0123456789abcdef+", "2.15.0", 12.5),
        *("a processor, 2 threads", "python experiments/train.py"),
    ]


def test_learning_curves_are_a_row_per_epoch(tmp_path):
    folders.compare(tmp_path / "a", {"dp": [0.9], "cdp_v1": [0.7]})
    folders.train(tmp_path / "b", "cdp_v2", seed=5)
    found = learning_curves(tmp_path)
    assert found[["rule", "seed", "epoch"]].values.tolist() == [
        *(["dp", 0, k] for k in (0, 1)),
        *(["cdp_v1", 0, k] for k in (0, 1)),
        *(["CDP-v2", 5, k] for k in (0, 1)),
    ]
    assert found.top1.tolist() == pytest.approx([45, 90, 35, 70, 45, 90])


def test_learning_curves_have_the_options_that_differ(tmp_path):
    with_rates(tmp_path, 0.1, 0.2)
    found = learning_curves(tmp_path)
    assert found["optimizer.lr"].tolist() == [0.1, 0.1, 0.2, 0.2]
    assert "batch" not in found


def test_sizes_are_those_of_the_schedule(tmp_path):
    """Its own options count; the sizes of a schedule file are not among them."""
    for name, own in (
        ("a", {"n": 8, "n_stages": 3}),
        ("b", {"n": 8, "file": "orders.csv"}),
    ):
        folders.train(tmp_path / name, schedule=folders.schedule("dp") | own)
    folders.change(tmp_path / "b", schedule="orders")
    folders.job(tmp_path / "b", {}, rule="cdp_v2")
    columns = ["microbatches", "stages", "rule", "schedule"]
    assert collect(tmp_path)[columns].values.tolist() == [
        [8, 3, "DP", "DP"],
        [2, 2, "orders", "orders"],  # the rule of a file is the file
    ]


def test_lists_are_json_and_empty_groups_have_no_column(tmp_path):
    for name, nodes, arguments in (
        ("a", [1, 2], {}),
        ("b", [3], {"depth": 2}),
        ("c", [3], {}),
    ):
        data = {
            "_target_": "own.data",
            "nodes": nodes,
            "arguments": arguments,
            "at": {"x": [1]},
        }
        folders.train(tmp_path / name, data=data)
    found = collect(tmp_path)
    assert found["data.nodes"].tolist() == ["[1, 2]", "[3]", "[3]"]
    assert not [
        name for name in found if name.startswith(("data.arguments", "data.at"))
    ]


def test_jobs_are_in_the_order_of_their_numbers(tmp_path):
    for number in (10, 9, 1):
        folders.train(tmp_path / str(number), seed=number)
    assert collect(tmp_path).seed.tolist() == [1, 9, 10]


def test_the_experiment_is_the_job_of_a_launcher(tmp_path):
    """Its command is the launcher's own script. Reports are no runs."""
    result = folders.train(tmp_path / "a", command="python _submit.py /a/.submitit/%j")
    folders.job(tmp_path / "a", result["provenance"]["config"])
    folders.job(
        tmp_path / "b", {"runs": "a"}, name="report", status={"state": "running"}
    )
    (row,) = collect(tmp_path).itertuples()
    assert (row.kind, row.state, row.top1) == ("train", "finished", 90)


def test_a_comparison_is_a_row_per_rule_and_seed(tmp_path):
    folders.compare(tmp_path / "a", {"dp": [0.9, 0.8], "cdp_v1": [0.7, 0.6]})
    folders.train(tmp_path / "a" / "jobs" / "0")  # as if the comparison had started it
    (tmp_path / "b").symlink_to(tmp_path / "a")
    found = collect(tmp_path, tmp_path / "b")  # once, though found three times
    assert found[
        ["kind", "rule", "schedule", "schedule.delay", "seed", "top1"]
    ].values.tolist() == [
        ["compare", "dp", "DP", 0, 0, pytest.approx(90)],
        ["compare", "cdp_v1", "CDP-v1", 1, 0, pytest.approx(70)],
        ["compare", "dp", "DP", 0, 1, pytest.approx(80)],
        ["compare", "cdp_v1", "CDP-v1", 1, 1, pytest.approx(60)],
    ]


def test_a_rule_that_a_resumed_comparison_left_out_keeps_its_schedule(tmp_path):
    folders.compare(tmp_path / "a", {"dp": [0.9], "cdp_v1": [0.7]})
    result = folders.result_of(tmp_path / "a")
    config = result["provenance"]["config"]
    (tmp_path / "a" / "runs.yaml").write_text(json.dumps(config))
    config["rules"] = {"dp": config["rules"]["dp"]}
    folders.change(
        tmp_path / "a", metrics=result["metrics"][:1], provenance=result["provenance"]
    )
    found = collect(tmp_path)
    assert found[["schedule", "schedule.delay"]].values.tolist() == [
        ["DP", 0],
        ["CDP-v1", 1],
    ]


def test_an_unfinished_comparison_has_the_runs_that_ended(tmp_path):
    folders.compare(tmp_path / "a", {"dp": [0.9, 0.8], "cdp_v1": [0.7, 0.6]})
    options = folders.result_of(tmp_path / "a")["provenance"]["config"]
    (tmp_path / "a" / "result.json").unlink()
    folders.job(
        tmp_path / "a",
        options,
        name="compare",
        status={"state": "failed", "message": "x"},
    )
    lines = (tmp_path / "a" / "runs.csv").read_text().splitlines()
    # dp; half of cdp_v1.
    (tmp_path / "a" / "runs.csv").write_text("\n".join(lines[:4]) + "\n")
    found = collect(tmp_path)
    assert found[["state", "message"]].values.tolist() == [
        *(["finished", ""], ["failed", "x"]),
        *[["unfinished", "it has not started"]] * 2,
    ]
    assert found.top1.fillna(-1).tolist() == [pytest.approx(90), *[-1] * 3]


def test_seeds_of_a_comparison_begin_with_its_own(tmp_path):
    own = folders.config(rules={"dp": folders.schedule("dp")}, seed=3, seeds=2)
    folders.job(
        tmp_path / "a",
        own,
        name="compare",
        status={"state": "running", "message": None},
    )
    assert [run.seed for run in read_runs([tmp_path])] == [3, 4]


def test_other_experiments_have_no_metrics(tmp_path):
    (tmp_path / "m").mkdir()
    source = folders.provenance(
        {"model": {"name": "vit_b_16"}}, "python experiments/memory.py"
    )
    folders.write_json(
        tmp_path / "m" / "result.json", {"metrics": [], "provenance": source}
    )
    found = collect(tmp_path)
    assert (found.kind[0], found.state[0], found.model[0]) == (
        "memory",
        "finished",
        "vit_b_16",
    )
    assert math.isnan(found.top1[0])


@pytest.mark.parametrize(
    ("status", "state", "message"),
    [
        (None, "unfinished", "there is no result.json"),
        (
            {"state": "failed", "message": "the loss is NaN"},
            "failed",
            "the loss is NaN",
        ),
        (
            {"state": "running", "message": None},
            "running",
            "it is running, or was killed",
        ),
        ({"state": "stopped"}, "stopped", "it was stopped before its first checkpoint"),
        ({"state": "stopped", "saved": 1}, "stopped", "it was stopped: resume=FOLDER"),
        ({"state": "finished"}, "damaged", "status.json says finished"),
        ({"state": "lost"}, "damaged", "status.json says lost"),
    ],
)
def test_a_job_without_a_result_has_its_options(
    tmp_path, monkeypatch, status, state, message
):
    """Interpolations of its options are resolved; the environment is not read."""
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    own = folders.schedule("cdp_v1") | {"n": "${microbatches}", "n_stages": "${stages}"}
    options = folders.config(schedule=own, seed=3, workers=8, stages=8, note="x")
    folders.job(tmp_path / "a", options, rule="cdp_v1", status=status)
    folders.job(tmp_path / "b", options | {"note": "${oc.env:WANDB_API_KEY}"})
    if "saved" in (status or {}):
        (tmp_path / "a" / "checkpoints").mkdir()
        (tmp_path / "a" / "checkpoints" / "step_000000002.ckpt").touch()
    found = collect(tmp_path)
    row = found.iloc[0]
    assert (row.state, row.message[: len(message)]) == (state, message)
    assert (row.rule, row.schedule, row.seed) == ("cdp_v1", "CDP-v1", 3)
    assert (row.microbatches, row["optimizer.lr"]) == (8, 0.1)
    assert math.isnan(row.top1)
    assert found.note.tolist() == ["x", "${oc.env:WANDB_API_KEY}"]


def test_the_status_says_whether_the_loss_of_a_training_diverged(tmp_path):
    failed = {"state": "failed", "message": "the training loss of epoch 0 is nan"}
    for name, status in (("a", failed), ("b", failed | {"diverged": True})):
        folders.job(
            tmp_path / name,
            folders.config(schedule=folders.schedule("dp")),
            status=status,
        )
    assert [run.diverged for run in read_runs([tmp_path])] == [False, True]


def test_a_run_resumed_with_other_options_has_a_caution(tmp_path):
    note = "resumed with other options than those of the checkpoint: schedule.delay=1 (was 0)"
    for name in "ab":
        folders.train(tmp_path / name, "cdp_v1")
    # 1 if it is missing.
    folders.change(tmp_path / "a", notes=["another", note], schema=1)
    assert "schema" not in folders.result_of(tmp_path / "b")
    assert collect(tmp_path)[["top1", "message"]].values.tolist() == [
        [90, note],
        [90, ""],
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("result.json", b'{"metrics": {', "result.json cannot be read"),
        ("result.json", b"[1]", "result.json is not a JSON object"),
        ("result.json", b"\xff\xfe\0", "result.json cannot be read:"),
        ("epochs.csv", b"epoch,top1\n0,0.5\n1", "epochs.csv cannot be read: line 3 "),
        (
            "epochs.csv",
            b"epoch,top1\n0,high\n",
            "epochs.csv cannot be read: could not convert",
        ),
        ("status.json", b"{", "status.json cannot be read"),
    ],
)
def test_a_damaged_file_makes_a_damaged_run(tmp_path, name, content, message):
    for folder in "ab":
        folders.train(tmp_path / folder)
    (tmp_path / "a" / name).write_bytes(content)
    found = collect(tmp_path)
    assert found.state.tolist() == ["damaged", "finished"]
    assert found.message[0].startswith(message)
    assert math.isnan(found.top1[0])
    assert learning_curves(tmp_path).folder.unique().tolist() == [str(tmp_path / "b")]


def options(**more):
    return {
        "provenance": {"config": {"rules": {"dp": 3}, "seeds": 1, "seed": 0} | more}
    }


@pytest.mark.parametrize(
    "more",
    [
        {"schema": 2},
        {"provenance": None},
        {"notes": [7]},
        {"delays": math.nan},
        {"judged_by": "taste"},
        {"metrics": [{"rule": {"a": 1}}, 3]},
        options(rules=["dp"]),
        options(seeds=10**9),
        options(seeds="many"),
    ],
    ids=str,
)
def test_a_result_that_does_not_match_its_schema_is_damaged(tmp_path, more):
    folders.compare(tmp_path / "a", {"dp": [0.9]})
    folders.change(tmp_path / "a", **more)
    folders.job(tmp_path / "a", folders.config(), name="compare")
    (row,) = collect(tmp_path).itertuples()
    assert (row.kind, row.state) == ("compare", "damaged")
    assert row.message


@pytest.mark.parametrize("metrics", [[], {"top1": "90 %"}])
def test_a_training_without_accuracy_is_damaged(tmp_path, metrics):
    folders.train(tmp_path / "a")
    folders.change(tmp_path / "a", metrics=metrics)
    (row,) = collect(tmp_path).itertuples()
    assert (row.state, row.seed) == ("damaged", 0)
    assert "top1" in row.message


def test_a_damaged_or_missing_table_makes_one_damaged_run(tmp_path):
    folders.compare(tmp_path / "a", {"dp": [0.9], "cdp_v1": [0.7]})
    (tmp_path / "a" / "runs.csv").write_text("rule,epoch,top1\ndp,0,0.5\n")
    folders.compare(tmp_path / "b", {"dp": [0.9], "cdp_v1": [0.7]})
    (tmp_path / "b" / "runs.csv").unlink()
    found = collect(tmp_path)
    assert found.state.tolist() == ["damaged"] * 2
    assert "'seed'" in found.message[0]
    assert "runs.csv" in found.message[1]


def test_a_seed_that_is_no_number_of_a_table_is_unknown(tmp_path):
    for name, seed in (("a", 10**400), ("b", "one"), ("c", 3)):
        folders.train(tmp_path / name, seed=seed)
    assert collect(tmp_path).seed.fillna(-1).tolist() == [-1, -1, 3]


def test_a_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(UserError, match="nowhere is not a folder"):
        collect(tmp_path / "nowhere")
    with pytest.raises(UserError, match=f"no runs in {tmp_path}"):
        collect(tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {"_target_": "os.system", "command": "false"},
        {"_target_": "exec"},
        {"_target_": "toolkit.schedule.catalog.Schedule.from_csv"},
        {"_target_": "toolkit.schedule.catalog.whole", "value": 1},
        {"_target_": CYCLIC, "n": "${oc.env:HOME}"},
        {"_target_": CYCLIC, "n": 10**7},
        {"_target_": CYCLIC, "n": 10**6, "n_stages": 64},
        {"_target_": CYCLIC, "n": 4, "of_tomorrow": 1},
        {"_target_": CYCLIC, "n": {"_target_": "builtins.int"}},
        {"_target_": CYCLIC, "_args_": [4]},
        {"_target_": None},
        {},
    ],
)
def test_only_the_catalogue_is_called_for_small_schedules(options):
    with pytest.raises(UserError):
        rebuild_schedule(options)


def test_a_long_delay_makes_no_large_schedule():
    options = {"_target_": CYCLIC, "n": 64, "n_stages": 64, "delay": 250}
    assert rebuild_schedule(options).max_staleness == 250
