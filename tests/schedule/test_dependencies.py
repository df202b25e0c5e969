"""What instructions wait for: literal cases; and that any order that keeps to it is right."""

import random
from collections import defaultdict, deque
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime import models
from tests.schedule.meetings import COLLECTIVES, METHODS, occasion, other_ends
from tests.schedule.strategies import programs, quick
from toolkit.runtime.dataflow import in_background
from toolkit.schedule import Action, Buffer, Instruction, catalog
from toolkit.schedule.dependencies import needs
from toolkit.schedule.replay import replay


def written(program):
    """The instructions by their positions, and what each waits for."""
    return "\n\n".join(
        "\n".join(
            f"{p} {i}" + (f" <- {' '.join(map(str, found))}" if found else "")
            for p, (i, found) in enumerate(zip(order, needs(order, rank), strict=True))
        )
        for rank, order in enumerate(program.ranks)
    )


# The gradient of an input goes on before that of the parameters has been computed.
SPLIT = """
0 FORWARD stage 0 microbatch 0 step 0 version 0
1 SEND activation stage 0 microbatch 0 step 0 to rank 1 <- 0
2 RECV activation gradient stage 1 microbatch 0 step 0 from rank 1
3 BACKWARD_INPUT stage 0 microbatch 0 step 0 version 0 <- 0 2
4 BACKWARD_WEIGHT stage 0 microbatch 0 step 0 version 0 <- 0 3
5 UPDATE stage 0 step 0 version 1 <- 0 4
6 FREE activation stage 0 microbatch 0 step 0 <- 0 3 4
7 FREE weights stage 0 version 0 <- 0 3 4 5

0 RECV activation stage 0 microbatch 0 step 0 from rank 0
1 FORWARD stage 1 microbatch 0 step 0 version 0 <- 0
2 BACKWARD_INPUT stage 1 microbatch 0 step 0 version 0 <- 1
3 SEND activation gradient stage 1 microbatch 0 step 0 to rank 0 <- 2
4 BACKWARD_WEIGHT stage 1 microbatch 0 step 0 version 0 <- 1 2
5 UPDATE stage 1 step 0 version 1 <- 1 4
6 FREE activation stage 1 microbatch 0 step 0 <- 1 2 4
7 FREE weights stage 1 version 0 <- 1 2 4 5
"""
# Step 2 reads version 2 as extrapolated from versions 0 and 1; it needs neither after that.
PREDICTED = """
0 FORWARD stage 0 microbatch 0 step 0 version 0
1 BACKWARD stage 0 microbatch 0 step 0 version 0 <- 0
2 UPDATE stage 0 step 0 version 1 <- 0 1
3 FREE activation stage 0 microbatch 0 step 0 <- 0 1
4 FORWARD stage 0 microbatch 0 step 1 version 0
5 BACKWARD stage 0 microbatch 0 step 1 version 0 <- 4
6 UPDATE stage 0 step 1 version 2 <- 2 4 5
7 PREDICT prediction stage 0 step 2 version 1 <- 2
8 FREE activation stage 0 microbatch 0 step 1 <- 4 5
9 FREE weights stage 0 version 0 <- 0 1 2 4 5 7
10 FREE weights stage 0 version 1 <- 2 6 7
11 FORWARD prediction stage 0 microbatch 0 step 2 version 1 <- 7
12 BACKWARD prediction stage 0 microbatch 0 step 2 version 1 <- 7 11
13 UPDATE stage 0 step 2 version 3 <- 6 11 12
14 FREE prediction stage 0 step 2 version 1 <- 7 11 12
15 FREE activation stage 0 microbatch 0 step 2 <- 11 12
16 FREE weights stage 0 version 2 <- 6 13
"""


@pytest.mark.parametrize(
    ("schedule", "n_steps", "expected"),
    [
        pytest.param(catalog.zero_bubble(2, 1), 1, SPLIT, id="split backward"),
        pytest.param(catalog.cyclic(1, 1, predict=True), 3, PREDICTED, id="predicted"),
    ],
)
def test_literal_needs(schedule, n_steps, expected):
    assert written(schedule.lower(n_steps)) == expected.strip("\n")


def test_a_sum_after_an_all_reduce():
    """Every rank's update waits for it, not for what was added before."""
    first, second = catalog.data_parallel(2, n_stages=1).lower(1).ranks
    for rank, order in enumerate((first, second)):
        at = next(p for p, i in enumerate(order) if i.action == Action.ALL_REDUCE)
        found = needs(order, rank)
        assert found[at] == (0, 1)
        assert found[at + 1] == (at,)


def test_a_broadcast():
    """Its root uses what it holds; the others wait until they have freed what they held."""

    def weights(action, version, peers=()):
        return Instruction(0, action, 0, None, None, version, Buffer.WEIGHTS, peers)

    order = [
        weights(Action.BROADCAST, 7, (2, 0)),
        weights(Action.FREE, 7),
        weights(Action.BROADCAST, 7, (2, 0)),
        weights(Action.FREE, 7),
    ]
    assert needs(order, 2) == [(), (0,), (), (2,)]
    assert needs(order, 0) == [(), (0,), (1,), (2,)]


