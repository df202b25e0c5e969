"""States go from any runtime to any other with the same update rule, if their forms agree."""

import contextlib
import copy
import re

import pytest
import torch

from tests.runtime.models import assert_same, learning_rates
from tests.runtime.test_baselines import CASES
from toolkit.errors import UserError
from toolkit.runtime import SingleProcess
from toolkit.runtime.process_group.launch import launch
from toolkit.runtime.state import difference

METHODS = ("ddp", "fsdp", "delayed", "gpipe", "interleaved")
NAMES = [f"{method}-mixed-2" for method in METHODS]
MIDDLE = 3


def train(runtime, batches):
    list(runtime.run(batches))
    return runtime


def make(case, kind=None):
    options = {} if kind is SingleProcess else case.options
    return (kind or case.make)(
        *case.arguments(), lr_scheduler=case.lr_scheduler, **options
    )


@contextlib.contextmanager
def no_gather(runtime):
    """Within, the whole model is not brought together."""
    runtime.module = None
    try:
        yield
    finally:
        del runtime.module


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
    return launch(
        rank_0_first, 2, {name: middle for name, (middle, _) in single.items()}
    )


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
            assert on_rank[name][-1].startswith(
                "the state is not of this run: state['model']"
            )


@pytest.mark.parametrize("unused", [None, {}, "x", ["no weight"], [[]], [0]], ids=repr)
def test_unused_weights_that_are_no_names_are_refused(unused):
    case = CASES["ddp-mixed-2"]
    runtime = make(case, SingleProcess)
    state = runtime.state_dict()
    state["stages"][1]["unused"] = unused
    with pytest.raises(
        UserError, match=re.escape(f"['stages'][1]['unused'] is {unused!r}")
    ):
        runtime.load_state_dict(state)
    state["stages"][1]["unused"] = []
    runtime.load_state_dict(state)


# The first difference in form

WHOLE = {"a": torch.zeros(2, 3), "b": [1.0, {"c": None}], "d": 3, "e": True, "f": {}}


def test_values_do_not_matter():
    found = {"a": torch.ones(2, 3), "b": [7, {"c": None}], "d": 0, "e": False, "f": {}}
    assert difference(found, WHOLE, "it") is None
    assert difference({"x": (1,)}, {"x": [2]}, "it") is None


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"a": torch.zeros(3, 2)}, "it['a'] is float32[3, 2], not float32[2, 3]"),
        (
            {"a": torch.zeros(2, 3).double()},
            "it['a'] is float64[2, 3], not float32[2, 3]",
        ),
        ({"a": None}, "it['a'] is None, not float32[2, 3]"),
        ({"b": [1.0]}, "it['b'][1]['c'] is missing, not None"),
        ({"b": "xy"}, "it['b'][0] is missing, not of type float"),
        ({"b": [1.0, {}]}, "it['b'][1]['c'] is missing, not None"),
        (
            {"b": [1.0, {"c": None, "x": 1}]},
            "it['b'][1]['x'] is of type int, not unknown",
        ),
        ({"b": [1.0, {"c": 0}]}, "it['b'][1]['c'] is of type int, not None"),
        ({"d": 3.0}, "it['d'] is of type float, not of type int"),
        ({"e": 1}, "it['e'] is of type int, not of type bool"),
        ({"f": None}, "it['f'] is None, not of type dict"),
    ],
)
def test_forms_do(change, fault):
    assert difference(WHOLE | change, WHOLE, "it") == fault
