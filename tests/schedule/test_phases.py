"""Schedules that follow one another: one verified program across the change."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.schedule.strategies import quick
from tests.schedule.test_verify import drop, find
from toolkit.cost import simulate
from toolkit.cost.hardware import UNIT
from toolkit.cost.stage_costs import unit_costs
from toolkit.errors import UserError
from toolkit.figures import schedules
from toolkit.schedule import (
    Action,
    Buffer,
    Correction,
    Phase,
    ScheduleSpec,
    after,
    catalog,
    switched,
)
from toolkit.schedule.steady_state import footprint, steady_steps, steps_to_time

DP, V1, V2 = (
    f(2) for f in (catalog.data_parallel, catalog.METHODS["cdp_v1"], catalog.cyclic)
)


def test_a_synchronous_start():
    """The first cyclic step reads the newest weights only; the next ones are a step late."""
    schedule = after([(DP, 2)], V1)
    program = schedule.lower(5).verify()
    reads = {
        (i.step, i.version) for rank in program.ranks for i in rank if i.action.computes
    }
    assert reads == {(0, 0), (1, 1), (2, 2), (3, 2), (4, 3)}
    # Two steps of 4 slots, with one to drain, come before.
    assert program.changes == (9,)
    first = [min(i.tick for i in rank if i.step == 2) for rank in program.ranks]
    assert first == [9, 11]
    assert [schedule.oldest_version(0, t) for t in range(5)] == [0, 1, 2, 2, 3]
    assert schedule.name == "CDP-v1 after 2 steps of DP"


def test_what_the_next_schedule_reads_is_kept_or_sent():
    """CDP-v2's last worker reads no old version of the last stage; a later one does."""
    late = catalog.data_parallel(2, delay=[1, 2])
    program = after([(V2, 3)], late).lower(6).verify()
    assert after([(V2, 3)], late).at(3).first_versions == (2, 3)
    across = [i for rank in program.ranks for i in rank if i.tick == program.changes[0]]
    assert not [i for i in across if i.action == Action.FREE]
    pipeline = after([(DP, 1)], catalog.gpipe(2, 2)).lower(2).verify()
    across = [
        [i for i in rank if i.tick == pipeline.changes[0]] for rank in pipeline.ranks
    ]
    # Each rank goes on with one of the stages that both had.
    assert [next((i.action, i.stage) for i in rank) for rank in across] == [
        (Action.FREE, 1),
        (Action.FREE, 0),
    ]
    back = after([(catalog.gpipe(2, 2), 1)], DP).lower(2).verify()
    sent = [
        (rank, i.stage)
        for rank, own in enumerate(back.ranks)
        for i in own
        if i.peers == (1 - rank,)
        and i.action == Action.SEND
        and i.buffer == Buffer.WEIGHTS
    ]
    assert sent == [(0, 0), (1, 1)]


MADE = [
    DP,
    V1,
    V2,
    catalog.data_parallel(2, delay=[2, 0]),
    catalog.data_parallel(2, state="sharded"),
    catalog.cyclic(2, 1, state="sharded"),
    catalog.cyclic(2, 1, "per_stage"),
    catalog.cyclic(2, 1, chains="rotated"),
    catalog.cyclic(2, 2, correction="extrapolate"),
    catalog.cyclic(2, 1, correction=Correction("compensate", 1)),
    catalog.gpipe(2, 2),
    catalog.zero_bubble(2, 2),
    catalog.pipedream_2bw(2, 2),
]


@given(
    st.lists(
        st.tuples(st.sampled_from(MADE), st.integers(1, 3)), min_size=1, max_size=3
    ),
    st.sampled_from(MADE),
    st.integers(0, 3),
    st.integers(1, 7),
)
@quick
def test_any_may_follow_any(phases, last, first_step, n_steps):
    schedule = after(phases, last)
    program = schedule.lower(n_steps, first_step).verify()
    assert program.steps == range(first_step, first_step + n_steps)
    starts = schedule.changes(range(first_step, first_step + n_steps))
    assert len(program.changes) == len(starts)
    timeline = simulate(program, unit_costs(2), UNIT)
    assert len(timeline.step_ends) == n_steps
    begin = starts[-1] - first_step if starts else 0
    plain = steady_steps(schedule.at(first_step + n_steps - 1), n_steps - begin)
    assert [*timeline.steady] == [begin + step for step in plain]


def test_a_program_that_lacks_what_the_change_hands_on_is_refused():
    program = after([(catalog.gpipe(2, 2), 1)], DP).lower(2)
    at = program.changes[0]
    place = find(program, lambda i: i.action == Action.RECV and i.tick == at)
    with pytest.raises(UserError, match=r"version 1 of stage|waits for ever"):
        drop(program, *place).verify()


