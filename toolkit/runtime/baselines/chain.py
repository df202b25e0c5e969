"""All stages, one after another, as one module that torch's wrappers can take."""

import copy
from itertools import chain

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from toolkit.errors import UserError
from toolkit.model import Stages
from toolkit.model.trace import draws_at_random, in_training
from toolkit.runtime.stage import drawing


class Chain(nn.Module):
    """The stages in training mode, whatever mode the model is in. It shares the model's tensors.

    Args:
        stages: the model, partitioned.
        seed: with step, stage and micro-batch it seeds what a stage draws at random.

    Raises:
        ValueError: a norm mixes the micro-batches, or there is nothing to train.
    """

    def __init__(self, stages: Stages, seed: int) -> None:
        super().__init__()
        for name, module in stages.model.named_modules():
            if isinstance(module, nn.SyncBatchNorm):
                raise UserError(
                    f"{name} is a SyncBatchNorm, and each micro-batch is normalised by its own"
                    " statistics: use the plain BatchNorm"
                )
        tensors = chain(stages.model.parameters(), stages.model.buffers())
        memo = {id(tensor): tensor for tensor in tensors}
        self.stages = nn.ModuleList(map(in_training, copy.deepcopy(list(stages), memo)))
        self.seed = seed
        self._random = [draws_at_random(stage) for stage in self.stages]
        self._at = (0, 0)

    def at(self, step: int, microbatch: int) -> None:
        """Say what the next forward is of."""
        self._at = (step, microbatch)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Inputs ``[b, ...]`` to the model's output ``[b, ...]``."""
        values = inputs
        for j, stage in enumerate(self.stages):
            if self._random[j]:
                step, microbatch = self._at
                with drawing(values, self.seed, step, j, microbatch):
                    values = stage(*values)
            else:
                values = stage(*values)
        return values[0]

    def norms(self) -> list[_BatchNorm]:
        """The batch norms whose running statistics advance."""
        norms = (m for m in self.modules() if isinstance(m, _BatchNorm) and m.training)
        return [norm for norm in norms if norm.running_mean is not None]
