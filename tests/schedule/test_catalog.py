"""The named methods, and the sizes they refuse."""

import re
from inspect import signature

import pytest

from toolkit.errors import UserError
from toolkit.schedule import RandomDelay, catalog, timing


@pytest.mark.parametrize(
    ("schedule", "name"),
    [
        (catalog.data_parallel(2), "DP"),
        (catalog.data_parallel(2, state="sharded"), "ZeRO-DP"),
        (catalog.cyclic(2), "CDP-v2"),
        (catalog.cyclic(2, 1), "CDP-v1"),
        (catalog.cyclic(2, 2), "CDP delay 2"),
        (catalog.data_parallel(2, delay=1), "DP delay 1"),
        (catalog.data_parallel(2, delay="freshest"), "DP"),
        (catalog.data_parallel(2, delay=[0, 3]), "DP delay 0-3 by stage"),
        (catalog.data_parallel(2, delay=[[0, 3], [0, 0]]), "DP delay 0-3"),
        (catalog.data_parallel(2, delay=[2, 2]), "DP delay 2"),
        (catalog.data_parallel(2, delay=RandomDelay(most=3)), "DP random delay 0-3"),
        (
            catalog.cyclic(2, RandomDelay("geometric", 1, 4, p=0.5), state="sharded"),
            "ZeRO-CDP geometric delay 1-4",
        ),
        (catalog.data_parallel(2, accumulate=3), "DP accumulate 3"),
        (catalog.cyclic(2, accumulate=3), "CDP-v2 accumulate 3"),
        (catalog.cyclic(2, 2, state="sharded", accumulate=2), "ZeRO-CDP delay 2 accumulate 2"),
        (catalog.cyclic(2, 1, chains="rotated", accumulate=2), "CDP-v1 rotated accumulate 2"),
        (catalog.published(8), "CDP-v2 as published"),
        (catalog.cyclic(2, 1, chains="rotated"), "CDP-v1 rotated"),
        (catalog.cyclic(2, [[1, 1], [1, 1]]), "CDP-v1"),
        (catalog.cyclic(2, [[1, 1], [1, 0]]), "CDP delay 0-1"),
        (catalog.cyclic(2, state="sharded"), "ZeRO-CDP-v2"),
        (catalog.cyclic(2, 1, state="sharded"), "ZeRO-CDP-v1"),
        (catalog.gradient_accumulation(2, 3), "gradient accumulation"),
        (catalog.cyclic(3, predict=True), "CDP-v2 predicted"),
        (catalog.data_parallel(3, delay=2, predict=True), "DP delay 2 predicted"),
        (catalog.data_parallel(3, predict=True), "DP"),
        (catalog.pipedream_2bw(3, 4, predict=True), "PipeDream-2BW predicted"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_names(schedule, name):
    assert schedule.name == name


def choices(schedule):
    return schedule.timing, schedule.placement, schedule.delay, schedule.state


def test_each_method_is_its_row_of_the_table():
    both = timing.simultaneous(3, 3), timing.cyclic(3, 3)
    assert choices(catalog.data_parallel(3)) == (both[0], "per_microbatch", 0, "replicated")
    assert choices(catalog.cyclic(3)) == (both[1], "per_microbatch", "freshest", "replicated")
    own = catalog.cyclic(3, 1, "per_stage", "sharded")
    assert choices(own) == (both[1], "per_stage", 1, "sharded")
    accumulation = catalog.gradient_accumulation(2, 3)
    assert choices(accumulation) == (timing.sequential(2, 3), "one", 0, "replicated")


@pytest.mark.parametrize("make", [catalog.data_parallel, catalog.cyclic])
def test_as_many_stages_as_microbatches_unless_given(make):
    assert (make(3).n_stages, make(3).n_microbatches) == (3, 3)
    assert (make(3, n_stages=5).n_stages, make(3, n_stages=5).n_microbatches) == (5, 3)


@pytest.mark.parametrize("size", [0, -1, 2.0, 2.5, True, False, "3"])
@pytest.mark.parametrize("name", catalog.FACTORIES)
def test_refuses_what_is_no_size(name, size):
    make = catalog.FACTORIES[name]
    sizes = signature(make).parameters.keys() & {"n", "n_stages", "n_microbatches", "n_ranks"}
    for wrong in sizes:
        with pytest.raises(UserError, match=re.escape(repr(size))):
            make(**dict.fromkeys(sizes, 4) | {wrong: size})


@pytest.mark.parametrize("method", catalog.METHODS.values(), ids=list(catalog.METHODS))
def test_each_method_of_the_registry_is_built_by_name(method):
    own = method(4, n_stages=4) if "n" in signature(method.factory).parameters else method(4, 4)
    sizes = dict.fromkeys(("n", "n_stages", "n_microbatches"), 4)
    taken = {k: v for k, v in sizes.items() if k in signature(method.factory).parameters}
    assert own.name == method.label
    assert catalog.build(method.name, **taken) == own
    assert catalog.build(method.factory.__name__, **method.options, **taken) == own


def test_a_schedule_of_plain_values():
    delay = {"least": 1, "most": 2}
    late = catalog.cyclic(2, RandomDelay(least=1, most=2))
    assert catalog.build("cdp_v2", n=2, delay=delay) == late
    with pytest.raises(UserError, match="cdp_v1"):
        catalog.build("cdp_v3", n=2)
