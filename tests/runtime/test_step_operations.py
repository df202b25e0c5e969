"""Order "grouped" takes few more operations a training step than plain PyTorch."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.compiling import counted_graphs
from tests.thorough import thorough
from toolkit.model import MODELS, build, partition
from toolkit.runtime import SingleProcess, StepOptions, microbatch_losses
from toolkit.runtime.meters.operations import count_operations
from toolkit.schedule import catalog

N_MICROBATCHES = 8
N_STAGES = 4

sgd = partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=5e-4, foreach=True)


def plain_operations(model, options, inputs, targets):
    model = copy.deepcopy(model).train()
    optimizer = sgd(model.parameters())

    def step():
        optimizer.zero_grad()
        with options.autocast(inputs.device):
            loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()

    step()
    return count_operations(step).total()


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=thorough)])
def test_a_step_takes_few_operations_more_than_plain_pytorch(precision, monkeypatch):
    """With fused norms, as on a GPU. Two versions of a stage's weights are two forwards of it."""
    # The first steps take some more.
    monkeypatch.setattr(microbatch_losses, "_EXAMINED", 0)
    torch.manual_seed(0)
    model = build("resnet18", 10, 16)
    options = StepOptions(precision=precision, norms="fused")
    inputs = torch.randn(N_MICROBATCHES, 3, 16, 16)
    targets = torch.randint(10, (N_MICROBATCHES,))
    plain = plain_operations(model, options, inputs, targets)
    limits = ((catalog.data_parallel, 1.01), (catalog.cyclic, 1.9))
    for make_schedule, limit in limits:
        stages = partition(copy.deepcopy(model), N_STAGES, inputs[:1])
        schedule = make_schedule(N_MICROBATCHES, n_stages=N_STAGES)
        runtime = SingleProcess(stages, schedule, sgd, F.cross_entropy, options=options)
        step = partial(runtime.step, inputs, targets)
        step()
        step()
        assert count_operations(step).total() <= limit * plain


USUAL = ("resnet6", "convnet")


@pytest.mark.parametrize("norms", ["fused", "separate"])
@pytest.mark.parametrize(
    "name",
    [name if name in USUAL else pytest.param(name, marks=thorough) for name in MODELS],
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's tracing
def test_a_stage_is_one_graph_for_the_compiler(name, norms, monkeypatch):
    graphs = counted_graphs(monkeypatch, fullgraph=True)
    size = 224 if name.startswith("vit") else 32
    stages = partition(build(name, 10, size), 2, torch.randn(2, 3, size, size))
    options = StepOptions(compile="default", norms=norms)
    schedule = catalog.data_parallel(2, n_stages=2)
    runtime = SingleProcess(stages, schedule, sgd, F.cross_entropy, options=options)
    runtime.step(torch.randn(4, 3, size, size), torch.randint(10, (4,)))
    assert len(graphs) == 2


def test_fused_norms_refuse_one_value_of_a_channel():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    stages = partition(model, 1, torch.randn(2, 3))
    options = StepOptions(norms="fused")
    schedule = catalog.data_parallel(2, n_stages=1)
    runtime = SingleProcess(stages, schedule, sgd, F.cross_entropy, options=options)
    with pytest.raises(ValueError, match="one value"):
        runtime.step(torch.randn(2, 3), torch.randint(2, (2,)))
