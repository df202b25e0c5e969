"""Mutations: whatever is broken in a program, verify() refuses it and says where."""

import re
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.schedule.meetings import COLLECTIVES
from tests.schedule.strategies import programs, quick
from tests.thorough import more
from toolkit.errors import UserError
from toolkit.schedule import Action, Buffer, catalog

END = "at the end: "
PLACE = re.compile(r"rank (\d+), slot (\d+), ([A-Z_]+ .*stage \d+[^:]*): (.+)")


def edit(program, rank, change):
    """``program`` after ``change(list of the rank's instructions)``."""
    ranks = [list(instructions) for instructions in program.ranks]
    change(ranks[rank])
    return replace(program, ranks=tuple(map(tuple, ranks)))


def drop(program, rank, i):
    return edit(program, rank, lambda own: own.remove(i))


def twice(program, rank, i):
    return edit(program, rank, lambda own: own.insert(own.index(i), i))


def put(program, rank, i, other):
    """``program`` with ``other`` in the place of ``i``."""
    return edit(program, rank, lambda own: own.__setitem__(own.index(i), other))


def before(program, rank, i, other):
    """``program`` with ``i`` moved to just before ``other``."""
    without = drop(program, rank, i)
    return edit(without, rank, lambda own: own.insert(own.index(other), i))


def refusal(program, original=None):
    """The error of a mutant. It names a place in the mutant or the original, and has the grid."""
    with pytest.raises(UserError, match="slot") as error:
        program.verify()
    first, head, *_ = str(error.value).splitlines()
    assert head.startswith("slot")
    if not first.startswith(END):
        rank, slot, text, _ = PLACE.fullmatch(first).groups()
        of_rank = [*program.ranks[int(rank)], *(original or program).ranks[int(rank)]]
        assert (int(slot), text) in {(program.slot(i), str(i)) for i in of_rank}
    return str(error.value)


def at(program, rank, i):
    return f"rank {rank}, slot {program.slot(i)}, {i}: "


def find(program, wanted):
    return next((r, i) for r, own in enumerate(program.ranks) for i in own if wanted(i))


def of(*actions, buffer=None):
    return lambda i: i.action in actions and buffer in (None, i.buffer)


def computes(i):
    return i.action.computes


def same(program, rank, i, action, **other):
    """The instruction of ``rank`` that does ``action`` for the stage, micro-batch and step of i."""
    key = (action, *i._replace(**other)[2:5])
    return next(found for found in program.ranks[rank] if found[1:5] == key)


# Each change returns the mutant, and the instruction at which it is refused and why, if known.


def drop_both(program, rank, send, data):
    receive = send._replace(action=Action.RECV, peers=(rank,))
    return drop(drop(program, rank, send), send.peers[0], receive), None, None


def redirect(program, rank, send, data):
    others = sorted({*range(len(program.ranks))} - {rank, *send.peers})
    assume(others)
    other = data.draw(st.sampled_from(others))
    return put(program, rank, send, send._replace(peers=(other,))), None, None


def backward_first(program, rank, backward, data):
    forward = same(program, rank, backward, Action.FORWARD)
    return before(program, rank, backward, forward), None, None


def second_half_first(program, rank, second, data):
    first = same(program, rank, second, Action.BACKWARD_INPUT)
    return (
        before(program, rank, second, first),
        second,
        "the first half of this backward",
    )


def later_stage_first(program, rank, later, data):
    assume(later.stage)
    earlier = same(program, rank, later, Action.FORWARD, stage=later.stage - 1)
    return before(program, rank, later, earlier), None, None


def free_before_use(program, rank, free, data):
    users = of(Action.BACKWARD, Action.BACKWARD_INPUT)
    user = next(i for i in program.ranks[rank] if users(i) and i[2:5] == free[2:5])
    return before(program, rank, free, user), user, "its activations are not there"


def free_weights_before_use(program, rank, user, data):
    own = program.ranks[rank]
    ends = own[own.index(user) :]
    free = next(
        i for i in ends if i.action == Action.FREE and i.weights == user.weights
    )
    what = (
        "the prediction from version" if user.buffer == Buffer.PREDICTION else "version"
    )
    why = f"the rank does not hold {what} {user.version} of stage {user.stage}"
    return before(program, rank, free, user), user, why


def read_another(program, rank, op, data):
    wrong = op._replace(version=op.version + data.draw(st.sampled_from([-1, 1, 2])))
    also = {
        Buffer.PREDICTION: "predict from it",
        Buffer.COMPENSATED: "compensate its gradient",
    }
    more = f", and to {also[op.buffer]}" if op.buffer else ""
    why = f"the schedule promises weight version {op.version}{more}\n"
    return put(program, rank, op, wrong), wrong, why


def make_another(program, rank, update, data):
    wrong = update._replace(
        version=update.version + data.draw(st.sampled_from([-1, 1]))
    )
    return put(program, rank, update, wrong), wrong, "the update of step"


def dropped(why=None):
    return lambda program, rank, i, data: (drop(program, rank, i), i, why)


def repeated(why=None):
    return lambda program, rank, i, data: (twice(program, rank, i), i, why)


