"""What trains on limited links: the methods by name, and how each is made."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from toolkit.model import build, partition
from toolkit.runtime import Distributed, World
from toolkit.runtime.baselines import DDP, DelayedAllReduce
from toolkit.schedule import Schedule, catalog

COMPUTE = "compute"
"""The same computation without any message: not a method, but what every method has to do."""

Train = Callable[[int], Iterator[object]]
"""Trains so many steps, and yields at the end of each."""


@dataclass(frozen=True)
class Method:
    runtime: Callable[..., Any]
    delay: Any  # of the weights
    options: Mapping[str, Any] = field(default_factory=dict)


def _all() -> Iterator[tuple[str, Method]]:
    half = {"compression": "bf16"}
    paced = {"pacing": True, "chunk_mb": 0.25}
    yield "DDP", Method(DDP, 0)
    yield "DDP tuned", Method(DDP, 0, {"bucket_mb": 4.0, "bucket_view": True})
    yield "DDP 16-bit", Method(DDP, 0, half)
    yield "delayed all-reduce", Method(DelayedAllReduce, 1)
    yield "delayed all-reduce 16-bit", Method(DelayedAllReduce, 1, half)
    for name, delay in (("CDP-v1", 1), ("CDP-v2", "freshest")):
        yield name, Method(Distributed, delay)
        yield f"{name} 16-bit", Method(Distributed, delay, half)
        yield f"{name} paced", Method(Distributed, delay, paced)
        yield f"{name} 16-bit paced", Method(Distributed, delay, half | paced)


METHODS = dict(_all())
ALL = (COMPUTE, *METHODS)


@dataclass(frozen=True)
class Task:
    """What every method trains."""

    workers: int
    model: str
    image_size: int
    batch: int  # images of a worker
    stages: int
    partition: Any
    chunk_mb: float | None  # of CDP's messages; None: as its runtime has it
    chains: str | None  # of CDP-v1; None: as its schedule has it
    seed: int

    def images(self) -> tuple[Tensor, Tensor]:
        """Random images of all workers, and their classes."""
        generator = torch.Generator().manual_seed(self.seed)
        n, size = self.workers * self.batch, self.image_size
        images = torch.randn(n, 3, size, size, generator=generator)
        return images, torch.randint(10, (n,), generator=generator)

    def fresh_model(self) -> torch.nn.Module:
        torch.manual_seed(self.seed)
        return build(self.model, 10, self.image_size)

    def schedule(self, method: Method) -> Schedule:
        if method.delay == 0:
            return catalog.data_parallel(self.workers, n_stages=self.stages)
        chained = method.runtime is Distributed and method.delay == 1 and self.chains is not None
        more: dict[str, Any] = {"chains": self.chains} if chained else {}
        return catalog.cyclic(self.workers, method.delay, n_stages=self.stages, **more)

    def make(self, name: str, world: World) -> Train:
        """A method, ready to train from the first weights on. Every rank calls it."""
        images, classes = self.images()
        if name == COMPUTE:
            mine = (images.chunk(self.workers)[world.rank], classes.chunk(self.workers)[world.rank])
            return _plain(self.fresh_model(), *mine)
        method = METHODS[name]
        example = images[: self.batch]
        stages = partition(self.fresh_model(), self.stages, example, by=self.partition)
        options = dict(method.options)
        if method.runtime is Distributed and self.chunk_mb is not None:
            options["chunk_mb"] = self.chunk_mb
        runtime = method.runtime(
            stages, self.schedule(method), _sgd, F.cross_entropy, world=world, **options
        )
        return lambda n_steps: runtime.run([(images, classes)] * n_steps)


def _plain(model: torch.nn.Module, images: Tensor, classes: Tensor) -> Train:
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
