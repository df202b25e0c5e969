"""The layouts of all messages, found without a run: what every run really sends."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.runtime import conform, models
from toolkit.model import partition
from toolkit.model.node_costs import meta_copy
from toolkit.runtime import SingleProcess
from toolkit.runtime.message_layout import Layout
from toolkit.runtime.microbatch_norm import MicrobatchNorm
from toolkit.runtime.rank import Rank
from toolkit.runtime.stage import StageRunner
from toolkit.runtime.stage_layouts import find_layouts
from toolkit.runtime.updater import GradientSum
from toolkit.schedule import Action, catalog

CPU = torch.device("cpu")


def shapes(found):
    return {x.place: (x.shape, x.dtype) for x in found.tensors}


def skeletons_of(model, n_stages, example, by="flops"):
    stages = partition(model, n_stages, example, by)
    runners = [StageRunner(stage, j, conform.sgd) for j, stage in enumerate(stages)]
    return [meta_copy(runner.compute) for runner in runners]


def test_finding_layouts_leaves_no_statistics():
    """The skeletons are used again, for micro-batches of another size."""
    skeletons = skeletons_of(
        models.residual(), 2, torch.zeros(3, 1, 6, 6, dtype=torch.float64)
    )
    small, large = (
        torch.empty(n, 1, 6, 6, dtype=torch.float64, device="meta") for n in (3, 8)
    )
    first, other = find_layouts(skeletons, (small,)), find_layouts(skeletons, (large,))
    assert find_layouts(skeletons, (small,)) == first
    norms = [
        m
        for stage in skeletons
        for m in stage.modules()
        if isinstance(m, MicrobatchNorm)
    ]
    assert {norm.statistics for norm in norms} == {None}
    assert (other.gradients, other.weights) == (first.gradients, first.weights)
    assert other.activations[0].n_bytes * 3 == first.activations[0].n_bytes * 8


def sent_as(found):
    return {part.place: part.sent_as for part in found.tensors}


def test_what_of_a_model_is_compressed():
    """Weights and their gradients; neither the statistics of norms nor what crosses boundaries."""
    skeletons = skeletons_of(models.residual().float(), 2, torch.zeros(3, 1, 6, 6))
    inputs = (torch.zeros(3, 1, 6, 6, device="meta"),)
    plain, found = (
        find_layouts(skeletons, inputs),
        find_layouts(skeletons, inputs, torch.bfloat16),
    )
    assert found.activations == plain.activations
    assert found.activation_gradients == plain.activation_gradients
    for weights, gradients, before in zip(
        found.weights, found.gradients, plain.gradients, strict=True
    ):
        trained = dict.fromkeys(sent_as(weights), torch.bfloat16)
        statistics = dict.fromkeys(sent_as(gradients).keys() - trained, torch.float32)
        assert statistics
        assert sent_as(weights) == trained
        assert sent_as(gradients) == trained | statistics
        assert shapes(gradients) == shapes(before)


# Against real runs


SCHEDULES = [
    catalog.data_parallel(2, state="sharded"),
    catalog.cyclic(3, "freshest"),
    catalog.cyclic(3, "freshest", "per_stage"),
    catalog.cyclic(2, 1, "per_stage_and_microbatch", "sharded"),
    catalog.gpipe(3, 3),
    catalog.interleaved_1f1b(4, 2, 2),
    catalog.zero_bubble(3, 3),
]


class Odd(nn.Module):
    """Two inputs, a frozen stage, an unused weight, a norm without running statistics.

    Whole numbers, and a tensor without a gradient, cross to the last stage.
    """

    def __init__(self):
        super().__init__()
        self.first, self.middle = nn.Linear(3, 4).requires_grad_(False), nn.Linear(4, 4)
        self.unused = nn.Parameter(torch.ones(3))
        self.norm = nn.BatchNorm1d(4, track_running_stats=False)
        self.last = nn.Linear(4, 3)

    def forward(self, x, y):
        x = self.first(x) + y
        z = self.norm(torch.tanh(self.middle(x)))
        return self.last(z + x.detach()) + z.argmax(1, keepdim=True)


def odd_batches(n_microbatches, steps):
    n = 4 * n_microbatches
    inputs = (
        torch.randn(n, 3, dtype=torch.float64),
        torch.randn(n, 4, dtype=torch.float64),
    )
    return [(inputs, torch.arange(n) % 3)] * steps


def cut_odd(model, schedule):
    example = tuple(x[:4] for x in odd_batches(1, 1)[0][0])
    return partition(model.double(), schedule.n_stages, example, ["middle", "last"])


MODELS = {
    "residual": (models.cut, models.residual, models.make_batches),
    "awkward": (models.cut_awkward, models.awkward, models.id_batches),
    "odd": (cut_odd, Odd, odd_batches),
}
RUNS = [
    pytest.param(schedule, model, id=f"{models.name_of(schedule)}-{model}")
    for schedule in SCHEDULES
    for model in MODELS
    if model != "odd" or schedule.n_stages == 3
]


def tensors_of(payload):
    if isinstance(payload, GradientSum):
        return payload.tensors
    if isinstance(payload, tuple):
        return {k: x for k, x in enumerate(payload) if x is not None}
    return payload


@pytest.mark.parametrize(("schedule", "model"), RUNS)
def test_layouts_are_what_a_run_hands_over(monkeypatch, schedule, model):
    """In one process every payload is seen; each must be what its receiver would expect."""
    cut, make, batches = MODELS[model]
    handed_over = set()
    give = Rank.give

    def spy(self, i):
        payload = give(self, i)
        handed_over.add((i.buffer, i.stage))
        assert shapes(Layout.of(tensors_of(payload))) == shapes(layouts.of(i)), i
        back = layouts.unpack(i, layouts.pack(i, payload, CPU))
        assert type(back) is type(payload)
        if isinstance(payload, tuple):
            assert [x is None for x in back] == [x is None for x in payload]
        models.assert_same(tensors_of(back), tensors_of(payload), 0, 0)
        return payload

    monkeypatch.setattr(Rank, "give", spy)
    stages = cut(make(), schedule)
    runtime = SingleProcess(stages, schedule, conform.sgd, F.cross_entropy, "scheduled")
    data = batches(schedule.n_microbatches, 2)
    inputs = data[0][0] if isinstance(data[0][0], tuple) else (data[0][0],)
    example = tuple(x.chunk(schedule.n_microbatches)[0].to("meta") for x in inputs)
    layouts = find_layouts(
        [meta_copy(runner.compute) for runner in runtime._runners], example
    )
    list(runtime.run(data))
    sent = (
        i for order in schedule.lower(2).ranks for i in order if i.action.communicates
    )
    assert handed_over == {(i.buffer, i.stage) for i in sent if i.action != Action.RECV}
