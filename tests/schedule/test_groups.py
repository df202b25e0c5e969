"""Workers in groups that start together: closed forms for every number of groups."""

from collections import Counter
from fractions import Fraction
from itertools import pairwise

import pytest

from toolkit.errors import UserError
from toolkit.schedule import Action, Buffer, catalog, grid
from toolkit.schedule.steady_state import footprint

SIZES = [(n, g) for n in range(2, 17) for g in range(1, n + 1) if n % g == 0]


def test_two_groups_of_two():
    schedule = catalog.cyclic(4, groups=2)
    assert schedule.name == "CDP-v2 2 groups"
    _, *lines = grid.render(schedule.timing, schedule.layout).splitlines()
    assert [" ".join(line.split()[2:]) for line in lines] == [
        "0F0 1F0 2F0 3F0 3B0 2B0 1B0 0B0 . . . .",
        "0F1 1F1 2F1 3F1 3B1 2B1 1B1 0B1 . . . .",
        ". . . . 0F2 1F2 2F2 3F2 3B2 2B2 1B2 0B2",
        ". . . . 0F3 1F3 2F3 3F3 3B3 2B3 1B3 0B3",
    ]
    assert schedule.staleness == (
        (1, 1, 0, 0),
        (1, 1, 0, 0),
        (0, 0, 0, 0),
        (0, 0, 0, 0),
    )


@pytest.mark.parametrize(("n", "g"), SIZES)
def test_closed_forms(n, g):
    """n workers in g groups, with n stages."""
    grouped = catalog.cyclic(n, groups=g)
    # Group k starts 2n k/g slots late, and the last backward of stage j ends 2n - j later.
    for j, row in enumerate(grouped.staleness):
        for m, late in enumerate(row):
            group = m // (n // g)
            fresh = j + 2 * n * group / g >= 2 * n * (g - 1) / g - j
            assert late == (0 if fresh else 1)
    found = footprint(grouped)
    assert found.total_activations == total(n, g)
    assert found.traffic == Fraction(2 * (n - 1), n)  # bytes do not depend on groups
    assert found.ranks == n


def total(n, g):
    """The largest sum of activations: a worker holds up to n stages' in a step of 2n slots."""
    # stages, by slot of a worker's step.
    held = [min(t + 1, 2 * n - t) for t in range(2 * n)]
    starts = [Fraction(2 * n * k, g) for k in range(g)]
    moments = {(start + t) % (2 * n) for start in starts for t in range(2 * n)}
    most = max(
        sum(held[int((moment - start) % (2 * n))] for start in starts)
        for moment in moments
    )
    return Fraction(most * (n // g), n)


@pytest.mark.parametrize("state", ["replicated", "sharded"])
def test_one_group_is_data_parallelism_and_n_groups_are_cyclic(state):
    together = catalog.cyclic(4, groups=1, state=state)
    assert (
        together.lower(3).ranks == catalog.data_parallel(4, state=state).lower(3).ranks
    )
    alone = catalog.cyclic(4, state=state)
    assert catalog.cyclic(4, groups=4, state=state) == alone


@pytest.mark.parametrize(("n", "g"), [(4, 2), (8, 2), (6, 3), (9, 3)])
def test_a_machine_a_group_sends_each_sum_on_once_and_each_version_to_the_others_once(
    n, g
):
    """Between groups, of each stage and step; the owner's group gets new weights from the owner."""
    schedule, size = catalog.cyclic(n, 1, groups=g), n // g
    program = schedule.lower(6).verify()
    between: dict = {}
    for rank, order in enumerate(program.ranks):
        for i in order:
            if i.action == Action.SEND and rank // size != i.peers[0] // size:
                key = (
                    i.buffer,
                    i.stage,
                    i.version if i.buffer == Buffer.WEIGHTS else i.step,
                )
                between.setdefault(key, []).append((rank // size, i.peers[0] // size))
    gradients = between[Buffer.GRADIENT, 0, 3]
    assert sorted(gradients) == [*pairwise(range(g))]
    weights = between[Buffer.WEIGHTS, 0, 3]
    assert sorted(weights) == sorted([(g - 1, 0), *pairwise(range(g - 1))])


@pytest.mark.parametrize(("n", "g"), [(n, g) for n, g in SIZES if g > 1])
def test_rotated_groups_share_messages_and_updates(n, g):
    """n stages: a group sends (g-1)/g of the sums to the next, and as many weights."""
    schedule, size = catalog.cyclic(n, 1, groups=g, chains="rotated"), n // g
    assert sorted(schedule.owners) == [*range(n)]
    program = schedule.lower(5).verify()
    between: Counter = Counter()
    for rank, order in enumerate(program.ranks):
        for i in order:
            if (
                i.action == Action.SEND
                and i.of_step == 3
                and i.peers[0] // size != rank // size
            ):
                between[i.buffer, rank // size, i.peers[0] // size] += 1
    expected = {
        (buffer, k, (k + 1) % g): n - size
        for buffer in (Buffer.GRADIENT, Buffer.WEIGHTS)
        for k in range(g)
    }
    assert between == expected
    found = footprint(schedule)
    assert found.total_activations == total(n, g)
    assert found.traffic == Fraction(2 * (n - 1), n)


def test_a_rotated_chain_of_groups():
    """Stage 3 of four: the sum begins in group 1; rank 0 updates, and rank 1 gets its weights."""
    schedule = catalog.cyclic(4, 1, groups=2, chains="rotated")
    assert schedule.rings[3] == ((3, 2), (1, 0))
    assert schedule.owners == (3, 1, 2, 0)
    program = schedule.lower(4).verify()
    sent = [
        (i.tick, rank, *i.peers, i.buffer)
        for rank, order in enumerate(program.ranks)
        for i in order
        if (i.action, i.stage, i.of_step) == (Action.SEND, 3, 2)
    ]
    gradient = [hop[1:3] for hop in sorted(sent) if hop[3] == Buffer.GRADIENT]
    weights = [hop[1:3] for hop in sorted(sent) if hop[3] == Buffer.WEIGHTS]
    assert sorted(gradient) == sorted([(3, 2), (2, 1), (1, 0)])
    assert sorted(weights) == sorted([(0, 3), (3, 2), (0, 1)])


@pytest.mark.parametrize(
    ("groups", "named"),
    [(3, "1, 2, 4, 8"), (0, "1 or more"), (16, "1, 2, 4, 8"), ("two", "two")],
)
def test_refuses_groups_that_do_not_divide_the_workers(groups, named):
    with pytest.raises(UserError, match=named):
        catalog.cyclic(8, groups=groups)
