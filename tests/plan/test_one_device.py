"""The least memory of micro-batches on one device: chosen, predicted, and measured."""

import gc
import random
from functools import partial
from itertools import combinations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.runtime.models import assert_same
from tests.thorough import more
from toolkit.cost import Hardware, StageCost, profile, recomputing, simulate
from toolkit.cost.hardware import UNIT
from toolkit.errors import UserError
from toolkit.model import build, partition
from toolkit.model.peak_memory import LiveMemory
from toolkit.plan.one_device import least_peak, peak_in_turn, peak_of, stage_curve
from toolkit.runtime import SingleProcess, StepOptions
from toolkit.schedule import catalog

A100 = Hardware("A100", 156e12, 2.039e12, 3e11)


def stage(kept, forward=1.0, received=0.0, backward=None):
    """A stage whose forward and, unless given, backward take as long."""
    times = {
        "forward_seconds": forward,
        "backward_seconds": forward if backward is None else backward,
    }
    inputs = {"input_bytes": received, "extra_input_bytes": 0.0}
    return StageCost(1.0, 1.0, activation_bytes=kept, **inputs, **times)


def uniform(n):
    return [m / n for m in range(n)]


def test_the_curve_of_stages_by_hand():
    """Stage 0 keeps 8 bytes, and stage 1, which receives 1, keeps 4."""
    costs = [stage(8.0), stage(4.0, received=1.0)]
    curve = stage_curve(costs, UNIT)
    assert curve.edges.tolist() == [0, 1, 3, 4]
    assert curve.levels.tolist() == [8, 12, 8]
    again = stage_curve(recomputing(costs, [0]), UNIT)
    assert again.edges.tolist() == [0, 1, 3, 5]
    assert again.levels.tolist() == [0, 5, 8]


def test_two_micro_batches_by_hand():
    """Either stage takes 2 of 8 seconds to compute again; stage 0 saves more."""
    costs = [stage(8.0, 2.0), stage(4.0, 2.0)]
    plain = least_peak(costs, 2, 0.0)
    assert (plain.recomputed, plain.extra_time, plain.seconds) == ((), 0.0, 8.0)
    assert plain.simultaneous == 24
    assert plain.peak == 20  # one at 12, the other at 8
    again = least_peak(costs, 2, 0.25)
    assert (again.recomputed, again.extra_time, again.seconds) == ((0,), 0.25, 10.0)
    # One holds stage 0 again, at 8, when the other is at stage 1.
    assert again.peak == 12
    assert again.reduction == 1 - 12 / 24


def drawn(draw, n_stages):
    seconds = [draw.uniform(0.1, 3) for _ in range(n_stages)]
    return [
        stage(draw.uniform(0, 10), x, draw.uniform(0, 3), x * draw.uniform(1, 2.5))
        for x in seconds
    ]


@pytest.mark.parametrize("seed", range(12))
def test_no_choice_of_stages_is_better(seed):
    draw = random.Random(seed)
    costs, n = drawn(draw, draw.randint(2, 6)), draw.choice([2, 3, 5, 8])
    share = draw.choice([0.0, 0.1, 0.3])
    found = least_peak(costs, n, share)
    places, total = range(len(costs)), stage_curve(costs, UNIT).edges[-1]
    peaks = [
        peak_of(stage_curve(recomputing(costs, [*again]), UNIT), uniform(n))
        for k in range(len(costs) + 1)
        for again in combinations(places, k)
        if sum(costs[j].forward_seconds for j in again) <= share * total
    ]
    assert found.extra_time <= share + 1e-9
    assert found.bound <= found.peak <= min(peaks) * (1 + 1e-9)
    assert found.peak == pytest.approx(
        peak_of(stage_curve(found.costs, UNIT), found.offsets)
    )


