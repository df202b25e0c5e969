"""Learning rates as a factor on the optimizer's own rate, per training step.

All warm up linearly, and scale linearly with the batch if ``reference_batch`` is given (Goyal et
al., arXiv 1706.02677).
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import cos, inf, pi
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from toolkit.errors import UserError


@dataclass(frozen=True)
class Constant:
    """A constant rate; the base of the others.

    Args:
        warmup_epochs: epochs over which the rate rises linearly to its full height.
        reference_batch: images of a training step for which the optimizer's rate was chosen; the
            rate is scaled by (images of a step) / reference_batch. None: no scaling.

    Raises:
        UserError: a number is out of its range.
    """

    warmup_epochs: float = 0.0
    reference_batch: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.warmup_epochs < inf:
            raise UserError(f"lr.warmup_epochs is 0 or more: got {self.warmup_epochs}")
        if self.reference_batch is not None and self.reference_batch < 1:
            raise UserError(
                f"lr.reference_batch is 1 or more: got {self.reference_batch}"
            )

    def decay(self, epoch: float, epochs: int) -> float:
        """Return the factor at ``epoch`` (fractions count) of ``epochs``, without warm-up."""
        return 1.0

    def factor(self, step: int, steps_per_epoch: int, epochs: int, batch: int) -> float:
        """Return the factor on the optimizer's rate for the update of ``step``."""
        # With 4 steps of warm-up, the updates 0, 1, 2, 3, 4 have the factors 1/4, 2/4, 3/4, 1, 1.
        warmup = self.warmup_epochs * steps_per_epoch
        warmup_factor = min(1.0, (step + 1) / warmup) if warmup else 1.0
        batch_factor = batch / self.reference_batch if self.reference_batch else 1.0
        return batch_factor * warmup_factor * self.decay(step / steps_per_epoch, epochs)


@dataclass(frozen=True)
class Step(Constant):
    """A rate that is multiplied by a factor after every few epochs.

    Attributes:
        every_epochs: epochs from one product to the next.
        gamma: the factor.
    """

    every_epochs: int = 30
    gamma: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every_epochs < 1:
            raise UserError(f"lr.every_epochs is 1 or more: got {self.every_epochs}")
        if not 0 < self.gamma < inf:
            raise UserError(f"lr.gamma is above 0: got {self.gamma}")

    def decay(self, epoch: float, epochs: int) -> float:
        """Return ``gamma`` to the power of the completed intervals of ``every_epochs``."""
        return self.gamma ** (int(epoch) // self.every_epochs)


@dataclass(frozen=True)
class Cosine(Constant):
    """Half a cosine from the full rate, after warm-up, to ``final`` times it."""

    final: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.final < inf:
            raise UserError(f"lr.final is 0 or more: got {self.final}")

    def decay(self, epoch: float, epochs: int) -> float:
        """Return the factor of half a cosine from 1 to ``final``, after warm-up."""
        # From 1, as warm-up ends, to `final` at the end of the run::
        #
        #     final + (1 - final) * (1 + cos(pi * progress)) / 2,   progress from 0 to 1
        decay_epochs = epochs - self.warmup_epochs
        progress = 0.0
        if decay_epochs > 0:
            progress = min(1.0, max(0.0, epoch - self.warmup_epochs) / decay_epochs)
        return self.final + (1 - self.final) * 0.5 * (1 + cos(pi * progress))


class Rates(LambdaLR):
    """A LambdaLR that keeps this run's optimizer options when a checkpoint is loaded.

    torch's ``load_state_dict`` would restore those of the checkpoint.
    """

    def __init__(self, optimizer: Optimizer, factor: Callable[[int], float]) -> None:
        self._own = []  # the options of each group of parameters
        for group in optimizer.param_groups:
            options = dict(group)
            del options["params"]
            self._own.append(options)
        super().__init__(optimizer, factor)

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state, without this run's own options."""
        return {
            name: value
            for name, value in super().state_dict().items()
            if name != "_own"
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the update of ``state_dict``; load the optimizer's state first."""
        # torch's loading replaces these by the checkpoint's, of a run that may have had another
        # rate.
        base_rates = self.base_lrs
        groups = self.optimizer.param_groups
        super().load_state_dict(state_dict)
        self.base_lrs = base_rates
        for group, own_options, base_rate, factor in zip(
            groups, self._own, base_rates, self.lr_lambdas, strict=True
        ):
            group |= own_options | {
                "initial_lr": base_rate,
                "lr": base_rate * factor(self.last_epoch),
            }
        self._last_lr = [group["lr"] for group in groups]
