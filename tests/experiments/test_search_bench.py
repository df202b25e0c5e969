"""Short runs of the benchmark of searched orders."""

import pytest

from tests.experiments.command import complete
from tests.thorough import thorough


def run(folder, **options):
    small = {"known": "[2,3]", "brute": 2, "models": "[]", "seconds": 10} | options
    given = [f"bench.{name}={value}" for name, value in small.items()]
    return complete("bench", folder, "bench=search", "device=cpu", *given)["metrics"]


@thorough
def test_known_optima(tmp_path):
    found = run(tmp_path)
    known = ["1F1B", "ZB-H1", "ZB-V", "cyclic, activations"]
    assert [row["problem"] for row in found] == [*known, "whole backwards", "halves"]
    for row in found:
        assert row["found"] == row["bound"] == pytest.approx(row["least"])
        assert row["proven"]
    # 6 of each rank; those of rank 0 number micro-batches.
    assert found[4]["of"] == "18 orders"


@thorough
def test_unequal_stages(tmp_path):
    options = {"models": "[decoder]", "ranks": "[2]", "stages": "[1,2]"}
    found = run(tmp_path, **options, layers=2, width=64, sequences=1, seconds=1)[6:]
    assert [row["of"].split()[0] for row in found][-1] in (
        "PipeDream-2BW",
        "CDP-v1",
        "CDP-v2",
    )
    for row in found:
        assert row["bound"] <= row["found"] <= row["least"] * 1.1
