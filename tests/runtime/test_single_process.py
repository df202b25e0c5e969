"""Conformance: every schedule and order follows the reference, parameter by parameter."""

import copy
import functools
import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.runtime import conform, models
from tests.runtime.models import (
    assert_same,
    cut,
    make_batches,
    name_of,
    residual,
    runtime_for,
)
from tests.runtime.reference import adamw, decaying, sgd, trajectory
from tests.thorough import more
from toolkit.errors import UserError
from toolkit.model import partition
from toolkit.runtime import ORDERS, SingleProcess
from toolkit.runtime.updater import Updater
from toolkit.schedule import Correction, RandomDelay, Schedule, catalog


@pytest.fixture
def model():
    return residual()


SIZES = more([(2, 2), (3, 4)], [(2, 2), (3, 3), (4, 4), (4, 8), (3, 4)])


def _schedules():
    """Every method, small; to add one here is to buy all tests below."""
    for n_stages, n in SIZES:
        yield catalog.data_parallel(n, n_stages=n_stages)
        for delay in (1, 2, "freshest"):
            yield catalog.cyclic(n, delay, n_stages=n_stages)
    for n_stages, n in (*SIZES, (4, 2)):
        yield catalog.cyclic(n, 1, n_stages=n_stages, chains="rotated")
    yield catalog.cyclic(3, [[1, 2, 1], [1, 1, 3], [2, 1, 1]], chains="rotated")
    yield catalog.cyclic(4, n_stages=3, groups=2)
    yield catalog.cyclic(4, 1, n_stages=3, groups=2, chains="rotated")
    for placement in ("one", "per_stage_and_microbatch"):
        yield catalog.data_parallel(3, placement)
    yield catalog.data_parallel(3, state="sharded")
    yield catalog.weipipe(3)
    yield catalog.weipipe(2, n_stages=3, accumulate=3)
    yield catalog.cyclic(3, state="circulating")
    yield catalog.data_parallel(3, delay=[[0, 1, 2], [2, 0, 0], [0, 0, 3]])
    yield catalog.data_parallel(2, delay=[2, 0])
    yield catalog.data_parallel(2, delay=RandomDelay(most=3, seed=1))
    late = RandomDelay("geometric", 1, 4, p=0.5, per="stage", seed=2)
    yield catalog.cyclic(2, late, state="sharded")
    yield catalog.gradient_accumulation(2, 4)
    yield catalog.data_parallel(2, accumulate=2)
    yield catalog.cyclic(2, 1, accumulate=2)
    yield catalog.cyclic(2, "freshest", "per_stage_and_microbatch", accumulate=2)
    yield from _corrected()
    yield from _pipelines()
    for delay in (1, "freshest"):
        for placement in ("one", "per_stage", "per_stage_and_microbatch"):
            yield catalog.cyclic(3, delay, placement)
        for placement in ("per_microbatch", "per_stage_and_microbatch"):
            yield catalog.cyclic(4, delay, placement, "sharded")


def _pipelines():
    """Whose ranks have orders of their own; and delays that no stagger makes."""
    for n in more([3], [2, 3, 5]):
        yield catalog.published(n)
    yield from conform.pipelines(2, 4)
    yield catalog.one_f_one_b(2, 3)
    yield catalog.zb_v(4, 3)
    yield catalog.chimera(4, 6)
    orders = "0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"
    yield Schedule.from_rank_orders(
        orders, name="overlapping", period=4, delay="freshest"
    )


def _corrected():
    """Late weights are predicted, or their gradients compensated."""
    for kind in ("optimizer_step", "compensate"):
        yield catalog.cyclic(3, 1, correction=kind)
        yield catalog.cyclic(
            3, "freshest", "per_stage", correction=Correction(kind, 0.5)
        )
    yield catalog.data_parallel(
        3, delay=[0, 2, 3], correction=Correction("compensate", 3)
    )
    halves = "0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1W0 1F1 1I1 1W1"
    yield Schedule.from_rank_orders(
        halves, name="halves", delay=1, correction="compensate"
    )
    for delay, placement in (
        (1, "one"),
        ("freshest", "per_microbatch"),
        (1, "per_stage"),
    ):
        yield catalog.cyclic(3, delay, placement, correction="extrapolate")
    yield catalog.cyclic(
        2,
        "freshest",
        "per_stage_and_microbatch",
        accumulate=2,
        correction="extrapolate",
    )
    yield catalog.cyclic(3, [2, 1, 1], chains="rotated", correction="extrapolate")
    yield catalog.data_parallel(
        3, delay=[[0, 1, 2], [2, 0, 0], [0, 0, 3]], correction="extrapolate"
    )
    late = RandomDelay("geometric", 0, 4, p=0.5, per="stage", seed=2)
    yield catalog.data_parallel(2, delay=late, correction="extrapolate")
    yield catalog.pipedream_2bw(2, 3, correction="extrapolate")


SCHEDULES = {name_of(schedule): schedule for schedule in _schedules()}


@functools.cache
def expected(name):
    """The state after each step, by the reference."""
    model, schedule = residual(), SCHEDULES[name]
    stages = cut(model, schedule)
    batches = make_batches(schedule.n_microbatches)
    arguments = model, models.stage_of(stages), schedule.delays, batches, sgd
    return trajectory(*arguments, schedule.corrected)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_follows_the_reference(model, name, order):
    schedule = SCHEDULES[name]
    batches = make_batches(schedule.n_microbatches)
    runtime = runtime_for(model, schedule, order)
    for batch, state in zip(batches, expected(name), strict=True):
        runtime.step(*batch)
        assert_same(runtime.module().state_dict(), state)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("delay", [1, "freshest", 3])
@pytest.mark.parametrize("decoupled", [False, True])
def test_predicts_by_the_optimizers_step_at_the_rate_of_the_step(
    model, decoupled, delay, order
):
    schedule = catalog.data_parallel(3, delay=delay, correction="optimizer_step")
    if delay == "freshest":
        schedule = catalog.cyclic(3, correction="optimizer_step")
    batches = make_batches(3)
    make, makers = (
        decaying,
        {"optimizer": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)},
    )
    makers["lr_scheduler"] = lambda o: torch.optim.lr_scheduler.LambdaLR(
        o, lambda t: 1 / (1 + t)
    )
    if decoupled:
        make = adamw
        makers = {
            "optimizer": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1)
        }
    stages = cut(model, schedule)
    given = model, models.stage_of(stages), schedule.delays, batches, make
    runtime = SingleProcess(
        stages, schedule, loss=F.cross_entropy, order=order, **makers
    )
    for batch, state in zip(
        batches, trajectory(*given, schedule.corrected), strict=True
    ):
        runtime.step(*batch)
        assert_same(runtime.module().state_dict(), state)