@given(programs())
@quick
def test_they_come_earlier(program):
    for rank, order in enumerate(program.ranks):
        for position, found in enumerate(needs(order, rank)):
            assert list(found) == sorted({*found})
            assert all(0 <= p < position for p in found)


# Any order, symbolically


class Held:
    """What a rank holds. A sum is the set of what has been added."""

    def __init__(self, weights):
        self.weights = set(weights)
        self.activations, self.boundaries = set(), set()
        self.sums = defaultdict(frozenset)

    def add(self, key, parts):
        assert not self.sums[key] & parts, "added twice"
        self.sums[key] |= parts

    def gain(self, where, key):
        assert key not in where, "there already"
        where.add(key)

    def lose(self, where, key):
        assert key in where, "not there: never made, used up or freed"
        where.remove(key)


class Symbols:
    """Does a program's instructions, in whatever order; notes the sum that each of them uses."""

    def __init__(self, program):
        self.program, self.schedule = program, program.schedule
        first, schedule = program.first_step, program.schedule
        self.ranks = [
            Held(
                (j, version)
                for j in range(schedule.n_stages)
                if rank in schedule.first_holders(j)
                for version in range(schedule.oldest_version(j, first), first + 1)
            )
            for rank in range(len(program.ranks))
        ]
        self.sent = {}  # what is on its way, by the occasion on which it is received
        self.met = defaultdict(dict)  # what ranks have given to a collective
        self.used = {}
        self.other_end = other_ends(program)

    def begin(self, rank, position):
        """What a background instruction does as it begins, an op altogether."""
        i, here = self.program.ranks[rank][position], self.ranks[rank]
        if i.action.computes:
            self._compute(here, i)
        elif i.action == Action.PREDICT:
            assert {(i.stage, i.version - 1), (i.stage, i.version)} <= here.weights
            here.gain(here.weights, (i.stage, i.version, i.step))
        elif i.action == Action.FREE and i.buffer != Buffer.ACTIVATION:
            here.lose(here.weights, i.weights)
        elif i.action == Action.FREE:
            here.lose(here.activations, (i.stage, i.microbatch, i.step))
        elif i.action == Action.UPDATE:
            every = {(kind, m) for kind in "FB" for m in range(self.schedule.n_microbatches)}
            assert self._use_sum(rank, position, i) == every
            assert (i.stage, i.step) in here.weights
            here.gain(here.weights, (i.stage, i.version))
        elif i.action == Action.SEND:
            self.sent[self.other_end[rank, position]] = self._give(rank, position, i)
        elif i.action != Action.RECV:
            gives = i.action != Action.BROADCAST or rank == i.peers[0]
            self.met[occasion(i)][rank] = self._give(rank, position, i) if gives else None

    def may_end(self, rank, position):
        i = self.program.ranks[rank][position]
        if i.action == Action.RECV:
            return (rank, position) in self.sent
        return i.action not in COLLECTIVES or len(self.met[occasion(i)]) == len(i.peers)

    def end(self, rank, position):
        """What a message leaves as it ends."""
        i, here = self.program.ranks[rank][position], self.ranks[rank]
        is_root = i.peers[:1] == (rank,)
        if i.action == Action.RECV:
            payload = self.sent.pop((rank, position))
            if i.buffer == Buffer.GRADIENT:
                here.add((i.stage, i.step), payload)
            else:
                here.gain(here.weights if i.buffer == Buffer.WEIGHTS else here.boundaries, payload)
        elif i.action == Action.ALL_REDUCE or (i.action == Action.REDUCE and is_root):
            for part in self.met[occasion(i)].values():
                here.add((i.stage, i.step), part)
        elif i.action == Action.BROADCAST and not is_root:
            here.gain(here.weights, (i.stage, i.version))

    def _compute(self, here, i):
        key = (i.stage, i.microbatch, i.step)
        last = self.schedule.n_stages - 1
        assert i.version == self.schedule.version(*key)
        read = (i.stage, i.version)
        if self.schedule.predicts(i.version, i.step):
            read += (i.step,)
        assert read in here.weights, "the version, or what is predicted from it, is not there"
        if i.action == Action.FORWARD:
            if i.stage > 0:
                before = (Buffer.ACTIVATION, i.stage - 1, i.microbatch, i.step)
                here.lose(here.boundaries, before)
            if i.stage < last:
                here.gain(here.boundaries, (Buffer.ACTIVATION, *key))
            here.gain(here.activations, key)
            here.add((i.stage, i.step), {("F", i.microbatch)})
            return
        assert key in here.activations
        if i.action != Action.BACKWARD_WEIGHT:
            if i.stage < last:
                after = (Buffer.ACTIVATION_GRADIENT, i.stage + 1, i.microbatch, i.step)
                here.lose(here.boundaries, after)
            if i.stage > 0:
                here.gain(here.boundaries, (Buffer.ACTIVATION_GRADIENT, *key))
        if i.action != Action.BACKWARD_INPUT:
            here.add((i.stage, i.step), {("B", i.microbatch)})

    def _give(self, rank, position, i):
        here = self.ranks[rank]
        if i.buffer == Buffer.GRADIENT:
            return self._use_sum(rank, position, i)
        key = (i.buffer, i.stage, i.microbatch, i.step)
        if i.buffer == Buffer.WEIGHTS:
            key = (i.stage, i.version)
            assert key in here.weights
        else:
            here.lose(here.boundaries, key)
        return key

    def _use_sum(self, rank, position, i):
        found = self.ranks[rank].sums.pop((i.stage, i.step), frozenset())
        assert found, "there is no sum"
        self.used[rank, position] = found
        return found


