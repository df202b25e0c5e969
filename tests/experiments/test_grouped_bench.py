"""The plain PyTorch that order "grouped" is compared with."""

import torch
from torch import nn

from tests.experiments.command import EXPERIMENTS
from toolkit.runtime import StepOptions


def test_cuda_graphs_know_where_its_steps_begin(monkeypatch):
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    from benchmarks.grouped import Plain

    begun = []
    monkeypatch.setattr("torch.compile", lambda model, mode: model)
    monkeypatch.setattr("torch.compiler.cudagraph_mark_step_begin", lambda: begun.append("step"))
    for compile in ("reduce-overhead", "default"):
        plain = Plain(nn.Linear(3, 2), StepOptions(compile=compile), torch.device("cpu"))
        plain.step(torch.ones(4, 3), torch.zeros(4, dtype=torch.long))
    assert begun == ["step"]
