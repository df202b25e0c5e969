"""The benchmark of switching: its links, its table and what it refuses."""

import pytest
import torch
from omegaconf import OmegaConf

from toolkit.cli import settings
from toolkit.errors import UserError


@pytest.fixture
def bench(benchmark_module):
    return benchmark_module("switching")


def config(**changes):
    usual = {"steps": [4, 4], "settled": 2, "ratio": 0.5, "sleep": 0.2}
    return OmegaConf.merge(settings("bench", "bench=switching").bench, usual | changes)


def test_links_slow_down_in_every_second_phase(bench, monkeypatch):
    monkeypatch.setattr(bench.network, "check", lambda n: None)
    task = bench.check(config(steps=[4, 4, 4], slower=10.0), torch.device("cpu"), 0)
    assert bench.rates_of(task) == pytest.approx([3.2e8, 3.2e7, 3.2e8])
    names = [*bench.schedules_of(task, (*task.candidates, *task.beside))]
    assert names == ["DP", "CDP-v1", "CDP-v2", "CDP-v1 rotated"]


def test_phases_are_compared_once_they_have_settled(bench, monkeypatch):
    monkeypatch.setattr(bench.network, "check", lambda n: None)
    task = bench.check(config(), torch.device("cpu"), 0)
    runs = [
        ("DP", [9, 9, 2, 2, 9, 9, 4, 4]),
        ("other", [9, 9, 1, 1, 9, 9, 1, 1]),  # no candidate
        (bench.SWITCHING, [9, 9, 1, 2, 9, 9, 5, 5]),
    ]
    rows = bench.table(task, runs, ["DP"])
    assert [(row["run"], row["candidate"]) for row in rows] == [
        (bench.SWITCHING, False),
        ("DP", True),
        ("other", False),
    ]
    assert [[row[f"phase {k} (s)"] for k in (0, 1)] for row in rows] == [
        [1.5, 5],
        [2, 4],
        [1, 1],
    ]
    assert [row["phase 1 / best"] for row in rows] == [1.25, 1, 0.25]
    assert [row["whole (s)"] for row in rows] == [49, 48, 40]


@pytest.mark.parametrize(
    ("changes", "value"),
    [
        ({"steps": [4, 2]}, "bench.steps .* got"),
        ({"candidates": []}, "bench.candidates"),
        ({"candidates": ["cdp_v3"]}, "candidates: got 'cdp_v3'"),
        ({"ratio": 0.0}, "bench.ratio is above 0"),
        ({"workers": 1}, "machines: got 1"),
    ],
)
def test_refuses(bench, changes, value):
    with pytest.raises(UserError, match=value):
        bench.check(config(**changes), torch.device("cpu"), 0)
    with pytest.raises(UserError, match="give device=cpu"):
        bench.check(config(), torch.device("cuda"), 0)
