"""Plans that leave the scores of the last stage where they are made, on the devices of a rank.

Each device has the scores of some classes, and the loss is found from them by three small
collectives: torch's ``loss_parallel``. No device makes the scores of all classes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

REDUCTIONS = 3
"""All-reduces of a number for each sample: the largest score, the sum, and the right class's."""


@dataclass(frozen=True)
class LossParallel:
    """Marks a plan after which the last stage returns DTensors that are sharded by classes.

    The loss is then called with such DTensors ``[..., n_classes]`` within torch's
    ``loss_parallel``, which knows ``cross_entropy`` without label smoothing.

    Args:
        parallelize: shards a stage, as for :class:`toolkit.runtime.Distributed`.
    """

    parallelize: Callable[[nn.Module, DeviceMesh], Any]

    def __call__(self, stage: nn.Module, mesh: DeviceMesh) -> Any:
        """Shard the modules of ``stage``."""
        return self.parallelize(stage, mesh)


def is_loss_parallel(parallelize: Callable[[nn.Module, DeviceMesh], Any]) -> bool:
    """Whether the last stage's outputs stay sharded by classes."""
    return isinstance(parallelize, LossParallel)
