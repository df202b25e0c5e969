"""Losses of a sum and its count: each step is that of one big batch, wherever it runs."""

import copy

import pytest
import torch

from tests.runtime import reference, token_losses
from tests.runtime.models import assert_same, name_of
from tests.runtime.token_losses import (
    by_itself,
    make_batches,
    sgd,
    token_loss,
    whole_loss,
)
from toolkit.errors import UserError
from toolkit.runtime import SingleProcess, StepOptions, launch
from toolkit.schedule import catalog

IN_ONE_PROCESS = [
    catalog.data_parallel(4, n_stages=2),
    catalog.cyclic(4, 1, n_stages=2),
    catalog.cyclic(3),
    catalog.gpipe(2, 4),
    catalog.one_f_one_b(3, 5),
    catalog.gradient_accumulation(2, 3),
    *token_losses.schedules(2),
]


def late_reference(schedule):
    """The states that follow from the update rule, with its delays."""

    def staleness(step):
        stages, microbatches = range(schedule.n_stages), range(schedule.n_microbatches)
        return [
            [step - schedule.version(j, m, step) for m in microbatches] for j in stages
        ]

    def make_optimizer(parameters, previous):
        optimizer = sgd(parameters)
        if previous is not None:
            optimizer.load_state_dict(previous.state_dict())
        return optimizer

    stage_of = token_losses.stage_of(schedule.n_stages)
    batches = make_batches(schedule.n_microbatches)
    return reference.trajectory(
        token_losses.model(),
        stage_of,
        staleness,
        batches,
        make_optimizer,
        schedule.corrected,
        token_loss,
    )


def big_batches(n_microbatches):
    """The weights and losses of plain torch, each batch as one."""
    net = token_losses.model()
    optimizer, losses = sgd(net.parameters()), []
    for inputs, targets in make_batches(n_microbatches):
        loss = whole_loss(net(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return net.state_dict(), torch.stack(losses)


@pytest.fixture(scope="module", params=[2, 3])
def on_ranks(request):
    found = launch(token_losses.on_ranks, request.param)
    return request.param, found


@pytest.mark.parametrize("order", ["grouped", "scheduled"])
@pytest.mark.parametrize("schedule", IN_ONE_PROCESS, ids=name_of)
def test_follows_the_update_rule(schedule, order):
    state, losses = by_itself(schedule, order)
    assert_same(state, late_reference(schedule)[-1], 1e-12, 1e-13)
    if schedule.max_staleness == 0:
        expected, expected_losses = big_batches(schedule.n_microbatches)
        assert_same(state, expected, 1e-12, 1e-13)
        torch.testing.assert_close(losses, expected_losses, rtol=1e-12, atol=0)


def test_means_of_microbatches_are_something_else():
    """And say so once; or the tests above would show nothing."""
    schedule = catalog.gpipe(2, 4)
    stages = token_losses.cut(token_losses.model(), schedule)
    runtime = SingleProcess(stages, schedule, sgd, whole_loss)
    with pytest.warns(UserWarning, match="sum and their number") as warned:
        result = runtime.step(*make_batches(4)[0])
    assert len(warned) == 1
    assert result.loss.isnan()
    difference = (
        runtime.module()[3].weight - by_itself(schedule, n_steps=1)[0]["3.weight"]
    )
    assert difference.abs().max() > 1e-3


def test_on_ranks(on_ranks):
    n_ranks, found = on_ranks
    for k, schedule in enumerate(token_losses.schedules(n_ranks)):
        state, losses = by_itself(schedule)
        for of_rank, _ in found:
            assert_same(of_rank[k][0], state, 1e-12, 1e-13)
            torch.testing.assert_close(of_rank[k][1], losses, rtol=1e-12, atol=0)


def test_baselines(on_ranks):
    for _, baselines in on_ranks[1]:
        for schedule, state, losses in baselines.values():
            expected, expected_losses = by_itself(schedule)
            assert_same(state, expected, 1e-12, 1e-13)
            torch.testing.assert_close(losses, expected_losses, rtol=1e-12, atol=0)


def test_under_a_controller():
    schedule = catalog.cyclic(2)
    state, losses = token_losses.by_controller(schedule)
    expected, expected_losses = by_itself(schedule)
    assert_same(state, expected, 1e-12, 1e-13)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-12, atol=0)


@pytest.mark.parametrize("order", ["grouped", "scheduled"])
def test_norms_are_those_of_the_mean(order):
    """Clipping, with a scale of the loss as for 16 bits, sees the gradient of the step's loss."""
    options = StepOptions(clip=0.05, clip_by="stage")
    schedule = catalog.data_parallel(3, n_stages=1)
    state, _ = by_itself(schedule, order, options=options)
    net = token_losses.model()
    optimizer = sgd(net.parameters())
    for inputs, targets in make_batches(3):
        optimizer.zero_grad()
        whole_loss(net(inputs), targets).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        optimizer.step()
    assert_same(state, net.state_dict(), 1e-10, 1e-12)


@pytest.mark.parametrize("order", ["grouped", "scheduled"])
def test_a_step_without_tokens_has_no_gradient(order):
    schedule = catalog.cyclic(2)
    stages = token_losses.cut(token_losses.model(), schedule)
    runtime = SingleProcess(stages, schedule, sgd, token_loss, order)
    before = copy.deepcopy(runtime.module().state_dict())
    inputs, targets = make_batches(2)[0]
    result = runtime.step(inputs, torch.full_like(targets, token_losses.IGNORED))
    assert_same(runtime.module().state_dict(), before, 0, 0)
    assert result.losses.tolist() == [0, 0]


@pytest.mark.parametrize("count", ["many", None, torch.ones(3)])
def test_a_count_is_a_number(count):
    schedule = catalog.gpipe(2, 2)
    stages = token_losses.cut(token_losses.model(), schedule)
    runtime = SingleProcess(stages, schedule, sgd, lambda o, t: (o.sum(), count))
    with pytest.raises(UserError, match="count"):
        runtime.step(*make_batches(2)[0])


def test_sums_and_means_do_not_mix():
    answers = iter([0, 1])

    def either(outputs, targets):
        return (outputs.sum(), 3) if next(answers) else outputs.mean()

    schedule = catalog.gpipe(2, 2)
    stages = token_losses.cut(token_losses.model(), schedule)
    with pytest.raises(UserError, match="mean"):
        SingleProcess(stages, schedule, sgd, either).step(*make_batches(2)[0])


@pytest.mark.parametrize(
    "schedule", [catalog.data_parallel(2), catalog.gpipe(2, 2)], ids=name_of
)
def test_a_count_that_receivers_do_not_expect_is_refused(schedule):
    """Where the loss fails on the outputs of zeros by which they find out."""
    with pytest.raises(UserError, match="outputs of zeros"):
        launch(token_losses.fails_on_zeros, 2, schedule)
