"""The stability experiment, what it measures by training, and warnings of train and compare."""

import json

import pytest

from tests.experiments.command import (
    EXPERIMENTS,
    TINY,
    complete,
    refused,
    run,
    succeeded,
)
from tests.thorough import thorough
from toolkit.schedule import catalog

ALSO = ("+schedule@also.v1=cdp_v1", "+schedule@also.dp=dp")


def test_limits_of_several_schedules(tmp_path):
    found = complete("stability", tmp_path, "workers=8", "stages=8", *ALSO)["metrics"]
    limits = {row["schedule"]: (row["heavy ball"], row["Nesterov"]) for row in found}
    assert limits["DP"] == pytest.approx((3.8, 1.357), abs=1e-3)
    assert limits["CDP-v1"] == pytest.approx((0.1, 0.253), abs=1e-3)
    assert limits["CDP-v2"] == pytest.approx((0.2286, 0.9229), abs=1e-3)
    assert [row["Nesterov / DP"] for row in found][1:] == pytest.approx(
        [0.1865, 1], abs=1e-3
    )
    random = "schedule.delay={least: 1, most: 2}"
    (row,) = complete("stability", tmp_path / "random", random)["metrics"]
    assert row["kind"] == "mean square"


def test_rates_of_a_model(tmp_path):
    small = [
        option for option in TINY if not option.startswith(("epochs", "stability"))
    ]
    out = succeeded(
        "stability", tmp_path, *small, "+schedule@also.dp=dp", "tolerance=0.1"
    )
    late, fresh = json.loads((tmp_path / "result.json").read_text())["metrics"]
    assert "rate, Nesterov" in out
    assert late["curvature"] == pytest.approx(fresh["curvature"], rel=0.3)
    assert fresh["rate, heavy ball"] == pytest.approx(
        3.8 / fresh["curvature"], rel=1e-3
    )
    assert late["rate, heavy ball"] < fresh["rate, heavy ball"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["model=resnet8"], "model and data go together"),
        (["optimizer=adamw"], "no momentum: .* optimizer=sgd"),
        (["optimizer.momentum=1"], "momentum is 0 or more, below 1: got 1"),
        (["+schedule@also.schedule=dp"], "also.schedule is the name of the first"),
        (["measured=network"], "models of measured 'network'"),
        (["schedule=no"], "schedule=no is unknown"),
        (["tuned=nowhere"], "nowhere is not a folder"),
        ([f"tuned={EXPERIMENTS / 'results' / 'papers'}"], "0 rules with finished runs"),
        (
            [f"tuned={EXPERIMENTS / 'results' / 'text_tuned'}"],
            "the certificate is that of SGD",
        ),
        (["tuned=nowhere", "measured=networks"], "different questions"),
    ],
)
def test_refuses(tmp_path, options, message):
    refused("stability", *options, f"hydra.run.dir={tmp_path}", match=message)


def test_training_on_the_quadratic_finds_the_certified_rate(
    benchmark_module, monkeypatch
):
    rates = benchmark_module("stable_rates")
    monkeypatch.setattr(rates, "MOMENTA", rates.MOMENTA[1:])
    monkeypatch.setattr(rates, "_LONG", 600)
    rows = [*rates._rows(rates._quadratic(2), [catalog.cyclic(2)])]
    (row,) = rows
    assert row["found"] == pytest.approx(row["certified"], rel=0.01)
    (summary,) = rates.summary([*rows, row | {"found": 2.0, "certified": 2.5}])
    assert (summary["rates"], summary["rank correlation"]) == (2, 1)
    assert summary["found / certified, least"] == 0.8


def test_networks_start_at_random_and_at_a_minimum(benchmark_module):
    rates = benchmark_module("stable_rates")
    random, minimum = (
        case for case, _ in zip(rates._networks(4, 0), range(2), strict=False)
    )
    losses = [
        case.loss(case.model(case.batch[0]), case.batch[1]).item()
        for case in (random, minimum)
    ]
    assert losses[1] < 0.6 < 2 < losses[0]
    first = losses[0]
    for end, stable in (
        (0.9 * first, True),
        (1.1 * first, False),
        (float("nan"), False),
    ):
        given = iter([first] * (rates._STEPS - 40) + [end] * 40)
        assert random.is_stable(given) is stable


