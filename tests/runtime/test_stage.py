"""What a stage does alike wherever and however often it computes: draws, and frozen norms."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.runtime.conform import sgd
from tests.runtime.models import assert_same, differ
from toolkit.model import partition
from toolkit.model.random_draws import drawing, seed_layer
from toolkit.runtime import ORDERS, SingleProcess, StepOptions
from toolkit.runtime.baselines.ddp import WholeModel
from toolkit.runtime.grouped_pass import _regroup
from toolkit.runtime.meters.operations import count_operations
from toolkit.runtime.stage import StageRunner, leaves
from toolkit.schedule import catalog


def test_a_microbatch_by_itself_is_not_copied():
    """Nor its gradient, on the way through norms and what draws at random; nor of merged ones."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    (stage,) = partition(model, 1, torch.zeros(3, 4))
    runner = StageRunner(stage, 0, sgd, None, 0)

    def both_ways(*microbatches):
        inputs = torch.randn(3 * len(microbatches), 4, requires_grad=True)
        (output,) = runner.forward(leaves(runner.newest()), (inputs,), microbatches, 0)
        output.sum().backward()

    parts = [torch.randn(2, 3, requires_grad=True) for _ in range(2)]
    ((merged,),) = _regroup([(part,) for part in parts], [(0,), (1,)], [(0, 1)])
    assert torch.equal(merged, torch.cat(parts))
    ways = (
        (lambda: both_ways(0, 1)),
        (lambda: both_ways(0)),
        (lambda: merged.sum().backward()),
    )
    assert [count_operations(way)["cat"] for way in ways] == [2, 0, 0]


def test_a_norm_in_evaluation_mode_keeps_its_statistics():
    """As in fine-tuning: against plain PyTorch."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)
    ).double()
    model[1].running_mean.fill_(0.1)
    model[1].eval()
    plain = copy.deepcopy(model)
    optimizer = sgd(plain.parameters())
    example = torch.zeros(3, 6, dtype=torch.float64)
    schedule = catalog.data_parallel(2)
    runtime = SingleProcess(
        partition(model, 2, example), schedule, sgd, F.cross_entropy
    )
    for _ in range(3):
        inputs, targets = torch.randn(6, 6, dtype=torch.float64), torch.randint(3, (6,))
        optimizer.zero_grad()
        F.cross_entropy(plain(inputs), targets).backward()
        optimizer.step()
        runtime.step(inputs, targets)
    assert_same(runtime.module().state_dict(), plain.state_dict())


class Noisy(nn.Module):
    """Dropout as a module, as a function, or of attention."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.dropout = nn.Dropout(0.5) if kind == "module" else nn.Identity()

    def forward(self, x):
        x = self.dropout(self.first(x))
        if self.kind == "function":
            x = F.dropout(x, 0.5, training=self.training)
        if self.kind == "attention":
            heads = x.view(-1, 2, 1, 3)
            x = F.scaled_dot_product_attention(
                heads, heads, heads, dropout_p=0.5
            ).flatten(1)
        return self.last(x)


