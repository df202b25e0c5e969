"""One stage at work: it computes with any weight version, and updates its newest."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from toolkit.runtime.norm import Group, advance_running_statistics, replace_norms

Weights = dict[str, Tensor]
"""One version of a stage's trainable parameters, by name. Never changed in place once shared."""

Values = tuple[Tensor, ...]
"""The tensors that cross a boundary."""

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]
MakeScheduler = Callable[[Optimizer], LRScheduler]


class Sum:
    """Gradients of a stage's weights and statistics of its norms, summed over micro-batches.

    It takes the tensors that it is given as its own.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def add(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if name in self.tensors:
                self.tensors[name].add_(tensor)
            else:
                self.tensors[name] = tensor


class StageWorker:
    """A stage as one rank runs it.

    Args:
        stage: the stage; its parameters are the newest weights and are updated in place.
        index: which stage it is.
        seed: with step, stage and micro-batch it seeds what the stage draws at random (dropout),
            so that no runtime, order or grouping changes the draws.
    """

    def __init__(
        self,
        stage: nn.Module,
        index: int,
        make_optimizer: MakeOptimizer,
        make_scheduler: MakeScheduler | None,
        seed: int,
    ) -> None:
        self.index = index
        self.seed = seed
        self.makers = (make_optimizer, make_scheduler)
        self.stage = stage
        self.masters = {k: p for k, p in stage.named_parameters() if p.requires_grad}
        self.group = Group()
        tensors = chain(stage.parameters(), stage.buffers())
        self.compute = copy.deepcopy(stage, {id(tensor): tensor for tensor in tensors}).train()
        self.norms = replace_norms(self.compute, self.group)
        self.random = draws_at_random(self.compute)
        self.optimizer = make_optimizer(list(self.masters.values())) if self.masters else None
        self.scheduler = (
            make_scheduler(self.optimizer) if make_scheduler and self.optimizer else None
        )

    def replica(self) -> "StageWorker":
        """A copy with parameters and optimizer state of its own."""
        twin = StageWorker(copy.deepcopy(self.stage), self.index, *self.makers, self.seed)
        twin.load(
            self.optimizer.state_dict() if self.optimizer else None,
            self.scheduler.state_dict() if self.scheduler else None,
        )
        return twin

    def load(self, optimizer: dict[str, Any] | None, scheduler: dict[str, Any] | None) -> None:
        """Take over a copy of the state of another stage's optimizer and learning-rate schedule."""
        if self.optimizer is not None and optimizer is not None:
            self.optimizer.load_state_dict(copy.deepcopy(optimizer))
        if self.scheduler is not None and scheduler is not None:
            self.scheduler.load_state_dict(copy.deepcopy(scheduler))

    @property
    def learning_rate(self) -> float | None:
        """That of the next update; None where there is nothing to train."""
        return self.optimizer.param_groups[0]["lr"] if self.optimizer else None

    def newest(self) -> Weights:
        """The newest version. It shares memory with the parameters until the next update."""
        return {name: master.data for name, master in self.masters.items()}

    def forward(
        self, weights: Weights, inputs: Values, microbatches: Sequence[int], step: int
    ) -> Values:
        """Run micro-batches that read the same weights as one batch."""
        if not self.random:
            self.group.size = len(microbatches)
            return torch.func.functional_call(self.compute, weights, inputs)
        self.group.size = 1
        parts = zip(*(tensor.chunk(len(microbatches)) for tensor in inputs), strict=True)
        outputs = []
        for microbatch, part in zip(microbatches, parts, strict=True):
            with drawing(part, self.seed, step, self.index, microbatch):
                outputs.append(torch.func.functional_call(self.compute, weights, part))
        return tuple(torch.cat(tensors) for tensors in zip(*outputs, strict=True))

    def take_statistics(self) -> dict[str, Tensor]:
        """What the norms have summed since this was last called, by the norm's name."""
        taken = {name: norm.take_statistics() for name, norm in self.norms.items()}
        return {name: statistics for name, statistics in taken.items() if statistics is not None}

    def update(self, total: Sum, n_microbatches: int, *, keep_old: bool) -> None:
        """One optimizer step on the newest weights; then the learning rate of the next.

        Args:
            total: the sum over all micro-batches of the gradients of (loss / n_microbatches) and
                of the norms' statistics.
            n_microbatches: how many there are.
            keep_old: whether someone still reads the version before. If so the new one gets
                memory of its own.
        """
        for name, master in self.masters.items():
            if keep_old:
                master.data = master.data.clone()
            master.grad = total.tensors.get(name)
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        if self.scheduler is not None:
            self.scheduler.step()
        for name in self.norms:
            if name in total.tensors:
                norm = self.stage.get_submodule(name)
                assert isinstance(norm, _BatchNorm)
                advance_running_statistics(norm, total.tensors[name] / n_microbatches)


def leaves(weights: Weights) -> Weights:
    """The same memory as leaves of a new graph, to gather gradients apart from the parameters."""
    return {name: tensor.detach().requires_grad_() for name, tensor in weights.items()}


def gradients(weights: Weights) -> dict[str, Tensor]:
    """What backward has left on ``leaves``."""
    return {name: leaf.grad for name, leaf in weights.items() if leaf.grad is not None}


@contextmanager
def drawing(inputs: Values, seed: int, step: int, stage: int, microbatch: int) -> Iterator[None]:
    """Draw at random what belongs to a stage on a micro-batch; the generators are kept."""
    with torch.random.fork_rng({tensor.device for tensor in inputs if tensor.is_cuda}):
        torch.manual_seed(hash((seed, step, stage, microbatch)))
        yield


_RANDOM_MODULES = (nn.modules.dropout._DropoutNd, nn.RReLU)
_RANDOM_FUNCTIONS = ("dropout", "stochastic_depth", "bernoulli", "rrelu", "rand", "normal_")


def draws_at_random(stage: nn.Module) -> bool:
    """Whether a stage's forward in training may use a random generator."""
    for module in stage.modules():
        if isinstance(module, _RANDOM_MODULES) and getattr(module, "p", 1) > 0:
            return True
        if isinstance(module, nn.MultiheadAttention | nn.RNNBase) and module.dropout > 0:
            return True
    if not isinstance(stage, fx.GraphModule):
        return False
    names = (
        getattr(node.target, "__name__", str(node.target))
        for node in stage.graph.nodes
        if node.op in ("call_function", "call_method")
    )
    return any(word in name for name in names for word in _RANDOM_FUNCTIONS)
