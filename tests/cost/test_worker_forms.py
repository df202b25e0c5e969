"""DDP in buckets, and CDP in its fastest form: what is cut where, and what is chosen."""

import pytest
import torch
from torch import nn

from toolkit.cost import Hardware, simulate
from toolkit.cost.worker_forms import (
    BUCKETS,
    CUTS,
    DataParallelJob,
    ModelCosts,
    fastest_form,
    steady_timeline,
)
from toolkit.model import Images, build
from toolkit.model.partition import Traced
from toolkit.schedule import catalog

MIB = 2**20
IMAGES = Images(3, 224, 224, 1000)


def resnet50():
    with torch.device("meta"):
        return build("resnet50", **IMAGES.arguments)


@pytest.fixture(scope="module")
def costs_of():
    return ModelCosts(resnet50(), IMAGES.example(32, "meta"))


def linears(*megabytes):
    """Layers of so many MiB of weights, with one value between them and no bias."""
    widths = [size * MIB // 4 for size in megabytes]
    layers = []
    for width in widths:
        layers += [nn.Linear(1, width, bias=False), _Sum()]
    return nn.Sequential(*layers)


class _Sum(nn.Module):
    def forward(self, x):
        return x.sum(1, keepdim=True)


@pytest.mark.parametrize(
    ("layers", "buckets"),
    [
        # The first is full at 1 MiB, the others at 25 MiB.
        ([30, 20, 6, 2], [30, 26, 2]),
        ([10, 10, 10, 3], [30, 3]),
        ([5, 5], [5, 5]),
        ([1], [1]),
    ],
)
def test_buckets_fill_in_the_order_of_the_backward(layers, buckets):
    with torch.device("meta"):
        model = linears(*layers)
        traced = Traced.of(model, torch.empty(2, 1))
    stages = traced.cut_in_buckets()
    sizes = [sum(p.nbytes for p in stage.parameters()) / MIB for stage in stages]
    assert sizes == buckets


def test_buckets_of_a_model_hold_each_weight_once(costs_of):
    costs = costs_of(1, BUCKETS)
    sizes = [cost.parameter_bytes for cost in costs]
    assert sum(sizes) == sum(p.nbytes for p in resnet50().parameters())
    assert all(size >= 25 * MIB * 0.99 for size in sizes[1:-1])
    assert costs is costs_of(5, BUCKETS)


def test_ddp_takes_no_account_of_stages_and_of_accumulation_only_its_compute(costs_of):
    ethernet = Hardware.preset("ethernet_10")
    once = DataParallelJob(costs_of, ethernet, 8).form()
    twice = DataParallelJob(costs_of, ethernet, 8, accumulate=2).form()
    compute = sum(sum(cost.seconds(ethernet)) for cost in costs_of(1, BUCKETS))
    assert once.schedule.n_stages == len(costs_of(1, BUCKETS))
    assert twice.seconds == pytest.approx(once.seconds + compute, rel=0.01)


@pytest.mark.parametrize("delay", [1, "freshest"])
def test_the_fastest_form_is_the_least_of_all(costs_of, delay):
    ethernet = Hardware.preset("ethernet_10")
    schedule = catalog.cyclic(4, delay)
    form = fastest_form(schedule, costs_of, ethernet)
    seconds = {}
    for chains in ("in_order", "rotated")[: 2 if delay == 1 else 1]:
        for cut in CUTS:
            other = catalog.cyclic(4, delay, chains=chains)
            seconds[chains, cut] = steady_timeline(
                other, costs_of(4, cut), ethernet
            ).step_time
    assert form.seconds == min(seconds.values())
    assert seconds[form.schedule.chains, form.partition] == form.seconds


def test_what_has_one_form_keeps_its_chains_and_the_first_cut(costs_of):
    fast = Hardware.preset("h200_nvlink")
    pipeline = catalog.gpipe(2, 2)
    form = fastest_form(pipeline, costs_of, fast, cuts=("activations", "flops"))
    assert form.schedule is pipeline
    assert form.partition == "activations"
    program = pipeline.lower(3).verify()
    expected = simulate(program, costs_of(2, "activations"), fast).step_time
    assert form.seconds == pytest.approx(expected, rel=1e-9)
    given = fastest_form(catalog.cyclic(2), costs_of, fast, chains=(), cuts=("flops",))
    assert (given.schedule.chains, given.partition) == ("in_order", "flops")
