"""Rivals on slow links equal independent trainers of a few lines, and resume with the same bits.

Every trainer here is one process, written from its equation, without the toolkit's own parts.
"""

import copy
import functools
import os

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    powerSGD_hook,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tests.runtime.models import assert_same, differ
from toolkit.errors import UserError
from toolkit.model import partition
from toolkit.runtime import launch
from toolkit.runtime.baselines import DDP, DiLoCo, LocalSGD
from toolkit.schedule import catalog

RANKS, STEPS, MIDDLE = 2, 7, 4


def model():
    torch.manual_seed(0)
    layers = nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 3)
    return nn.Sequential(*layers).double()


def batches():
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(4 * RANKS, 6, generator=generator, dtype=torch.float64),
            torch.randint(3, (4 * RANKS,), generator=generator),
        )
        for _ in range(STEPS)
    ]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=5e-3)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def counted(outputs, targets):
    """A loss whose micro-batches have unlike counts."""
    is_counted = targets > 0
    losses = F.cross_entropy(outputs, targets, reduction="none") * is_counted
    return losses.sum(), is_counted.sum()


LOCAL = {
    "local": (LocalSGD, {"period": 3}, sgd, F.cross_entropy),
    "post-local": (LocalSGD, {"period": 2, "start": 3}, adamw, F.cross_entropy),
    "local counted": (LocalSGD, {"period": 3}, sgd, counted),
    "diloco": (DiLoCo, {"period": 2, "start": 1}, adamw, F.cross_entropy),
    "diloco sgd": (
        DiLoCo,
        {"period": 3, "outer_lr": 0.4, "outer_momentum": 0.5},
        sgd,
        F.cross_entropy,
    ),
}
COMPRESSED = {
    "powersgd": {"compression": "powersgd", "low_rank": 1, "bucket_mb": 0.005},
    "powersgd late cold": {
        "compression": "powersgd",
        "compression_start": 3,
        "warm_start": False,
        "low_rank": 2,
    },
    "powersgd no feedback": {"compression": "powersgd", "error_feedback": False},
    "int8": {"compression": "int8"},
    "int8 buckets": {"compression": "int8", "bucket_mb": 0.005},
    "int8 no feedback": {"compression": "int8", "error_feedback": False},
    "int4": {"compression": "int4"},
    "topk": {"compression": "topk"},
}


def mean_loss(loss, outputs, targets):
    value = loss(outputs, targets)
    return value[0] / value[1].clamp(min=1) if isinstance(value, tuple) else value


def locally(options, make_optimizer, loss):
    """The means of the ranks' weights after each step, of local SGD or with an outer step."""
    period, start = options["period"], options.get("start", 0)
    ranks = [model() for _ in range(RANKS)]
    optimizers = [make_optimizer(rank.parameters()) for rank in ranks]
    outer = velocity = None
    means = []
    for step, (inputs, targets) in enumerate(batches()):
        if step == start:
            outer = [p.detach().clone() for p in ranks[0].parameters()]
            velocity = [torch.zeros_like(p) for p in outer]
        parts = zip(ranks, inputs.chunk(RANKS), targets.chunk(RANKS), strict=True)
        for rank, x, y in parts:
            rank.zero_grad()
            mean_loss(loss, rank(x), y).backward()
        if step < start:
            for parameters in zip(*(rank.parameters() for rank in ranks), strict=True):
                mean = sum(p.grad for p in parameters) / RANKS
                for parameter in parameters:
                    parameter.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
        if step >= start and (step + 1 - start) % period == 0:
            for k, parameters in enumerate(
                zip(*(r.parameters() for r in ranks), strict=True)
            ):
                new = sum(p.detach() for p in parameters) / RANKS
                if "outer_lr" in options:
                    delta = outer[k] - new
                    velocity[k] = options["outer_momentum"] * velocity[k] + delta
                    ahead = delta + options["outer_momentum"] * velocity[k]
                    new = outer[k] = outer[k] - options["outer_lr"] * ahead
                for parameter in parameters:
                    parameter.data.copy_(new)
        states = [rank.state_dict() for rank in ranks]
        means.append({name: sum(s[name] for s in states) / RANKS for name in states[0]})
    return means


