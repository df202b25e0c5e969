"""Timings: exact fractions where starts fall between slots, and what is refused."""

import pytest

from toolkit.errors import UserError
from toolkit.schedule import Kind, Op, timing


@pytest.mark.parametrize(("s", "m", "ticks"), [(3, 3, 1), (4, 3, 3), (3, 4, 2), (2, 6, 3)])
def test_the_tick_is_as_coarse_as_can_be(s, m, ticks):
    assert timing.cyclic(s, m).ticks_per_slot == ticks


@pytest.mark.parametrize(
    ("starts", "period", "message"),
    [
        ({Op(Kind.FORWARD, 0, 0): -2}, 4, "0F0.*-2"),
        ({Op(Kind.FORWARD, 0, 0): 0.5}, 4, r"0F0.*0\.5"),
        ({(Kind.FORWARD, 0, 0): 0}, 4, r"maps ops.* got \("),
        ({Op(Kind.FORWARD, 0, 0): 0}, 4.0, "period of a timing, in ticks, is a whole number"),
        ({Op(Kind.FORWARD, 0, 0): 0}, 0, "period of a timing, in ticks, is a whole number, 1 or"),
    ],
)
def test_what_is_no_timing(starts, period, message):
    with pytest.raises(UserError, match=message):
        timing.Timing(starts, period)
