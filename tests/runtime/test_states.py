"""States go from any runtime to any other that follows the same update rule."""

import contextlib
import copy

import pytest
import torch

from tests.runtime.models import assert_same, learning_rates
from tests.runtime.test_baselines import CASES
from toolkit.runtime import SingleProcess
from toolkit.runtime.process_group.launch import launch

METHODS = ("ddp", "fsdp", "delayed", "gpipe", "interleaved")
NAMES = [f"{method}-mixed-2" for method in METHODS]
MIDDLE = 3


def train(runtime, batches):
    list(runtime.run(batches))
    return runtime


def make(case, kind=None):
    options = {} if kind is SingleProcess else case.options
    return (kind or case.make)(*case.arguments(), lr_scheduler=case.lr_scheduler, **options)


@contextlib.contextmanager
def no_gather(runtime):
    """Within, the whole model is not brought together."""
    runtime._module = None
    try:
        yield
    finally:
        del runtime._module


def rank_0_first(states):
    """By case: the middle state, last weights of two runs, the second resumed, and a refusal."""
    torch.set_num_threads(1)
    found = {}
    for name in NAMES:
        case = CASES[name]
        batches = case.batches()
        first = train(make(case), batches[:MIDDLE])
        middle = first.state_dict()
        train(first, batches[MIDDLE:])
        second = make(case)
        with no_gather(second):
            second.load_state_dict(states[name])
        train(second, batches[MIDDLE:])
        refused = None
        try:
            second.load_state_dict(states[name] | {"model": {}})
        except ValueError as error:
            refused = str(error)
        found[name] = [
            middle,
            *(copy.deepcopy(r.module().state_dict()) for r in (first, second)),
            learning_rates(second),
            refused,
        ]
    return found


@pytest.fixture(scope="module")
def single():
    """By case: the state in the middle, and the run at its end."""
    found = {}
    for name in NAMES:
        batches = CASES[name].batches()
        runtime = train(make(CASES[name], SingleProcess), batches[:MIDDLE])
        middle = runtime.state_dict()
        found[name] = (middle, train(runtime, batches[MIDDLE:]))
    return found


@pytest.fixture(scope="module")
def found(single):
    return launch(rank_0_first, 2, {name: middle for name, (middle, _) in single.items()})


@pytest.mark.parametrize("name", NAMES)
def test_continues_from_the_state_of_a_single_process(single, found, name):
    _, whole = single[name]
    for on_rank in found:
        _, first, second, rates, _ = on_rank[name]
        assert_same(first, whole.module().state_dict())
        assert_same(second, whole.module().state_dict())
        assert rates == pytest.approx(learning_rates(whole))


@pytest.mark.parametrize("name", NAMES)
def test_a_single_process_continues_from_its_state(single, found, name):
    case = CASES[name]
    _, whole = single[name]
    for on_rank in found:
        runtime = make(case, SingleProcess)
        runtime.load_state_dict(on_rank[name][0])
        train(runtime, case.batches()[MIDDLE:])
        assert_same(runtime.module().state_dict(), whole.module().state_dict())
        assert learning_rates(runtime) == pytest.approx(learning_rates(whole))


def test_a_state_of_another_form_is_refused_on_every_rank(found):
    for on_rank in found:
        for name in NAMES:
            assert on_rank[name][-1].startswith("the state is not of this run: model[")
