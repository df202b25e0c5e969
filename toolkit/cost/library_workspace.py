"""Workspace that libraries allocate inside an operation, measured on the device.

    bytes        peak of the allocator
      |         .-- workspace: allocated and freed within the operation; no tensor has it
      |     ____|_
      |    |      |____ tensors after the operation
      | ___|
      +-----------------> time

cuDNN's convolutions choose their algorithm by shapes, data type and GPU, and algorithms by FFT or
Winograd's transform take much workspace in 32 bits: it can exceed a small stage's activations. Meta
tensors do not have it, so a GPU must measure it once for each stage.
"""

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from toolkit.cost.stage_costs import Costs, StageCost
from toolkit.cost.stage_seconds import fresh_leaves, received_inputs, timed
from toolkit.errors import UserError
from toolkit.model import Stages
from toolkit.model.generators import kept_generators
from toolkit.model.partition import check_stages
from toolkit.model.peak_memory import MemoryMeter, peaks_beside_kept
from toolkit.model.precision import autocast, check_precision
from toolkit.model.structure import tensors_of
from toolkit.model.trace import refused
from toolkit.model.traced_stage import in_training


class CudaMemory:
    """Bytes that torch's CUDA allocator was asked for, without what it adds to fill its blocks.

    Tensors and workspaces count alike.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def bytes(self) -> int:
        """Bytes in use now."""
        return self._statistic("current")

    @property
    def most(self) -> int:
        """Peak since the last restart."""
        return self._statistic("peak")

    def restart(self) -> None:
        """Set the peak to the bytes in use now."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def _statistic(self, name: str) -> int:
        n_bytes: int = torch.cuda.memory_stats(self.device)[
            f"requested_bytes.all.{name}"
        ]
        return n_bytes


def add_library_workspace(
    costs: Costs,
    stages: Stages,
    example: Any,
    precision: str = "fp32",
    memory: MemoryMeter | None = None,
) -> tuple[StageCost, ...]:
    """Return ``costs`` with the working bytes of each stage as the device's allocator has them.

    Each stage runs twice, forward and backward; the second run counts. The first one loads the
    libraries, which keep some memory from then on.

    Args:
        costs: costs of ``stages``, from :func:`toolkit.cost.profile`.
        stages: a partitioned model, on the device.
        example: a micro-batch on the device, as for :func:`toolkit.cost.profile`.
        precision: as for :func:`toolkit.cost.profile`.
        memory: meter of the device; None: torch's CUDA allocator.

    Raises:
        UserError: the example is not on a GPU, and ``memory`` is None.
    """
    check_stages(stages)
    check_precision(precision)
    values = tensors_of(example)
    device = values[0].device
    if memory is None:
        if device.type != "cuda":
            raise UserError(
                f"library workspace is measured on a GPU: got an example on {device}; expected cuda"
            )
        memory = CudaMemory(device)
    measured: list[StageCost] = []
    with refused(stages.model, values), kept_generators(values):
        for cost, stage in zip(costs, stages, strict=True):
            # A copy: running statistics change.
            stage_copy = in_training(copy.deepcopy(stage))
            # cuDNN chooses algorithms and loads kernels in the first run; those stay in memory.
            first_run = partial(stage_copy, *fresh_leaves(values))
            *_, outputs = timed(first_run, device, precision)
            # It holds the inputs of the run, with their gradients: they would count as in use.
            del first_run
            # Or the second run would add to these gradients.
            stage_copy.zero_grad(set_to_none=True)
            forward_bytes, backward_bytes = peaks_beside_kept(
                forward=partial(stage_copy, *fresh_leaves(values)),
                memory=memory,
                precision=autocast(precision, device),
            )
            measured.append(
                replace(
                    cost,
                    forward_working_bytes=forward_bytes,
                    backward_working_bytes=backward_bytes,
                )
            )
            # Real outputs, since the next stage has to run on the device as well.
            values = received_inputs(outputs)
    return tuple(measured)
