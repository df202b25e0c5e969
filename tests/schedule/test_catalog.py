"""The named methods, and the sizes they refuse."""

import re
from inspect import signature

import pytest

from toolkit.errors import UserError
from toolkit.schedule import RandomDelay, ScheduleSpec, catalog, timing


@pytest.mark.parametrize(
    ("name", "factory", "options"),
    [
        ("DP", catalog.data_parallel, {}),
        ("DP delay 1", catalog.data_parallel, {"delay": 1}),
        ("DP", catalog.data_parallel, {"delay": "freshest"}),
        ("DP delay 0-3 by stage", catalog.data_parallel, {"delay": [0, 3]}),
        ("DP delay 0-3", catalog.data_parallel, {"delay": [[0, 3], [0, 0]]}),
        ("DP delay 2", catalog.data_parallel, {"delay": [2, 2]}),
        ("DP random delay 0-3", catalog.data_parallel, {"delay": RandomDelay(most=3)}),
        ("DP accumulate 3", catalog.data_parallel, {"accumulate": 3}),
        ("DP delay 2 predicted", catalog.data_parallel, {"delay": 2, "correction": "extrapolate"}),
        ("DP", catalog.data_parallel, {"correction": "extrapolate"}),
        ("ZeRO-DP", catalog.data_parallel, {"state": "sharded"}),
        ("CDP-v2", catalog.cyclic, {}),
        ("CDP-v1", catalog.cyclic, {"delay": [[1, 1], [1, 1]]}),
        ("CDP delay 0-1", catalog.cyclic, {"delay": [[1, 1], [1, 0]]}),
        ("CDP-v2 predicted", catalog.cyclic, {"correction": "extrapolate"}),
        ("CDP-v1 rotated accumulate 2", catalog.cyclic,
         {"delay": 1, "chains": "rotated", "accumulate": 2}),
        ("ZeRO-CDP delay 2 accumulate 2", catalog.cyclic,
         {"delay": 2, "state": "sharded", "accumulate": 2}),
        ("ZeRO-CDP geometric delay 1-4", catalog.cyclic,
         {"delay": RandomDelay("geometric", 1, 4, p=0.5), "state": "sharded"}),
    ],
)  # fmt: skip
def test_names(name, factory, options):
    assert factory(2, **options).name == name


def test_each_method_is_its_row_of_the_table():
    found = [catalog.data_parallel(3), catalog.cyclic(3)]
    found += [
        catalog.cyclic(3, 1, "per_stage", "sharded"),
        catalog.gradient_accumulation(2, 3),
    ]
    assert [(one.timing, one.placement, one.delay, one.state) for one in found] == [
        (timing.simultaneous(3, 3), "per_microbatch", 0, "replicated"),
        (timing.cyclic(3, 3), "per_microbatch", "freshest", "replicated"),
        (timing.cyclic(3, 3), "per_stage", 1, "sharded"),
        (timing.simultaneous(2, 1, 3), "one", 0, "replicated"),
    ]


@pytest.mark.parametrize("make", [catalog.data_parallel, catalog.cyclic])
def test_n_stages_is_n_unless_given(make):
    assert (make(3).n_stages, make(3).n_microbatches) == (3, 3)
    assert (make(3, n_stages=5).n_stages, make(3, n_stages=5).n_microbatches) == (5, 3)


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "3"])
@pytest.mark.parametrize("name", catalog.FACTORIES)
def test_refuses_an_invalid_size(name, size):
    make = catalog.FACTORIES[name]
    sizes = signature(make).parameters.keys() & {
        "n",
        "n_stages",
        "n_microbatches",
        "n_ranks",
    }
    for wrong in sizes:
        with pytest.raises(UserError, match=re.escape(repr(size))):
            make(**dict.fromkeys(sizes, 4) | {wrong: size})


@pytest.mark.parametrize("method", catalog.METHODS.values(), ids=list(catalog.METHODS))
def test_each_method_of_the_registry_is_built_by_name(method):
    sizes = signature(method.factory).parameters.keys() & {
        "n",
        "n_stages",
        "n_microbatches",
    }
    options = {size: 8 if size == "n_microbatches" else 4 for size in sizes}
    own = method(**options)
    assert own.name == method.label
    assert ScheduleSpec.from_call(method.name, options).build() == own
    assert (
        ScheduleSpec.from_call(
            method.factory.__name__, method.options | options
        ).build()
        == own
    )


def test_a_schedule_of_plain_values():
    late = catalog.cyclic(2, RandomDelay(least=1, most=2))
    assert ScheduleSpec("cdp_v2", 2, 2, {"least": 1, "most": 2}).build() == late
    assert ScheduleSpec.from_call("cdp_v1", {"n": 2}).build() == catalog.cdp_v1(2)
    with pytest.raises(UserError, match=r"cdp_v3.*cdp_v1"):
        ScheduleSpec.from_call("cdp_v3", {"n": 2})
