"""How stages compute and update, whatever the schedule: precision, memory, clipping, averages."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from math import inf
from numbers import Real

import torch
from torch import Tensor

from toolkit.errors import UserError, check_choice
from toolkit.model.partition import check_checkpoint, checkpointed, recomputes
from toolkit.model.precision import autocast, autocast_type, check_precision
from toolkit.schedule import Schedule
from toolkit.schedule.staleness import freshest

COMPILE_MODES = ("none", "default", "reduce-overhead", "max-autotune")
_CLIP_BY = ("stage", "model")


@dataclass(frozen=True)
class StepOptions:
    """What users add to a training step, and every schedule can be combined with.

    Args:
        precision: ``fp32`` or ``tf32``, which only NVIDIA GPUs tell apart, by what
            :func:`allow_tf32` has set for the whole process; ``bf16`` or ``fp16``: torch's
            autocast over weights of 32 bits.
        loss_scale: factor on the loss under ``fp16``, so that small gradients do not vanish. An
            update whose gradient is not finite is left out; see :attr:`Updater.n_skipped`.
        checkpoint: stages whose forward is computed again in the backward, instead of its
            activations being kept: ``none``, ``all`` or a list of stages.
        clip: largest norm of a gradient; larger ones are scaled down to it. None: no limit.
        clip_by: scope of the norm that ``clip`` limits: each ``stage`` by itself, or the whole
            ``model``, which takes all gradients of a step before its first update.
        ema: decay of an exponential moving average of the weights and of batch norms' running
            statistics, which is kept beside them; at update t the decay is at most
            (1 + t) / (10 + t). None: no average.
        compile: mode of torch.compile for the stages; ``none`` leaves them as they are.
        channels_last: keep images and the weights of convolutions in that memory format.

    Raises:
        UserError: an option has no such value.
    """

    precision: str = "fp32"
    loss_scale: float = 1024.0
    checkpoint: str | Sequence[int] = "none"
    clip: float | None = None
    clip_by: str = "stage"
    ema: float | None = None
    compile: str = "none"
    channels_last: bool = False

    def __post_init__(self) -> None:
        check_precision(self.precision)
        for name, choices in (("clip_by", _CLIP_BY), ("compile", COMPILE_MODES)):
            check_choice(name, getattr(self, name), choices)
        check_checkpoint(self.checkpoint)
        if not _is_between(self.loss_scale, inf):
            raise UserError(f"loss_scale is a number above 0: got {self.loss_scale!r}")
        if self.clip is not None and not _is_between(self.clip, inf):
            raise UserError(f"clip is a norm above 0, or null: got {self.clip!r}")
        if self.ema is not None and not _is_between(self.ema, 1):
            raise UserError(f"ema is a decay between 0 and 1, or null: got {self.ema!r}")

    @property
    def scale(self) -> float:
        """The factor on the loss."""
        return self.loss_scale if self.precision == "fp16" else 1.0

    @property
    def needs_norm(self) -> bool:
        """Whether an update depends on its gradient's norm."""
        return self.clip is not None or self.scale != 1

    @property
    def autocasts(self) -> bool:
        """Whether stages compute in another type than their weights have."""
        return autocast_type(self.precision) is not None

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """The context in which stages compute."""
        return autocast(self.precision, device)

    def computed(
        self, loss: Callable[[Tensor, Tensor], Tensor]
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """``loss`` in the precision that suits it."""
        if not self.autocasts:
            return loss

        def cast(outputs: Tensor, targets: Tensor) -> Tensor:
            with self.autocast(outputs.device):
                return loss(outputs, targets)

        return cast

    @property
    def in_cuda_graphs(self) -> bool:
        """Whether compiled stages compute in memory that their next call takes again."""
        return self.compile in ("reduce-overhead", "max-autotune")

    def begin_step(self) -> None:
        """Say that a training step begins; what compiled stages made in the last is done with.

        Unless told, CUDA graphs take the first compiled forward after a backward for the beginning,
        even if it is one that a checkpoint runs again; and one that needs no gradient at any time.
        """
        if self.in_cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()

    def checkpoints(self, stage: int) -> bool:
        """Whether ``stage`` computes its forward twice."""
        return recomputes(self.checkpoint, stage)

    def check(self, schedule: Schedule, *, whole_step: bool) -> None:
        """Refuse what ``schedule`` or its runtime cannot do.

        Args:
            whole_step: whether the runtime has all gradients of a step before its first update.

        Raises:
            UserError: stages that there are not; a norm that is not known in time; CUDA graphs
                where forwards and backwards take turns.
        """
        if self.in_cuda_graphs and not whole_step:
            raise UserError(
                f"compile={self.compile} runs all forwards of a step before its backwards: use"
                " compile=default, or runtime=single_process with order=grouped"
            )
        checkpointed(self.checkpoint, schedule.n_stages)
        if self.clip is None or self.clip_by != "model":
            return
        sizes = (schedule.n_stages, schedule.n_microbatches)
        needed = chain(*freshest(schedule.timing, *sizes, together=True))
        if any(
            d < least for d, least in zip(chain(*schedule.least_staleness), needed, strict=True)
        ):
            raise UserError(
                f"clip_by=model needs every gradient of a step before its first update, and"
                f" {schedule.name} reads the first updates before the last gradients: use"
                f" clip_by=stage{', or schedule=cdp_v1' if whole_step else ''}"
            )
        if not whole_step:
            raise UserError(
                "clip_by=model needs every gradient of a step at one place: use clip_by=stage, or"
                " runtime=single_process with order=grouped"
            )

    def check_only(self, runtime: str, *possible: str) -> None:
        """Refuse what differs from the default and is not among the ``possible`` options.

        Raises:
            UserError: with the first such option.
        """
        plain = StepOptions()
        for name in self.__dataclass_fields__:
            if name not in possible and getattr(self, name) != getattr(plain, name):
                raise UserError(
                    f"runtime={runtime} takes no {name}={getattr(self, name)}: leave it out, or use"
                    " runtime=single_process or runtime=distributed"
                )


def _is_between(value: object, end: float) -> bool:
    """Whether ``value`` is a number above 0 and below ``end``."""
    return isinstance(value, Real) and not isinstance(value, bool) and 0 < float(value) < end


PLAIN = StepOptions()
"""Plain training in 32 bits."""


def allow_tf32(allowed: bool) -> None:
    """Whether NVIDIA GPUs may round the factors of 32-bit products to 10 bits of mantissa.

    It holds for the whole process, so runtimes do not set it; ``experiments`` do.
    """
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed
