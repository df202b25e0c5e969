"""What the delay does to the gradients, against the definition."""

from dataclasses import astuple
from math import isnan

import pytest
import torch
from torch.nn import functional as F

from tests.runtime import conform
from tests.runtime.models import assert_same, cut, make_batches, residual
from toolkit.errors import UserError
from toolkit.runtime import SingleProcess, StepOptions
from toolkit.schedule import catalog


def make(schedule, **options):
    stages = cut(residual(), schedule)
    return SingleProcess(stages, schedule, conform.sgd, F.cross_entropy, **options)


def looked_into(schedule, steps=6, every=2):
    runtime = make(schedule, diagnostics=every)
    results = list(runtime.run(make_batches(schedule.n_microbatches, steps)))
    return runtime, [result.delays for result in results]


def test_nothing_is_late_without_delay():
    _, found = looked_into(catalog.data_parallel(3))
    assert [len(delays) for delays in found] == [3, 0, 3, 0, 3, 0]
    for delays in found[::2]:
        assert [(delay.stage, delay.delay) for delay in delays] == [
            (0, 0),
            (1, 0),
            (2, 0),
        ]
        for delay in delays:
            assert delay.cosine == pytest.approx(1)
            assert delay.gradient == pytest.approx(delay.fresh_gradient)


@pytest.mark.parametrize("rule", [1, "freshest", 3])
def test_looking_changes_nothing(rule):
    schedule = catalog.cyclic(3, rule)
    (runtime, _), plain = looked_into(schedule), make(schedule)
    list(plain.run(make_batches(3, 6)))
    assert_same(runtime.module().state_dict(), plain.module().state_dict())


def test_follows_its_definition():
    """Delay 1: gradients on theta_{t-1} and on theta_t, by plain PyTorch."""
    schedule = catalog.cyclic(3, 1)
    batches = make_batches(3, 4)
    runtime, found = looked_into(schedule, steps=4, every=1)
    past = []
    again = make(schedule)
    for batch in batches:
        past.append(
            {k: p.detach().clone() for k, p in again.module().named_parameters()}
        )
        again.step(*batch)
    model = residual().train()

    def gradient(weights, batch):
        leaves = {k: w.clone().requires_grad_() for k, w in weights.items()}
        losses = [
            F.cross_entropy(torch.func.functional_call(model, leaves, (x,)), y)
            for x, y in zip(batch[0].chunk(3), batch[1].chunk(3), strict=True)
        ]
        found = torch.autograd.grad(sum(losses) / 3, list(leaves.values()))
        return dict(zip(leaves, found, strict=True))

    def flat(tensors, stage):
        names = [name for name, _ in runtime.stages[stage].named_parameters()]
        return torch.cat([tensors[name].flatten() for name in names]).detach()

    step = 2
    late, fresh = gradient(past[1], batches[2]), gradient(past[2], batches[2])
    for stage, delay in enumerate(found[step]):
        a, b = flat(late, stage), flat(fresh, stage)
        newest, before = flat(past[2], stage), flat(past[1], stage)
        cosine = float(F.cosine_similarity(a, b, dim=0))
        norms = [float(x.norm()) for x in (a, b, newest, newest - before)]
        assert cosine < 0.9999
        assert astuple(delay) == pytest.approx(
            (step, stage, 1, cosine, *norms), rel=1e-9
        )
    assert all(isnan(delay.moved) for delay in found[0])


def test_the_scale_of_the_loss_is_not_in_the_gradients():
    schedule = catalog.cyclic(3, 1)

    def delays(scale):
        options = StepOptions(precision="fp16", loss_scale=scale)
        stages = cut(residual().float(), schedule)
        runtime = SingleProcess(
            stages,
            schedule,
            conform.sgd,
            F.cross_entropy,
            options=options,
            diagnostics=1,
        )
        batches = [(x.float(), y) for x, y in make_batches(3, 3)]
        return [[*map(astuple, result.delays)] for result in runtime.run(batches)]

    for found, expected in zip(delays(16)[1:], delays(128)[1:], strict=True):
        assert found == [pytest.approx(of_stage, rel=1e-3) for of_stage in expected]


@pytest.mark.parametrize("delay", [2, 3])
def test_moved_is_the_last_update_whatever_the_delay(delay):
    """The versions before it are read, too."""
    schedule = catalog.cyclic(3, delay)
    runtime, found = looked_into(schedule, steps=5, every=1)
    plain = make(schedule)
    past = []
    for batch in make_batches(3, 5):
        past.append(
            {k: p.detach().clone() for k, p in plain.module().named_parameters()}
        )
        plain.step(*batch)
    for stage, measured in enumerate(found[4]):
        names = [name for name, _ in runtime.stages[stage].named_parameters()]
        moves = [(past[4][name] - past[3][name]).flatten() for name in names]
        assert (measured.stage, measured.delay) == (stage, delay)
        assert measured.moved == pytest.approx(float(torch.cat(moves).norm()), rel=1e-9)


def test_takes_order_grouped():
    with pytest.raises(UserError, match=r"diagnostics.*2 with order=scheduled"):
        make(catalog.cyclic(3), diagnostics=2, order="scheduled")


def test_mean_delay_and_moved_weights():
    """Delays differ between stages; no op reads the version before."""
    schedule = catalog.data_parallel(2, n_stages=2, delay=[[0, 1], [0, 0]])
    _, (_, (first, last)) = looked_into(schedule, steps=2, every=1)
    assert (first.delay, last.delay) == (0.5, 0)
    assert first.moved > 0
    assert last.moved > 0