def test_measured_rates_are_the_result(benchmark_module, monkeypatch, tmp_path):
    rates = benchmark_module("stable_rates")
    case = rates._quadratic(2)
    row = {"model": case.name, "start": "", "rule": "DP", "momentum": "heavy ball"}
    row |= {
        "curvature": 1.0,
        "certified": 1.0,
        "certified, stages coupled equally": 1.0,
    }
    rows = [
        row | {"found": 1.01},
        row | {"certified": 2.0, "found": 1.99},
    ]
    monkeypatch.setattr(rates, "measured_rates", lambda models, n, seed: iter(rows))
    result = complete("stability", tmp_path, "measured=networks")
    assert result["metrics"] == rows
    assert result["summary"][0]["found / certified, least"] == 0.995


KEPT = EXPERIMENTS / "results"


def test_tuned_rates_beside_certified_ones(tmp_path):
    result = complete("stability", tmp_path, f"tuned={KEPT / 'cifar10_corrections'}")
    rates = {
        row["rule"]: (row["tuned / first"], row["limit"]) for row in result["metrics"]
    }
    assert rates["DP (dp)"] == pytest.approx((1, 3.8), abs=1e-3)
    assert rates["CDP-v1 (cdp_v1)"] == pytest.approx((0.5, 0.1), abs=1e-3)
    assert rates["DP (dp_nesterov)"] == pytest.approx((1, 1.357), abs=1e-3)
    (summary,) = result["summary"]
    assert summary["rules"] == 8
    assert summary["rank correlation"] == pytest.approx(0.63, abs=1e-3)
    assert (tmp_path / "tuned_rates.png").exists()


@thorough
def test_tuned_rates_of_a_model_and_how_far_gradients_turn(tmp_path, benchmark_module):
    small = [option for option in TINY if not option.startswith("epochs")]
    tuned = tmp_path / "compared"
    options = (
        "epochs=2",
        "diagnostics=1",
        "~rules.cdp_v1",
        "seeds=1",
        "tracking.mode=disabled",
    )
    succeeded("compare", tuned, *small, *options, "+own.cdp_v2.optimizer.lr=0.05")
    small.remove("stability=false")
    result = complete("stability", tmp_path, *small, f"tuned={tuned}", "tolerance=0.1")
    fresh, late = result["metrics"]
    assert fresh["cosine"] == pytest.approx(1, abs=1e-6)
    assert late["cosine"] < 1
    assert late["tuned / first"] == pytest.approx(0.5)
    assert late["certified"] / fresh["certified"] == pytest.approx(
        late["certified / first"]
    )
    rates = benchmark_module("tuned_rates")
    curves = rates.cosines(tuned, rates.tuned_runs(tuned))
    assert [len(points) for points in curves.values()] == [8, 8]


def test_correlations_are_of_the_rates(benchmark_module):
    rows = [{"tuned": rate, "limit": 3 * rate**2} for rate in (0.1, 0.2, 0.4)]
    correlations = benchmark_module("tuned_rates").correlations(rows)
    assert (
        correlations["rank correlation"],
        correlations["correlation of logarithms"],
    ) == (1, 1)
    rows[0]["tuned"] = 1.0
    assert (
        benchmark_module("tuned_rates").correlations(rows)["rank correlation"] == -0.5
    )


FAR = (*TINY[:-1], "data.n_train=16", "tracking.mode=disabled", "optimizer.lr=1000")
WARNING = "warning: CDP-v2: the learning rate 1e+03 is far above"


def test_training_warns_of_an_unstable_rate(tmp_path):
    finished = run("train", *FAR, "guard=off", f"hydra.run.dir={tmp_path / 'a'}")
    assert finished.err.startswith(WARNING)
    quiet = run(
        "train", *FAR, "guard=off", "stability=false", f"hydra.run.dir={tmp_path / 'b'}"
    )
    assert "far above" not in quiet.err


def test_a_comparison_warns_once_a_rule_and_notes_it(tmp_path):
    rules = "~rules.cdp_v1", "~rules.dp", "seeds=2", f"hydra.run.dir={tmp_path}"
    assert run("compare", *FAR, *rules).err.count(WARNING) == 1
    notes = json.loads((tmp_path / "result.json").read_text())["notes"]
    assert [note.startswith(WARNING.removeprefix("warning: ")) for note in notes].count(
        True
    ) == 1
