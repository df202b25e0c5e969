"""Lowering: every program is complete, and what is inferred is what the rules say."""

from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.schedule.strategies import programs, quick, schedules
from toolkit.errors import UserError
from toolkit.schedule import Action, Buffer, Instruction, Schedule, Timing, catalog
from toolkit.schedule.timing import simultaneous

DP = """
 0 FORWARD stage 0 microbatch 0 step 0 version 0
 1 BACKWARD stage 0 microbatch 0 step 0 version 0
 2 ALL_REDUCE gradient stage 0 step 0 among rank 0, 1
 2 UPDATE stage 0 step 0 version 1
 2 FREE activation stage 0 microbatch 0 step 0
 2 FREE weights stage 0 version 0

 0 FORWARD stage 0 microbatch 1 step 0 version 0
 1 BACKWARD stage 0 microbatch 1 step 0 version 0
 2 ALL_REDUCE gradient stage 0 step 0 among rank 0, 1
 2 UPDATE stage 0 step 0 version 1
 2 FREE activation stage 0 microbatch 1 step 0
 2 FREE weights stage 0 version 0
"""
# The running sum goes from rank 0 to rank 1, which updates, and the new weights back.
CDP = """
 0 FORWARD stage 0 microbatch 0 step 0 version 0
 1 BACKWARD stage 0 microbatch 0 step 0 version 0
 2 SEND gradient stage 0 step 0 to rank 1
 2 FREE activation stage 0 microbatch 0 step 0
 2 FORWARD stage 0 microbatch 0 step 1 version 0
 3 RECV weights stage 0 version 1 from rank 1
 3 BACKWARD stage 0 microbatch 0 step 1 version 0
 4 SEND gradient stage 0 step 1 to rank 1
 4 FREE activation stage 0 microbatch 0 step 1
 4 FREE weights stage 0 version 0
 4 FORWARD stage 0 microbatch 0 step 2 version 1
 5 BACKWARD stage 0 microbatch 0 step 2 version 1
 6 SEND gradient stage 0 step 2 to rank 1
 6 FREE activation stage 0 microbatch 0 step 2
 6 FREE weights stage 0 version 1

 1 FORWARD stage 0 microbatch 1 step 0 version 0
 2 RECV gradient stage 0 step 0 from rank 0
 2 BACKWARD stage 0 microbatch 1 step 0 version 0
 3 UPDATE stage 0 step 0 version 1
 3 SEND weights stage 0 version 1 to rank 0
 3 FREE activation stage 0 microbatch 1 step 0
 3 FORWARD stage 0 microbatch 1 step 1 version 0
 4 RECV gradient stage 0 step 1 from rank 0
 4 BACKWARD stage 0 microbatch 1 step 1 version 0
 5 UPDATE stage 0 step 1 version 2
 5 FREE activation stage 0 microbatch 1 step 1
 5 FREE weights stage 0 version 0
 5 FORWARD stage 0 microbatch 1 step 2 version 1
 6 RECV gradient stage 0 step 2 from rank 0
 6 BACKWARD stage 0 microbatch 1 step 2 version 1
 7 UPDATE stage 0 step 2 version 3
 7 FREE activation stage 0 microbatch 1 step 2
 7 FREE weights stage 0 version 1
 7 FREE weights stage 0 version 2
"""


@pytest.mark.parametrize(
    ("schedule", "n_steps", "expected"),
    [
        pytest.param(catalog.data_parallel(2, n_stages=1), 1, DP, id="DP"),
        pytest.param(catalog.cyclic(2, 1, n_stages=1), 3, CDP, id="CDP-v1"),
    ],
)
def test_literal_program(schedule, n_steps, expected):
    ranks = schedule.lower(n_steps).ranks
    text = "\n\n".join("\n".join(f"{i.tick:2} {i}" for i in rank) for rank in ranks)
    assert text == expected.strip("\n")


