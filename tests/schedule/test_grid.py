# ruff: noqa: E501 - a timeline is as long as it is
"""Literal timelines of the small cases."""

from textwrap import dedent

import pytest

from toolkit.errors import UserError
from toolkit.schedule import Kind, Op, Schedule, catalog
from toolkit.schedule.grid import render

DP = """
    slot   0   1   2   3   4   5
    rank 0 0F0 1F0 2F0 2B0 1B0 0B0
    rank 1 0F1 1F1 2F1 2B1 1B1 0B1
    rank 2 0F2 1F2 2F2 2B2 1B2 0B2
"""
CDP = """
    slot   0   1   2   3   4   5   6    7    8    9    10   11   12   13   14   15
    rank 0 0F0 1F0 2F0 2B0 1B0 0B0 0F0' 1F0' 2F0' 2B0' 1B0' 0B0' .    .    .    .
    rank 1 .   .   0F1 1F1 2F1 2B1 1B1  0B1  0F1' 1F1' 2F1' 2B1' 1B1' 0B1' .    .
    rank 2 .   .   .   .   0F2 1F2 2F2  2B2  1B2  0B2  0F2' 1F2' 2F2' 2B2' 1B2' 0B2'
"""
DP_ACCUMULATED = """
    slot   0   1   2   3   4   5   6   7   8    9    10   11   12   13   14   15
    rank 0 0F0 1F0 1B0 0B0 0F2 1F2 1B2 0B2 0F0' 1F0' 1B0' 0B0' 0F2' 1F2' 1B2' 0B2'
    rank 1 0F1 1F1 1B1 0B1 0F3 1F3 1B3 0B3 0F1' 1F1' 1B1' 0B1' 0F3' 1F3' 1B3' 0B3'
"""
CDP_ACCUMULATED = """
    slot   0   1   2   3   4   5   6   7   8    9    10   11   12   13   14   15   16   17
    rank 0 0F0 1F0 1B0 0B0 0F2 1F2 1B2 0B2 0F0' 1F0' 1B0' 0B0' 0F2' 1F2' 1B2' 0B2' .    .
    rank 1 .   .   0F1 1F1 1B1 0B1 0F3 1F3 1B3  0B3  0F1' 1F1' 1B1' 0B1' 0F3' 1F3' 1B3' 0B3'
"""
PIPELINE = """
    slot   0   1   2   3   4   5   6    7    8    9    10   11   12   13   14   15
    rank 0 0F0 .   0F1 .   0F2 0B0 0F0' 0B1  0F1' 0B2  0F2' 0B0' .    0B1' .    0B2'
    rank 1 .   1F0 .   1F1 1B0 1F2 1B1  1F0' 1B2  1F1' 1B0' 1F2' 1B1' .    1B2' .
    rank 2 .   .   2F0 2B0 2F1 2B1 2F2  2B2  2F0' 2B0' 2F1' 2B1' 2F2' 2B2' .    .
"""
# Stage 0 has three ranks, stage 1 two: its third micro-batch takes the first of them again,
# and the next step continues with the second.
TIMES_MODEL_PARALLEL = """
    slot   0   1   2   3   4   5   6    7    8    9    10   11   12   13   14   15
    rank 0 0F0 .   .   .   .   0B0 0F0' .    .    .    .    0B0' .    .    .    .
    rank 1 .   .   0F1 .   .   .   .    0B1  0F1' .    .    .    .    0B1' .    .
    rank 2 .   .   .   .   0F2 .   .    .    .    0B2  0F2' .    .    .    .    0B2'
    rank 3 .   1F0 .   .   1B0 1F2 .    .    1B2  1F1' .    .    1B1' .    .    .
    rank 4 .   .   .   1F1 .   .   1B1  1F0' .    .    1B0' 1F2' .    .    1B2' .
    rank 5 .   .   2F0 2B0 2F1 2B1 2F2  2B2  2F0' 2B0' 2F1' 2B1' 2F2' 2B2' .    .
"""
# 2S/M = 8/3 slots: three columns a slot, and an op covers its further columns with a dash.
FOUR_BY_THREE = """
    slot   0       1       2         3         4         5           6           7           8         9         10       11       12       13
    rank 0 0F0 - - 1F0 - - 2F0 - -   3F0 - -   3B0 - -   2B0 -   -   1B0 -   -   0B0 -   -   . .   .   . .   .   .  .   . .  .   . .  .   . .
    rank 1 .   . . .   . . .   . 0F1 -   - 1F1 -   - 2F1 -   -   3F1 -   -   3B1 -   -   2B1 - -   1B1 - -   0B1 -  -   . .  .   . .  .   . .
    rank 2 .   . . .   . . .   . .   .   . .   .   . .   .   0F2 -   -   1F2 -   -   2F2 -   - 3F2 -   - 3B2 -   -  2B2 - -  1B2 - -  0B2 - -
"""
ONE_DEVICE = """
    slot        0   1   2   3   4   5   6   7   8   9
    rank 0 mb 0 0F0 1F0 2F0 2B0 1B0 0B0 .   .   .   .
    rank 0 mb 1 .   .   0F1 1F1 2F1 2B1 1B1 0B1 .   .
    rank 0 mb 2 .   .   .   .   0F2 1F2 2F2 2B2 1B2 0B2
"""
# Three steps are under way at once, so that one prime would not distinguish them.
THREE_STEPS = """
    slot   0   1   2    3    4     5     6     7     8     9     10  11
    rank 0 0F0 .   0F0' .    0F0'' 0B0   0F0   0B0'  .     0B0'' .   0B0
    rank 1 .   1F0 .    1F0' 1B0   1F0'' 1B0'  1F0   1B0'' .     1B0 .
    rank 2 .   .   2F0  2B0  2F0'  2B0'  2F0'' 2B0'' 2F0   2B0   .   .
"""
CHAIN = Schedule.from_rank_orders(
    ["0F0 0B0", "1F0 1B0", "2F0 2B0"], delay=[2, 1, 0], period=2
)
BOTH = "per_stage_and_microbatch"


