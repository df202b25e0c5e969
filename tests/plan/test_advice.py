"""The rule of the advice, case by case."""

import shlex
from dataclasses import replace
from math import inf, nan

import pytest

from toolkit.cli import settings
from toolkit.cost import Hardware
from toolkit.plan import Pilot, RuleFindings, TrainingFindings, advise
from toolkit.plan.candidates import Candidate
from toolkit.plan.predictions import Prediction
from toolkit.results import Estimate
from toolkit.schedule import ScheduleSpec
from toolkit.schedule.catalog import METHODS

GIB = 2**30
NAMES = {method.label: name for name, method in METHODS.items()}
MACHINE = Hardware("machine", 1e12, 1e11, 1e9, memory=8 * GIB)


def rule(name, activations, step, memory, spread=0.01, machine=MACHINE, placement=None):
    candidate = Candidate(ScheduleSpec(NAMES[name], 4, 4, placement=placement), 8)
    late = {"DP": 0.0, "CDP-v1": 1.0, "CDP-v2": 0.375}[name]
    peaks = GIB, memory * GIB, GIB, GIB
    fits = all(peak <= machine.memory_of(k) for k, peak in enumerate(peaks))
    return RuleFindings(
        rule=name,
        activations=activations,
        seconds=0.1,
        ratio=(0.99, 1.0, 1.01),
        predicted=Prediction(candidate, step, max(peaks), 4, late, fits=fits),
        speed=(step - spread, step, step + spread),
        without_links=0.6,
    )


def trained(mean=0.0, half_width=0.5, **changes):
    found = TrainingFindings(
        n_steps=300,
        seeds=(0, 1, 2),
        n_tested=500,
        accuracy={"DP": (0.9, 0.91, 0.89), "CDP-v2": (0.91, 0.9, 0.89)},
        difference=Estimate(mean, half_width),
        loss_ratio=1.02,
        highest=1.4,
        chance=0.1,
        frequent=0.15,
        learned=True,
        diverged=(),
        cosine=0.98,
    )
    return replace(found, **changes)


def findings(v2=1.0, memory=(4, 4), spread=0.01, v1=1.0, **changes):
    """With CDP-v2's step time by DP's, and GiB of the fullest device under DP and CDP-v2."""
    more = {
        "machine": changes.get("hardware", MACHINE),
        "placement": changes.get("placement"),
    }
    rules = (
        rule("DP", 400, 1.0, memory[0], 0, **more),
        rule("CDP-v1", 250, v1, memory[1], **more),
        rule("CDP-v2", 250, v2, memory[1], spread, **more),
    )
    found = Pilot(
        4, 4, 8, "per_microbatch", "a CPU", MACHINE, "measured", rules, trained()
    )
    return replace(found, command_options="model.target=my.net data=digits", **changes)


FAST, LARGE = {"v2": 0.7}, {"memory": (12, 6)}
RANDOM = trained(learned=False, accuracy={"DP": (0.1,), "CDP-v2": (0.1,)})

EASY = trained(0, 0.1, accuracy={"DP": (1.0,) * 3, "CDP-v2": (1.0,) * 3})
ALIKE = trained(
    -0.2, 0.5, accuracy={"DP": (0.9, 0.8, 0.7), "CDP-v2": (0.898, 0.798, 0.698)}
)
LOST = trained(-5, 3, accuracy={"DP": (0.9, 0.9), "CDP-v2": (0.85, 0.85)})
OF_V1 = trained(accuracy={"DP": (0.9, 0.91, 0.89), "CDP-v1": (0.91, 0.9, 0.89)})
ROOMY = replace(MACHINE, memory=16 * GIB)


def more_kept(activations=500):
    found = findings()
    late = [replace(rule, activations=activations) for rule in found.rules[1:]]
    return replace(found, rules=(found.rules[0], *late))


