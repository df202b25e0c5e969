"""Pipelines side by side keep to their closed forms, and say what cannot be made."""

from fractions import Fraction

import pytest

from tests.schedule.test_v_schedules import bubble, most
from toolkit.cost.pipeline_table import METHODS, assess, pipelines
from toolkit.errors import UserError

LATE = ("PipeDream-2BW", "CDP-v1", "CDP-v2")
V_SCHEDULES = ("ZB-V", "V-Half", "V-Min")


def column(found, name):
    return {method: row[name] for method, row in found.items()}


@pytest.fixture(scope="module", params=[(2, 4), (3, 3), (4, 8)], ids=str)
def sized(request):
    """Ranks p, micro-batches m, and all methods on them."""
    made, _ = pipelines(*request.param)
    return *request.param, {method: assess(method, schedule) for method, schedule in made.items()}


def test_idle_shares(sized):
    """A backward takes twice its forward, and two stages of a rank as long as one."""
    p, m, found = sized
    assert list(found) == list(METHODS)
    assert {(row["ranks"], row["microbatches"]) for row in found.values()} == {(p, m)}
    fill = p - 1  # of a pipeline, in micro-batches
    expected = {
        "GPipe": fill / (m + fill),
        "1F1B": fill / (m + fill),
        "interleaved 1F1B": fill / (2 * m + fill),
        "ZB-H1": fill / (3 * m + fill),
    }
    for method in V_SCHEDULES:
        slots = bubble(method, p, m)
        expected[method] = slots / (6 * m + slots)
    assert column(found, "idle") == pytest.approx(expected | dict.fromkeys(LATE, 0.0))


def test_no_bubble_in_zb_v_from_twice_the_ranks_on():
    assert assess("ZB-V", pipelines(3, 5)[0]["ZB-V"])["idle"] == 0
    assert assess("ZB-V", pipelines(3, 4)[0]["ZB-V"])["idle"] > 0


def test_activations(sized):
    """In micro-batches: p stages of p, or 2p of 2p, are one."""
    p, m, found = sized
    expected = dict.fromkeys(("1F1B", "ZB-H1", *LATE), 1) | {
        "GPipe": Fraction(m, p),
        "interleaved 1F1B": min(Fraction(m, p), 1 + Fraction(p - 1, 2 * p)),
        **{method: Fraction(most(method, p), 2 * p) for method in V_SCHEDULES},
    }
    assert column(found, "activations") == expected
    total = column(found, "total_activations")
    assert total["GPipe"] == m
    assert {total[method] for method in ("1F1B", *LATE)} == {Fraction(p + 1, 2)}


def test_weights_and_staleness(sized):
    p, m, found = sized
    late = {"PipeDream-2BW": 1, "CDP-v1": 1, "CDP-v2": pytest.approx((p - 1) / (2 * m))}
    assert column(found, "staleness_mean") == dict.fromkeys(METHODS, 0) | late
    assert column(found, "staleness_max") == dict.fromkeys(METHODS, 0) | dict.fromkeys(LATE, 1)
    assert [method for method, row in found.items() if not row["flush"]] == [*LATE]
    versions = {method: row["weights"] * p for method, row in found.items()}
    assert versions["1F1B"] == versions["CDP-v2"] == 2
    assert versions["PipeDream-2BW"] == versions["CDP-v1"] == 3


@pytest.mark.parametrize(
    ("sizes", "left_out"),
    [((4, 3), {"PipeDream-2BW", "CDP-v1", "CDP-v2"}), ((2, 5), {"interleaved 1F1B", *LATE[1:]})],
)
def test_what_cannot_be_made_is_left_out(sizes, left_out):
    made, reasons = pipelines(*sizes)
    assert reasons.keys() == left_out
    assert made.keys() == METHODS.keys() - left_out
    for reason in reasons.values():
        assert str(sizes[1]) in reason
        assert "\n" not in reason


@pytest.mark.parametrize(("sizes", "name"), [((0, 4), "ranks"), ((2, 0), "micro-batches")])
def test_rejects_no_ranks_or_micro_batches(sizes, name):
    with pytest.raises(UserError, match=f"{name}.*0"):
        pipelines(*sizes)
