"""What each process of the tests of gathered weights does."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.runtime import models
from tests.runtime.device_rows import refusals
from toolkit.model import partition
from toolkit.model.gathered_weights import GatheredWeight, shard_parameters
from toolkit.model.sharded_module import Sharding
from toolkit.runtime import Distributed, SingleProcess, StepOptions, join
from toolkit.runtime.process_group.columns import column
from toolkit.schedule import catalog

STEPS = 4
plain_sgd = partial(torch.optim.SGD, lr=0.1)
momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=5e-3)
nesterov = partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)
adamw = partial(torch.optim.AdamW, lr=0.01)
PLAIN = StepOptions()
CLIPPED = StepOptions(clip=0.5, ema=0.9)
RECOMPUTED = StepOptions(checkpoint="all")

# Schedule, optimizer and options; models with batch norms.
CASES = {
    "DP": (catalog.data_parallel(2), plain_sgd, PLAIN),
    "DP, Nesterov": (catalog.data_parallel(2), nesterov, CLIPPED),
    "CDP-v1": (catalog.cyclic(2, 1), plain_sgd, PLAIN),
    "CDP-v1, Nesterov": (catalog.cyclic(2, 1), nesterov, PLAIN),
    "CDP-v2": (catalog.cyclic(2), plain_sgd, PLAIN),
    "CDP-v2, momentum": (catalog.cyclic(2), momentum, CLIPPED),
    "CDP-v2, predicting": (
        catalog.cyclic(2, 1, correction="optimizer_step"),
        momentum,
        PLAIN,
    ),
    "ZeRO-CDP": (catalog.cyclic(2, state="sharded"), adamw, PLAIN),
    "1F1B": (catalog.one_f_one_b(2, 4), plain_sgd, RECOMPUTED),
    "1F1B, Nesterov": (catalog.one_f_one_b(2, 4), nesterov, CLIPPED),
    "ZB": (catalog.zero_bubble(2, 4), momentum, PLAIN),
}


class Uneven(nn.Module):
    """Matrices that two devices cannot halve, one that is frozen, and a tied one."""

    def __init__(self):
        super().__init__()
        self.near = nn.Embedding(7, 5)
        self.first = nn.Linear(5, 3)
        self.frozen = nn.Linear(3, 5).requires_grad_(False)
        self.again = nn.Linear(5, 3)
        self.again.weight = self.first.weight
        self.gain = nn.Parameter(torch.ones(1, 3))
        self.head = nn.Linear(3, 3)

    def forward(self, ids):
        x = self.frozen(torch.tanh(self.first(self.near(ids))))
        return self.head(self.gain * self.again(x).mean(1))


def uneven():
    torch.manual_seed(0)
    return Uneven().double()


def exported(model, schedule):
    assert schedule.n_stages == 2
    return models.masked_stages(model, False)


# Model, its cut, its batches and its loss.
MODELS = {
    "uneven": (uneven, models.cut_awkward, models.id_batches, F.cross_entropy),
    "dropout": (
        models.awkward,
        models.cut_awkward,
        models.id_batches,
        F.cross_entropy,
    ),
    "exported": (models.masked, exported, models.masked_batches, models.scores_loss),
}


def runtime_of(kind, schedule, optimizer, options=PLAIN, **others):
    """A runtime for models with batch norms, in float64."""
    return kind(
        models.cut(models.residual(), schedule),
        schedule,
        optimizer,
        F.cross_entropy,
        options=options,
        **others,
    )


def batches_of(schedule):
    return models.make_batches(schedule.n_microbatches, STEPS)


def after(runtime, of_steps):
    """Train, and return a copy of all weights and buffers."""
    list(runtime.run(of_steps))
    return copy.deepcopy(runtime.module().state_dict())


# Of models in 32 bits: 16-bit kernels read shards that were cast before they were gathered.
FORMATS = {
    "bf16": StepOptions(precision="bf16"),
    "channels last": StepOptions(channels_last=True),
}


def in_formats(**others):
    """The final states on 2 ranks, by format."""
    if not others:
        others = {"world": join(device="cpu")}
    schedule = catalog.cyclic(2)
    of_steps = [(images.float(), labels) for images, labels in batches_of(schedule)]
    found = {}
    for name, options in FORMATS.items():
        model = models.residual().float()
        runtime = Distributed(
            partition(model, 2, torch.zeros(3, 1, 6, 6)),
            schedule,
            nesterov,
            F.cross_entropy,
            options=options,
            **others,
        )
        found[name] = after(runtime, of_steps)
    return found


def odd_model(kind, name, **others):
    make, cut, batches, loss = MODELS[name]
    schedule = catalog.cyclic(2, n_stages=2)
    runtime = kind(cut(make(), schedule), schedule, nesterov, loss, **others)
    return after(runtime, batches(2, STEPS))


def on_devices(world, width):
    return {"world": world, "width": width, "parallelize": shard_parameters}


def on_two_devices(world):
    return on_devices(world, 2)


ON_ONE_RANK = (catalog.gradient_accumulation(2, 2), nesterov, CLIPPED)


def on_one_rank():
    """The final state on one rank of all processes."""
    world = join(device="cpu")
    options = on_devices(world, world.size)
    runtime = runtime_of(Distributed, *ON_ONE_RANK, **options)
    return after(runtime, batches_of(ON_ONE_RANK[0]))


def train_all(names):
    """Of each case on 2 ranks of 2 devices: final state and averages. Further jobs by name."""
    world = join(device="cpu")
    found = {}
    for name in names:
        schedule = CASES[name][0]
        runtime = runtime_of(Distributed, *CASES[name], **on_two_devices(world))
        state = after(runtime, batches_of(schedule))
        found[name] = state, runtime.averages()
    found["models"] = {
        name: odd_model(Distributed, name, **on_two_devices(world)) for name in MODELS
    }
    found["formats"] = in_formats(**on_two_devices(world))
    found["resumed"] = resumed(world)
    found["sizes"] = sizes(world)
    found["refused"] = refused(world)
    found["ops"] = ops(world)
    return found


RESUMED = (catalog.cyclic(2), nesterov, CLIPPED)


def resumed(world):
    """The state of a single process, taken over by ranks of two devices; and their state later."""
    alone = runtime_of(SingleProcess, *RESUMED)
    of_steps = batches_of(RESUMED[0])
    list(alone.run(of_steps[:2]))
    state = alone.state_dict()
    runtime = runtime_of(Distributed, *RESUMED, **on_two_devices(world))
    runtime.load_state_dict(state)
    taken_over = runtime.state_dict()
    list(runtime.run(of_steps[2:3]))
    return state, taken_over, runtime.state_dict()


def sizes(world):
    """Bytes of a device's weights and of their momenta, by width. Each rank updates all stages."""
    found = {}
    for width in (1, 2):
        schedule = catalog.data_parallel(world.size // width)
        options = {"world": world}
        if width > 1:
            options = on_two_devices(world)
        runtime = runtime_of(Distributed, schedule, momentum, **options)
        list(runtime.run(batches_of(schedule)[:1]))
        n_bytes = {"weights": 0, "momenta": 0}
        for updater in runtime._updaters:
            n_bytes["weights"] += sum(
                weight.untyped_storage().nbytes()
                for weight in updater.newest().values()
            )
            for entry in updater.optimizer.state.values():
                buffer = entry["momentum_buffer"]
                if isinstance(buffer, DTensor):
                    buffer = buffer.to_local()
                # Of the storage, which a view would keep whole.
                n_bytes["momenta"] += buffer.untyped_storage().nbytes()
        found[width] = n_bytes
    return found


def refused(world):
    """Messages of what devices cannot do."""

    def shard_fully(stage, mesh):
        fully_shard(stage, mesh=mesh)

    def write_in_place():
        mesh = column(world, 2).row.compute
        weight = GatheredWeight(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
        weight.add_(1)

    attempts = (
        lambda: runtime_of(
            Distributed,
            catalog.cyclic(2),
            momentum,
            **on_two_devices(world) | {"parallelize": shard_fully},
        ),
        write_in_place,
    )
    return refusals(attempts)


# What reads a weight [4, 6] in a forward.
OPS = {
    "linear": lambda x, weight: F.linear(x, weight),
    "linear with a bias": lambda x, weight: F.linear(x, weight, weight[:, 0]),
    "matmul": lambda x, weight: x[:, :4] @ weight,
    "embedding": lambda x, weight: F.embedding(x.long().abs() % 4, weight),
    "convolution": lambda x, weight: F.conv1d(
        x[:, :3, None], weight.view(4, 3, 2), padding=1
    ),
    "parts": lambda x, weight: sum(x[:, :2] @ part.t() for part in weight.chunk(3, 1)),
    "cast": lambda x, weight: F.linear(x.float(), weight.float()).double(),
    "several reads": lambda x, weight: (
        F.linear(x, weight) * weight.norm() + weight.sum()
    ),
}


@dataclass
class Reading:
    """What an op did with a weight.

    Attributes:
        output: of the op.
        gradient: of the whole weight.
        forward: names of its collectives.
        backward: likewise.
        kept_bytes: that autograd keeps of weights.
    """

    output: torch.Tensor
    gradient: torch.Tensor
    forward: Sequence[str] = ()
    backward: Sequence[str] = ()
    kept_bytes: int = 0


def operands():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(5, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    return x, torch.randn(4, 6, generator=generator, dtype=torch.float64)


class Collectives(TorchDispatchMode):
    """Lists collectives by name, also those within operations on gathered weights."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor | GatheredWeight) for kind in types):
            return NotImplemented  # their kernels come here next
        name = func._overloadpacket.__name__
        # Besides collectives, torch has ops there that wrap a result and wait for it.
        if (
            func.namespace == "_c10d_functional"
            and "tensor_autograd" not in name
            and name != "wait_tensor"
        ):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def ops(world):
    """Readings by op and sharded dimension, on a row of two devices."""
    mesh = column(world, 2).row.compute
    return {
        (name, dimension): _reading(name, dimension, mesh)
        for name in OPS
        for dimension in (0, 1)
    }


def _reading(name, dimension, mesh):
    x, whole = operands()
    sharding = Sharding((Shard(dimension),), whole.shape, whole.stride(), True)
    local = sharding.shard(whole, mesh).requires_grad_()
    kept_weights = []

    def keep(tensor):
        if isinstance(tensor, GatheredWeight):
            kept_weights.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor), Collectives() as forward:
        output = OPS[name](x, sharding.weight(local, mesh))
    with Collectives() as backward:
        output.square().sum().backward()
    return Reading(
        output.detach(),
        sharding.whole(local.grad, mesh),
        forward.names,
        backward.names,
        sum(weight.untyped_storage().nbytes() for weight in kept_weights),
    )


def reading_in_one_process(name):
    x, weight = operands()
    weight.requires_grad_()
    output = OPS[name](x, weight)
    output.square().sum().backward()
    return Reading(output.detach(), weight.grad)