def test_the_steady_state_is_that_of_the_last():
    schedule = after([(DP, 3)], V1)
    assert footprint(schedule) == footprint(V1)
    assert steps_to_time(schedule) == 3 + steps_to_time(V1)
    program = schedule.lower(steps_to_time(schedule)).verify()
    timeline, plain = (
        simulate(p, unit_costs(2), UNIT) for p in (program, V1.lower(20))
    )
    assert timeline.step_time == plain.step_time


def test_the_next_schedule_starts_when_all_have_finished():
    program = after([(DP, 2)], V1).lower(4).verify()
    timeline = simulate(program, unit_costs(2), UNIT)
    starts = [
        [
            min(s.start for s in timeline.spans if (s.rank, s.step) == (r, t))
            for r in range(2)
        ]
        for t in range(3)
    ]
    assert starts[0] == [0, 0]
    assert starts[1][0] == starts[1][1]
    assert starts[2][1] - starts[2][0] == 2  # the stagger


def test_lengths_in_epochs():
    schedule = after([Phase(DP, epochs=1), Phase(V2, epochs=0.01)], V1).in_steps(30)
    assert schedule.changes(range(100)) == [30, 31]
    assert schedule.changes(range(30, 100)) == [31]
    assert [schedule.at(t).max_staleness for t in (29, 30, 31)] == [0, 1, 1]


def test_by_plain_values():
    phases = [{"schedule": "dp", "epochs": 1}, {"schedule": "cdp_v2", "steps": 2}]
    built = ScheduleSpec.from_call(
        "cdp_v1", {"n": 4, "n_stages": 3, "phases": phases}
    ).build()
    assert built == after(
        [
            Phase(catalog.data_parallel(4, n_stages=3), epochs=1),
            (catalog.cyclic(4, n_stages=3), 2),
        ],
        catalog.cyclic(4, 1, n_stages=3),
    )


def test_is_drawn_with_a_step_of_each():
    figure = schedules(after([Phase(DP, epochs=1)], V1), 2)
    assert figure.axes[0].get_title() == "CDP-v1 after 1 epoch of DP"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Phase(DP), "steps=None, epochs=None"),
        (lambda: Phase(DP, 1, 1), "steps=1, epochs=1"),
        (lambda: Phase(DP, 0), "got 0"),
        (lambda: Phase(DP, epochs=-1), "got -1"),
        (lambda: Phase(DP, epochs="1"), "got '1'"),
        (lambda: after([], V1), "one or more"),
        (lambda: after([(after([(DP, 1)], V1), 1)], V1), "no phases themselves"),
        (lambda: after([(catalog.data_parallel(3), 1)], V1), "equal n_stages: got 3"),
        (
            lambda: after([(catalog.data_parallel(2, "one"), 1)], V1),
            "equal n_ranks: got 1 of DP and 2",
        ),
        (lambda: after([Phase(DP, epochs=1)], V1).lower(1), "in_steps"),
        (lambda: ScheduleSpec.from_call("cdp_v1", {"n": 2, "phases": 1}), "got 1"),
        (
            lambda: ScheduleSpec.from_call("cdp_v1", {"n": 2, "phases": ["dp"]}),
            "got 'dp'",
        ),
        (
            lambda: ScheduleSpec.from_call(
                "cdp_v1", {"n": 2, "phases": [{"schedule": "pd"}]}
            ),
            "'pd'",
        ),
    ],
)
def test_refuses(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_other_lengths_of_slots_make_one_program():
    coarse, fine = catalog.data_parallel(3, n_stages=2), catalog.cyclic(3, n_stages=2)
    assert coarse.timing.ticks_per_slot < fine.timing.ticks_per_slot
    for pair in product((coarse, fine), repeat=2):
        program = after([(pair[0], 2)], pair[1]).lower(4).verify()
        assert {
            i.step for rank in program.ranks for i in rank if i.action.computes
        } == {*range(4)}
    assert replace(after([(coarse, 2)], fine), name="x").name == "x"


def test_a_course_grows_by_a_change():
    """Parts keep their lengths; a change leaves out what was planned from its step on."""
    grown = switched(switched(switched(DP, 2, V1), 5, V2), 6, DP)
    expected = after([(DP, 2), (V1, 3), (V2, 1)], DP, "DP")
    assert grown == expected
    assert switched(expected, 5, DP) == after([(DP, 2), (V1, 3)], DP, "DP")
    assert switched(expected, 3, V2) == after([(DP, 2), (V1, 1)], V2, "CDP-v2")
    assert switched(expected, 0, V2) is V2
    with pytest.raises(UserError, match="n_ranks"):
        switched(expected, 3, catalog.cyclic(2, placement="one"))