def in_the_order_of_the_program(program):
    """What is done as the verifier sees it."""
    symbols = Symbols(program)
    at = [0] * len(program.ranks)
    open_ends = []
    for rank, i in replay(program.ranks):
        symbols.begin(rank, at[rank])
        open_ends.append((rank, at[rank]))
        at[rank] += 1
        if i.action not in COLLECTIVES or symbols.may_end(*open_ends[-1]):
            for occasion in open_ends:
                symbols.end(*occasion)
            open_ends = []
    return symbols


def in_any_order(program, chance):
    """Whatever is possible: ops and frees of activations in order, collectives begun in order."""
    symbols = Symbols(program)
    orders = program.ranks
    found = [needs(order, rank) for rank, order in enumerate(orders)]
    lacking = [[len(needed) for needed in of_rank] for of_rank in found]
    users = [defaultdict(list) for _ in orders]
    queues = [defaultdict(deque) for _ in orders]
    for rank, order in enumerate(orders):
        for position, i in enumerate(order):
            if (name := _queue(i)) is not None:
                queues[rank][name].append(position)
            for needed in found[rank][position]:
                users[rank][needed].append(position)
    possible, under_way = [], []

    def consider(rank, position):
        queue = queues[rank].get(_queue(orders[rank][position]))
        if not lacking[rank][position] and (queue is None or (queue and queue[0] == position)):
            possible.append((rank, position))

    def end(rank, position):
        symbols.end(rank, position)
        for user in users[rank][position]:
            lacking[rank][user] -= 1
            consider(rank, user)

    for rank, order in enumerate(orders):
        for position in range(len(order)):
            consider(rank, position)
    while possible or under_way:
        may_end = [occasion for occasion in under_way if symbols.may_end(*occasion)]
        choice = [*possible, *may_end]
        assert choice, "stuck"
        chosen = chance.choice(choice)
        if chosen in may_end:
            under_way.remove(chosen)
            end(*chosen)
            continue
        possible.remove(chosen)
        rank, position = chosen
        symbols.begin(rank, position)
        if (name := _queue(orders[rank][position])) is not None:
            queue = queues[rank][name]
            queue.popleft()
        if name == "main":
            end(rank, position)
        else:
            under_way.append((rank, position))
        if name is not None and queue and queue[0] not in users[rank][position]:
            consider(rank, queue[0])
    assert not any(map(any, lacking))
    assert not any(queue for of_rank in queues for queue in of_rank.values())
    return symbols


def _queue(i):
    if i.action in COLLECTIVES:
        return "collectives"
    return None if in_background(i) else "main"


def assert_nothing_is_left(symbols):
    schedule, steps = symbols.schedule, symbols.program.steps
    for here in symbols.ranks:
        assert not here.activations
        assert not here.boundaries
        assert not any(here.sums.values())
        assert here.weights <= {(j, steps.stop) for j in range(schedule.n_stages)}
    assert not symbols.sent
    for j, owner in enumerate(schedule.owners):
        assert (j, steps.stop) in symbols.ranks[owner].weights


@given(programs(), st.integers(0, 10**6))
@quick
def test_any_order_that_keeps_to_them_is_right(program, seed):
    """Every op reads what is promised, and every sum is what the program's own order makes it."""
    expected = in_the_order_of_the_program(program)
    assert_nothing_is_left(expected)
    found = in_any_order(program, random.Random(seed))
    assert_nothing_is_left(found)
    assert found.used == expected.used


@pytest.mark.parametrize("schedule", METHODS, ids=models.name_of)
def test_any_order_of_a_method_is_right(schedule):
    """Of those that random schedules seldom are, too."""
    program = schedule.lower(3)
    expected = in_the_order_of_the_program(program).used
    for seed in range(20):
        found = in_any_order(program, random.Random(seed))
        assert_nothing_is_left(found)
        assert found.used == expected


@pytest.mark.parametrize("schedule", METHODS, ids=models.name_of)
def test_instructions_meet_where_the_replay_joins_them(schedule):
    """It has the keys written out."""
    walk = iter([step for step in replay(schedule.lower(2).ranks) if step[1].action.communicates])
    for rank, first in walk:
        n = 2 if first.action == Action.SEND else len(first.peers)
        joined = [(rank, first), *islice(walk, n - 1)]
        assert len({i.meeting(rank) for rank, i in joined}) == 1
