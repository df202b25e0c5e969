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
PIPELINE = """
    slot   0   1   2   3   4   5   6    7    8    9    10   11   12   13   14   15
    rank 0 0F0 .   0F1 .   0F2 0B0 0F0' 0B1  0F1' 0B2  0F2' 0B0' .    0B1' .    0B2'
    rank 1 .   1F0 .   1F1 1B0 1F2 1B1  1F0' 1B2  1F1' 1B0' 1F2' 1B1' .    1B2' .
    rank 2 .   .   2F0 2B0 2F1 2B1 2F2  2B2  2F0' 2B0' 2F1' 2B1' 2F2' 2B2' .    .
"""
# Stage 0 has three ranks, stage 1 two: its third micro-batch takes the first of them again,
# and the next step goes on with the second.
TIMES_MODEL_PARALLEL = """
    slot   0   1   2   3   4   5   6    7    8    9    10   11   12   13   14   15
    rank 0 0F0 .   .   .   .   0B0 0F0' .    .    .    .    0B0' .    .    .    .
    rank 1 .   .   0F1 .   .   .   .    0B1  0F1' .    .    .    .    0B1' .    .
    rank 2 .   .   .   .   0F2 .   .    .    .    0B2  0F2' .    .    .    .    0B2'
    rank 3 .   1F0 .   .   1B0 1F2 .    .    1B2  1F1' .    .    1B1' .    .    .
    rank 4 .   .   .   1F1 .   .   1B1  1F0' .    .    1B0' 1F2' .    .    1B2' .
    rank 5 .   .   2F0 2B0 2F1 2B1 2F2  2B2  2F0' 2B0' 2F1' 2B1' 2F2' 2B2' .    .
"""
# 2S/M = 8/3 slots: three columns a slot, and an op goes on in the columns with a dash.
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


@pytest.mark.parametrize(
    ("schedule", "n_steps", "expected"),
    [
        pytest.param(catalog.data_parallel(3), 1, DP, id="simultaneous"),
        pytest.param(catalog.cyclic(3), 2, CDP, id="cyclic"),
        pytest.param(catalog.cyclic(3, n_stages=4), 1, FOUR_BY_THREE, id="4x3"),
        pytest.param(catalog.cyclic(3, placement="per_stage"), 2, PIPELINE, id="per_stage"),
        pytest.param(catalog.cyclic(3, placement="one"), 1, ONE_DEVICE, id="one"),
        pytest.param(
            catalog.cyclic(3, placement="per_stage_and_microbatch"),
            2,
            TIMES_MODEL_PARALLEL,
            id="per_stage_and_microbatch-cyclic",
        ),
    ],
)
def test_literal_timeline(schedule, n_steps, expected):
    assert schedule.grid(n_steps) == dedent(expected).strip()


def test_steps_under_way_are_told_apart():
    """Three at once, so that two kinds of step would not do."""
    orders = ["0F0 0B0", "1F0 1B0", "2F0 2B0"]
    schedule = Schedule.from_rank_orders(orders, delay=[2, 1, 0], period=2)
    assert schedule.grid(4) == dedent(
        """
        slot   0   1   2    3    4     5     6     7     8     9     10  11
        rank 0 0F0 .   0F0' .    0F0'' 0B0   0F0   0B0'  .     0B0'' .   0B0
        rank 1 .   1F0 .    1F0' 1B0   1F0'' 1B0'  1F0   1B0'' .     1B0 .
        rank 2 .   .   2F0  2B0  2F0'  2B0'  2F0'' 2B0'' 2F0   2B0   .   .
        """
    ).strip("\n")


@pytest.mark.parametrize("n_steps", [0, 1.5, True])
def test_no_number_of_steps(n_steps):
    with pytest.raises(UserError, match="n_steps is a whole number, 1 or more: got"):
        catalog.cyclic(2).grid(n_steps)


def test_of_a_large_grid_what_is_around_the_mark():
    schedule = catalog.one_f_one_b(64, 128)
    op = Op(Kind.BACKWARD, 20, 100)
    whole = schedule.grid().splitlines()
    head, *body = render(schedule.timing, schedule.layout, mark=(op, 0)).splitlines()
    assert (len(whole), len(body)) == (65, 16)
    assert [line.split()[1] for line in body] == [str(rank) for rank in range(12, 28)]
    slots = list(map(int, head.split()[1:]))
    start = schedule.timing.starts[op] // schedule.timing.ticks_per_slot
    assert slots == list(range(start - 20, start + 20))
    row = body[8].split()[2:]
    assert row[20] == "[20B100]"
    assert row[19] == whole[21].split()[2:][start - 1]
    schedule = catalog.cyclic(3)
    assert (
        render(schedule.timing, schedule.layout, mark=(Op(Kind.FORWARD, 0, 0), 0)).count("\n") == 3
    )
