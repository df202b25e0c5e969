"""Pipelines side by side keep to their closed forms, and say what cannot be made."""

from fractions import Fraction

import pytest

from tests.schedule.test_v_schedules import bubble, most
from toolkit.cost.pipeline_table import METHODS, assess, pipelines
from toolkit.errors import UserError

LATE = ("PipeDream-2BW", "CDP-v1", "CDP-v2")


def assessed(n_ranks, n_microbatches):
    made, _ = pipelines(n_ranks, n_microbatches)
    return {method: assess(method, schedule) for method, schedule in made.items()}


@pytest.fixture(scope="module", params=[(2, 4), (3, 3), (4, 8)], ids=str)
def sized(request):
    """Ranks p, micro-batches m, and all methods on them."""
    return *request.param, assessed(*request.param)


def test_every_method_on_equal_ranks(sized):
    p, m, found = sized
    assert list(found) == list(METHODS)
    assert {(row.ranks, row.microbatches) for row in found.values()} == {(p, m)}


def test_idle_shares(sized):
    """A backward takes twice its forward, and two stages of a rank as long as one."""
    p, m, found = sized
    idle = {method: row.idle for method, row in found.items()}
    fill = p - 1  # of a pipeline, in micro-batches
    expected = {
        "GPipe": fill / (m + fill),
        "1F1B": fill / (m + fill),
        "interleaved 1F1B": fill / (2 * m + fill),
        "ZB-H1": fill / (3 * m + fill),
    }
    for method in ("ZB-V", "V-Half", "V-Min"):
        slots = bubble(method, p, m)
        expected[method] = slots / (6 * m + slots)
    assert idle == pytest.approx(expected | dict.fromkeys(LATE, 0.0))


def test_no_bubble_in_zb_v_from_twice_the_ranks_on():
    made, _ = pipelines(3, 5)
    assert assess("ZB-V", made["ZB-V"]).idle == 0
    made, _ = pipelines(3, 4)
    assert assess("ZB-V", made["ZB-V"]).idle > 0


def test_activations(sized):
    """In micro-batches: p stages of p, or 2p of 2p, are one."""
    p, m, found = sized
    held = {method: row.activations for method, row in found.items()}
    assert held["GPipe"] == Fraction(m, p)
    assert {held[method] for method in ("1F1B", "ZB-H1", *LATE)} == {1}
    assert held["interleaved 1F1B"] == min(Fraction(m, p), 1 + Fraction(p - 1, 2 * p))
    for method in ("ZB-V", "V-Half", "V-Min"):
        assert held[method] == Fraction(most(method, p), 2 * p)
    total = {method: row.total_activations for method, row in found.items()}
    assert total["GPipe"] == m
    assert {total[method] for method in ("1F1B", *LATE)} == {Fraction(p + 1, 2)}


def test_weights_and_staleness(sized):
    p, m, found = sized
    late = {method: (row.staleness_mean, row.staleness_max) for method, row in found.items()}
    fresh = dict.fromkeys(METHODS, (0, 0))
    by_stage = (p - 1) / (2 * m)
    assert late == fresh | {
        "PipeDream-2BW": (1, 1),
        "CDP-v1": (1, 1),
        "CDP-v2": (pytest.approx(by_stage), 1),
    }
    assert [method for method, row in found.items() if not row.flush] == [*LATE]
    versions = {method: row.weights * p for method, row in found.items()}
    assert versions["1F1B"] == versions["CDP-v2"] == 2
    assert versions["PipeDream-2BW"] == versions["CDP-v1"] == 3


@pytest.mark.parametrize(
    ("sizes", "left_out"),
    [
        ((2, 4), set()),
        ((4, 3), {"PipeDream-2BW", "CDP-v1", "CDP-v2"}),
        ((2, 5), {"interleaved 1F1B", "CDP-v1", "CDP-v2"}),
    ],
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