@pytest.mark.parametrize(
    ("schedule", "n_steps", "expected"),
    [
        pytest.param(catalog.data_parallel(3), 1, DP, id="simultaneous"),
        pytest.param(catalog.cyclic(3), 2, CDP, id="cyclic"),
        pytest.param(
            catalog.data_parallel(2, accumulate=2), 2, DP_ACCUMULATED, id="accumulated"
        ),
        pytest.param(
            catalog.cyclic(2, accumulate=2), 2, CDP_ACCUMULATED, id="cyclic accumulated"
        ),
        pytest.param(catalog.cyclic(3, n_stages=4), 1, FOUR_BY_THREE, id="4x3"),
        pytest.param(
            catalog.cyclic(3, placement="per_stage"), 2, PIPELINE, id="per_stage"
        ),
        pytest.param(catalog.cyclic(3, placement="one"), 1, ONE_DEVICE, id="one"),
        pytest.param(
            catalog.cyclic(3, placement=BOTH), 2, TIMES_MODEL_PARALLEL, id=BOTH
        ),
        pytest.param(CHAIN, 4, THREE_STEPS, id="three steps"),
    ],
)
def test_literal_timeline(schedule, n_steps, expected):
    assert schedule.grid(n_steps) == dedent(expected).strip("\n")


@pytest.mark.parametrize("n_steps", [0, 1.5, True])
def test_no_number_of_steps(n_steps):
    with pytest.raises(UserError, match=f"n_steps .*got {n_steps!r}"):
        catalog.cyclic(2).grid(n_steps)


def test_a_large_grid_shows_the_surroundings_of_the_mark():
    schedule = catalog.one_f_one_b(64, 128)
    op = Op(Kind.BACKWARD, 20, 100)
    head, *body = render(schedule.timing, schedule.layout, mark=(op, 0)).splitlines()
    assert [line.split()[1] for line in body] == [str(rank) for rank in range(12, 28)]
    start = schedule.timing.starts[op]
    assert head.split()[1:] == [str(slot) for slot in range(start - 20, start + 20)]
    row, whole = body[8].split()[2:], schedule.grid().splitlines()[21].split()[2:]
    assert row[19:21] == [whole[start - 1], "[20B100]"]
