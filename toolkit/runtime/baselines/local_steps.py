"""Data parallelism whose ranks take steps of their own, and meet every few steps."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from toolkit.errors import UserError, whole
from toolkit.runtime.baselines.ddp import Synchronous, WholeModel, ddp_wrapped
from toolkit.runtime.losses import LossValue, nonzero
from toolkit.runtime.microbatches import StepResult
from toolkit.runtime.stage import Values

_BUCKET_MB = 25.0


@dataclass(eq=False, repr=False, kw_only=True)
class LocalSteps(Synchronous):
    """Rank m trains its own weights on micro-batch m; every ``period`` steps the ranks meet.

    Between meetings :meth:`module` returns the mean of the ranks' weights, and training continues
    with each rank's own.

    Args:
        stages, optimizer, loss, lr_scheduler, seed, world: as in ``Distributed``.
        schedule: ``catalog.data_parallel(n)``.
        options: only precision and memory format may be set.
        period: steps from one meeting to the next.
        start: first steps, in which the ranks average gradients as DDP does.

    Raises:
        UserError: the schedule is not data parallelism, or an option has no such value.
    """

    states: ClassVar[tuple[str, ...]] = ("replicated",)

    period: int = 8
    start: int = 0

    def __post_init__(self) -> None:
        whole(self.period, "period", 1)
        whole(self.start, "start", 0)
        super().__post_init__()
        self._parameters: list[nn.Parameter] = []
        for updater in self._updaters:
            self._parameters += updater.masters.values()
        self._differ = False  # whether ranks have different weights
        self._rank_weights: list[Tensor] | None = None  # while the model has the mean
        self._begin()

    def _begin(self) -> None:
        """Note the first weights."""

    def _wrap(self, model: WholeModel) -> nn.Module:
        return ddp_wrapped(
            model,
            self.world.group,
            self.options,
            bucket_mb=_BUCKET_MB,
            bucket_view=False,
        )

    def _train(self, step: int, inputs: Values, targets: Tensor) -> StepResult:
        self._restore()
        # period = 3, start = 2, M ranks:
        #
        #     step          0     1     2     3     4     5     6     7
        #     gradients     mean  mean  own   own   own   own   own   own
        #     weights       equal ..... own   own   meet  own   own   meet
        context: Any = nullcontext()
        if step >= self.start:
            context = cast(DistributedDataParallel, self._wrapped).no_sync()
        with context:
            result = super()._train(step, inputs, targets)
        if step >= self.start:
            self._differ = True
            if (step + 1 - self.start) % self.period == 0:
                self._meet()
                self._differ = False
        return result

    def _backward_root(self, loss: LossValue) -> Tensor:
        if self.steps_done < self.start:
            return super()._backward_root(loss)
        # A local step: the mean over this rank's micro-batch alone.
        if loss.count is None:
            return loss.value
        return loss.value / nonzero(loss.count).to(loss.value.dtype)

    @abstractmethod
    def _meet(self) -> None:
        """Give all ranks the same weights."""

    @torch.no_grad()
    def _mean_weights(self) -> list[Tensor]:
        """Return the mean of the ranks' weights."""
        if not self._parameters:
            return []
        # One message, and not one for each weight.
        flat = torch.cat([parameter.flatten() for parameter in self._parameters])
        mean = self.total(flat) / self.n_ranks
        pieces = mean.split([parameter.numel() for parameter in self._parameters])
        return [
            piece.view(parameter.shape)
            for piece, parameter in zip(pieces, self._parameters, strict=True)
        ]

    @torch.no_grad()
    def _set(self, weights: Sequence[Tensor]) -> None:
        for parameter, weight in zip(self._parameters, weights, strict=True):
            parameter.copy_(weight)

    # What is read and saved between steps.

    @torch.no_grad()
    def _settle(self) -> None:
        super()._settle()
        # The model shows the mean now. Each rank's own weights wait until the next step restores
        # them.
        if self._differ and self._rank_weights is None:
            mean = self._mean_weights()
            self._rank_weights = [
                parameter.detach().clone() for parameter in self._parameters
            ]
            self._set(mean)

    def _restore(self) -> None:
        """Give each rank its own weights again."""
        if self._rank_weights is not None:
            self._set(self._rank_weights)
            self._rank_weights = None

    def _rank_state(self) -> dict[str, Any] | None:
        return {
            "weights": self._rank_weights,
            "updaters": [updater.state() for updater in self._updaters],
        }

    def _load_rank_state(self, state: Mapping[str, Any] | None) -> None:
        self._rank_weights = None
        self._differ = False
        if state is None:
            self._begin()
            return
        if state["weights"] is not None:
            self._rank_weights = [
                weight.to(parameter.device, copy=True)
                for weight, parameter in zip(
                    state["weights"], self._parameters, strict=True
                )
            ]
            self._differ = True
        for updater, updater_state in zip(
            self._updaters, state["updaters"], strict=True
        ):
            updater.load(updater_state)


