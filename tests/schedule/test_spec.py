"""Schedules as plain values: what carries them, and what they refuse."""

from dataclasses import replace

import pytest

from toolkit.errors import UserError
from toolkit.schedule import (
    RandomDelay,
    Schedule,
    ScheduleSpec,
    after,
    catalog,
    switched,
)
from toolkit.schedule.catalog import METHODS
from toolkit.schedule.plain_options import RANK_ORDERS
from toolkit.schedule.spec import PhaseSpec, same_sized
from toolkit.schedule.spec_phases import in_order

ORDERS = ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")


@pytest.mark.parametrize("name", METHODS)
def test_every_schedule_of_the_catalogue_carries_its_spec(name):
    spec = ScheduleSpec(name, 4, 8)
    schedule = spec.build()
    assert schedule.spec == spec
    assert schedule.spec.method == name
    assert schedule.spec.build() == schedule


@pytest.mark.parametrize(
    ("schedule", "spec"),
    [
        (catalog.cyclic(4), ScheduleSpec("cdp_v2", 4, 4)),
        (catalog.cyclic(4, 1), ScheduleSpec("cdp_v1", 4, 4)),
        (catalog.cyclic(4, 1, state="sharded"), ScheduleSpec("zero_cdp_v1", 4, 4)),
        (catalog.cyclic(4, 2, n_stages=3), ScheduleSpec("cdp_v2", 3, 4, delay=2)),
        (
            catalog.data_parallel(2, accumulate=3),
            ScheduleSpec("dp", 2, 2, accumulate=3),
        ),
        (
            catalog.weipipe(3, state="sharded"),
            ScheduleSpec("weipipe", 3, 3, state="sharded"),
        ),
        (catalog.published(8), ScheduleSpec("published", 4, 8)),
        (
            catalog.interleaved_1f1b(8, 4, 4),
            ScheduleSpec("interleaved_1f1b", 8, 4, n_ranks=4),
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Schedule) else "",
)
def test_a_call_of_the_catalogue_has_the_shortest_spec(schedule, spec):
    assert schedule.spec == spec


def test_options_that_equal_defaults_are_left_out():
    spelled = ScheduleSpec(
        "cdp_v1", 2, 2, delay=1, placement="per_microbatch", accumulate=1
    )
    assert spelled == ScheduleSpec("cdp_v1", 2, 2)
    assert spelled.given == {}
    assert hash(spelled) == hash(ScheduleSpec("cdp_v1", 2, 2))


def test_mappings_become_values():
    spec = ScheduleSpec(
        "dp", 2, 2, delay={"most": 3}, correction={"kind": "compensate"}
    )
    assert spec.delay == RandomDelay(most=3)
    assert spec.build().corrected.kind == "compensate"


def test_rank_orders_have_a_spec():
    schedule = Schedule.from_rank_orders(ORDERS, delay=0, state="replicated")
    assert schedule.spec is None
    spec = ScheduleSpec.of(schedule)
    assert (spec.method, spec.orders) == (RANK_ORDERS, ORDERS)
    assert (spec.stages, spec.microbatches, spec.family) == (2, 2, "pipeline")
    assert spec.build() == schedule


def test_a_file_of_rank_orders_is_read(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(catalog.gpipe(2, 3).to_csv())
    spec = ScheduleSpec.from_config(
        {"_target_": "ignored", "file": str(path), "delay": 0}
    )
    assert spec.build().name == "mine"
    assert spec.build().timing == catalog.gpipe(2, 3).timing
    assert spec.overrides() == f"schedule.file={path} schedule.delay=0"


def test_phases_are_part_of_the_spec():
    trained = after([(catalog.data_parallel(3), 5)], catalog.cdp_v1(3))
    spec = ScheduleSpec(
        "cdp_v1", 3, 3, phases=(PhaseSpec(ScheduleSpec("dp", 3, 3), 5),)
    )
    assert trained.spec == spec
    assert trained.final.spec == ScheduleSpec("cdp_v1", 3, 3)
    assert spec.build() == trained
    assert in_order([(catalog.data_parallel(3), 5), (catalog.cdp_v1(3), 9)]) == spec
    assert switched(trained, 2, catalog.cyclic(3)).spec.phases[0].steps == 2
    assert spec.after([]) is spec


def test_a_copy_with_other_fields_has_no_spec():
    assert replace(catalog.cyclic(3), name="mine").spec is None
    with pytest.raises(UserError, match="no spec makes"):
        ScheduleSpec.of(replace(catalog.cyclic(3), name="mine"))


def test_methods_of_equal_sizes():
    schedule = catalog.cyclic(4, n_stages=3, accumulate=2, placement="one")
    assert same_sized(schedule, "dp") == ScheduleSpec(
        "dp", 3, 4, placement="one", accumulate=2
    )
    delayed = same_sized(schedule, {"schedule": "dp", "delay": 2})
    assert delayed == ScheduleSpec("dp", 3, 4, delay=2, placement="one", accumulate=2)
    assert same_sized(catalog.gpipe(2, 6), "one_f_one_b") == ScheduleSpec(
        "one_f_one_b", 2, 6
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ScheduleSpec("cdp_v3"), r"cdp_v3.*cdp_v"),
        (lambda: ScheduleSpec("gpipe", delay=1).build(), "gpipe has no delay, got 1"),
        (lambda: ScheduleSpec("dp", delay={"mots": 3}), r"mots.*most"),
        (
            lambda: ScheduleSpec.from_call("cyclic", {"n": 2, "of_tomorrow": 1}),
            "of_tomorrow",
        ),
        (lambda: ScheduleSpec.from_call("cyclic", {}), "cyclic needs n"),
        (
            lambda: ScheduleSpec.from_call("gpipe", {"n_microbatches": 2}),
            "gpipe needs n_stages",
        ),
        (lambda: ScheduleSpec.from_config({"_target_": "os.system"}), "os.system"),
        (lambda: ScheduleSpec.from_config({"file": ""}), "file is empty"),
        (lambda: ScheduleSpec.from_config({"file": "x", "groups": 2}), "groups=2"),
        (lambda: same_sized(catalog.gpipe(2, 2), "pd"), "'pd'"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(UserError, match=message):
        make()