# By buffer, stage, and version or step: the tick and ranks of each message; of weights' frees.
SHARDED = {
    (Buffer.WEIGHTS, 0, 0): (
        "0 2>0, 1 0>1, 5 2>0, 7 0>1, 10 2>0, 12 0>1", "1 0, 3 1, 7 0, 9 1, 10 2, 12 0, 14 1",
    ),
    (Buffer.WEIGHTS, 0, 1): ("", "16 2"),
    (Buffer.WEIGHTS, 1, 0): ("2 3>4, 6 3>4, 9 3>4", "4 4, 8 4, 9 3, 11 4"),
    (Buffer.WEIGHTS, 1, 1): ("10 3>4, 13 3>4", "12 4, 15 3, 15 4"),
    (Buffer.WEIGHTS, 2, 0): ("", "8 5"),
    (Buffer.WEIGHTS, 2, 1): ("", "14 5"),
    (Buffer.GRADIENT, 0, 0): ("6 0>1, 8 1>2", ""),
    (Buffer.GRADIENT, 0, 1): ("12 0>1, 14 1>2", ""),
    (Buffer.GRADIENT, 1, 0): ("7 4>3", ""),
    (Buffer.GRADIENT, 1, 1): ("15 4>3", ""),
}  # fmt: skip

CIRCULATING = {
    (Buffer.WEIGHTS, 0, 0): ("0 2>0, 5 0>1, 19 2>0, 26 0>1", "5 0, 11 1, 26 0, 32 1, 40 2"),
    (Buffer.WEIGHTS, 1, 0): ("0 2>0, 8 0>1, 15 2>0, 23 0>1", "8 0, 14 1, 23 0, 29 1, 37 2"),
    (Buffer.WEIGHTS, 2, 0): ("3 1>0, 15 1>0, 19 1>2, 28 1>2", "9 0, 18 0, 25 2, 34 1, 34 2"),
    (Buffer.WEIGHTS, 3, 0): ("15 0>1, 23 1>2", "23 1, 31 0, 31 2"),
    (Buffer.GRADIENT, 0, 0): ("24 0>1, 32 1>2", ""),
    (Buffer.GRADIENT, 1, 0): ("21 0>1, 29 1>2", ""),
    (Buffer.GRADIENT, 2, 0): ("18 0>2, 34 2>1", ""),
    (Buffer.GRADIENT, 3, 0): ("23 1>2, 31 2>0", ""),
}  # fmt: skip


@pytest.mark.parametrize(
    ("schedule", "n_steps", "expected"),
    [
        # The owners are ranks 2, 3 and 5. Stage 1 has two ranks, which take turns; stage 2 has one.
        pytest.param(
            catalog.cyclic(3, placement="per_stage_and_microbatch", state="sharded"),
            2,
            SHARDED,
            id="sharded",
        ),
        # Forwards and backwards hand on copies of their own.
        pytest.param(
            catalog.cyclic(3, n_stages=4, state="circulating"),
            1,
            CIRCULATING,
            id="circulating",
        ),
    ],
)
def test_literal_handovers(schedule, n_steps, expected):
    messages, frees = defaultdict(list), defaultdict(list)
    for rank, own in enumerate(schedule.lower(n_steps).ranks):
        for i in own:
            key = (
                i.buffer,
                i.stage,
                i.step if i.buffer == Buffer.GRADIENT else i.version,
            )
            if i.action == Action.SEND and i.microbatch is None:
                messages[key].append((i.tick, f"{rank}>{i.peers[0]}"))
            elif i.action == Action.FREE and i.microbatch is None:
                frees[key].append((i.tick, f"{rank}"))
    found = {}
    for key in messages.keys() | frees.keys():
        moments = sorted(messages[key]), sorted(frees[key])
        found[key] = tuple(
            ", ".join(f"{tick} {who}" for tick, who in own) for own in moments
        )
    assert found == expected


@given(schedules(), st.integers(1, 4), st.integers(0, 4))
@quick
def test_every_op_runs_when_and_where_the_schedule_says(schedule, n_steps, first_step):
    """That it runs once and on the right weights is verified."""
    program = schedule.lower(n_steps, first_step)
    assert program.verify() is program
    assert program.steps == range(first_step, first_step + n_steps)
    assert len(program.ranks) == schedule.n_ranks
    timing = schedule.timing
    for rank, instructions in enumerate(program.ranks):
        assert [i.tick for i in instructions] == sorted(i.tick for i in instructions)
        for i in instructions:
            if i.action.computes:
                assert rank == schedule.rank(i.stage, i.microbatch, i.step)
                assert (
                    i.tick
                    == timing.starts[i.op] + (i.step - first_step) * timing.period
                )
            elif i.action == Action.UPDATE and schedule.state == "sharded":
                assert rank == schedule.owners[i.stage]


@given(programs())
@quick
def test_activations_are_counted_as_the_ops_live(program):
    """Against a count by tick: from a forward's start to its (whole) backward's end."""
    tick = program.schedule.timing.ticks_per_slot
    ends = {}
    for i in (i for rank in program.ranks for i in rank):
        if i.action in (Action.BACKWARD, Action.BACKWARD_WEIGHT):
            ends[i.stage, i.microbatch, i.step] = i.tick + tick
    for rank, by_slot in zip(program.ranks, program.activations(), strict=True):
        alive = Counter()
        for i in (i for i in rank if i.action == Action.FORWARD):
            alive.update(range(i.tick, ends[i.stage, i.microbatch, i.step]))
        slots = [
            range(slot * tick, (slot + 1) * tick) for slot in range(program.n_slots)
        ]
        assert list(by_slot) == [max(alive[at] for at in slot) for slot in slots]
    assert program.peak_activations() == tuple(map(max, program.activations()))


@pytest.mark.parametrize(
    ("n_steps", "first_step"),
    [(0, 0), (-1, 0), (1, -1), (1.5, 0), ("2", 0), (1, 0.5), (1, True), (None, 0)],
)
def test_refuses_an_invalid_number_of_steps(n_steps, first_step):
    name, value = ("n_steps", n_steps) if n_steps != 1 else ("first_step", first_step)
    with pytest.raises(UserError, match=f"^{name}.*{value!r}"):
        catalog.cyclic(3).lower(n_steps, first_step)


@pytest.mark.parametrize(
    ("label", "action", "microbatch", "buffer"),
    [
        ("3F12", Action.FORWARD, 12, None),
        ("3W1", Action.BACKWARD_WEIGHT, 1, Buffer.PREDICTION),
        ("update 3", Action.UPDATE, None, None),
        ("predict 3", Action.PREDICT, None, Buffer.PREDICTION),
        ("activation gradient", Action.SEND, 1, Buffer.ACTIVATION_GRADIENT),
        ("weights", Action.RECV, None, Buffer.WEIGHTS),
        ("all-reduce", Action.ALL_REDUCE, None, Buffer.GRADIENT),
    ],
)
def test_label_in_timelines(label, action, microbatch, buffer):
    assert Instruction(0, action, 3, microbatch, 0, 0, buffer).label == label


@pytest.mark.parametrize(
    ("action", "gives", "leaves"),
    [
        (Action.SEND, [5, 2, 7], []),
        (Action.RECV, [], [5, 2, 7]),
        (Action.ALL_REDUCE, [5, 2, 7], [5, 2, 7]),
        (Action.REDUCE, [5, 2, 7], [5]),
        (Action.BROADCAST, [5], [2, 7]),
    ],
)
def test_ranks_that_give_and_that_receive(action, gives, leaves):
    """The root is the first of the peers."""
    i = Instruction(0, action, 0, step=0, buffer=Buffer.GRADIENT, peers=(5, 2, 7))
    assert [rank for rank in i.peers if i.gives(rank)] == gives
    assert [rank for rank in i.peers if i.leaves(rank)] == leaves


@pytest.mark.parametrize("state", ["replicated", "sharded"])
def test_ranks_that_take_turns_do_not_reduce_without_the_others(state):
    """The two micro-batches of a step end together, on two of the three ranks of a stage."""
    timing = Timing(simultaneous(2, 2).starts, 2)
    schedule = Schedule(
        "x", 2, 2, timing, "per_stage_and_microbatch", "freshest", state
    )
    assert len(schedule.layout.ranks(0)) > 2
    schedule.lower(5).verify()
