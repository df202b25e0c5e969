"""When ops start: against the formulas, and exact fractions where starts fall between slots."""

from fractions import Fraction
from itertools import product

import pytest

from toolkit.errors import UserError
from toolkit.schedule import Kind, Op, timing

SIZES = list(product(range(1, 7), repeat=2))


def in_slots(when, op):
    return Fraction(when.starts[op], when.ticks_per_slot)


@pytest.mark.parametrize(("s", "m"), SIZES)
@pytest.mark.parametrize(
    ("rule", "offset", "period"),
    [
        (timing.simultaneous, lambda s, m, i: 0, lambda s, m: 2 * s),
        (timing.cyclic, lambda s, m, i: Fraction(2 * s * i, m), lambda s, m: 2 * s),
        (timing.sequential, lambda s, m, i: 2 * s * i, lambda s, m: 2 * s * m),
    ],
    ids=["simultaneous", "cyclic", "sequential"],
)
def test_every_op_starts_at_its_formula(rule, offset, period, s, m):
    when = rule(s, m)
    assert len(when.starts) == 2 * s * m
    for j, i in product(range(s), range(m)):
        assert in_slots(when, Op(Kind.FORWARD, j, i)) == offset(s, m, i) + j
        assert in_slots(when, Op(Kind.BACKWARD, j, i)) == offset(s, m, i) + 2 * s - 1 - j
    assert Fraction(when.period, when.ticks_per_slot) == period(s, m)


@pytest.mark.parametrize(("s", "m", "ticks"), [(3, 3, 1), (4, 3, 3), (3, 4, 2), (2, 6, 3)])
def test_the_tick_is_as_coarse_as_can_be(s, m, ticks):
    assert timing.cyclic(s, m).ticks_per_slot == ticks


def test_an_op_ends_one_slot_after_its_start():
    when = timing.cyclic(4, 3)
    assert when.end(Op(Kind.FORWARD, 0, 1)) == 8 + 3
    assert when.gradient_end(3, 1) == 8 + 5 * 3
    assert when.update_ready(3, 3) == 2 * 8 + 5 * 3


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
