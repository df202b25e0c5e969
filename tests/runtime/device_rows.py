"""What each process of the tests of ranks of several devices does."""

import copy
import os
import signal
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

from tests.stages import cut as cut_once
from tests.thorough import THOROUGH
from toolkit.errors import UserError
from toolkit.runtime import Distributed, SingleProcess, StepOptions, join
from toolkit.schedule import catalog

STEPS = 4


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


def blocks(dropout=0.0):
    """Four blocks of sequences ``[b, 4, 6]`` in float64; one weight is frozen."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(dropout) for _ in range(4))).double()
    model[1].norm.bias.requires_grad_(False)
    model[2].up.weight.requires_grad_(False)
    return model


class NormedBlock(Block):
    """Normalises each of 4 tokens by the batch."""

    def __init__(self, dropout):
        super().__init__(dropout)
        self.norm = nn.BatchNorm1d(4)


def normed_blocks(dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(*(NormedBlock(dropout) for _ in range(4))).double()


def batches(n_microbatches, steps=STEPS):
    generator = torch.Generator().manual_seed(1)
    shape = (2 * n_microbatches, 4, 6)
    pairs = []
    for _ in range(steps):
        inputs = torch.randn(shape, generator=generator, dtype=torch.float64)
        targets = torch.randn(shape, generator=generator, dtype=torch.float64)
        pairs.append((inputs, targets))
    return pairs


def in_plan(stage, mesh, plan):
    """Shard the modules of a stage whose last name is in ``plan``."""
    for name, module in [*stage.named_modules()]:
        style = plan.get(name.rpartition(".")[2])
        if style is not None:
            parallelize_module(module, mesh, style)


def by_columns_and_rows(stage, mesh):
    """Activations are whole on each device, outside of the two layers."""
    in_plan(stage, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def by_sequence(stage, mesh):
    """Each device has some of the tokens; what crosses boundaries is a DTensor."""
    plan = {
        "norm": SequenceParallel(use_local_output=False),
        "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    in_plan(stage, mesh, plan)
    names = [name for name, _ in stage.named_modules()]
    if "0.up" in names:  # the first stage
        stage.register_forward_pre_hook(partial(_scatter, mesh))


def _scatter(mesh, stage, inputs):
    scattered = DTensor.from_local(inputs[0], mesh, [Replicate()]).redistribute(
        mesh, [Shard(1)]
    )
    return (scattered, *inputs[1:])


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=5e-3)


def nesterov(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


CLIPPED = StepOptions(clip=0.05, ema=0.9)
RECOMPUTED = StepOptions(checkpoint="all")


def cases():
    """Name, schedule, optimizer, options and sharding of each case on ranks of two devices."""
    plain = StepOptions()
    v2 = catalog.cyclic(2)
    return [
        ("DP", catalog.data_parallel(2), sgd, CLIPPED, by_columns_and_rows),
        ("CDP-v1", catalog.cyclic(2, 1), nesterov, plain, by_sequence),
        ("CDP-v2", v2, adamw, CLIPPED, by_columns_and_rows),
        (
            "CDP-v2 accumulating",
            catalog.cyclic(2, accumulate=2),
            sgd,
            plain,
            by_sequence,
        ),
        ("ZeRO-CDP", catalog.cyclic(2, state="sharded"), adamw, CLIPPED, by_sequence),
        ("GPipe", catalog.gpipe(2, 4), nesterov, RECOMPUTED, by_sequence),
        ("1F1B", catalog.one_f_one_b(2, 4), sgd, CLIPPED, by_columns_and_rows),
        (
            "interleaved",
            catalog.interleaved_1f1b(4, 4, 2),
            adamw,
            RECOMPUTED,
            by_columns_and_rows,
        ),
        ("ZB-V", catalog.zb_v(4, 4), sgd, CLIPPED, by_sequence),
        ("DualPipeV", catalog.dualpipe_v(4, 4), adamw, plain, by_columns_and_rows),
        ("2BW", catalog.pipedream_2bw(2, 4), nesterov, CLIPPED, by_sequence),
        (
            "predicting",
            catalog.cyclic(2, 1, correction="optimizer_step"),
            adamw,
            plain,
            by_columns_and_rows,
        ),
    ]


def cut(model, schedule):
    weight = next(model.parameters())
    example = torch.zeros(2, 4, 6, dtype=weight.dtype, device=weight.device)
    return cut_once(model, schedule.n_stages, example, by="parameters")


def single(schedule, optimizer, options, **others) -> SingleProcess:
    stages = cut(others.pop("model", None) or blocks(), schedule)
    return SingleProcess(
        stages, schedule, optimizer, F.mse_loss, options=options, **others
    )


def on_devices(
    world, schedule, optimizer, options, parallelize, **others
) -> Distributed:
    stages = cut(others.pop("model", None) or blocks(), schedule)
    return Distributed(
        stages,
        schedule,
        optimizer,
        F.mse_loss,
        options=options,
        parallelize=parallelize,
        **{"world": world, "width": 2} | others,
    )


def weights_after(runtime, of_steps):
    """Train, and return a copy of all weights and buffers."""
    list(runtime.run(of_steps))
    return copy.deepcopy(runtime.module().state_dict())


def train_all(names=None) -> dict[str, Any]:
    """States, averages and losses of the cases."""
    world = join(device="cpu")
    found = {}
    for name, schedule, optimizer, options, parallelize in cases():
        if names is not None and name not in names:
            continue
        runtime = on_devices(world, schedule, optimizer, options, parallelize)
        losses = [
            result.losses for result in runtime.run(batches(schedule.n_microbatches))
        ]
        found[name] = {
            "state": copy.deepcopy(runtime.module().state_dict()),
            "averages": runtime.averages(),
            "losses": losses,
        }
    return found


def on_gpus() -> dict[str, Any]:
    """Final weights under CDP-v2 and GPipe, on the CPU; two ranks of two devices."""
    world = join()
    found = {}
    for name, schedule, parallelize in (
        ("CDP-v2", catalog.cyclic(2), by_columns_and_rows),
        ("GPipe", catalog.gpipe(2, 4), by_sequence),
    ):
        model = blocks().to(world.device)
        runtime = on_devices(world, schedule, sgd, CLIPPED, parallelize, model=model)
        state = weights_after(runtime, batches(schedule.n_microbatches))
        found[name] = {key: tensor.cpu() for key, tensor in state.items()}
    return found


def odd_jobs() -> dict[str, Any]:
    """What one schedule is enough to show, on 2 ranks of 2 devices."""
    world = join(device="cpu")
    found = {
        "dropout": _dropped(world, by_columns_and_rows),
        "resumed": _resumed(world),
        "refused": _refused(world),
        "peaks": _peaks(world),
        "norms": _with_norms(world),
    }
    if THOROUGH:
        found |= {
            "draws of shards": _draws_of_shards(world),
            "switched": _switched(world),
            "mesh": _in_mesh(world),
            "16 bits": _in_16_bits(world),
        }
    return found


ADAMW_1F1B = (catalog.one_f_one_b(2, 4), adamw, CLIPPED)


def _dropped(world, parallelize):
    case = catalog.cyclic(2), sgd, StepOptions()
    runtime = on_devices(world, *case, parallelize, model=blocks(0.3), seed=5)
    return weights_after(runtime, batches(2))


def _draws_of_shards(world):
    """The model's outputs for 4 equal tokens; each device has 2 of them."""
    runtime = on_devices(
        world, catalog.gpipe(2, 2), sgd, StepOptions(), by_sequence, model=blocks(0.5)
    )
    (inputs, targets), *_ = batches(2)
    equal_tokens = inputs[:, :1].expand(-1, 4, -1)
    return runtime.step(equal_tokens, targets).outputs


