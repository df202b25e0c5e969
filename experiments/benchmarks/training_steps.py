"""Training steps that benchmarks compare: plain PyTorch, and order "grouped"."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit.model import build, partition
from toolkit.runtime import SingleProcess, StepOptions
from toolkit.runtime.step_options import allow_tf32
from toolkit.schedule import Schedule, catalog

N_CLASSES = 10
# Uncounted steps; the second one is the first that reads weights of two versions.
WARM_UP = 3

Step = Callable[[Tensor, Tensor], object]


@dataclass(frozen=True)
class Setting:
    """What all methods of a benchmark have in common.

    Attributes:
        config: options of the benchmark.
        device: where they compute.
        model: the model, which each method copies.
        inputs: images of a training step, ``[n_microbatches * b, 3, size, size]``.
        targets: their classes.
        options: precision, memory format, compilation and norms.
    """

    config: DictConfig
    device: torch.device
    model: nn.Module
    inputs: Tensor
    targets: Tensor
    options: StepOptions

    @classmethod
    def of(cls, config: DictConfig, device: torch.device, seed: int) -> "Setting":
        """Return the setting of a benchmark's options."""
        torch.manual_seed(seed)
        n_images = config.microbatches * config.batch
        size = config.image_size
        options = StepOptions(
            precision=config.precision,
            channels_last=config.channels_last,
            compile=config.compile,
            norms=config.norms,
        )
        allow_tf32(options.precision == "tf32")
        model = build(config.model, N_CLASSES, size).to(device)
        inputs, targets = random_images(n_images, size, device)
        return cls(
            config=config,
            device=device,
            model=model,
            inputs=inputs,
            targets=targets,
            options=options,
        )

    def plain(self) -> "Plain":
        """Return plain PyTorch."""
        # Each method trains a copy, so that all start from the same weights.
        return Plain(copy.deepcopy(self.model), self.options, self.device)

    def data_parallel(self) -> SingleProcess:
        """Return DP in order "grouped"."""
        config = self.config
        return self._grouped(
            catalog.data_parallel(config.microbatches, n_stages=config.stages)
        )

    def cyclic(self) -> SingleProcess:
        """Return CDP-v2 in order "grouped"."""
        config = self.config
        return self._grouped(
            catalog.cyclic(config.microbatches, n_stages=config.stages)
        )

    def _grouped(self, schedule: Schedule) -> SingleProcess:
        example = self.inputs[: self.config.batch]
        return SingleProcess(
            partition(copy.deepcopy(self.model), self.config.stages, example),
            schedule,
            sgd,
            F.cross_entropy,
            options=self.options,
            capture=self.config.capture,
        )


class Plain:
    """A model under plain PyTorch, as one would write it."""

    def __init__(
        self, model: nn.Module, options: StepOptions, device: torch.device
    ) -> None:
        self.options = options
        self.device = device
        self.model: Any = model.train()
        if options.channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)
        self.optimizer = sgd(self.model.parameters())
        if options.compile != "none":
            self.model = torch.compile(self.model, mode=options.compile)

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of a training step."""
        if self.options.channels_last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        self.options.begin_step()
        self.optimizer.zero_grad()
        with self.options.autocast(self.device):
            loss = F.cross_entropy(self.model(inputs), targets)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def capture(self, inputs: Tensor, targets: Tensor) -> Step:
        """Return a function that replays a training step as a CUDA graph."""
        # A graph reads and writes fixed addresses: batches are copied to the ones that it has
        # recorded.
        own_inputs = inputs.clone()
        own_targets = targets.clone()
        # The first steps allocate the optimizer's state and workspaces, which a graph must not
        # record. torch asks for these steps on a stream of their own.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self.step(own_inputs, own_targets)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = self.step(own_inputs, own_targets)

        def replay(inputs: Tensor, targets: Tensor) -> Tensor:
            own_inputs.copy_(inputs)
            own_targets.copy_(targets)
            graph.replay()
            # The next replay overwrites the loss.
            return loss.clone()

        return replay


def random_images(
    n: int,
    size: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Return images ``[n, 3, size, size]`` and their classes, drawn by torch's generator."""
    images = torch.randn(n, 3, size, size, device=device, dtype=dtype)
    return images, torch.randint(N_CLASSES, (n,), device=device)


momentum_sgd = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
"""The optimizer of benchmarks that compare messages: the simplest that has a state."""


def sgd(parameters: Any) -> torch.optim.SGD:
    """Return the optimizer of training steps that are timed on one device."""
    # As on a GPU by default: one operation for all weights.
    return torch.optim.SGD(
        parameters, lr=0.01, momentum=0.9, weight_decay=5e-4, foreach=True
    )