CASES = {
    "neither": (findings(), "DP", "nothing that counts"),
    "memory-limited": (findings(**LARGE), "CDP-v2", "DP needs 12.0 GiB on the fullest"),
    "link-limited": (findings(**FAST), "CDP-v2", "0.70 (0.69 to 0.71)"),
    "both": (findings(**FAST, **LARGE), "CDP-v2", "a loss of up to 0.5 points"),
    "a gain that is not sure": (
        findings(v2=0.9, spread=0.1),
        "DP",
        "surely more than 5%",
    ),
    "a small gain": (findings(v2=0.97), "DP", "nothing that counts"),
    "only CDP-v1 is faster": (
        findings(v1=0.7, training=OF_V1),
        "CDP-v1",
        "a CDP-v1 step takes 0.70",
    ),
    "only CDP-v1 is faster, and it loses": (
        findings(v1=0.7, training=replace(OF_V1, difference=Estimate(-2, 1))),
        "DP",
        "CDP-v1 is -2.0 ± 1.0 points",
    ),
    "CDP-v1 is faster than CDP-v2": (
        findings(**FAST, v1=0.6),
        "CDP-v2",
        "CDP-v1 would take 0.60",
    ),
    "more is kept": (more_kept(), "DP", "keep 25% more with CDP-v2"),
    "as much is kept": (more_kept(401), "DP", "keep 0% more with CDP-v2"),
    "accuracy lost": (
        findings(**FAST, training=trained(-2, 1)),
        "DP",
        "-2.0 ± 1.0 points",
    ),
    "accuracy lost, and DP does not fit": (
        findings(**LARGE, training=trained(-2, 1)),
        "DP",
        "checkpoint=all",
    ),
    "accuracy not sure": (
        findings(**FAST, training=trained(-0.5, 3)),
        "CDP-v2 on trial",
        "3.5",
    ),
    "accuracy of one run": (
        findings(**FAST, training=trained(0, nan)),
        "CDP-v2 on trial",
        "one",
    ),
    "nothing learned": (
        findings(**FAST, training=RANDOM),
        "CDP-v2 on trial",
        "random images",
    ),
    "a loss where nothing was learned": (
        findings(**FAST, training=replace(RANDOM, difference=Estimate(-2, 1))),
        "CDP-v2 on trial",
        "unknown",
    ),
    "images too easy": (
        findings(**FAST, training=EASY),
        "CDP-v2 on trial",
        "all 500 test images",
    ),
    "differences without spread": (
        findings(**FAST, training=ALIKE),
        "CDP-v2 on trial",
        "the same with every seed: 500 test images",
    ),
    "a loss without spread": (
        findings(**FAST, training=LOST),
        "DP",
        "-5.0 ± 3.0 points",
    ),
    "a device of less memory": (
        findings(**LARGE, hardware=replace(ROOMY, memories=(8 * GIB, 8 * GIB))),
        "CDP-v2",
        "CDP-v2 6.0 GiB, of 8.0 GiB to 16.0 GiB",
    ),
    "a device of more memory": (
        findings(
            memory=(12, 12), hardware=replace(MACHINE, memories=(2 * GIB, 16 * GIB))
        ),
        "DP",
        "nothing that counts",
    ),
    "the fullest has the most memory": (
        findings(
            memory=(12, 12), hardware=replace(MACHINE, memories=(GIB / 2, 16 * GIB))
        ),
        "DP",
        "neither fits: DP needs 12.0 GiB on the fullest device",
    ),
    "not trained": (
        findings(**FAST, training=None, untrained="without classes"),
        "CDP-v2 on trial",
        "without classes",
    ),
    "CDP-v2 diverged": (
        findings(**FAST, training=trained(diverged=("CDP-v2",))),
        "DP",
        "diverged",
    ),
    "DP diverged": (
        findings(**FAST, training=trained(diverged=("DP", "CDP-v2"))),
        "undecided",
        "learning rate",
    ),
    "not to be cut": (
        findings(n_stages=1, rules=(), training=None),
        "DP",
        "cannot be cut",
    ),
    "neither fits": (
        findings(memory=(12, 9)),
        "DP",
        "neither fits: DP needs 12.0 GiB on the fullest",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_choice(case):
    found, choice, reason = CASES[case]
    advice = advise(found)
    assert advice.choice == choice
    assert reason in " ".join(advice.reasons)
    assert found.recommendation == advice.text()
    assert str(found).startswith(advice.verdict)
    assert "-0%" not in str(found)
    assert bool(advice.watch) == bool(advice.roll_back) == choice.startswith("CDP")


@pytest.mark.parametrize(
    ("case", "placement"),
    [
        ("neither", "per_microbatch"),
        ("not trained", "per_microbatch"),
        ("link-limited", "per_microbatch"),
        ("link-limited", "per_stage"),
        ("link-limited", "one"),
        ("CDP-v1 on trial", "per_microbatch"),
        ("CDP-v1 on trial", "one"),
    ],
)
def test_the_command_is_one_that_the_experiments_take(case, placement):
    how = {
        "neither": {},
        "not trained": {**FAST, "training": None},
        "link-limited": FAST,
        "CDP-v1 on trial": {"v1": 0.7, "training": None},
    }
    found = findings(**how[case], placement=placement)
    words = shlex.split(advise(found).command)
    at = 1 + next(k for k, word in enumerate(words) if word in ("cyclic-dp", "toolkit"))
    experiment = words[at]
    config = settings(experiment, *words[at + 1 :])
    assert (config.model.target, config.microbatches, config.stages, config.batch) == (
        "my.net", 4, 4, 8,
    )  # fmt: skip
    if case == "link-limited":
        assert config.schedule.placement == placement
        assert config.guard == ("stop" if placement == "per_stage" else "rollback")
        assert config.guard_factor == 2.8  # twice the highest loss that was seen
    if "training" in how[case] and not how[case]["training"]:
        name = "cdp_v1" if "v1" in how[case] else "cdp_v2"
        assert (experiment, list(config.rules)) == ("compare", ["dp", name])
        assert config.rules[name].placement == placement
    ranks = {"per_microbatch": 4, "per_stage": 4, "one": 1}[placement]
    if experiment == "train" and ranks > 1:
        assert words[:3] == ["torchrun", "--nproc-per-node", "4"]


def test_a_trial_is_judged_by_its_comparison_which_has_no_guard():
    tried, adopted = (
        advise(CASES[case][0]) for case in ("not trained", "link-limited")
    )
    assert "guard" not in tried.command
    assert "interval of CDP-v2's difference" in tried.roll_back[0]
    assert adopted.roll_back[0].startswith("guard=rollback")


def test_measured_and_predicted_are_named():
    found = CASES["nothing learned"][0]
    for shown in (str(found), found._repr_html_()):
        assert "Measured on a CPU" in shown
        assert "Predicted for machine" in shown
        assert "Simulated, not run there" in shown
        assert "nothing about the end of a long one" in shown
        assert "guard=rollback" in shown
    assert "chance 10.0% and the most frequent class 15.0%" in found.recommendation
    assert "<script>" not in replace(found, device="<script>")._repr_html_()


def test_the_memory_of_every_device_is_shown():
    memories = (GIB, inf, 4 * GIB, 4 * GIB)
    found = findings(hardware=replace(MACHINE, memory=inf, memories=memories))
    assert "1.0 GiB to not limited a device" in str(found)
    assert [*found.frame().loc["fits"]] == ["yes"] * 3
    unknown = findings(hardware=replace(MACHINE, memory=inf))
    assert "memory not given" in str(unknown)
    assert "fits" not in unknown.frame().index
    assert "8.0 GiB a device" in str(findings())


def test_the_guard_is_twice_the_first_loss_at_least():
    assert (
        "guard_factor=2 "
        in findings(**FAST, training=trained(highest=0.7)).advice.command
    )
