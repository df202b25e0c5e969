"""The benchmark of gaps: gaps of literal intervals, and a short run."""

import pytest

from tests.experiments.command import complete


@pytest.fixture
def gaps(benchmark_module):
    return benchmark_module("gaps")


# Of each case: intervals, gaps between them, and idle share of the time from first to last.
CASES = {
    "one kernel": ([("a", 5, 9)], [], 0),
    "back to back": ([("a", 0, 4), ("b", 4, 10)], [], 0),
    "in any order": ([("b", 6, 10), ("a", 0, 4)], [(2, "a", "b")], 0.2),
    # a ==== .... c ==
    #   b == (ends first)
    "nested": ([("a", 0, 5), ("b", 1, 3), ("c", 9, 10)], [(4, "a", "c")], 0.4),
    "nested from its start": (
        [("b", 0, 3), ("a", 0, 5), ("c", 9, 10)],
        [(4, "a", "c")],
        0.4,
    ),
    # Two streams, as drawn in the module: b covers the gap between a and c.
    "two streams": (
        [("a", 0, 4), ("c", 6, 10), ("b", 3, 7), ("d", 15, 20)],
        [(5, "c", "d")],
        0.25,
    ),
    "two gaps": (
        [("a", 0, 1), ("b", 2, 4), ("c", 7, 8)],
        [(1, "a", "b"), (3, "b", "c")],
        0.5,
    ),
    "no time": ([("a", 3, 3)], [], 0),
}


@pytest.mark.parametrize(("intervals", "expected", "idle"), CASES.values(), ids=CASES)
def test_gaps_between_intervals(gaps, intervals, expected, idle):
    kernels = [gaps.Interval(*interval) for interval in intervals]
    assert gaps.gaps_between(kernels) == expected
    assert gaps.idle_share(kernels) == pytest.approx(idle)


def test_bench_gaps(tmp_path):
    sizes = {
        "image_size": 8,
        "stages": 2,
        "microbatches": 2,
        "batch": 2,
        "steps": 2,
        "longest": 3,
    }
    options = [f"bench.{name}={value}" for name, value in sizes.items()]
    command = "bench=gaps", "device=cpu", "bench.model=resnet8", *options
    rows = complete("bench", tmp_path, *command)["metrics"]
    methods = ["plain PyTorch", "DP grouped", "CDP-v2 grouped"]
    assert [row["method"] for row in rows] == [
        name for name in methods for _ in range(3)
    ]
    for name in methods:
        lengths = [row["gap (us)"] for row in rows if row["method"] == name]
        assert lengths == sorted(lengths, reverse=True)
    for row in rows:
        assert 0 < row["gap (us)"] < 2 * row["step (us)"]
        assert 0 < row["idle (%)"] < 100
        assert row["kernels"] > 10
        assert row["before"].startswith(("aten::", "autograd::"))
