"""DeepSpeed and Horovod, where they are installed, follow the trajectories of data parallelism."""

import copy
from dataclasses import replace
from functools import cache
from importlib.util import find_spec

import pytest
import torch

from tests.missing_packages import without_package
from tests.runtime.models import assert_same, differ
from tests.runtime.test_baselines import Case, adamw, falling
from toolkit.errors import UserError
from toolkit.runtime import SingleProcess, StepOptions, launch
from toolkit.runtime.baselines import DeepSpeed, Horovod
from toolkit.schedule import catalog

DP = catalog.data_parallel(2, n_stages=3)
ZERO = catalog.data_parallel(2, state="sharded", n_stages=3)
MIXED = {
    "frozen": True,
    "dropout": 0.3,
    "optimizer": adamw,
    "lr_scheduler": falling,
    "runs": (2, 4),
}
CASES = {
    "deepspeed": {
        "zero-1": Case(DeepSpeed, DP, {"zero": 1}, **MIXED),
        "zero-2-offloaded": Case(DeepSpeed, DP, {"zero": 2, "offload": True}),
        "zero-3": Case(DeepSpeed, ZERO, **MIXED),
        "zero-3-offloaded": Case(DeepSpeed, ZERO, {"offload": True}, runs=(6,)),
    },
    "horovod": {
        "plain": Case(Horovod, DP),
        "mixed": Case(Horovod, DP, **MIXED),
        "fp16": Case(Horovod, DP, {"compression": "fp16"}),
    },
}
SYSTEMS = [
    pytest.param(
        name, marks=pytest.mark.skipif(not find_spec(name), reason=f"needs {name}")
    )
    for name in CASES
]
# 32 bits, 64 bits.
TOLERANCE = {"deepspeed": {"rtol": 1e-4, "atol": 1e-5}, "horovod": {}}
RESUMED = ("zero-1", "zero-3", "mixed")


def made(case):
    return case.make(*case.arguments(), lr_scheduler=case.lr_scheduler, **case.options)


def follow(case):
    """The weights and the losses by step and micro-batch."""
    runtime = made(case)
    results = [result for run in case.follow(runtime) for result in run[1]]
    losses = {
        (r[0], m): float(x) for r in results for m, x in zip(r[1], r[2], strict=True)
    }
    return copy.deepcopy(runtime.module().state_dict()), losses


def interrupted(case):
    """The state after three of the steps, and the weights of a new runtime that takes it over."""
    first = made(case)
    list(first.run(case.batches()[:3]))
    state = first.state_dict()
    return state, continued(case, state)


def continued(case, state):
    runtime = made(case)
    list(runtime.run(case.batches()[:1]))  # which the state replaces
    runtime.load_state_dict(state)
    list(runtime.run(case.batches()[3:]))
    return copy.deepcopy(runtime.module().state_dict())


def follow_all(system):
    torch.set_num_threads(1)
    cases = CASES[system]
    found = {name: follow(case) for name, case in cases.items()}
    return found, {name: interrupted(cases[name]) for name in cases if name in RESUMED}


@cache
def on_ranks(system):
    return launch(follow_all, 2, system)


def alone(case):
    return replace(case, make=SingleProcess, options={})


@pytest.mark.parametrize("system", SYSTEMS)
def test_follows_data_parallelism(system):
    for name, case in CASES[system].items():
        weights, losses = follow(alone(case))
        (first, some), (second, others) = (found[name] for found, _ in on_ranks(system))
        assert_same(first, second, rtol=0, atol=0)
        rough = case.options.get("compression") == "fp16"
        assert some | others == pytest.approx(losses, rel=1e-2 if rough else 1e-5)
        tolerance = {"rtol": 0.05, "atol": 0.02} if rough else TOLERANCE[system]
        assert_same(first, weights, **tolerance)
        assert differ(first, weights) or not rough


@pytest.mark.parametrize("system", SYSTEMS)
def test_states_are_those_of_any_runtime(system):
    for _, resumed in on_ranks(system):
        for name, (state, weights) in resumed.items():
            case = alone(CASES[system][name])
            expected, _ = follow(case)
            assert_same(weights, expected, **TOLERANCE[system])
            assert_same(continued(case, state), expected, **TOLERANCE[system])


@pytest.mark.parametrize("system", SYSTEMS)
def test_refuses_what_it_cannot_train(system):
    (case, *_) = CASES[system].values()
    with pytest.raises(UserError, match="CDP-v2"):
        made(replace(case, schedule=catalog.cyclic(2, n_stages=3)))
    half = {"options": StepOptions(precision="fp16")}
    with pytest.raises(UserError, match="fp16"):
        made(replace(case, options=half))


@pytest.mark.parametrize(
    ("make", "options", "named"),
    [
        (Horovod, {"compression": "bf16"}, "bf16"),
        (DeepSpeed, {"zero": 0}, "1, 2 or 3"),
        (DeepSpeed, {"options": StepOptions(precision="bf16")}, "bf16"),
    ],
)
def test_refuses_other_options(make, options, named):
    with pytest.raises(UserError, match=named):
        made(Case(make, DP, options))


@pytest.mark.parametrize(
    ("make", "module", "way_out"),
    [
        (DeepSpeed, "deepspeed", "pip install"),
        (Horovod, "horovod", "install_horovod.sh"),
    ],
)
def test_names_the_command_that_installs_it(make, module, way_out, monkeypatch):
    """Also before ranks are joined."""
    without_package(monkeypatch, module)
    for use in (make.check_installed, lambda: made(Case(make, DP))):
        with pytest.raises(
            UserError, match=f"{make.runtime} needs {module}: .*{way_out}"
        ):
            use()