@pytest.mark.parametrize(
    "optimizer", [torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam]
)
@pytest.mark.parametrize("decoupled", [False, True])
def test_weight_decay_is_decoupled_as_the_option_says(optimizer, decoupled):
    layer = nn.Linear(2, 2, bias=False)
    options = {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": decoupled}
    updater = Updater(layer, lambda parameters: optimizer(parameters, **options))
    assert updater.rates(0) == {"weight": (0.01, 0.1 if decoupled else 0.0)}


def test_decoupled_adam_is_predicted_as_adamw():
    schedule = catalog.cyclic(3, 1, correction="optimizer_step")
    decoupled_adam = partial(torch.optim.Adam, decoupled_weight_decay=True)
    states = []
    for make in (decoupled_adam, torch.optim.AdamW):
        stages = cut(residual(), schedule)
        optimizer = partial(make, lr=0.01, weight_decay=0.5)
        runtime = SingleProcess(stages, schedule, optimizer, F.cross_entropy)
        list(runtime.run(make_batches(3)))
        states.append(runtime.module().state_dict())
    assert_same(*states)


@pytest.mark.parametrize("order", ORDERS)
def test_predictions_read_out_one_update_further_are_error_feedback(order):
    """x_{t+1} = x_t - 2 u_t + u_{t-1}, u_t by Adam from the gradient at x_{t-1}."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    draw = torch.Generator().manual_seed(0)
    batches = [
        (
            torch.randn(6, 4, dtype=torch.float64, generator=draw),
            torch.randint(3, (6,), generator=draw),
        )
        for _ in range(200)
    ]
    x = {name: p.detach().clone() for name, p in model.named_parameters()}
    past, last = x, dict.fromkeys(x, 0)
    carrier = [nn.Parameter(torch.zeros_like(p)) for p in x.values()]
    adam = torch.optim.Adam(carrier, lr=0.01)
    schedule = catalog.cyclic(2, 1, correction="extrapolate")
    stages = partition(model, 2, batches[0][0])
    runtime = SingleProcess(
        stages,
        schedule,
        lambda p: torch.optim.Adam(p, lr=0.01),
        F.cross_entropy,
        order=order,
    )
    twin = copy.deepcopy(model)
    for inputs, targets in batches:
        runtime.step(inputs, targets)
        twin.load_state_dict(past)
        loss = F.cross_entropy(twin(inputs), targets)
        for p, gradient in zip(
            carrier, torch.autograd.grad(loss, twin.parameters()), strict=True
        ):
            p.grad = gradient
        before = [p.detach().clone() for p in carrier]
        adam.step()
        u = {k: b - p.detach() for k, b, p in zip(x, before, carrier, strict=True)}
        past, x, last = x, {k: x[k] - 2 * u[k] + last[k] for k in x}, u
        assert_same(runtime.extrapolated(), x, atol=1e-10)


@pytest.mark.parametrize("order", ORDERS)
def test_stages_without_late_weights_are_not_extrapolated(model, order):
    runtime = runtime_for(model, catalog.cyclic(3), order)
    assert runtime.extrapolated() == {}
    list(runtime.run(make_batches(3)[:2]))
    late = {
        name
        for stage in list(runtime.stages)[:2]
        for name, _ in stage.named_parameters()
    }
    assert runtime.extrapolated().keys() == late


@pytest.mark.parametrize("order", ORDERS)
def test_late_weights_are_those_that_the_next_step_reads(model, order):
    runtime = runtime_for(model, catalog.cyclic(3, 1), order)
    assert runtime.late_weights() == {}
    batches = make_batches(3)
    list(runtime.run(batches[:1]))
    before = copy.deepcopy(runtime.module().state_dict())
    list(runtime.run(batches[1:2]))
    late = runtime.late_weights()
    assert late.keys() == {name for name, _ in model.named_parameters()}
    for name, tensor in late.items():
        assert torch.equal(tensor, before[name])
        assert not torch.equal(tensor, runtime.module().state_dict()[name])
    fresh = runtime_for(model, catalog.data_parallel(3), order)
    list(fresh.run(batches))
    assert fresh.late_weights() == {}


def test_a_wrong_rule_differs(model):
    """The comparison above can fail: the reference of each rule differs from each other rule's."""
    rules = [catalog.data_parallel(3), catalog.cyclic(3, 1), catalog.cyclic(3)]
    rules += [
        replace(rules[-1], correction=c)
        for c in ("extrapolate", Correction("compensate", 9))
    ]
    at, batches = models.stage_of(cut(model, rules[0])), make_batches(3)
    ends = [
        trajectory(model, at, rule.staleness, batches, sgd, rule.corrected)[-1]
        for rule in rules
    ]
    assert all(
        models.differ(one, other) for one, other in itertools.permutations(ends, 2)
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_overlapping_steps_follow_the_same_trajectory(model, name):
    """Steps overlap within each of two runs."""
    schedule = SCHEDULES[name]
    batches = make_batches(schedule.n_microbatches)
    kept = []
    optimizer = models.keeping(kept, lambda parameters: sgd(parameters, None))
    stages = cut(model, schedule)
    runtime = SingleProcess(stages, schedule, optimizer, F.cross_entropy, "scheduled")
    results = [*runtime.run(batches[:3]), *runtime.run(batches[3:])]
    models.assert_updates(kept, expected(name))
    assert_same(runtime.module().state_dict(), expected(name)[-1])
    assert [result.step for result in results] == list(range(len(batches)))


@pytest.mark.parametrize("order", ORDERS)
def test_no_delay_is_plain_pytorch(order):
    """delay=0 without batch norm: the whole batch, one optimizer, no toolkit; a frozen weight."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 3)
    ).double()
    model[1].bias.requires_grad_(False)
    plain = copy.deepcopy(model)
    optimizer = sgd(plain.parameters(), None)
    runtime = runtime_for(model, catalog.data_parallel(4, n_stages=2), order)
    for inputs, targets in make_batches(4):
        loss = F.cross_entropy(plain(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        result = runtime.step(inputs, targets)
        torch.testing.assert_close(result.loss, loss.detach(), rtol=1e-12, atol=0)
        assert_same(runtime.module().state_dict(), plain.state_dict())


@pytest.mark.parametrize("order", ORDERS)
def test_result_holds_losses_and_outputs_in_order(model, order):
    schedule = catalog.data_parallel(4, n_stages=2)
    ((inputs, targets),) = make_batches(4, steps=1)
    expected = [copy.deepcopy(model)(x) for x in inputs.chunk(4)]
    result = runtime_for(model, schedule, order).step(inputs, targets)
    torch.testing.assert_close(result.outputs, torch.cat(expected).detach())
    losses = [
        F.cross_entropy(x, y) for x, y in zip(expected, targets.chunk(4), strict=True)
    ]
    torch.testing.assert_close(result.losses, torch.stack(losses).detach())
    assert not result.outputs.requires_grad


@pytest.mark.parametrize("order", ORDERS)
def test_batches_go_to_the_device_of_the_model(order):
    schedule = catalog.gpipe(2, 2)
    with torch.device("meta"):
        model = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Linear(8, 3)).double()
    runtime = runtime_for(model, schedule, order)
    (batch,) = make_batches(2, 1)
    assert batch[0].device.type == batch[1].device.type == "cpu"
    assert runtime.step(*batch).outputs.device.type == "meta"


@pytest.mark.parametrize(
    "orders", [*zip(ORDERS, ORDERS, strict=True), ORDERS], ids="-".join
)
@pytest.mark.parametrize("correction", ["none", "extrapolate"])
@pytest.mark.parametrize("delay", [0, 1, "freshest"])
def test_continues_from_a_state_dict(model, orders, delay, correction):
    """Of the same order, or of the other one."""
    method = catalog.data_parallel if delay == 0 else catalog.cyclic
    schedule = method(3, delay=delay, correction=correction)
    batches = make_batches(3)
    whole, begun, resumed = (
        runtime_for(copy.deepcopy(model), schedule, order)
        for order in (orders[0], *orders)
    )
    list(whole.run(batches))
    for batch in batches[:2]:
        begun.step(*batch)
        with torch.no_grad():  # evaluating between steps changes nothing
            begun.module().eval()(batch[0])
    resumed.load_state_dict(copy.deepcopy(begun.state_dict()))
    list(resumed.run(batches[2:]))
    assert_same(resumed.module().state_dict(), whole.module().state_dict())


@pytest.mark.parametrize("order", ORDERS)
def test_returns_to_a_state_again_and_again(model, order):
    """It is a copy, and a copy of it is taken over, also by replicas that have trained since."""
    runtime = runtime_for(model, catalog.data_parallel(3), order, adamw)
    batches = make_batches(3)
    list(runtime.run(batches[:2]))
    state, ends = runtime.state_dict(), []
    for _ in range(3):
        list(runtime.run(batches[2:4]))
        ends.append(copy.deepcopy(runtime.module().state_dict()))
        runtime.load_state_dict(state)
    assert_same(ends[1], ends[0])
    assert_same(ends[2], ends[0])


@pytest.mark.parametrize("order", ORDERS)
def test_learning_rate_of_step_t_applies_to_update_t(model, order):
    """By AdamW, which tests another optimizer, too."""
    batches = make_batches(3)
    schedule = catalog.cyclic(3)
    rates = [0.1, 0.05, 0.0, 0.2, 0.01]

    def scheduled(parameters, previous):
        optimizer = adamw(parameters, previous)
        step = 0 if previous is None else previous.step_reached + 1
        optimizer.step_reached = step
        optimizer.param_groups[0]["lr"] = 0.01 * rates[step]
        return optimizer

    stages = cut(model, schedule)
    expected = trajectory(
        model, models.stage_of(stages), schedule.staleness, batches, scheduled
    )
    runtime = SingleProcess(
        cut(copy.deepcopy(model), schedule),
        schedule,
        lambda parameters: adamw(parameters, None),
        F.cross_entropy,
        order,
        lr_scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(
            o, lambda t: [*rates, 0][t]
        ),
    )
    list(runtime.run(batches))
    assert_same(runtime.module().state_dict(), expected[-1])


REDUCE_ON_PLATEAU = torch.optim.lr_scheduler.ReduceLROnPlateau


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"order": "fast"}, "order.*fast"),
        ({"schedule": catalog.cyclic(4)}, "4 stages.*has 3"),
        ({"schedule": "cyclic"}, "schedule: got 'cyclic'"),
        ({"options": {"clip": 1}}, "options:.*dict"),
        ({"options": None}, "options: got None"),
        ({"loss": None}, "loss: got None"),
        ({"loss": 0.5}, "loss:.*float"),
        ({"optimizer": torch.optim.LBFGS}, "optimizer.*LBFGS.*'closure'"),
        ({"optimizer": lambda parameters: None}, "optimizer.*None"),
        ({"optimizer": list}, "optimizer.*list"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)])}, "optimizer:.*SGD"),
        (
            {"lr_scheduler": REDUCE_ON_PLATEAU},
            "lr_scheduler.*ReduceLROnPlateau.*'metrics'",
        ),
        ({"lr_scheduler": lambda optimizer: None}, "lr_scheduler.*None"),
    ],
)
def test_refuses_what_does_not_fit(model, arguments, message):
    stages = cut(model, catalog.cyclic(3))
    given = {
        "schedule": catalog.cyclic(3),
        "optimizer": torch.optim.SGD,
        "loss": F.cross_entropy,
    }
    with pytest.raises(UserError, match=message):
        SingleProcess(stages, **given | arguments)


def test_refuses_models(model):
    """Not partitioned, frozen, or with a norm over all micro-batches."""
    given = catalog.cyclic(3), torch.optim.SGD, F.cross_entropy
    with pytest.raises(UserError, match=r"Sequential.*partition"):
        SingleProcess(model, *given)
    with pytest.raises(UserError, match=r"Sequential.*requires_grad"):
        SingleProcess(cut(model.requires_grad_(False), given[0]), *given)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.SyncBatchNorm(4), nn.Flatten(), nn.Linear(64, 3)
    )
    with pytest.raises(UserError, match="SyncBatchNorm"):
        runtime_for(model.double(), catalog.data_parallel(2, n_stages=1), "grouped")


@pytest.mark.parametrize("order", ORDERS)
def test_refuses_a_loss_that_is_not_scalar(model, order):
    def loss(outputs, targets):
        return F.cross_entropy(outputs, targets, reduction="none")

    schedule = catalog.cyclic(3)
    runtime = SingleProcess(
        cut(model, schedule), schedule, torch.optim.SGD, loss, order
    )
    with pytest.raises(UserError, match=r"loss.*\[3\].*reduction"):
        runtime.step(*make_batches(3, 1)[0])


def test_a_run_can_be_left(model):
    batches = make_batches(3)
    left, whole = (
        runtime_for(copy.deepcopy(model), catalog.cyclic(3), "grouped") for _ in "ab"
    )
    run = left.run(batches)
    next(run)
    run.close()
    assert left.steps_done == left.state_dict()["steps_done"] == 1
    list(left.run(batches[1:]))
    list(whole.run(batches))
    assert_same(left.module().state_dict(), whole.module().state_dict(), rtol=0, atol=0)


def test_refuses_a_state_that_lacks_what_the_schedule_reads(model):
    fresh, late, other = (
        runtime_for(copy.deepcopy(model), schedule, "grouped")
        for schedule in (catalog.data_parallel(3), *[catalog.cyclic(3)] * 2)
    )
    list(fresh.run(make_batches(3, 2)))
    with pytest.raises(UserError, match="version 1 of stage 0 at step 2"):
        late.load_state_dict(fresh.state_dict())
    with pytest.raises(UserError, match=r"lacks .*'versions'"):
        late.load_state_dict({})
    # The other way round nothing is lacking: a delayed run may go on without delay.
    list(other.run(make_batches(3, 2)))
    fresh.load_state_dict(other.state_dict())
    list(fresh.run(make_batches(3, 1)))


def test_cumulative_batch_norm():
    """momentum=None: running statistics are the mean over all steps."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.BatchNorm2d(1, momentum=None), nn.Flatten(), nn.Linear(36, 3)
    ).double()
    batches = make_batches(2, 3)
    runtime = runtime_for(model, catalog.data_parallel(2, n_stages=1), "grouped")
    list(runtime.run(batches))
    means = [x.mean() for inputs, _ in batches for x in inputs.chunk(2)]
    torch.testing.assert_close(model[0].running_mean[0], sum(means) / len(means))
