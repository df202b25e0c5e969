import importlib

import pytest

from tests.experiments.command import EXPERIMENTS


@pytest.fixture
def benchmark_module(monkeypatch):
    """Import a module of experiments/benchmarks by its name."""
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    return lambda name: importlib.import_module(f"benchmarks.{name}")