@dataclass(eq=False, repr=False, kw_only=True)
class LocalSGD(LocalSteps):
    """Local SGD: every ``period`` steps the ranks average their weights.

    ::

        theta^m_{t+1} = optimizer(theta^m_t, grad f_m(theta^m_t))
        theta^m       = 1/M sum_m theta^m                            every ``period`` steps

    Each rank keeps its optimizer's state. With ``start`` above 0 it is post-local SGD.

    Args:
        stages, optimizer, loss, lr_scheduler, seed, world, schedule, options, period, start: as in
            ``LocalSteps``.

    Source: arXiv 1805.09767, algorithm 1; post-local, arXiv 1808.07217, section 3.
    """

    runtime = "local_sgd"

    def _meet(self) -> None:
        self._set(self._mean_weights())


@dataclass(eq=False, repr=False, kw_only=True)
class DiLoCo(LocalSteps):
    """DiLoCo: every ``period`` steps an outer optimizer takes a step along the ranks' mean change.

    ::

        theta^m_{t+1} = optimizer(theta^m_t, grad f_m(theta^m_t))
        delta         = theta - 1/M sum_m theta^m
        theta         = Nesterov(theta, delta),   theta^m = theta    every ``period`` steps

    Each rank keeps its optimizer's state. The first outer weights are those after ``start`` steps.

    Args:
        stages, optimizer, loss, lr_scheduler, seed, world, schedule, options, period, start: as in
            ``LocalSteps``.
        outer_lr: rate of the outer optimizer.
        outer_momentum: its momentum.

    Source: arXiv 2311.08105, algorithm 1, with Nesterov's momentum as in its section 3.
    """

    runtime = "diloco"

    outer_lr: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        for name, end in (("outer_lr", float("inf")), ("outer_momentum", 1.0)):
            value = getattr(self, name)
            if not 0 < value < end:
                raise UserError(
                    f"{name}: got {value}; expected a number above 0, below {end}"
                )
        super().__post_init__()

    def _begin(self) -> None:
        self._outer_weights = [
            nn.Parameter(parameter.detach().clone()) for parameter in self._parameters
        ]
        self._outer_optimizer: torch.optim.SGD | None = None
        if self._outer_weights:
            self._outer_optimizer = torch.optim.SGD(
                self._outer_weights, self.outer_lr, self.outer_momentum, nesterov=True
            )

    def _train(self, step: int, inputs: Values, targets: Tensor) -> StepResult:
        if step == self.start and self._outer_optimizer is not None:
            self._set_outer()
        return super()._train(step, inputs, targets)

    @torch.no_grad()
    def _set_outer(self) -> None:
        """Begin the outer weights with those of the ranks, which are the same here."""
        for outer, parameter in zip(self._outer_weights, self._parameters, strict=True):
            outer.copy_(parameter)

    def _meet(self) -> None:
        if self._outer_optimizer is None:
            return
        for outer, mean in zip(self._outer_weights, self._mean_weights(), strict=True):
            # The ranks' mean change, with the sign of a gradient: descent moves towards their mean.
            outer.grad = outer.detach() - mean
        self._outer_optimizer.step()
        self._outer_optimizer.zero_grad(set_to_none=True)
        self._set([outer.detach() for outer in self._outer_weights])

    def _rank_state(self) -> dict[str, Any] | None:
        state = super()._rank_state()
        assert state is not None
        state["outer_weights"] = [outer.detach() for outer in self._outer_weights]
        state["outer_optimizer"] = None
        if self._outer_optimizer is not None:
            state["outer_optimizer"] = self._outer_optimizer.state_dict()
        return state

    @torch.no_grad()
    def _load_rank_state(self, state: Mapping[str, Any] | None) -> None:
        super()._load_rank_state(state)
        if state is None:
            return
        for outer, weight in zip(
            self._outer_weights, state["outer_weights"], strict=True
        ):
            outer.copy_(weight)
        if self._outer_optimizer is not None:
            self._outer_optimizer.load_state_dict(state["outer_optimizer"])