@pytest.mark.parametrize(("share", "n"), [(0.0, 3), (0.2, 4)])
def test_its_schedule_runs_one_op_after_another(share, n):
    costs = drawn(random.Random(1), 5)
    found = least_peak(costs, n, share)
    schedule = found.schedule()
    schedule.lower(4).verify()
    assert (schedule.n_ranks, schedule.period) == (1, 2 * 5 * n)
    slots = [
        start % schedule.timing.period for start in schedule.timing.starts.values()
    ]
    assert sorted(slots) == [*range(schedule.timing.period)]
    assert peak_in_turn(found.costs, schedule) <= found.peak
    assert schedule.max_staleness == 1
    assert type(schedule).from_csv(schedule.to_csv(), delay=1).timing == schedule.timing


def test_uniform_shifts_of_equal_stages_hold_less_than_in_slots():
    """At a moment when several ops begin, backwards go first and free what forwards then fill."""
    schedule = least_peak([stage(1.0)] * 4, 4, 0.0).schedule()
    assert schedule.lower(3).peak_activations() == (8,)
    assert catalog.cyclic(4, placement="one").lower(3).peak_activations() == (10,)


@pytest.mark.parametrize(
    ("name", "stages", "bar"),
    more([("vit_b_16", 12, 0.6)], [("vit_b_16", 24, 0.6), ("resnet50", 16, 0.55)]),
)
def test_of_real_models(name, stages, bar):
    with torch.device("meta"):
        model, example = build(name, 1000, 224), torch.empty(32, 3, 224, 224)
    costs = profile(partition(model, stages, example), example)
    for n in (8, 32):
        found = least_peak(costs, n, 0.1, A100)
        assert found.reduction > bar
        assert found.extra_time <= 0.1
        assert found.peak < 1.06 * found.bound


def network():
    """Blocks whose activations shrink, with few weights."""
    sizes = [(1, 8), (8, 8), (8, 8), (8, 8)]
    blocks = [
        nn.Sequential(nn.Conv2d(*s, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2))
        for s in sizes
    ]
    torch.manual_seed(0)
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(32, 3)).double()


def trained(schedule, images, checkpoint=(), order="scheduled"):
    """Bytes held above those between steps, and the weights after four steps."""
    n, parts = schedule.n_microbatches, partition(network(), schedule.n_stages, images)
    batch = images.repeat(n, 1, 1, 1), torch.arange(n * len(images)) % 3
    options = StepOptions(checkpoint=[*checkpoint])
    sgd = partial(torch.optim.SGD, lr=0.01)
    with LiveMemory() as live:
        runtime = SingleProcess(
            parts, schedule, sgd, F.cross_entropy, order, options=options
        )
        for _ in range(2):
            runtime.step(*batch)
        gc.collect()
        at_rest = live.most = live.bytes
        for result in runtime.run([batch] * 2):
            del result
    return live.most - at_rest, runtime.module().state_dict()


def foreseen(schedule, costs):
    """Bytes above the weights between steps."""
    timeline = simulate(schedule.lower(2, 2), costs, UNIT)
    (_, at_rest), *_ = timeline.memory(kind="weights")
    return timeline.peak_memory() - at_rest


def test_measured_on_the_cpu():
    """Every tensor counts; memory is as predicted, and the trajectory that of the schedule."""
    images = torch.randn(4, 1, 32, 32, dtype=torch.double)
    costs = profile(partition(network(), 4, images), images.to("meta"))
    found = least_peak(costs, 4, 0.3, A100)
    assert found.recomputed == (0,)
    schedule = found.schedule(A100)
    measured, state = trained(schedule, images, found.recomputed)
    assert measured == pytest.approx(foreseen(schedule, found.costs), rel=0.005)
    together, _ = trained(catalog.data_parallel(4, "one"), images)
    assert measured < 0.5 * together
    assert_same(state, trained(schedule, images, order="grouped")[1])


@pytest.mark.parametrize(
    ("costs", "share", "message"),
    [
        ([stage(1.0)], -0.1, "extra_time is 0 or more.*got -0.1"),
        ([stage(1.0)], float("nan"), "extra_time.*got nan"),
        ([stage(1.0, 0.0)], 0.1, "stages take no time"),
        ([stage(0.0)], 0.1, "keep no activations"),
    ],
)
def test_refuses(costs, share, message):
    with pytest.raises(UserError, match=message):
        least_peak(costs, 2, share)
