"""What each rank of the tests of CyclicDataParallel does: a training loop as for DDP."""

import copy
from collections import OrderedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR

from tests.runtime import conform, models
from toolkit.cost import Hardware
from toolkit.errors import UserError
from toolkit.runtime import CyclicDataParallel, StepOptions, join
from toolkit.schedule import catalog

STEPS = 5
# All parameters take about a step.
SLOW = Hardware("slow", 1e8, 1e12, link_bandwidth=3e6)


def schedules():
    """Every method in which each of 4 ranks has the whole model, and a micro-batch at a time."""
    whole = (s for s in conform.schedules(4) if s.layout.has_whole_models)
    yield from (s for s in whole if not s.name.startswith("WeiPipe"))
    yield catalog.weipipe(4)
    yield catalog.cyclic(4, [[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]])
    yield catalog.cyclic(4, accumulate=2)
    yield catalog.data_parallel(4, accumulate=2, state="sharded")


def train(net, batches, scheduler=None):
    """Train on this rank's shares of ``batches``."""
    schedule, rank = net.schedule, net.world.rank
    n, k = schedule.n_microbatches, schedule.accumulate
    mine = [m for m in range(n) if schedule.rank(0, m) == rank]
    for inputs, targets in batches:
        shares = [*zip(inputs.chunk(n), targets.chunk(n), strict=True)]
        net.optimizer.zero_grad()
        for m in mine:
            x, y = shares[m]
            (F.cross_entropy(net(x), y) / k).backward()
        net.optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return net


def state(net):
    return {k.removeprefix("module."): x.clone() for k, x in net.state_dict().items()}


def wrap(schedule, **options):
    return CyclicDataParallel(
        models.residual(), rule=schedule, **({"optimizer": conform.sgd} | options)
    )


def all_methods():
    """The state after all steps but one, and after all: for each schedule."""
    found = []
    for schedule in schedules():
        batches = models.make_batches(schedule.n_microbatches, STEPS)
        net = wrap(schedule)
        found.append([state(train(net, part)) for part in (batches[:-1], batches[-1:])])
    return found


def odd_jobs():
    return {
        job.__name__: job()
        for job in (
            changing_rates,
            clipped,
            resumed,
            resumed_rates,
            evaluated,
            autocast,
            automatic,
        )
    }


