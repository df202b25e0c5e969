"""How stages compute and update, whatever the schedule: precision, memory, clipping, averages."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from math import inf
from numbers import Real
from operator import lt
from typing import Any

import torch
from torch import Tensor

from toolkit.errors import UserError, check_choice
from toolkit.model.checkpoints import check_checkpoint, recomputes
from toolkit.model.precision import autocast, autocast_type, check_precision
from toolkit.options import StepSettings
from toolkit.runtime.fused_norm import can_compile
from toolkit.schedule import Schedule
from toolkit.schedule.staleness import freshest

Loss = Callable[[Any, Tensor], Any]
"""From what the model returns, and targets, to the loss of a micro-batch.

Either its mean, shape ``[]``, or ``(sum, count)``: the loss of a training step is then the sum over
all micro-batches divided by their total count, such as the number of valid tokens.
"""

COMPILE_MODES = ("none", "default", "reduce-overhead", "max-autotune")
NORMS = ("auto", "fused", "separate")
_CLIP_BY = ("stage", "model")


@dataclass(frozen=True)
class StepOptions(StepSettings):
    """Techniques that users add to a training step; each combines with every schedule.

    Args:
        precision: ``fp32`` or ``tf32``, which differ on NVIDIA GPUs only, by the setting of
            :func:`allow_tf32` for the whole process; ``bf16`` or ``fp16``: torch's autocast over
            weights of 32 bits.
        loss_scale: factor on the loss under ``fp16``, so that small gradients do not vanish. An
            update whose gradient is not finite is skipped; see :attr:`Updater.n_skipped`.
        checkpoint: stages that repeat their forward in the backward, and keep no activations:
            ``none``, ``all`` or a list of stages.
        clip: largest norm of a gradient; larger ones are scaled down to it. None: no limit.
        clip_by: scope of the norm that ``clip`` limits: each ``stage``, or the whole ``model``,
            which takes all gradients of a step before its first update.
        ema: decay of an exponential moving average of the weights and of batch norms' running
            statistics; at update t the decay is at most (1 + t) / (10 + t). None: no average.
        compile: mode of torch.compile for the stages; ``none``: no compilation.
        channels_last: keep images and the weights of convolutions in that memory format.
        norms: batch norms of the micro-batches that run as one batch: ``fused``, one operation for
            all of them, or ``separate``, torch's own for each. ``auto``: fused on a GPU.

    Raises:
        UserError: an option has no such value.
    """

    def __post_init__(self) -> None:
        check_precision(self.precision)
        check_choice("clip_by", self.clip_by, _CLIP_BY)
        check_choice("compile", self.compile, COMPILE_MODES)
        check_choice("norms", self.norms, NORMS)
        check_checkpoint(self.checkpoint)
        for name, end in (("loss_scale", inf), ("clip", inf), ("ema", 1)):
            value = getattr(self, name)
            # In Python True is a number, too.
            number = isinstance(value, Real) and not isinstance(value, bool)
            absent = value is None and name != "loss_scale"
            if not absent and not (number and 0 < float(value) < end):
                raise UserError(
                    f"{name}: got {value!r}; expected a number above 0, below {end}"
                )

    @property
    def scale(self) -> float:
        """The factor on the loss."""
        if self.precision != "fp16":
            return 1.0
        return self.loss_scale

    @property
    def needs_norm(self) -> bool:
        """Whether an update depends on its gradient's norm."""
        return self.clip is not None or self.scale != 1

    @property
    def autocasts(self) -> bool:
        """Whether stages compute in another type than their weights have."""
        return autocast_type(self.precision) is not None

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """Return the context in which stages compute."""
        return autocast(self.precision, device)

    @property
    def in_cuda_graphs(self) -> bool:
        """Whether the next call of a compiled stage overwrites the results of the last."""
        return self.compile in ("reduce-overhead", "max-autotune")

    def least_fused(self, device: torch.device) -> int | None:
        """Return from how many micro-batches on their norms are one operation; None: never."""
        if self.norms == "fused":
            return 1
        # torch's own norm of one micro-batch is one operation, too.
        return 2 if self.norms == "auto" and can_compile(device) else None

    def begin_step(self) -> None:
        """Mark the start of a training step: CUDA graphs may now reuse the last one's memory."""
        # By default they take the first compiled forward after a backward for the start, even one
        # that a checkpoint repeats; and any forward that needs no gradient.
        if self.in_cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()

    def checkpoints(self, stage: int) -> bool:
        """Whether ``stage`` computes its forward twice."""
        return recomputes(self.checkpoint, stage)

    def check(self, schedule: Schedule, *, whole_step: bool) -> None:
        """Raise UserError if ``schedule`` or its runtime cannot honour the options.

        Args:
            schedule: schedule of the training.
            whole_step: whether the runtime has all gradients of a step before its first update.
        """
        check_checkpoint(self.checkpoint, schedule.n_stages)
        whole_model = self.clip is not None and self.clip_by == "model"
        for name, is_set in (
            ("compile", self.in_cuda_graphs),
            ("clip_by", whole_model),
        ):
            if is_set and not whole_step:
                raise UserError(
                    f"{name}={getattr(self, name)} takes all gradients of a step before its first"
                    f" update: leave {name} out, or use runtime=single_process with order=grouped"
                )
        if whole_model and not allows_whole_steps(schedule):
            raise UserError(
                "clip_by=model needs every gradient of a step before its first update, and"
                f" {schedule.name} reads the first updates before the last gradients: use"
                " clip_by=stage, or schedule=cdp_v1 with order=grouped"
            )

    def check_only(self, runtime: str, *possible: str) -> None:
        """Raise UserError if an option that is not ``possible`` differs from its default."""
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if name not in possible and value != getattr(PLAIN, name):
                raise UserError(
                    f"runtime={runtime} takes no {name}={value}: leave it out, or use"
                    " runtime=single_process or runtime=distributed"
                )


def allows_whole_steps(schedule: Schedule) -> bool:
    """Whether no op reads an update of a step before the step's last gradient is there."""
    sizes = (schedule.n_stages, schedule.n_microbatches)
    needed_staleness = chain(*freshest(schedule.timing, *sizes, together=True))
    # With `together`, an update counts as available only after the step's last gradient. A schedule
    # that reads fresher weights than that anywhere cannot run in whole steps.
    return not any(map(lt, chain(*schedule.least_staleness), needed_staleness))


PLAIN = StepOptions()
"""Plain training in 32 bits."""


def allow_tf32(allowed: bool) -> None:
    """Set whether NVIDIA GPUs may round 32-bit factors to 10 bits, in the whole process."""
    # Of 23 bits of a factor TF32 keeps 10. cuDNN's convolutions have a setting of their own.
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed
