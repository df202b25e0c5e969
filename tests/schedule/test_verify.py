"""Mutations: whatever is broken in a program, verify() refuses it and says where."""

import re
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.schedule.strategies import programs, quick
from toolkit.errors import UserError
from toolkit.schedule import Action, Buffer, catalog

COLLECTIVES = (Action.ALL_REDUCE, Action.REDUCE, Action.BROADCAST)
BACKWARDS = (Action.BACKWARD, Action.BACKWARD_INPUT)
APART = ["per_microbatch", "per_stage", "per_stage_and_microbatch"]


def edit(program, rank, change):
    """``program`` after ``change(list of the rank's instructions)``."""
    ranks = [list(instructions) for instructions in program.ranks]
    change(ranks[rank])
    return replace(program, ranks=tuple(map(tuple, ranks)))


def drop(program, rank, instruction):
    return edit(program, rank, lambda own: own.remove(instruction))


def put(program, rank, instruction, change):
    """``program`` with ``change``, an instruction, in the place of another."""

    def exchange(own):
        own[own.index(instruction)] = change

    return edit(program, rank, exchange)


def twice(program, rank, instruction):
    return edit(program, rank, lambda own: own.insert(own.index(instruction), instruction))


def before(program, rank, instruction, other):
    """``program`` with ``instruction`` moved to just before ``other``."""

    def move(own):
        own.remove(instruction)
        own.insert(own.index(other), instruction)

    return edit(program, rank, move)


def refusal(program):
    with pytest.raises(UserError, match="slot") as error:
        program.verify()
    return str(error.value)


PLACE = re.compile(r"rank (\d+), slot (\d+), ([A-Z_]+ .*stage \d+[^:]*): (.+)")


def names_the_place(message, program=None):
    """Rank, slot and instruction are named, and are those of the program."""
    first, head, *_ = message.splitlines()
    found = PLACE.fullmatch(first)
    assert found, first
    assert head.startswith("slot")
    if program:
        rank, slot, text = int(found[1]), int(found[2]), found[3]
        assert (slot, text) in {(program.slot(i), str(i)) for i in program.ranks[rank]}
    return found[4]


def at(program, rank, instruction):
    return f"rank {rank}, slot {program.slot(instruction)}, {instruction}: "


def pick(data, program, wanted):
    """Any (rank, instruction) that is ``wanted``."""
    found = [(r, i) for r, own in enumerate(program.ranks) for i in own if wanted(i)]
    assume(found)
    return data.draw(st.sampled_from(found))


def find(program, wanted):
    return next((r, i) for r, own in enumerate(program.ranks) for i in own if wanted(i))


def is_free(buffer):
    return lambda i: i.action == Action.FREE and i.buffer == buffer


@given(programs(placements=APART), st.data())
@quick
@pytest.mark.parametrize("action", [Action.SEND, Action.RECV], ids=["send", "receive"])
def test_a_dropped_message(action, program, data):
    rank, message = pick(data, program, lambda i: i.action == action)
    mutant = drop(program, rank, message)
    names_the_place(refusal(mutant), mutant)


@given(programs(placements=APART), st.data())
@quick
def test_a_dropped_send_and_its_receive(program, data):
    rank, send = pick(data, program, lambda i: i.action == Action.SEND)
    receive = send._replace(action=Action.RECV, peers=(rank,))
    mutant = drop(drop(program, rank, send), send.peers[0], receive)
    names_the_place(refusal(mutant), mutant)


@given(programs(placements=APART, rules=["simultaneous"]), st.data())
@quick
def test_a_rank_that_stays_away_from_a_collective(program, data):
    rank, collective = pick(data, program, lambda i: i.action in COLLECTIVES)
    mutant = drop(program, rank, collective)
    names_the_place(refusal(mutant), mutant)


def test_a_rank_that_joins_a_collective_of_others():
    program = catalog.data_parallel(2, "per_stage_and_microbatch").lower(1)
    _, collective = find(program, lambda i: i.action in COLLECTIVES)
    outsider = next(r for r in range(len(program.ranks)) if r not in collective.peers)
    mutant = edit(program, outsider, lambda own: own.insert(0, collective))
    names_the_place(refusal(mutant), mutant)


@given(programs(placements=APART), st.data())
@quick
def test_a_message_to_the_wrong_rank(program, data):
    assume(len(program.ranks) > 2)
    rank, send = pick(data, program, lambda i: i.action == Action.SEND)
    others = set(range(len(program.ranks))) - {rank, *send.peers}
    wrong = send._replace(peers=(data.draw(st.sampled_from(sorted(others))),))
    mutant = put(program, rank, send, wrong)
    names_the_place(refusal(mutant), mutant)


@given(programs(), st.data())
@quick
def test_any_dropped_instruction(program, data):
    rank, instruction = pick(data, program, lambda i: True)
    message = refusal(drop(program, rank, instruction))
    assert message.startswith("at the end: ") or names_the_place(message)


@given(programs(), st.data())
@quick
def test_any_duplicated_instruction(program, data):
    rank, instruction = pick(data, program, lambda i: True)
    mutant = twice(program, rank, instruction)
    names_the_place(refusal(mutant), mutant)


@given(programs(), st.data())
@quick
def test_a_duplicated_op(program, data):
    rank, op = pick(data, program, lambda i: i.action.computes)
    message = refusal(twice(program, rank, op))
    assert message.startswith(at(program, rank, op) + "it has been done before")


@given(programs(), st.data())
@quick
def test_a_backward_before_its_forward(program, data):
    """Two ops of a rank change places."""
    rank, backward = pick(data, program, lambda i: i.action in BACKWARDS)
    forward = backward._replace(
        action=Action.FORWARD,
        tick=next(
            i.tick for i in program.ranks[rank] if i[1:5] == (Action.FORWARD, *backward[2:5])
        ),
    )
    mutant = put(program, rank, forward, None)
    mutant = put(mutant, rank, backward, forward)
    mutant = put(mutant, rank, None, backward)
    names_the_place(refusal(mutant), mutant)


@given(programs(rules=["split"], placements=["one", "per_microbatch"]), st.data())
@quick
def test_the_second_half_of_a_backward_before_the_first(program, data):
    rank, second = pick(data, program, lambda i: i.action == Action.BACKWARD_WEIGHT)
    key = (Action.BACKWARD_INPUT, *second[2:5])
    first = next(i for i in program.ranks[rank] if i[1:5] == key)
    message = refusal(before(program, rank, second, first))
    assert message.startswith(at(program, rank, second) + "the first half of this backward")


@given(programs(placements=["one", "per_microbatch"]), st.data())
@quick
def test_a_forward_before_that_of_the_stage_before(program, data):
    rank, later = pick(data, program, lambda i: i.action == Action.FORWARD and i.stage > 0)
    key = (Action.FORWARD, later.stage - 1, later.microbatch, later.step)
    earlier = next(i for i in program.ranks[rank] if i[1:5] == key)
    mutant = before(program, rank, later, earlier)
    names_the_place(refusal(mutant), mutant)


@given(programs(placements=["per_stage", "per_stage_and_microbatch"]), st.data())
@quick
def test_ranks_that_wait_for_each_other(program, data):
    """A rank would receive the gradient of an activation before it sends that activation."""
    rank, send = pick(
        data, program, lambda i: i.action == Action.SEND and i.buffer == Buffer.ACTIVATION
    )
    key = (Action.RECV, send.stage + 1, send.microbatch, send.step)
    receive = next(i for i in program.ranks[rank] if i[1:5] == key)
    mutant = before(program, rank, receive, send)
    why = names_the_place(refusal(mutant), mutant)
    assert why.startswith("it waits for ever: rank ")
    assert f"rank {send.peers[0]} waits at" in why or f"rank {rank} waits at" in why


def test_two_ranks_that_wait_for_each_other():
    program = catalog.cyclic(2, placement="per_stage").lower(1)
    _, receive = find(program, lambda i: i.action == Action.RECV)
    assert refusal(before(program, 0, receive, program.ranks[0][1])).splitlines() == [
        "rank 1, slot 1, RECV activation stage 0 microbatch 0 step 0 from rank 0: it waits for"
        " ever: rank 0 waits at RECV activation gradient stage 1 microbatch 0 step 0 from rank 1",
        "slot   0     1   2   3   4   5",
        "rank 0 [0F0] .   0F1 0B0 .   0B1",
        "rank 1 .     1F0 1B0 1F1 1B1 .",
    ]


@given(programs(), st.data())
@quick
def test_activations_used_after_they_are_freed(program, data):
    rank, free = pick(data, program, is_free(Buffer.ACTIVATION))
    key = free[2:5]
    user = next(i for i in program.ranks[rank] if i.action in BACKWARDS and i[2:5] == key)
    message = refusal(before(program, rank, free, user))
    assert message.startswith(at(program, rank, user) + "its activations are not there")


@given(programs(), st.data())
@quick
def test_weights_used_after_they_are_freed(program, data):
    """Before an op that reads the version, if that op is after the version came."""
    rank, user = pick(data, program, lambda i: i.action.computes)
    own = program.ranks[rank]
    frees = [
        i
        for i in own[own.index(user) :]
        if i.action == Action.FREE and i.weights == user.weights and i.version is not None
    ]
    message = refusal(before(program, rank, frees[0], user))
    what = "the prediction from version" if user.buffer else "version"
    why = f"the rank does not hold {what} {user.version} of stage {user.stage}"
    assert message.startswith(at(program, rank, user) + why)


@given(programs(), st.data())
@quick
def test_activations_that_are_never_freed(program, data):
    rank, free = pick(data, program, is_free(Buffer.ACTIVATION))
    message = refusal(drop(program, rank, free))
    assert message.startswith(at(program, rank, free) + "it is missing\nslot")


@given(programs(states=["replicated"]), st.data())
@quick
def test_weights_that_are_never_freed(program, data):
    rank, free = pick(data, program, is_free(Buffer.WEIGHTS))
    message = refusal(drop(program, rank, free))
    assert message.startswith(at(program, rank, free) + "it is missing\nslot")


