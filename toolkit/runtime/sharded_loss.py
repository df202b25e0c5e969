"""The loss of scores whose classes the devices of a rank share.

Handlers of torch's ``loss_parallel`` are needed in the backward, too. They hold for the loss alone,
so that other softmaxes stay as they are::

    local scores --DTensor--> loss        within loss_parallel, forward and backward
    local scores ------------ its value   the graph that the runtime sees
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel

from toolkit.errors import UserError
from toolkit.model.sharded_module import ShardedModule, Sharding
from toolkit.runtime.losses import CheckedLoss, LossValue


@dataclass(frozen=True)
class _LossGraph:
    """The loss within ``loss_parallel``, until its backward.

    Attributes:
        value: the loss, shape ``[]``.
        scores: local scores, which it depends on.
    """

    value: Tensor
    scores: tuple[Tensor, ...]


class _ValueOfGraph(torch.autograd.Function):
    """The value of a loss; its backward is that of its graph, within ``loss_parallel``."""

    @staticmethod
    def forward(ctx: Any, graph: _LossGraph, *outputs: Tensor) -> Tensor:
        ctx.graph = graph
        return graph.value.detach().clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        graph: _LossGraph = ctx.graph
        with loss_parallel():
            score_gradients = torch.autograd.grad(graph.value, graph.scores, gradients)
        return None, *score_gradients


@dataclass(frozen=True)
class ShardedLoss:
    """Calls a loss with DTensors of the local scores that the last stage returns.

    Attributes:
        loss: takes DTensors; its result is the same on every device.
        last_stage: whose outputs say how scores lie.
        mesh: mesh of the loss's collectives.
    """

    loss: CheckedLoss
    last_stage: ShardedModule
    mesh: DeviceMesh

    def __call__(self, outputs: Any, targets: Tensor) -> LossValue:
        """Return the loss of a micro-batch's local ``outputs``."""
        needs_gradient = torch.is_grad_enabled()
        # Leaves of a graph of its own: that of the runtime must not run into it outside of
        # loss_parallel.
        scores = tuple(
            output.detach().requires_grad_(needs_gradient and output.requires_grad)
            for output in outputs
        )
        sharded = []
        for local, sharding in zip(scores, self.last_stage.outputs, strict=True):
            sharded.append(
                local if sharding is None else _by_classes(local, sharding, self.mesh)
            )
        with loss_parallel():
            result = self.loss(tuple(sharded), targets)
        value = result.value
        if isinstance(value, DTensor):
            value = value.to_local()
        if value.requires_grad:
            value = _ValueOfGraph.apply(_LossGraph(value, scores), *outputs)
        return LossValue(value, result.count)


def _by_classes(local: Tensor, sharding: Sharding, mesh: DeviceMesh) -> DTensor:
    """Return scores ``[..., n_classes]`` as a DTensor whose last dimension is sharded."""
    last_dimension = Shard(local.dim() - 1)
    if sharding.placements != (last_dimension,):
        raise UserError(
            f"LossParallel: got scores that lie as {sharding.placements}; expected"
            f" {last_dimension}, sharded by classes. Use output_layouts=Shard(-1) and"
            " use_local_output=False, or leave out LossParallel"
        )
    # The number of samples is that of this micro-batch, since the sharding was found on an example.
    # The number of classes is that of all devices together.
    shape = torch.Size([*local.shape[:-1], sharding.shape[-1]])
    stride = torch.empty(shape, device="meta").stride()
    return Sharding(sharding.placements, shape, stride).wrap(local, mesh)
