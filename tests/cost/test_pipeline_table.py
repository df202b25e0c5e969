"""Pipelines side by side keep to their closed forms, and say what cannot be made."""

from fractions import Fraction
from pathlib import Path

import pytest

from tests.schedule.test_v_schedules import WHOLE, bubble, most
from toolkit.cost import StageCost
from toolkit.cost.cost_file import FileCosts
from toolkit.cost.pipeline_table import (
    PIPELINES,
    WORKERS,
    assess_pipeline,
    pipeline_cells,
    pipelines,
)
from toolkit.errors import UserError

LATE = ("PipeDream", "PipeDream-2BW", "CDP-v1", "CDP-v2")
V_SCHEDULES = ("ZB-V", "V-Half", "V-Min")


def column(found, name):
    return {method: row[name] for method, row in found.items()}


@pytest.fixture(scope="module", params=[(2, 4), (4, 8), (4, 12)], ids=str)
def sized(request):
    """Ranks p, micro-batches m, and all methods on them."""
    made, _ = pipelines(*request.param)
    return *request.param, {
        method: assess_pipeline(method, schedule) for method, schedule in made.items()
    }


def test_idle_shares(sized):
    """A backward takes twice its forward, and two stages of a rank as long as one."""
    p, m, found = sized
    assert list(found) == list(PIPELINES)
    assert {(row["ranks"], row["microbatches"]) for row in found.values()} == {(p, m)}
    fill = p - 1  # of a pipeline, in micro-batches
    expected = {
        "GPipe": fill / (m + fill),
        "1F1B": fill / (m + fill),
        "Eager1F1B": fill / (m + fill),
        "looped BFS": fill / (2 * m + fill),
        "interleaved 1F1B": fill / (2 * m + fill),
        "ZB-H1": fill / (3 * m + fill),
        "1F1B-V": WHOLE[p] / (6 * m + WHOLE[p]),
    }
    gaps = {"ZB-H2": max(0, 2 * p - 1 - m)}
    rounds = m // p + 1  # a gap between those that fit in unit time, and at the ends
    gaps |= {"Hanayo": (p - 1) * rounds, "Chimera": (p - 2) * rounds}
    gaps |= {"DualPipe": p - 2, "DualPipeV": p - 1}
    expected |= {method: slots / (3 * m + slots) for method, slots in gaps.items()}
    for method in V_SCHEDULES:
        slots = bubble(method, p, m)
        expected[method] = slots / (6 * m + slots)
    assert column(found, "idle") == pytest.approx(expected | dict.fromkeys(LATE, 0.0))


def test_costs_of_a_file_give_idle_time_seconds_and_bytes():
    """The first of two rows takes 2 s, the second 6 s: with one op at a time 1F1B waits for it."""
    rows = []
    for forward in (0.5, 1.5):
        times = {"forward_seconds": forward, "backward_seconds": 3 * forward}
        rows.append(StageCost(0, 0, 5.0, 0, 0, 7.0, weight_share=0.5, **times))
    file_costs = FileCosts(Path("mine.csv"), tuple(rows))
    made, _ = pipelines(2, 4)
    row = assess_pipeline("1F1B", made["1F1B"], file_costs)
    # Of the slower rank, after the first forward and backward.
    assert row["seconds"] == 4 * 6 + 2
    assert row["idle"] == pytest.approx(1 - 4 * 8 / 2 / 26)
    # Two micro-batches in flight, weights and their gradient.
    assert row["bytes"] == 2 * 5 + 2 * 7
    assert pipeline_cells(row)["ms"] == "26000"


def test_no_bubble_in_zb_v_from_twice_the_ranks_on():
    assert assess_pipeline("ZB-V", pipelines(3, 5)[0]["ZB-V"])["idle"] == 0
    assert assess_pipeline("ZB-V", pipelines(3, 4)[0]["ZB-V"])["idle"] > 0


