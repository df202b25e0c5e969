"""When CDP helps: closed forms of memory and devices, bounds of time, what is refused."""

import pytest

from toolkit.cost.situations import (
    WITHIN,
    Situation,
    assess_situation,
    situation_cells,
    situations,
)
from toolkit.errors import UserError


def test_a_table_has_the_largest_number_of_workers_and_slow_links_of_all():
    found = situations((2, 4), (1.0, 2.0))
    assert [
        (each.workers, each.ratio, each.placement, each.machines) for each in found
    ] == [
        (4, 0, "one", None),
        (4, 0, "per_stage_and_microbatch", None),
        (4, 0, "per_microbatch", None),
        *((n, ratio, "per_microbatch", None) for n in (2, 4) for ratio in (1.0, 2.0)),
        *((4, ratio, "per_microbatch", 2) for ratio in (1.0, 2.0)),
    ]
    assert [each.machines for each in situations([8, 3], [1])][-2:] == [4, 2]


@pytest.mark.parametrize("n", [2, 3, 5])
def test_memory_and_devices_have_their_closed_forms_and_cost_no_time(n):
    one, parallel, alone = map(assess_situation, situations([n])[:3])
    names = ("devices_dp", "devices", "activations_dp", "activations")
    assert [one[name] for name in names] == [1, 1, n, (n + 1) / 2]
    assert [parallel[name] for name in names] == pytest.approx(
        [n * n, n * (n + 1) / 2, 1 / n, 1 / n]
    )
    assert [alone[name] for name in names] == [n, n, 1, 1]
    for row in (one, parallel, alone):
        times = [row[f"{name}_time"] for name in ("cdp_v1", "cdp_v2", "affordable")]
        assert times == pytest.approx([1, 1, 1])
        late = (
            row["cdp_v1_staleness"],
            row["cdp_v2_staleness"],
            row["affordable_staleness"],
        )
        assert late == pytest.approx((1, (n - 1) / (2 * n), (n - 1) / (2 * n)))


def test_two_workers_take_the_time_of_computing_or_of_what_they_send():
    """DP's eight all-reduces of M/8 begin with the first backward of 2 s, at 10 s of 24 s."""
    for ratio in (1.0, 2.0):
        dp = 10 + 24 * ratio
        row = assess_situation(Situation("slow", 2, ratio))
        assert row["cdp_v1_time"] == pytest.approx(24 * ratio / dp)


@pytest.mark.parametrize(("n", "machines"), [(2, None), (4, None), (4, 2)])
@pytest.mark.parametrize("ratio", [0.5, 1.0])
def test_the_affordable_delay_is_between_the_others(n, machines, ratio):
    row = assess_situation(Situation("slow", n, ratio, machines=machines))
    assert (
        row["cdp_v2_staleness"]
        <= row["affordable_staleness"]
        <= row["cdp_v1_staleness"]
        == 1
    )
    assert row["affordable_time"] <= (1 + WITHIN) * row["cdp_v1_time"] + 1e-9
    if row["affordable_time"] < row["cdp_v2_time"]:
        assert row["affordable_staleness"] > row["cdp_v2_staleness"]
    assert row["cdp_v1_time"] <= row["cdp_v2_time"] + 1e-9


def test_machines_save_what_groups_do_not_send():
    """Two machines of two send half of what four machines do."""
    apart, together = (
        assess_situation(Situation("slow", 4, 2.0, machines=k)) for k in (None, 2)
    )
    assert together["cdp_v2_time"] < apart["cdp_v2_time"]
    assert together["cdp_v2_staleness"] == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("workers", "ratios", "named"),
    [
        ([], [1], r"got \[\]"),
        ([1], [1], "got 1"),
        ([2], [], r"\[2\], \[\]"),
        ([2], [0], r"\[0\]"),
    ],
)
def test_refuses(workers, ratios, named):
    with pytest.raises(UserError, match=named):
        situations(workers, ratios)


def test_cells_of_a_row():
    row = {
        "situation": "model parallelism", "workers": 8, "ratio": 0.5, "devices_dp": 64,
        "devices": 36, "activations_dp": 0.125, "activations": 0.125, "cdp_v1_time": 0.774,
        "cdp_v1_staleness": 1.0, "cdp_v2_time": 0.919, "cdp_v2_staleness": 0.4375,
        "affordable_time": 0.85, "affordable_staleness": 0.45,
    }  # fmt: skip
    assert situation_cells(row) == {
        "situation": "model parallelism", "workers": 8, "M/C": "0.5", "devices": "64 → 36",
        "activations": "0.125", "CDP-v1": "0.77 (1.00)", "CDP-v2": "0.92 (0.44)",
        "affordable": "0.85 (0.45)",
    }  # fmt: skip