@given(programs(), st.data())
@quick
def test_a_buffer_freed_twice(program, data):
    rank, free = pick(data, program, lambda i: i.action == Action.FREE)
    message = refusal(twice(program, rank, free))
    assert message.startswith(at(program, rank, free) + "there is nothing to free")


@given(programs(), st.sampled_from([-1, 1, 2]), st.data())
@quick
def test_a_wrong_weight_version(program, off, data):
    rank, op = pick(data, program, lambda i: i.action.computes)
    wrong = op._replace(version=op.version + off)
    message = refusal(put(program, rank, op, wrong))
    predicts = ", and to predict from it" if op.buffer else ""
    why = f"the schedule promises weight version {op.version}{predicts}\n"
    assert message.startswith(at(program, rank, wrong) + why)


@given(programs(), st.data())
@quick
def test_a_missing_update(program, data):
    """Whoever needs the new version lacks it; after the last step, it is missed at the end."""
    rank, update = pick(data, program, lambda i: i.action == Action.UPDATE)
    message = refusal(drop(program, rank, update))
    if message.startswith("at the end"):
        lost = f"rank {rank} has lost the newest version, {program.steps.stop}, of stage"
        assert lost in message or f"rank {rank} is left with unused results" in message
    else:
        names_the_place(message)


@pytest.mark.parametrize("off", [-1, 1])
@given(programs(), st.data())
@quick
def test_an_update_that_makes_another_version(off, program, data):
    rank, update = pick(data, program, lambda i: i.action == Action.UPDATE)
    wrong = update._replace(version=update.version + off)
    message = refusal(put(program, rank, update, wrong))
    assert message.startswith("at the end: ") or names_the_place(message)


def test_newest_weights_that_are_freed():
    """What training has made must be there at the end."""
    program = catalog.cyclic(2).lower(1)
    rank, update = find(program, lambda i: i.action == Action.UPDATE)
    free = update._replace(action=Action.FREE, step=None, buffer=Buffer.WEIGHTS)
    tick = program.ranks[rank][-1].tick
    message = refusal(edit(program, rank, lambda own: own.append(free._replace(tick=tick))))
    assert f"rank {rank}" in message.splitlines()[0]
    assert f"stage {update.stage}" in message.splitlines()[0]


@given(programs(), st.data())
@quick
def test_a_missing_contribution(program, data):
    """A backward that is not done: its share of the gradient is missing, or its results are."""
    last = (Action.BACKWARD, Action.BACKWARD_WEIGHT)
    rank, backward = pick(data, program, lambda i: i.action in last)
    names_the_place(refusal(drop(program, rank, backward)))


@given(programs(placements=["per_microbatch"], rules=["simultaneous"]), st.data())
@quick
def test_a_gradient_counted_twice(program, data):
    """All ranks of an all-reduce do it again."""
    _, reduction = pick(data, program, lambda i: i.action == Action.ALL_REDUCE)
    mutant = program
    for rank in reduction.peers:
        mutant = twice(mutant, rank, reduction)
    message = refusal(mutant)
    assert message.startswith(at(program, reduction.peers[0], reduction))
    assert "a micro-batch's gradient is counted twice" in message


@pytest.mark.parametrize("action", [Action.REDUCE, Action.BROADCAST], ids=["reduce", "broadcast"])
def test_a_collective_done_twice_by_all(action):
    mutant = program = catalog.data_parallel(3, state="sharded").lower(2)
    _, collective = find(program, lambda i: i.action == action)
    for rank in collective.peers:
        mutant = twice(mutant, rank, collective)
    names_the_place(refusal(mutant), program)


def test_a_sum_handed_on_twice():
    mutant = program = catalog.cyclic(3).lower(1)
    rank, send = find(program, lambda i: i.action == Action.SEND)
    receive = send._replace(action=Action.RECV, peers=(rank,))
    mutant = twice(twice(program, rank, send), send.peers[0], receive)
    assert refusal(mutant).startswith(at(program, rank, send) + "there is no sum to hand on")


def test_an_update_before_the_sum_is_complete():
    program = catalog.cyclic(3).lower(1)
    rank, update = find(program, lambda i: i.action == Action.UPDATE)
    own = program.ranks[rank]
    receive = next(i for i in own if i.action == Action.RECV and i.stage == update.stage)
    message = refusal(before(program, rank, update, receive))
    why = "the gradient lacks micro-batches [0, 1, 2]"
    assert message.startswith(at(program, rank, update) + why)


@pytest.mark.parametrize("first_step", [0, 1, 5])
def test_the_place_is_marked_in_the_grid(first_step):
    program = catalog.cyclic(3).lower(2, first_step)
    rank, op = find(program, lambda i: i[1:5] == (Action.BACKWARD, 1, 1, first_step + 1))
    _, *grid = refusal(twice(program, rank, op)).splitlines()
    assert grid[0].startswith("slot")
    assert grid[1 + rank].count("[1B1") == 1
    assert "\n".join(grid).count("[") == 1
