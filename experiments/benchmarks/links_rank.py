"""The ranks of the benchmark of links: what each trains, and in which order."""

import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import network
from toolkit.model import build, partition
from toolkit.runtime import Distributed, World, join, report
from toolkit.runtime.baselines import DDP, DelayedAllReduce
from toolkit.schedule import Schedule, catalog

Task = SimpleNamespace
"""What every method trains: the options of the benchmark, and ``workers`` and ``seed``."""
Train = Callable[[int], Iterator[object]]
"""Trains a number of steps, and yields at the end of each."""
Times = list[list[float]]
"""Of each rank when its steps ended, by time.monotonic(), which a machine's processes share."""

_COMPUTES = 5  # runs without messages; their median counts
_SENDS = 3  # of all parameters; their median counts
_HALF = {"compression": "bf16"}
_PACED = {"pacing": True, "chunk_mb": 0.25}
METHODS: dict[str, tuple[Callable[..., Any], Any, dict[str, Any]]] = {
    "DDP": (DDP, 0, {}),
    "DDP tuned": (DDP, 0, {"bucket_mb": 4.0, "bucket_view": True}),
    "DDP 16-bit": (DDP, 0, _HALF),
    "delayed all-reduce": (DelayedAllReduce, 1, {}),
    "delayed all-reduce 16-bit": (DelayedAllReduce, 1, _HALF),
    **{
        f"{name}{suffix}": (Distributed, delay, options)
        for name, delay in (("CDP-v1", 1), ("CDP-v2", "freshest"))
        for suffix, options in (
            ("", {}),
            (" 16-bit", _HALF),
            (" paced", _PACED),
            (" 16-bit paced", _HALF | _PACED),
        )
    },
}
"""Of each method the runtime, the delay of its weights, and the runtime's options."""
COMPUTE = "compute"
"""The same computation without any message: a lower bound, not a method."""
ALL = (COMPUTE, *METHODS)


@dataclass(frozen=True)
class Link:
    """One setting of the links."""

    workers: int
    ratio: float  # of M to C that was asked for; 0: no limit
    mbit: float | None  # a second, of the limit
    compute: float  # C: seconds of a step without messages
    one_way: float  # M: seconds in which all parameters go from one rank to another

    @property
    def name(self) -> str:
        return link_name(self.ratio)


def link_name(ratio: float) -> str:
    return "unshaped" if ratio == 0 else f"M = {'' if ratio == 1 else f'{ratio:g} '}C"


def images_of(task: Task) -> tuple[Tensor, Tensor]:
    """Random images of all workers, and their classes."""
    torch.manual_seed(task.seed)
    n, size = task.workers * task.batch, task.image_size
    return torch.randn(n, 3, size, size), torch.randint(10, (n,))


def fresh_model(task: Task) -> nn.Module:
    torch.manual_seed(task.seed)
    return build(task.model, 10, task.image_size)


def schedule_of(task: Task, method: str) -> Schedule:
    runtime, delay, _ = METHODS[method]
    if delay == 0:
        return catalog.data_parallel(task.workers, n_stages=task.stages)
    chains = "rotated" if runtime is Distributed and delay == 1 else "in_order"
    return catalog.cyclic(task.workers, delay, n_stages=task.stages, chains=chains)


def make(task: Task, method: str, world: World) -> Train:
    """Make a method, ready to train from the first weights on. Every rank calls it."""
    images, classes = images_of(task)
    model = fresh_model(task)
    if method == COMPUTE:
        mine = (whole.chunk(task.workers)[world.rank] for whole in (images, classes))
        return _plain(model, *mine)
    runtime, _, options = METHODS[method]
    stages = partition(model, task.stages, images[: task.batch], by=task.partition)
    schedule = schedule_of(task, method)
    made = runtime(stages, schedule, _sgd, F.cross_entropy, world=world, **options)
    return lambda n_steps: made.run([(images, classes)] * n_steps)


def _plain(model: nn.Module, images: Tensor, classes: Tensor) -> Train:
    optimizer = _sgd(model.parameters())

    def train(n_steps: int) -> Iterator[None]:
        for _ in range(n_steps):
            optimizer.zero_grad()
            F.cross_entropy(model(images), classes).backward()
            optimizer.step()
            yield

    return train


def _sgd(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def train_all(net: network.Network, task: Task) -> None:
    """Measure the links, then train by every method in all rounds on all links, as one rank.

    Rank 0 reports the links, then of each run its link, round, method, and :data:`Times`.
    """
    rank = int(os.environ["RANK"])
    network.enter(net.ranks[rank])
    # The store of ``launch`` cannot be reached from here, so rank 0 has another.
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    os.environ |= {"MASTER_ADDR": network.address(0), "MASTER_PORT": "29500"}
    os.environ["GLOO_SOCKET_IFNAME"] = network.INTERFACE
    torch.set_num_threads(1)
    world = join(device="cpu", timeout=task.timeout)
    made: dict[str, Train] = {}

    def shape(rate: float | None) -> None:
        if rank == 0:
            net.shape(rate)
        world.barrier()

    def train(method: str) -> Times:
        if method not in made:
            made[method] = make(task, method, world)
        world.barrier()
        return world.gather([time.monotonic() for _ in made[method](task.steps)])

    def send(n_bytes: int) -> float:
        """Seconds from rank 0 to rank 1."""
        content = torch.zeros(n_bytes, dtype=torch.uint8)
        world.barrier()
        begin = time.monotonic()
        if rank < 2:
            dist.recv(content, 0) if rank else dist.send(content, 1)
        moments = world.gather(time.monotonic() if rank else begin)
        return moments[1] - moments[0]

    n_bytes = sum(4 * parameter.numel() for parameter in fresh_model(task).parameters())
    links = calibrate(task, n_bytes, shape, train, send)
    methods = list(task.methods or ALL)
    if rank == 0:
        report(links)
    for number in range(task.rounds):
        for link in links:
            shape(None if link.mbit is None else 1e6 * link.mbit)
            chance = random.Random(f"{task.seed} {number} {link.name}")
            for method in chance.sample(methods, len(methods)):
                times = train(method)
                if rank == 0:
                    report((link, number, method, times))


def calibrate(
    task: Task,
    n_bytes: int,
    shape: Callable[[float | None], object],
    train: Callable[[str], Times],
    send: Callable[[int], float],
) -> list[Link]:
    """Measure C, limit the links so that M is a multiple of it, and measure M."""
    compute = median(step_time(train(COMPUTE), task.skip) for _ in range(_COMPUTES))
    links = []
    for ratio in task.ratios:
        rate = 8 * n_bytes / (ratio * compute) if ratio else None
        shape(rate)
        one_way = median(send(n_bytes) for _ in range(_SENDS))
        mbit = None if rate is None else rate / 1e6
        links.append(Link(task.workers, ratio, mbit, compute, one_way))
    return links


def step_time(times: Times, skip: int) -> float:
    """Seconds of a step of the slowest rank, from the end of step ``skip`` (from 0) on."""
    return max((moments[-1] - moments[skip]) / (len(moments) - 1 - skip) for moments in times)