def in_blocks(numbers, compression):
    """Numbers as codes, in blocks of 256, read back; of topk the 16 largest of each."""
    largest = 7 if compression == "int4" else 127
    read = torch.empty_like(numbers)
    for first in range(0, len(numbers), 256):
        block = numbers[first : first + 256]
        if compression == "topk":
            kept = block.abs().topk(16).indices
            block = torch.zeros_like(block).index_copy(0, kept, block[kept])
        scale = (block.abs().max() / largest).float().double()
        codes = (block / scale).nan_to_num(0).round()
        read[first : first + 256] = codes.clamp(-largest, largest) * scale
    return read


def quantized(feedback, order, compression):
    """Weights after each step of DDP whose one bucket goes as codes both ways from step 2 on.

    ``order``: names of weights in the bucket.
    """
    whole = model()
    optimizer = sgd(whole.parameters())
    in_order = [whole.get_parameter(name.split(".", 3)[3]) for name in order]
    n = sum(p.numel() for p in in_order)
    share = -(-n // (RANKS * 256)) * 256
    errors = [torch.zeros(RANKS * share).double() for _ in range(RANKS)]
    errors_of_mean = [torch.zeros(share).double() for _ in range(RANKS)]
    weights = []
    for step, (inputs, targets) in enumerate(batches()):
        flats, sent = [], []
        for m, (x, y) in enumerate(
            zip(inputs.chunk(RANKS), targets.chunk(RANKS), strict=True)
        ):
            whole.zero_grad()
            F.cross_entropy(whole(x), y).backward()
            flats.append(torch.cat([p.grad.flatten() for p in in_order]))
            if step >= 2:
                flat = F.pad(flats[m], (0, RANKS * share - n)) + errors[m]
                sent.append(in_blocks(flat, compression))
                errors[m] = (flat - sent[m]) * feedback
        gradient = sum(flats) / RANKS
        if step >= 2:
            means = []
            for rank, parts in enumerate(
                zip(*(s.chunk(RANKS) for s in sent), strict=True)
            ):
                total = sum(parts) / RANKS + errors_of_mean[rank]
                means.append(in_blocks(total, compression))
                errors_of_mean[rank] = (total - means[rank]) * feedback
            gradient = torch.cat(means)
        for parameter in in_order:
            parameter.grad = gradient[: parameter.numel()].view_as(parameter).clone()
            gradient = gradient[parameter.numel() :]
        optimizer.step()
        weights.append(copy.deepcopy(whole.state_dict()))
    return weights


def plain_ddp(options):
    """On a rank: DDP and PowerSGD as torch's users write them."""
    rank = int(os.environ["RANK"])
    wrapped = DistributedDataParallel(
        model(), bucket_cap_mb=options.get("bucket_mb", 25)
    )
    state = PowerSGDState(
        None,
        matrix_approximation_rank=options.get("low_rank", 2),
        start_powerSGD_iter=options.get("compression_start", 2),
        warm_start=options.get("warm_start", True),
        use_error_feedback=options.get("error_feedback", True),
    )

    def in_turn(state, bucket):  # gloo would mix the rounds of several buckets
        future = powerSGD_hook(state, bucket)
        future.wait()
        return future

    wrapped.register_comm_hook(state, in_turn)
    optimizer = sgd(wrapped.parameters())
    weights = []
    for inputs, targets in batches():
        optimizer.zero_grad()
        F.cross_entropy(
            wrapped(inputs.chunk(RANKS)[rank]), targets.chunk(RANKS)[rank]
        ).backward()
        optimizer.step()
        weights.append(copy.deepcopy(wrapped.module.state_dict()))
    return weights


def make(kind, options, optimizer=sgd, loss=F.cross_entropy):
    stages = partition(model(), 2, torch.zeros(2, 6).double())
    return kind(
        stages, catalog.data_parallel(RANKS, n_stages=2), optimizer, loss, **options
    )


def on_rank():
    torch.set_num_threads(1)
    found = {}
    for name, (kind, options, optimizer, loss) in LOCAL.items():
        found[name] = followed(functools.partial(make, kind, options, optimizer, loss))
    for name, options in COMPRESSED.items():
        found[name] = followed(functools.partial(make, DDP, options))
        if options["compression"] == "powersgd":
            found[name, "torch"] = plain_ddp(options)
    found["exact"] = followed(functools.partial(make, DDP, {}))
    compressed = make(DDP, COMPRESSED["int8"])
    compressed.step(*batches()[0])
    (found["order"],) = compressed.state_dict()["ranks"][0]["buckets"]
    try:
        make(DDP, COMPRESSED["powersgd"]).load_state_dict(compressed.state_dict())
    except UserError as error:
        found["refused"] = str(error)
    return found


def followed(make_runtime):
    """Weights after each step; and, by the step of the state, the last ones of resumed runs."""
    runtime = make_runtime()
    weights, resumed_weights = [], {}
    states = {}
    for step, batch in enumerate(batches(), 1):
        runtime.step(*batch)
        weights.append(copy.deepcopy(runtime.module().state_dict()))
        if step in (1, MIDDLE):
            states[step] = runtime.state_dict()
    for step, state in states.items():
        resumed = make_runtime()
        resumed.load_state_dict(state)
        list(resumed.run(batches()[step:]))
        resumed_weights[step] = copy.deepcopy(resumed.module().state_dict())
    return weights, resumed_weights


@pytest.fixture(scope="module")
def found():
    return launch(on_rank, RANKS)


@pytest.mark.parametrize("name", LOCAL)
def test_local_steps_equal_their_equation(found, name):
    _, options, optimizer, loss = LOCAL[name]
    defaults = (
        {"outer_lr": 0.7, "outer_momentum": 0.9} if LOCAL[name][0] is DiLoCo else {}
    )
    expected = locally(defaults | options, optimizer, loss)
    for rank in found:
        for weights, true_weights in zip(rank[name][0], expected, strict=True):
            assert_same(weights, true_weights)


@pytest.mark.parametrize("name", [n for n in COMPRESSED if n.startswith("powersgd")])
def test_powersgd_is_torchs_own_bit_for_bit(found, name):
    for rank in found:
        for weights, true_weights in zip(
            rank[name][0], rank[name, "torch"], strict=True
        ):
            assert_same(weights, true_weights, 0, 0)
    assert differ(found[0][name][0][-1], found[0]["exact"][0][-1])


@pytest.mark.parametrize("name", ["int8", "int8 no feedback", "int4", "topk"])
def test_codes_equal_their_equation(found, name):
    compression = COMPRESSED[name]["compression"]
    feedback = "no feedback" not in name
    expected = quantized(feedback, found[0]["order"], compression)
    for rank in found:
        for weights, true_weights in zip(rank[name][0], expected, strict=True):
            assert_same(weights, true_weights)
    assert differ(found[0][name][0][-1], found[0]["exact"][0][-1])


def test_refuses_the_state_of_another_compression(found):
    for rank in found:
        assert "errors_of_mean" in rank["refused"]


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        (DDP, {"compression": "powersgd", "compression_start": 1}, "compression_start"),
        (DDP, {"compression": "powersgd", "low_rank": 0}, "low_rank"),
        (LocalSGD, {"period": 0}, "period"),
        (DiLoCo, {"outer_momentum": 1.0}, "outer_momentum"),
        (DiLoCo, {"outer_lr": 0}, "outer_lr"),
    ],
)
def test_refuses_other_options(kind, options, named):
    with pytest.raises(UserError, match=named):
        make(kind, options)


@pytest.mark.parametrize("name", [*LOCAL, *COMPRESSED])
def test_a_resumed_run_has_the_same_bits(found, name):
    for rank in found:
        weights, resumed_weights = rank[name]
        assert resumed_weights.keys() == {1, MIDDLE}
        for last in resumed_weights.values():
            assert_same(last, weights[-1], 0, 0)