def reduced_twice(program, rank, reduction, data):
    mutant = program
    for peer in reduction.peers:
        mutant = twice(mutant, peer, reduction)
    why = "a micro-batch's gradient is counted twice"
    return mutant, reduction, why if reduction.action == Action.ALL_REDUCE else None


def receive_first(program, rank, send, data):
    """A rank would receive the gradient of an activation before it sends that activation."""
    receive = same(program, rank, send, Action.RECV, stage=send.stage + 1)
    return before(program, rank, receive, send), None, "it waits for ever: rank "


APART = {"placements": ["per_microbatch", "per_stage", "per_stage_and_microbatch"]}
PIPED = {"placements": ["per_stage", "per_stage_and_microbatch"]}
LOCAL = {"placements": ["one", "per_microbatch"]}
TOGETHER = {"placements": ["per_microbatch"], "rules": ["simultaneous"]}
GONE = "it is missing\nslot"
WHOLE = (Action.BACKWARD, Action.BACKWARD_WEIGHT)
KEPT = of(Action.FREE, buffer=Buffer.ACTIVATION)
MUTATIONS = {
    "a send dropped": (APART, of(Action.SEND), dropped()),
    "a receive dropped": (APART, of(Action.RECV), dropped()),
    "a message dropped": (APART, of(Action.SEND), drop_both),
    "a collective left": (APART | TOGETHER, of(*COLLECTIVES), dropped()),
    "a collective repeated": (TOGETHER, of(*COLLECTIVES), reduced_twice),
    "a message to another rank": (APART, of(Action.SEND), redirect),
    "ranks that wait for each other": (
        PIPED, of(Action.SEND, buffer=Buffer.ACTIVATION), receive_first,
    ),
    "anything dropped": ({}, lambda i: True, dropped()),
    "anything repeated": ({}, lambda i: True, repeated()),
    "an update dropped": ({}, of(Action.UPDATE), dropped()),
    "an op repeated": ({}, computes, repeated("it has been done before")),
    "a backward before its forward": ({}, of(*WHOLE[:1], Action.BACKWARD_INPUT), backward_first),
    "a second half before the first": (
        LOCAL | {"rules": ["split"]}, of(Action.BACKWARD_WEIGHT), second_half_first,
    ),
    "a later stage's forward first": (LOCAL, of(Action.FORWARD), later_stage_first),
    "activations freed before their use": ({}, KEPT, free_before_use),
    "weights freed before their use": ({}, computes, free_weights_before_use),
    "activations never freed": ({}, KEPT, dropped(GONE)),
    "weights never freed": (
        {"states": ["replicated"]}, of(Action.FREE, buffer=Buffer.WEIGHTS), dropped(GONE),
    ),
    "a buffer freed twice": ({}, of(Action.FREE), repeated("there is nothing to free")),
    "another version read": ({}, computes, read_another),
    "another version made": ({}, of(Action.UPDATE), make_another),
    "a contribution missing": ({}, of(*WHOLE), dropped()),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
@given(data=st.data())
@quick
def test_is_refused(name, data):
    options, wanted, change = MUTATIONS[name]
    program = data.draw(programs(**options))
    found = [(r, i) for r, own in enumerate(program.ranks) for i in own if wanted(i)]
    assume(found)
    rank, i = data.draw(st.sampled_from(found))
    mutant, named, why = change(program, rank, i, data)
    message = refusal(mutant, program)
    if named is None:
        assert why is None or why in message
    elif why is not None:
        rank = named.peers[0] if named.action in COLLECTIVES else rank
        assert message.startswith(at(program, rank, named) + why)


def test_a_rank_that_joins_a_collective_of_others():
    program = catalog.data_parallel(2, "per_stage_and_microbatch").lower(1)
    _, collective = find(program, of(*COLLECTIVES))
    outsider = next(r for r in range(len(program.ranks)) if r not in collective.peers)
    refusal(edit(program, outsider, lambda own: own.insert(0, collective)))


@pytest.mark.parametrize(
    "action", [Action.REDUCE, Action.BROADCAST], ids=["reduce", "broadcast"]
)
def test_a_collective_of_sharded_state_done_twice_by_all(action):
    program = catalog.data_parallel(3, state="sharded").lower(2)
    refusal(reduced_twice(program, *find(program, of(action)), None)[0])


def test_a_sum_that_is_reduced_after_each_micro_batch():
    """Sums that share some micro-batches, and differ in others, do not add up either."""
    program = catalog.data_parallel(2, n_stages=1, accumulate=2).lower(1).verify()
    _, last = find(program, of(Action.ALL_REDUCE))
    mutant = program
    early = last._replace(tick=2)
    for rank in last.peers:
        assert [str(i)[:8] for i in program.ranks[rank][:2]] == ["FORWARD ", "BACKWARD"]
        mutant = edit(mutant, rank, lambda own: own.insert(2, early))
    why = "a micro-batch's gradient is counted twice"
    assert refusal(mutant).startswith(at(program, 0, last) + why)


def test_newest_weights_that_are_freed():
    """The result of training must be there at the end."""
    program = catalog.cyclic(2).lower(1)
    rank, update = find(program, of(Action.UPDATE))
    free = update._replace(action=Action.FREE, step=None, buffer=Buffer.WEIGHTS)
    last = free._replace(tick=program.ranks[rank][-1].tick)
    message = refusal(edit(program, rank, lambda own: own.append(last)))
    lost = f"rank {rank} has lost the newest version, 1, of stage {update.stage}"
    assert message.startswith(END + lost)


def test_a_sum_handed_on_twice():
    program = catalog.cyclic(3).lower(1)
    rank, send = find(program, of(Action.SEND))
    receive = send._replace(action=Action.RECV, peers=(rank,))
    mutant = twice(twice(program, rank, send), send.peers[0], receive)
    assert refusal(mutant).startswith(
        at(program, rank, send) + "there is no sum to hand on"
    )


def test_an_update_before_the_sum_is_complete():
    program = catalog.cyclic(3).lower(1)
    rank, update = find(program, of(Action.UPDATE))
    own = program.ranks[rank]
    receive = next(
        i for i in own if i.action == Action.RECV and i.stage == update.stage
    )
    message = refusal(before(program, rank, update, receive))
    why = "the gradient lacks micro-batches [0, 1, 2]"
    assert message.startswith(at(program, rank, update) + why)


@pytest.mark.parametrize("first_step", [0, 1, 5])
def test_the_place_is_marked_in_the_grid(first_step):
    program = catalog.cyclic(3).lower(2, first_step)
    rank, op = find(
        program, lambda i: i[1:5] == (Action.BACKWARD, 1, 1, first_step + 1)
    )
    _, *grid = refusal(twice(program, rank, op)).splitlines()
    assert grid[1 + rank].count("[1B1") == 1
    assert "\n".join(grid).count("[") == 1


FIELDS = {
    "tick": st.integers(-1, 60) | st.just(10_000),
    "action": st.sampled_from(Action),
    "stage": st.integers(-1, 9) | st.just(10**9),
    "microbatch": st.none() | st.integers(-1, 9) | st.just(10**9),
    "step": st.none() | st.integers(-1, 9) | st.just(10**9),
    "version": st.none() | st.integers(-1, 9) | st.just(10**9),
    "buffer": st.none() | st.sampled_from(Buffer),
    "peers": st.lists(st.integers(-1, 9), max_size=3).map(tuple),
}


@given(programs(), st.data())
@settings(quick, max_examples=more(100, 2000))
def test_any_change_of_a_field_is_refused(program, data):
    """Unless only an update, a prediction or a free moves between its neighbours."""
    rank, own = data.draw(st.sampled_from([*enumerate(program.ranks)]))
    assume(own)
    i = data.draw(st.sampled_from(own))
    field = data.draw(st.sampled_from([*FIELDS]))
    changed = i._replace(**{field: data.draw(FIELDS[field])})
    assume(changed != i)
    try:
        put(program, rank, i, changed).verify()
    except UserError:
        return
    assert field == "tick"
    assert i.action in (Action.UPDATE, Action.PREDICT, Action.FREE)


@pytest.mark.parametrize(
    ("wanted", "change", "why"),
    [
        (of(Action.RECV), {"tick": 10_000}, "stands after tick 10000"),
        (of(Action.FORWARD), {"stage": 7}, "no such stage"),
        (of(Action.FORWARD), {"microbatch": 7}, "no such stage"),
        (of(Action.FORWARD), {"step": 99}, "no such stage"),
        (of(Action.SEND), {"peers": ()}, "no such peers"),
        (of(Action.SEND), {"peers": (0, 1)}, "no such peers"),
        (
            of(Action.BACKWARD),
            {"action": Action.BACKWARD_INPUT},
            "schedule has no such op",
        ),
        (
            of(Action.UPDATE),
            {"buffer": Buffer.WEIGHTS},
            "no instruction of these fields",
        ),
        (of(Action.PREDICT), {"buffer": None}, "no instruction of these fields"),
    ],
)
def test_a_malformed_instruction_is_named(wanted, change, why):
    program = catalog.cyclic(3, 1, correction="extrapolate").lower(3)
    rank, i = find(program, wanted)
    assert why in refusal(put(program, rank, i, i._replace(**change)), program)


def test_an_op_stands_at_its_place_in_the_schedule():
    program = catalog.cyclic(2).lower(1)
    i = program.ranks[1][0]
    assert (i.action, i.tick) == (Action.FORWARD, 2)
    with pytest.raises(UserError, match="at tick 1, and its op at 2"):
        put(program, 1, i, i._replace(tick=1)).verify()


def test_both_ends_of_a_message_stand_at_one_tick():
    """Where the receiver's stood later, the sender could wait for ever."""
    program = catalog.cyclic(3, 1, "per_stage_and_microbatch").lower(2)
    rank, i, after = next(
        (rank, i, following.tick)
        for rank, own in enumerate(program.ranks)
        for i, following in pairwise(own)
        if i.action == Action.RECV and following.tick > i.tick
    )
    moved = put(program, rank, i, i._replace(tick=after))
    assert f"at tick {after}, and its peer's at {i.tick}" in refusal(moved, program)
