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
    """The reason. Rank, slot and instruction are named, and are those of the program."""
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


def of(*actions):
    return lambda i: i.action in actions


def same(program, rank, i, action, **other):
    """The instruction of ``rank`` that does ``action`` for the stage, micro-batch and step of i."""
    key = (action, *i._replace(**other)[2:5])
    return next(found for found in program.ranks[rank] if found[1:5] == key)


def drop_both(program, rank, send, data):
    receive = send._replace(action=Action.RECV, peers=(rank,))
    return drop(drop(program, rank, send), send.peers[0], receive)


def redirect(program, rank, send, data):
    others = sorted({*range(len(program.ranks))} - {rank, *send.peers})
    assume(others)
    return put(program, rank, send, send._replace(peers=(data.draw(st.sampled_from(others)),)))


def exchange(program, rank, backward, data):
    """A backward and its forward change places."""
    forward = same(program, rank, backward, Action.FORWARD)
    forward_there = backward._replace(action=Action.FORWARD, tick=forward.tick)
    mutant = put(program, rank, forward_there, None)
    return put(put(mutant, rank, backward, forward_there), rank, None, backward)


def second_half_first(program, rank, second, data):
    return before(program, rank, second, same(program, rank, second, Action.BACKWARD_INPUT))


def later_stage_first(program, rank, later, data):
    earlier = same(program, rank, later, Action.FORWARD, stage=later.stage - 1)
    return before(program, rank, later, earlier)


def free_before_use(program, rank, free, data):
    user = next(i for i in program.ranks[rank] if i.action in BACKWARDS and i[2:5] == free[2:5])
    return before(program, rank, free, user), user, "its activations are not there"


def free_weights_before_use(program, rank, user, data):
    own = program.ranks[rank]
    ends = own[own.index(user) :]
    free = next(i for i in ends if i.action == Action.FREE and i.weights == user.weights)
    what = "the prediction from version" if user.buffer else "version"
    why = f"the rank does not hold {what} {user.version} of stage {user.stage}"
    return before(program, rank, free, user), user, why


def read_another(program, rank, op, data):
    wrong = op._replace(version=op.version + data.draw(st.sampled_from([-1, 1, 2])))
    predicts = ", and to predict from it" if op.buffer else ""
    why = f"the schedule promises weight version {op.version}{predicts}\n"
    return put(program, rank, op, wrong), wrong, why


def make_another(program, rank, update, data):
    wrong = update._replace(version=update.version + data.draw(st.sampled_from([-1, 1])))
    return put(program, rank, update, wrong)


HERE, THERE, END = "in the mutant", "in the program", "at the end: "  # what must be named
LOCAL = ["one", "per_microbatch"]
FORWARDS_AFTER = lambda i: i.action == Action.FORWARD and i.stage > 0  # noqa: E731
MUTATIONS = {
    "a send dropped": ({"placements": APART}, of(Action.SEND), drop, HERE),
    "a receive dropped": ({"placements": APART}, of(Action.RECV), drop, HERE),
    "a message dropped": ({"placements": APART}, of(Action.SEND), drop_both, HERE),
    "a collective left": (
        {"placements": APART, "rules": ["simultaneous"]}, of(*COLLECTIVES), drop, HERE,
    ),
    "a message to another rank": ({"placements": APART}, of(Action.SEND), redirect, HERE),
    "anything dropped": ({}, lambda i: True, drop, END),
    "anything done twice": ({}, lambda i: True, twice, HERE),
    "an op done twice": ({}, lambda i: i.action.computes, twice, "it has been done before"),
    "a backward before its forward": ({}, of(*BACKWARDS), exchange, HERE),
    "a second half before the first": (
        {"rules": ["split"], "placements": LOCAL},
        of(Action.BACKWARD_WEIGHT),
        second_half_first,
        "the first half of this backward",
    ),
    "a later stage's forward first": (
        {"placements": LOCAL}, FORWARDS_AFTER, later_stage_first, HERE,
    ),
    "activations freed before their use": ({}, is_free(Buffer.ACTIVATION), free_before_use, None),
    "weights freed before their use": (
        {}, lambda i: i.action.computes, free_weights_before_use, None,
    ),
    "activations never freed": ({}, is_free(Buffer.ACTIVATION), drop, "it is missing\nslot"),
    "weights never freed": (
        {"states": ["replicated"]}, is_free(Buffer.WEIGHTS), drop, "it is missing\nslot",
    ),
    "a buffer freed twice": ({}, of(Action.FREE), twice, "there is nothing to free"),
    "another version read": ({}, lambda i: i.action.computes, read_another, None),
    "another version made": ({}, of(Action.UPDATE), make_another, END),
    "a contribution missing": (
        {}, of(Action.BACKWARD, Action.BACKWARD_WEIGHT), drop, THERE,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
@given(data=st.data())
@quick
def test_is_refused(name, data):
    options, wanted, change, why = MUTATIONS[name]
    program = data.draw(programs(**options))
    rank, named = pick(data, program, wanted)
    simple = change in (drop, twice)
    mutant = change(program, rank, named) if simple else change(program, rank, named, data)
    if isinstance(mutant, tuple):
        mutant, named, why = mutant
    message = refusal(mutant)
    if why in (HERE, THERE):
        names_the_place(message, mutant if why == HERE else None)
    elif why == END:
        assert message.startswith(END) or names_the_place(message)
    else:
        assert message.startswith(at(program, rank, named) + why)


def test_a_rank_that_joins_a_collective_of_others():
    program = catalog.data_parallel(2, "per_stage_and_microbatch").lower(1)
    _, collective = find(program, lambda i: i.action in COLLECTIVES)
    outsider = next(r for r in range(len(program.ranks)) if r not in collective.peers)
    mutant = edit(program, outsider, lambda own: own.insert(0, collective))
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


@given(programs(), st.data())
@quick
def test_a_missing_update(program, data):
    """Whoever needs the new version lacks it; after the last step, it is missed at the end."""
    rank, update = pick(data, program, lambda i: i.action == Action.UPDATE)
    message = refusal(drop(program, rank, update))
    if message.startswith("at the end"):
        lost = f"lost the newest version, {program.steps.stop}"
        assert re.match(rf"at the end: rank {rank} has ({lost}|unused results)", message)
    else:
        names_the_place(message)


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
    names_the_place(refusal(mutant))


def test_newest_weights_that_are_freed():
    """What training has made must be there at the end."""
    program = catalog.cyclic(2).lower(1)
    rank, update = find(program, lambda i: i.action == Action.UPDATE)
    free = update._replace(action=Action.FREE, step=None, buffer=Buffer.WEIGHTS)
    tick = program.ranks[rank][-1].tick
    message = refusal(edit(program, rank, lambda own: own.append(free._replace(tick=tick))))
    assert f"rank {rank}" in message.splitlines()[0]
    assert f"stage {update.stage}" in message.splitlines()[0]


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
