"""Footprints of small schedules, by hand."""

from fractions import Fraction

import pytest

from toolkit.schedule import Schedule, catalog
from toolkit.schedule.steady import Footprint, footprint

HALF, THIRD = Fraction(1, 2), Fraction(1, 3)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        # 2 all-reduces of half a model; each sends 2(n-1)/n = 1 time what it reduces.
        (catalog.data_parallel(2), Footprint(2, 1, 2, 1, 1 + HALF, 1, 4, HALF, 2)),
        # Each stage: one sum to the owner, one version back. Two versions of a stage are alive.
        (catalog.cyclic(2), Footprint(2, 1, 1 + HALF, 1, 1 + HALF, 1, 2, HALF, 1)),
        (catalog.data_parallel(2, "one"), Footprint(1, 2, 2, 1, 1 + HALF, 0, 0, 0, 0)),
        # One stage a rank, and a second version of it while it is remade.
        (catalog.gpipe(2, 2), Footprint(2, 1, 2, HALF, 1, 0, 0, 0, 0)),
        (catalog.one_f_one_b(2, 2), Footprint(2, 1, 1 + HALF, HALF, 1, 0, 0, 0, 0)),
        # 1F1B of 3 stages and many micro-batches: 3 + 2 + 1 stage-activations.
        (catalog.one_f_one_b(3, 9), Footprint(3, 1, 2, THIRD, 2 * THIRD, 0, 0, 0, 0)),
        # Every stage lives where it is owned.
        (
            catalog.data_parallel(2, state="sharded"),
            Footprint(2, 1, 2, HALF, 1 + HALF, Fraction(5, 4), Fraction(5, 2), 1, 2),
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Schedule) else "",
)
def test_by_hand(schedule, expected):
    assert footprint(schedule) == expected


def test_pipedream_2bw_keeps_two_versions_and_makes_a_third():
    found = footprint(catalog.pipedream_2bw(3, 3))
    assert (found.parameters, found.weights) == (THIRD, 3 * THIRD)


@pytest.mark.parametrize("n", [2, 3, 4, 7])
def test_a_rank_waits_for_as_many_messages_as_its_collective_has_rounds(n):
    assert footprint(catalog.data_parallel(n)).rounds == 2 * (n - 1)
    assert footprint(catalog.data_parallel(n, state="sharded")).rounds == 2 * (n - 1).bit_length()
    assert footprint(catalog.cyclic(n)).rounds == 1


def test_messages_that_wait_for_each_other_are_counted_in_a_row():
    """Ranks 0 to 2 end together and rank 3 later: the sum goes from hand to hand at once."""
    orders = ["0F0 0B0", "0F1 0B1", "0F2 0B2", "0F3 0F4 0B3 0B4"]
    assert footprint(Schedule.from_rank_orders(orders)).rounds == 3