def _resumed(world):
    """The state of a single process, taken over by ranks of two devices; and their state later."""
    alone = single(*ADAMW_1F1B)
    list(alone.run(batches(4)[:2]))
    runtime = on_devices(world, *ADAMW_1F1B, by_sequence)
    state = alone.state_dict()
    runtime.load_state_dict(state)
    taken_over = runtime.state_dict()
    list(runtime.run(batches(4)[2:3]))
    return state, taken_over, runtime.state_dict()


def _switched(world):
    case = catalog.cyclic(2, n_stages=2), adamw, StepOptions()
    runtime = on_devices(world, *case, by_columns_and_rows)
    list(runtime.run(batches(2)[:2]))
    runtime.switch(catalog.gpipe(2, 2))
    return weights_after(runtime, batches(2)[2:])


def _in_mesh(world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("schedule", "tensor"))
    case = catalog.gpipe(2, 4), sgd, CLIPPED
    runtime = on_devices(world, *case, by_columns_and_rows, width=mesh)
    return weights_after(runtime, batches(4))


def _peaks(world):
    """Bytes of the weights of a rank's device, with a width of 2."""
    case = catalog.gpipe(2, 4), sgd, StepOptions()
    runtime = on_devices(world, *case, by_columns_and_rows, record=1, overlap=False)
    list(runtime.run(batches(4)[:1]))
    return runtime.measurements().peak_weights()


