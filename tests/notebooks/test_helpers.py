"""What notebooks use beside the toolkit."""

import json
import os
import re

import pytest
import torch

from toolkit.notebook import (
    RESULTS,
    Live,
    counted_and_measured,
    delay_study,
    differences,
    own_curves,
    settings,
    top1_by_epoch,
    train_rules,
    watched,
)
from toolkit.pilot import pilot
from toolkit.runtime import JobFailedError
from toolkit.schedule.comparison import compare
from toolkit.tracking.collect import learning_curves


def test_settings_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = settings("train", "workers=3", "schedule=dp")
    assert (config.microbatches, config.schedule.n, config.schedule.n_stages) == (3, 3, 4)


@pytest.mark.parametrize(
    ("experiment", "options", "message"),
    [
        ("train", ["epoch=3"], "there is no option epoch: did you mean epochs?"),
        ("train", ["epochs=many"], "epochs=many: epochs is a whole number"),
        ("train", ["epochs"], "'epochs' is not OPTION=VALUE"),
        ("train", ["schedule=null"], "schedule=null is unknown: choose one of cdp_v1, "),
        ("train", ["workers=3", "microbatches=4"], "workers=3 and microbatches=4: workers sets"),
        ("memory", ["hardware=a100"], "hardware=a100 is unknown: did you mean a100_nvlink? choose"),
        ("trian", [], "unknown experiment 'trian': did you mean train? choose one of train, "),
    ],
)
def test_mistakes_in_settings_are_told_as_on_the_command_line(experiment, options, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)) as refused:
        settings(experiment, *options)
    assert "\n" not in str(refused.value)


def test_without_the_repository_there_are_no_settings(monkeypatch, tmp_path):
    monkeypatch.setattr("toolkit.repository.ROOT", tmp_path)
    with pytest.raises(ValueError, match=r"lives in the repository, .* pip install -e \."):
        settings("train")


def test_differences_are_those_of_the_kept_result():
    epochs = learning_curves(RESULTS / "cifar10_narrow_8")
    found = differences(epochs)
    result = json.loads((RESULTS / "cifar10_narrow_8" / "result.json").read_text())
    for row in result["metrics"]:
        told = found.loc[row["schedule"]]
        assert told["minus DP (points)"] == f"{row['difference']:+.2f} ± {row['difference_95']:.2f}"
        assert told["test accuracy (%)"] == f"{row['accuracy']:.2f} ± {row['accuracy_sd']:.2f}"
    says = ["", "lower", "lower", "no difference shown"]
    assert list(found["says"]) == says
    with pytest.raises(ValueError, match="no runs of 'SGD': there are DP, CDP-v1"):
        differences(epochs, "SGD")
    one = differences(epochs[epochs["seed"] == 0])
    assert one.loc["CDP-v1", "says"] == "one run: nothing"


def test_delays_of_the_kept_study():
    found = delay_study(RESULTS / "delays")
    assert list(found.index)[:2] == ["DP", "CDP-v1"]
    assert found.loc["DP", "least cosine"] == "1.00"
    assert found.loc["DP delay 4", "minus DP (points)"].startswith("-")


def test_rules_of_a_study_that_share_a_name_are_told_apart(tmp_path):
    result = json.loads((RESULTS / "delays" / "result.json").read_text())
    result["metrics"][2]["schedule"] = result["metrics"][1]["schedule"]
    (tmp_path / "result.json").write_text(json.dumps(result))
    found = delay_study(tmp_path)
    assert len(found) == len(result["metrics"])
    assert list(found.index)[1:3] == ["CDP-v1 (cdp_v1)", "CDP-v1 (cdp_v2)"]


def test_own_runs_beside_kept_ones():
    small = ("data=synthetic", "data.image_size=8", "data.n_train=128", "data.n_test=50")
    config = settings("compare", "experiment=digits", "~rules.cdp_v1", "epochs=1", *small)
    said = []
    own = train_rules(config, [0], on_epoch=lambda what, share: said.append((what, share)))
    assert said == [("DP, seed 0", 0.0), ("CDP-v2, seed 0", 0.5), ("2 runs", 1.0)]
    assert list(own["schedule"]) == ["DP", "CDP-v2"]
    assert ((own["top1"] > 1) & (own["top1"] <= 100)).all()
    kept = learning_curves(RESULTS / "digits")
    curves = own_curves(kept, own)
    assert list(curves) == ["DP, kept", "CDP-v2, kept", "DP, own", "CDP-v2, own"]
    assert {len(run) for runs in curves.values() for run in runs} == {1}
    assert curves["DP, own"] == [[own["top1"][0] / 100]]
    assert [len(runs) for runs in top1_by_epoch(kept).values()] == [5, 5, 5]


def test_the_counted_table():
    rows = compare(2)
    found = counted_and_measured(rows)
    assert len(found) == len(rows) == 15
    assert found.loc[("multi-device", "DP"), "sent"] == "1 P"
    assert found.loc[("one device", "CDP-v1"), "activations, all"] == "3/2 A"
    assert "measured" not in found


def test_live_rows():
    live = Live("training", total=2)
    with live:
        live.report(1, "setting <one>")
        live.report(0, {"step": 1, "n_steps": 4, "loss": 2.5, "lr": 0.1})
        live.report(0, {"step": 2, "n_steps": 4, "loss": 1.5, "lr": 0.1})
    assert repr(live).splitlines()[1:] == [
        "rank 0 50% step 2, loss 1.5, lr 0.1",
        "rank 1 50% setting <one>",
    ]
    shown = live._repr_html_()
    assert "&lt;one&gt;" in shown
    assert shown.count("<polyline") == 1
    assert shown.index("rank 0") < shown.index("rank 1")
    live.say("predicting", 0.25)
    assert repr(live).endswith("25% predicting")


def test_an_error_in_a_cell_is_one_sentence():
    with pytest.raises(ValueError, match="n_workers") as refused, Live("pilot"):
        pilot(torch.nn.Linear(3, 2), torch.randn(8, 3), n_workers=0)
    (line,) = refused.value._render_traceback_()
    assert line == f"ValueError: {refused.value}"
    with pytest.raises(KeyError) as bug, Live("pilot"):
        raise KeyError("a bug keeps its traceback")
    assert not hasattr(bug.value, "_render_traceback_")


def test_a_rank_that_dies():
    with pytest.raises(JobFailedError) as failed:
        watched(os._exit, 1, 3, title="dies")
    assert failed.value._render_traceback_() == [
        "JobFailedError: rank 0 ended with status 3 and no result"
    ]