@pytest.mark.parametrize("checkpoint", ["none", "all"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", ["module", "function", "attention"])
def test_draws_are_alike_in_every_order(kind, order, checkpoint):
    """And others with another seed."""

    def trained(order, checkpoint, seed=0):
        torch.manual_seed(0)
        schedule = catalog.cyclic(2)
        stages = partition(
            Noisy(kind).double(), 2, torch.zeros(3, 6, dtype=torch.float64)
        )
        given = stages, schedule, sgd, F.cross_entropy, order
        runtime = SingleProcess(
            *given, seed=seed, options=StepOptions(checkpoint=checkpoint)
        )
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            inputs = torch.randn(6, 6, dtype=torch.float64, generator=generator)
            runtime.step(inputs, torch.tensor([0, 1, 2, 0, 1, 2]))
        return runtime.module().state_dict()

    expected = trained("grouped", "none")
    assert_same(trained(order, checkpoint), expected)
    assert differ(trained(order, checkpoint, seed=1), expected)


class Deep(nn.Module):
    """Dropout between layers, and in an attention."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.dropouts = nn.ModuleList(nn.Dropout(0.5) for _ in range(3))

    def forward(self, x):
        for layer, dropout in zip(self.layers, self.dropouts, strict=False):
            x = dropout(torch.tanh(layer(x)))
        heads = x.view(-1, 2, 1, 3)
        x = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.5).flatten(
            1
        )
        return self.layers[3](x)


def deep_stages(n_stages, exported=False):
    torch.manual_seed(0)
    model = Deep().double()
    if exported:
        model = Exported(model)
    return partition(model, n_stages, torch.zeros(3, 6, dtype=torch.float64))


class Exported(nn.Module):
    """Control flow makes torch.export trace it instead of torch.fx."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        if x.dim() != 2 or x.shape[1] != 6:
            raise ValueError
        return self.model(x)


@pytest.mark.parametrize("exported", [False, True])
@pytest.mark.parametrize("checkpoint", ["none", "all"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("method", ["data_parallel", "cdp-v1"])
def test_draws_are_alike_in_every_cut(method, order, checkpoint, exported):
    """The staleness of these methods is the same for every stage."""

    def trained(n_stages):
        if method == "data_parallel":
            schedule = catalog.data_parallel(2, n_stages=n_stages)
        else:
            schedule = catalog.cyclic(2, 1, n_stages=n_stages)
        runtime = SingleProcess(
            deep_stages(n_stages, exported),
            schedule,
            sgd,
            F.cross_entropy,
            order,
            options=StepOptions(checkpoint=checkpoint),
        )
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            inputs = torch.randn(6, 6, dtype=torch.float64, generator=generator)
            runtime.step(inputs, torch.tensor([0, 1, 2, 0, 1, 2]))
        return runtime.module().state_dict()

    whole = trained(1)
    for n_stages in (2, 3):
        # In one process a stage without draws runs micro-batches as one batch: other roundings.
        assert_same(
            trained(n_stages),
            whole,
            *((1e-10, 1e-12) if order == "grouped" else (0, 0)),
        )


def test_a_module_of_all_stages_draws_as_they_do():
    """The one that torch's DistributedDataParallel wraps."""
    x = torch.randn(3, 6, dtype=torch.float64)
    outputs = []
    for n_stages in (1, 2, 3):
        stages = deep_stages(n_stages)
        chain = WholeModel(stages, 7)
        chain.at = 2, 1
        outputs.append(chain(x))
        values = (x,)
        for j, stage in enumerate(stages):
            runner = StageRunner(stage, j, sgd, None, 7)
            values = runner.forward(runner.newest(), values, (1,), 2)
        outputs += values
    assert all(torch.equal(output, outputs[0]) for output in outputs)


def test_draws_follow_the_names_of_layers_and_leave_the_generators():
    state = torch.get_rng_state()
    x = torch.ones(64)
    rows = []
    for seed, step, name, microbatch in (
        (0, 0, "a", 0),
        (1, 0, "a", 0),
        (0, 1, "a", 0),
        (0, 0, "b", 0),
        (0, 0, "a", 1),
        (0, 0, "a", 0),
    ):
        with drawing((x,), seed, step, microbatch):
            seed_layer(name)
            rows.append(tuple(F.dropout(x).tolist()))
    assert len({*rows}) == 5
    assert rows[0] == rows[-1]
    seed_layer("a")  # outside of a micro-batch
    assert torch.equal(torch.get_rng_state(), state)


def test_stages_microbatches_and_steps_draw_apart():
    """Each stage drops half of what is left."""
    layers = [nn.Linear(64, 64) for _ in range(3)]
    for layer in layers:
        layer.weight.data, layer.bias.data = torch.eye(64), torch.zeros(64)
    net = nn.Sequential(
        layers[0], nn.Dropout(0.5), layers[1], nn.Dropout(0.5), layers[2]
    )
    stages = partition(net, 3, torch.ones(1, 64))
    assert [sum(isinstance(m, nn.Dropout) for m in s.modules()) for s in stages] == [
        0,
        1,
        1,
    ]

    def still(parameters):
        return torch.optim.SGD(parameters, 0.0)

    schedule = catalog.data_parallel(2, n_stages=3)
    runtime = SingleProcess(stages, schedule, still, lambda x, y: x.mean())
    batch = torch.ones(2, 64), torch.zeros(2)
    rows = [*runtime.step(*batch).outputs, *runtime.step(*batch).outputs]
    assert len({tuple(row.tolist()) for row in rows}) == 4
    assert rows[0].count_nonzero() < 26  # 16 are expected; 32 if both drop the same