IN_16_BITS = {
    "DP": (catalog.data_parallel(2), by_columns_and_rows),
    "CDP-v1": (catalog.cyclic(2, 1), by_columns_and_rows),
    "CDP-v2": (catalog.cyclic(2), by_sequence),
    "1F1B": (catalog.one_f_one_b(2, 4), by_sequence),
}
BF16 = StepOptions(precision="bf16")


def single_batches(n_microbatches):
    return [
        (inputs.float(), targets.float()) for inputs, targets in batches(n_microbatches)
    ]


def _in_16_bits(world):
    """Final weights of 32 bits, by case; stages compute in 16, and so do their collectives."""
    found = {}
    for name, (schedule, parallelize) in IN_16_BITS.items():
        model = blocks().float()
        runtime = on_devices(world, schedule, sgd, BF16, parallelize, model=model)
        found[name] = weights_after(runtime, single_batches(schedule.n_microbatches))
    return found


WITH_NORMS = {
    "DP": catalog.data_parallel(2),
    "CDP-v2": catalog.cyclic(2),
    "1F1B": catalog.one_f_one_b(2, 4),
}


def _with_norms(world):
    """Final weights and running statistics, by case."""
    found = {}
    for name, schedule in WITH_NORMS.items():
        runtime = on_devices(
            world, schedule, sgd, CLIPPED, by_columns_and_rows, model=normed_blocks()
        )
        found[name] = weights_after(runtime, batches(schedule.n_microbatches))
    return found


def _refused(world):
    """Messages of what is refused; the first is raised on every process alike."""
    case = catalog.gpipe(2, 4), sgd, StepOptions()
    unlike = catalog.gpipe(2, 4 if world.rank != 3 else 5), sgd, StepOptions()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    attempts = (
        lambda: on_devices(world, *unlike, by_columns_and_rows),
        lambda: on_devices(world, *case, None),
        lambda: on_devices(world, *case, by_columns_and_rows, width=3),
        lambda: on_devices(world, *case, by_columns_and_rows, width=mesh),
        lambda: on_devices(world, *case, by_columns_and_rows, width=0),
        lambda: on_devices(
            world, *case[:2], StepOptions(compile="default"), by_columns_and_rows
        ),
    )
    return refusals(attempts)


def refusals(attempts):
    """The message of each attempt's UserError; empty where there is none."""
    messages = []
    for attempt in attempts:
        try:
            attempt()
        except UserError as error:
            messages.append(str(error))
        else:
            messages.append("")
    return messages


def killed() -> None:
    """Train until process 3 dies within an op."""
    world = join(device="cpu", timeout=10)
    runtime = on_devices(
        world, catalog.one_f_one_b(2, 4), dying(world), StepOptions(), by_sequence
    )
    list(runtime.run(batches(4)))


class Dies(torch.optim.SGD):
    def step(self, closure=None):
        os.kill(os.getpid(), signal.SIGKILL)


def dying(world):
    if world.rank == 3:
        return partial(Dies, lr=0.1)
    return sgd


class GainedBlock(Block):
    """Its gain is whole on each device, and meets the device's shard of the hidden units."""

    def __init__(self):
        super().__init__(0.0)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x + self.down(self.gain * torch.tanh(self.up(self.norm(x))))


def train_with_gains() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(GainedBlock(), GainedBlock()).double()
    case = catalog.gpipe(2, 4), sgd, StepOptions()
    runtime = on_devices(join(device="cpu"), *case, by_columns_and_rows, model=model)
    list(runtime.run(batches(4)[:1]))


def of_four_devices(name: str) -> dict[str, Any]:
    """The final weights of a case, on 2 ranks of 4 devices."""
    world = join(device="cpu")
    (case,) = [case for case in cases() if case[0] == name]
    _, schedule, optimizer, options, parallelize = case
    runtime = on_devices(world, schedule, optimizer, options, parallelize, width=4)
    return weights_after(runtime, batches(schedule.n_microbatches))