def test_activations(sized):
    """In micro-batches: p stages of p, or 2p of 2p, are one."""
    p, m, found = sized
    expected = dict.fromkeys(("1F1B", "ZB-H1", "Hanayo", "Chimera", *LATE), 1) | {
        **dict.fromkeys(("GPipe", "looped BFS"), Fraction(m, p)),
        **dict.fromkeys(("Eager1F1B", "ZB-H2"), Fraction(min(m, 2 * p - 1), p)),
        "1F1B-V": Fraction(2 * p // 3 + 1, p),
        "DualPipe": Fraction(p + 1, p),
        "DualPipeV": Fraction(2 * p + 1, 2 * p),
        "interleaved 1F1B": min(Fraction(m, p), 1 + Fraction(p - 1, 2 * p)),
        **{method: Fraction(most(method, p), 2 * p) for method in V_SCHEDULES},
    }
    assert column(found, "activations") == expected
    total = column(found, "total_activations")
    assert total["GPipe"] == m
    assert {total[method] for method in ("1F1B", *LATE)} == {Fraction(p + 1, 2)}


def test_weights_and_staleness(sized):
    p, m, found = sized
    late = {"PipeDream-2BW": 1, "CDP-v1": 1}
    late |= dict.fromkeys(("PipeDream", "CDP-v2"), pytest.approx((p - 1) / (2 * m)))
    assert column(found, "staleness_mean") == dict.fromkeys(PIPELINES, 0) | late
    assert column(found, "staleness_max") == dict.fromkeys(
        PIPELINES, 0
    ) | dict.fromkeys(LATE, 1)
    assert [method for method, row in found.items() if not row["flush"]] == [*LATE]
    versions = {method: row["weights"] * p for method, row in found.items()}
    assert versions["1F1B"] == versions["CDP-v2"] == 2
    assert versions["PipeDream-2BW"] == versions["CDP-v1"] == 3


@pytest.mark.parametrize(
    ("sizes", "left_out"),
    [
        ((4, 3), {"DualPipe", "DualPipeV", *LATE[1:]}),
        ((2, 5), {"interleaved 1F1B", "DualPipe", *LATE[2:]}),
    ],
)
def test_what_cannot_be_made_is_left_out(sizes, left_out):
    made, reasons = pipelines(*sizes)
    assert reasons.keys() == left_out
    assert made.keys() == PIPELINES.keys() - left_out
    for reason in reasons.values():
        assert str(sizes[1]) in reason
        assert "\n" not in reason


@pytest.mark.parametrize(
    ("sizes", "name"), [((0, 4), "ranks"), ((2, 0), "micro-batches")]
)
def test_rejects_no_ranks_or_micro_batches(sizes, name):
    with pytest.raises(UserError, match=f"{name}.*0"):
        pipelines(*sizes)


def test_what_ranks_send(sized):
    """A stage's boundaries are crossed twice by a micro-batch, and copies of a stage meet once."""
    p, m, found = sized
    crossings = dict.fromkeys(PIPELINES, p - 1)
    crossings |= dict.fromkeys(("interleaved 1F1B", "looped BFS"), 2 * p - 1)
    crossings |= dict.fromkeys(
        (*V_SCHEDULES, "1F1B-V", "Hanayo", "DualPipeV"), 2 * p - 2
    )
    for method, row in found.items():
        assert row["boundaries"] == Fraction(2 * m * crossings[method], p), method
        # An all-reduce of two ranks for each of a rank's two stages.
        messages = 4 * (method in ("Chimera", "DualPipe"))
        assert (row["traffic"], row["messages"]) == (
            Fraction(2, p) * bool(messages),
            messages,
        )


def test_workers_send_parameters_only():
    p = 4
    made, left_out = pipelines(p, p, WORKERS)
    assert not left_out
    rows = {label: assess_pipeline(label, schedule) for label, schedule in made.items()}
    for label in ("DP", "CDP-v1, whole models", "CDP-v2, whole models"):
        assert rows[label]["traffic"] == Fraction(2 * (p - 1), p)
    assert {row["boundaries"] for row in rows.values()} == {0}
    assert rows["gradient accumulation"]["ranks"] == 1
    assert rows["ZeRO-DP"]["weights"] < rows["DP"]["weights"]


def test_cells_of_a_row():
    row = {
        "microbatches": 8, "method": "GPipe", "activations": 8.0, "total_activations": 64.0,
        "idle": 0.4667, "weights": 0.25, "staleness_mean": 0.0, "staleness_max": 0, "flush": True,
        "traffic": 0.5, "messages": 2.0, "boundaries": 14.0,
    }  # fmt: skip
    assert pipeline_cells(row) == {
        "micro-batches": 8, "method": "GPipe", "activations (all)": "8 (64) A",
        "idle": "46.7%", "weights": "1/4 P", "mean staleness (largest)": "0.00 (0)",
        "flush": "yes", "sent (messages)": "1/2 P (2)", "boundaries": "14",
    }  # fmt: skip
