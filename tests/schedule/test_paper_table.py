"""The paper's table: closed forms against counts from programs."""

from dataclasses import replace
from fractions import Fraction

import pytest

from tests.thorough import more
from toolkit.errors import UserError
from toolkit.schedule.paper_table import RULES, SETTINGS, compare


@pytest.mark.parametrize("n", more((2, 3, 4, 5, 8), range(2, 17)))
def test_every_program_keeps_to_its_closed_form(n):
    rows = compare(n)
    assert [(row.setting, row.rule) for row in rows] == [(s, r) for s in SETTINGS for r in RULES]
    assert {(row.setting, row.rule): row.differences for row in rows if row.differences} == {}


@pytest.mark.parametrize(
    ("setting", "dp", "cdp"),
    [
        ("one device", (1, 4, 4), (1, 2.5, 2.5)),
        ("multi-device", (4, 1, 4), (4, 1, 2.5)),
        ("with model parallelism", (16, 0.25, 4), (10, 0.25, 2.5)),
        ("pipeline", (4, 1, 4), (4, 1, 2.5)),
        ("ZeRO", (4, 1, 4), (4, 1, 2.5)),
    ],
)
def test_the_papers_table_for_four_workers(setting, dp, cdp):
    """Ranks, activations of one and of all."""
    rows = {row.rule: row.counted for row in compare(4) if row.setting == setting}
    found = {rule: (f.ranks, f.activations, f.total_activations) for rule, f in rows.items()}
    assert found == {"DP": dp, "CDP-v1": cdp, "CDP-v2": cdp}


def test_a_broken_formula_or_another_count_is_seen():
    row = compare(3)[4]
    for quantity, right in row.formula.items():
        broken = replace(row, formula=row.formula | {quantity: right + Fraction(1, 7)})
        assert broken.differences == {quantity: (right + Fraction(1, 7), right)}
        counted = replace(row.counted, **{quantity: 99})
        assert replace(row, counted=counted).differences == {quantity: (right, 99)}


@pytest.mark.parametrize("n", [1, 2.0])
def test_fewer_than_two_workers_are_refused(n):
    with pytest.raises(UserError, match=f"2 or more.*{n!r}"):
        compare(n)
