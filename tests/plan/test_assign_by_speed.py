"""Micro-batches dealt by speeds."""

import pytest

from toolkit.cost import Hardware, StageCost, simulate
from toolkit.errors import UserError
from toolkit.plan import assign_by_speed


@pytest.mark.parametrize(
    ("m", "speeds", "expected"),
    [
        (14, (1, 1, 1, 0.5), [4, 4, 4, 2]),
        (6, (1, 1), [3, 3]),
        (7, (1, 1, 1, 1), [2, 2, 2, 1]),
        (4, (3, 1), [3, 1]),
    ],
)
def test_a_rank_gets_micro_batches_by_its_speed(m, speeds, expected):
    schedule = assign_by_speed(3, m, speeds)
    ranks = [[schedule.rank(j, k) for k in range(m)] for j in range(3)]
    assert [ranks[0].count(r) for r in range(len(speeds))] == expected
    assert ranks[0] == ranks[1] == ranks[2]
    cost = StageCost(0, 0, forward_seconds=1, backward_seconds=2)
    hardware = Hardware("made up", 1, 1e12, 1e12, speeds=speeds)
    found = simulate(schedule.lower(3).verify(), (cost,) * 3, hardware).step_time
    assert found == pytest.approx(
        9 * max(n / v for n, v in zip(expected, speeds, strict=True))
    )


@pytest.mark.parametrize(
    ("m", "speeds", "named"),
    [
        (3, (1, 0.1), "rank 1"),
        (2, (1, 0), "speeds"),
        (2, (1, float("nan")), "speeds"),
        (2, ("1", 1), "speeds"),
        (10**7, (1, 1), "40000000 ops"),
    ],
)
def test_refuses(m, speeds, named):
    with pytest.raises(UserError, match=named):
        assign_by_speed(2, m, speeds)
