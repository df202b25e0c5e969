"""Weights and sums of gradients that go round the workers: WeiPipe, and CDP beside it."""

from collections import Counter
from fractions import Fraction

import pytest

from toolkit.schedule import Action, Buffer, catalog
from toolkit.schedule.steady_state import footprint

ARRIVES = (Action.RECV, Buffer.GRADIENT)
SIZES = [(n, k) for n in range(3, 9) for k in (1, 2, 3)]


def test_grid_of_three_workers():
    """A worker's backwards and its next forwards alternate; a stage is on one worker at a time."""
    assert catalog.weipipe(3, accumulate=2).grid().splitlines()[1:] == [
        "rank 0 0F0 1F0 2F0 2B0 0F3 1B0 1F3 0B0 2F3 2B3 .   1B3 .   0B3 .   .",
        "rank 1 .   0F1 1F1 .   2F1 2B1 0F4 1B1 1F4 0B1 2F4 2B4 .   1B4 0B4 .",
        "rank 2 .   .   0F2 .   1F2 .   2F2 2B2 0F5 1B2 1F5 0B2 2F5 2B5 1B5 0B5",
    ]


@pytest.mark.parametrize(("n", "k"), SIZES)
def test_closed_forms(n, k):
    """A flow of sums and two of weights; a rank keeps weights between ops 2 k - 1 times a step."""
    schedule = catalog.weipipe(n, accumulate=k)
    assert schedule.period == 2 * (k * n + n - 1)  # idle: (n - 1) / (k n + n - 1)
    found = footprint(schedule)
    assert found.traffic == Fraction((n - 1) * (3 * k * n - 2 * k + 1), n * n)
    assert found.activations == 1
    assert found.parameters == Fraction(1, n)
    # Its own, two that pass, and one more.
    assert found.weights == Fraction(min(n, 4), n)


@pytest.mark.parametrize(
    "schedule",
    [catalog.weipipe(8, accumulate=3), catalog.cyclic(4, 1, state="circulating")],
    ids=lambda schedule: schedule.name,
)
def test_a_rank_sums_nothing_that_it_can_hand_on(schedule):
    program, n = schedule.lower(3).verify(), schedule.n_ranks
    ends, sent = Counter(), Counter()
    for rank, order in enumerate(program.ranks):
        held: set[tuple] = set()  # sums
        for i in order:
            key = rank, i.stage, i.step
            if i.action == Action.BACKWARD or (i.action, i.buffer) == ARRIVES:
                held.add(key)
                assert len(held) <= 4
            elif i.action == Action.UPDATE or i.buffer == Buffer.GRADIENT:
                held.remove(key)
            if i.action == Action.BACKWARD and rank != schedule.owners[i.stage]:
                ends[(*key, i.tick + schedule.timing.ticks_per_slot)] += 1
            elif i.action == Action.SEND and i.buffer == Buffer.GRADIENT:
                sent[(*key, i.tick)] += 1
                assert i.peers[0] in (
                    (rank + 1) % n,
                    (rank + 2) % n,
                    schedule.owners[i.stage],
                )
    assert sent == ends


@pytest.mark.parametrize("delay", [1, "freshest"])
def test_cdp_sends_as_much_as_sharded_and_a_slot_earlier(delay):
    first, second = (
        catalog.cyclic(4, delay, state=s) for s in ("sharded", "circulating")
    )
    assert footprint(first).traffic == footprint(second).traffic
    early = [
        sum(
            i.tick
            for rank in schedule.lower(6).verify().ranks
            for i in rank
            if is_sent(i)
        )
        for schedule in (first, second)
    ]
    assert early[1] < early[0]


def is_sent(i):
    return i.action == Action.SEND and i.buffer == Buffer.WEIGHTS


@pytest.mark.parametrize("n_stages", range(2, 7))
def test_any_number_of_stages(n_stages):
    """With fewer than workers, several run a stage at once."""
    schedule = catalog.weipipe(4, n_stages=n_stages, accumulate=3)
    program = schedule.lower(3).verify()
    at_once = any(i.action == Action.BROADCAST for rank in program.ranks for i in rank)
    assert at_once == (n_stages < 4)
