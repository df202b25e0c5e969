"""What instructions wait for: literal cases; and that any order that keeps to it is right."""

import random
from collections import Counter, defaultdict
from dataclasses import replace
from graphlib import TopologicalSorter
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
from toolkit.schedule.verify import verify_order


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
5 UPDATE stage 0 step 0 version 1 <- 4
6 FREE activation stage 0 microbatch 0 step 0 <- 0 3 4
7 FREE weights stage 0 version 0 <- 0 3 4 5

0 RECV activation stage 0 microbatch 0 step 0 from rank 0
1 FORWARD stage 1 microbatch 0 step 0 version 0 <- 0
2 BACKWARD_INPUT stage 1 microbatch 0 step 0 version 0 <- 1
3 SEND activation gradient stage 1 microbatch 0 step 0 to rank 0 <- 2
4 BACKWARD_WEIGHT stage 1 microbatch 0 step 0 version 0 <- 1 2
5 UPDATE stage 1 step 0 version 1 <- 4
6 FREE activation stage 1 microbatch 0 step 0 <- 1 2 4
7 FREE weights stage 1 version 0 <- 1 2 4 5
"""
# Step 2 reads version 2 as extrapolated from versions 0 and 1; it needs neither after that.
PREDICTED = """
0 FORWARD stage 0 microbatch 0 step 0 version 0
1 BACKWARD stage 0 microbatch 0 step 0 version 0 <- 0
2 UPDATE stage 0 step 0 version 1 <- 1
3 FREE activation stage 0 microbatch 0 step 0 <- 0 1
4 FORWARD stage 0 microbatch 0 step 1 version 0
5 BACKWARD stage 0 microbatch 0 step 1 version 0 <- 4
6 UPDATE stage 0 step 1 version 2 <- 2 5
7 PREDICT prediction stage 0 step 2 version 1 <- 2
8 FREE activation stage 0 microbatch 0 step 1 <- 4 5
9 FREE weights stage 0 version 0 <- 0 1 2 4 5 7
10 FREE weights stage 0 version 1 <- 2 6 7
11 FORWARD prediction stage 0 microbatch 0 step 2 version 1 <- 7
12 BACKWARD prediction stage 0 microbatch 0 step 2 version 1 <- 7 11
13 UPDATE stage 0 step 2 version 3 <- 6 12
14 FREE prediction stage 0 step 2 version 1 <- 7 11 12
15 FREE activation stage 0 microbatch 0 step 2 <- 11 12
16 FREE weights stage 0 version 2 <- 6 13
"""


@pytest.mark.parametrize(
    ("schedule", "n_steps", "expected"),
    [
        pytest.param(catalog.zero_bubble(2, 1), 1, SPLIT, id="split backward"),
        pytest.param(
            catalog.cyclic(1, 1, correction="extrapolate"), 3, PREDICTED, id="predicted"
        ),
    ],
)
def test_literal_needs(schedule, n_steps, expected):
    assert written(schedule.lower(n_steps)) == expected.strip("\n")


def test_a_sum_after_an_all_reduce():
    """Every rank's update waits for it, not for what was added before."""
    for rank, order in enumerate(catalog.data_parallel(2, n_stages=1).lower(1).ranks):
        assert order[2].action == Action.ALL_REDUCE
        assert needs(order, rank)[2:4] == [(1,), (2,)]


def test_a_sum_that_is_handed_on_again():
    """Its next part waits until the sum before it has left."""
    order = catalog.weipipe(3, accumulate=2).lower(1).ranks[0]
    found = [
        p for p, i in enumerate(order) if i.buffer == Buffer.GRADIENT and i.stage == 0
    ]
    backwards = [
        p for p, i in enumerate(order) if i.action == Action.BACKWARD and i.stage == 0
    ]
    assert [order[p].action for p in found] == [Action.SEND, Action.RECV, Action.SEND]
    assert found[0] in needs(order, 0)[backwards[1]]


def test_a_broadcast():
    """Its root uses what it holds; the others wait until they have freed what they held."""

    def weights(action, version, peers=()):
        return Instruction(0, action, 0, None, None, version, Buffer.WEIGHTS, peers)

    order = [weights(Action.BROADCAST, 7, (2, 0)), weights(Action.FREE, 7)] * 2
    assert needs(order, 2) == [(), (0,), (), (2,)]
    assert needs(order, 0) == [(), (0,), (1,), (2,)]


def in_any_order(program, chance):
    """The program with each rank's instructions in a random order that keeps to what they need.

    Messages and collectives happen at once on all their ranks. Ops, and what is not in the
    background, keep their order on a rank; so do its collectives.
    """
    ends, graph = other_ends(program), TopologicalSorter()
    event, members = {}, defaultdict(list)
    for rank, order in enumerate(program.ranks):
        met, last = Counter(), {}  # ranks may meet several times for the same
        for position, (i, found) in enumerate(
            zip(order, needs(order, rank), strict=True)
        ):
            here, collective = (rank, position), i.action in COLLECTIVES
            met[occasion(i)] += 1
            key = (
                (occasion(i), met[occasion(i)]) if collective else ends.get(here, here)
            )
            event[here] = key
            members[key].append(here)
            graph.add(key, *(event[rank, needed] for needed in found))
            if collective or not in_background(i):
                graph.add(key, *last.get(collective, ()))
                last[collective] = (key,)
    graph.prepare()  # or it raises CycleError
    ready, orders = [], [[] for _ in program.ranks]
    while graph.is_active():
        ready += graph.get_ready()
        key = ready.pop(chance.randrange(len(ready)))
        graph.done(key)
        for rank, position in members[key]:
            orders[rank].append(program.ranks[rank][position])
    return replace(program, ranks=tuple(map(tuple, orders)))


@given(programs(), st.integers(0, 10**6))
@quick
def test_any_order_that_keeps_to_them_is_right(program, seed):
    """Every op reads what is promised, sums are complete, and nothing is left."""
    verify_order(in_any_order(program, random.Random(seed)))
    for rank, order in enumerate(program.ranks):
        for position, found in enumerate(needs(order, rank)):
            assert [*found] == sorted({*found} & {*range(position)})


@pytest.mark.parametrize("schedule", METHODS, ids=models.name_of)
def test_any_order_of_a_method_is_right(schedule):
    """And its instructions meet where replay joins them, which has the keys written out."""
    for seed in range(5):
        verify_order(in_any_order(schedule.lower(3), random.Random(seed)))
    walk = iter(
        [
            step
            for step in replay(schedule.lower(2).ranks)
            if step[1].action.communicates
        ]
    )
    for rank, first in walk:
        n = 2 if first.action == Action.SEND else len(first.peers)
        joined = [(rank, first), *islice(walk, n - 1)]
        assert len({i.meeting(rank) for rank, i in joined}) == 1