def automatic():
    """The rule, chains and cut that the links of a machine allow."""
    (x, _), *_ = batches = models.make_batches(4, STEPS)
    net = wrap("auto", hardware=SLOW, example=x[: len(x) // 4])
    cut = net.schedule.chains, net.schedule.max_staleness
    return cut, state(train(net, batches))


def changing_rates():
    net = wrap(catalog.cyclic(4, 1, correction="optimizer_step"))
    scheduler = StepLR(net.optimizer, 2, 0.5)
    return state(train(net, models.make_batches(4, STEPS), scheduler))


def clipped():
    return state(
        train(
            wrap("cdp_v2", options=StepOptions(clip=0.05)),
            models.make_batches(4, STEPS),
        )
    )


def resumed():
    """Two parts, the second by another instance, with weights, versions and momentum."""
    batches = models.make_batches(4, STEPS)
    net = train(wrap("cdp_v1"), batches[:3])
    saved = copy.deepcopy((net.state_dict(), net.optimizer.state_dict()))
    other = wrap("cdp_v1")
    other.load_state_dict(saved[0])
    other.optimizer.load_state_dict(saved[1])
    again = state(train(other, batches[3:]))
    net.load_state_dict(saved[0])
    net.optimizer.load_state_dict(saved[1])
    return again, state(train(net, batches[3:]))


def resumed_rates():
    """As :func:`changing_rates`, with a break where the rate of the last update was another."""
    batches = models.make_batches(4, STEPS)
    schedule = catalog.cyclic(4, 1, correction="optimizer_step")
    net = wrap(schedule)
    scheduler = StepLR(net.optimizer, 2, 0.5)
    train(net, batches[:2], scheduler)
    saved = copy.deepcopy(
        (net.state_dict(), net.optimizer.state_dict(), scheduler.state_dict())
    )
    other = wrap(schedule)
    scheduler = StepLR(other.optimizer, 2, 0.5)
    for part, state_dict in zip(
        (other, other.optimizer, scheduler), saved, strict=True
    ):
        part.load_state_dict(state_dict)
    return state(train(other, batches[2:], scheduler))


def evaluated():
    """What the model computes between steps, in both modes, and that training goes on."""
    batches = models.make_batches(4, STEPS)
    net = train(wrap("cdp_v2"), batches[:2])
    net.eval()
    found = net(batches[0][0]).detach()
    net.train()
    with torch.no_grad():
        net(batches[0][0])  # it moves running statistics, as in any model
    return found, net.optimizer.param_groups[0]["lr"]


def autocast():
    net = CyclicDataParallel(
        models.residual().float(), optimizer=conform.sgd, rule="cdp_v2"
    )
    for inputs, targets in models.make_batches(4, STEPS):
        x, y = (tensor.chunk(4)[net.world.rank] for tensor in (inputs.float(), targets))
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(net(x), y)
        loss.backward()
        net.optimizer.step()
    return state(net)


class Masked(nn.Module):
    """Takes keywords, and returns a dictionary."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x, mask=None, **options):
        hidden = torch.relu(self.first(x)) * options.get("scale", 1.0)
        return OrderedDict(hidden=hidden, scores=self.second(hidden * mask))


def as_scripts_do():
    """A process group of the script's own, sums of its own; several outputs; mistakes."""
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())  # weights of rank 0 are everyone's
    net = CyclicDataParallel(
        Masked().double(), 2, optimizer=lambda p: torch.optim.SGD(p, 0.1), rule="cdp_v1"
    )
    begun = state(net) if net.world.rank == 0 else None
    refused = []

    def expect_refusal(call):
        try:
            call()
        except UserError as error:
            refused.append(str(error).split(":")[0])

    torch.manual_seed(5 + net.world.rank)
    shares = []
    for _ in range(3):
        # Shares differ in size.
        x = torch.randn(2 + net.world.rank, 4, dtype=torch.float64)
        mask = torch.rand(len(x), 8, dtype=torch.float64)
        shares.append((x, mask))
        expect_refusal(net.optimizer.step)
        found = net(x, mask=mask)
        expect_refusal(lambda x=x, mask=mask: net(x, mask=mask))
        expect_refusal(net.eval)
        expect_refusal(lambda: nn.utils.clip_grad_norm_(net.parameters(), 1.0))
        loss = found["scores"].square().mean() + found["hidden"].abs().mean()
        loss.backward(retain_graph=True)
        expect_refusal(loss.backward)
        net.optimizer.step()
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 2
    expect_refusal(lambda: net(x, mask=mask, scale=2.0))
    expect_refusal(lambda: net.no_sync().__enter__())
    expect_refusal(lambda: net(x.requires_grad_(), mask=mask))
    return begun, state(net), shares, refused


def alone():
    """One rank, a model with dropout, frozen and unused parameters, AdamW, groups of parameters."""
    schedule = catalog.cyclic(1, n_stages=2)
    net = CyclicDataParallel(
        models.awkward(), optimizer=conform.adamw, rule=schedule, seed=3
    )
    for x, y in models.id_batches(1):
        F.cross_entropy(net(x), y).backward()
        net.optimizer.step()
    return state(net)


def ends_with_updates_under_way():
    net = wrap(catalog.cyclic(2, 1))
    train(net, models.make_batches(2, 3))
    return net.steps_done


def leaves_a_step_out():
    net = CyclicDataParallel(
        models.residual(), optimizer=conform.sgd, rule="cdp_v1", world=join(timeout=3)
    )
    return train(net, models.make_batches(2, 3 - net.world.rank)).state_dict()
