"""The training loop, and evaluation."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, nan
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from toolkit.errors import UserError
from toolkit.metric import LOSS, Metric
from toolkit.runtime.base import Runtime
from toolkit.runtime.microbatches import StepResult
from toolkit.training.data import Batches
from toolkit.training.evaluation import evaluate_run

if TYPE_CHECKING:
    from toolkit.training.training_run import TrainingRun


@dataclass(frozen=True)
class Epoch:
    """Metrics of one epoch.

    Attributes:
        epoch: its number, from 0.
        train_loss: mean training loss, in nats.
        test_loss, top1, top5: see :class:`Evaluation`.
        learning_rate: learning rate of the epoch's first update.
        samples_per_second: training samples per second.
        ema_loss, ema_top1: with the averaged weights; None if the run keeps no average.
        published_loss, published_top1: with the late weights of micro-batch 0, as the published
            code of CDP evaluates; None unless the run asks for that.
    """

    epoch: int
    train_loss: float
    test_loss: float
    top1: float
    top5: float
    learning_rate: float
    samples_per_second: float
    ema_loss: float | None = None
    ema_top1: float | None = None
    published_loss: float | None = None
    published_top1: float | None = None

    def text(self, by: Metric) -> str:
        """Return the metric ``by`` as short text."""
        return f"loss {self.test_loss:.3f}" if by is LOSS else f"{self.top1:.2%}"


@dataclass(frozen=True)
class Step:
    """A training step that has run.

    Attributes:
        step: its number in the epoch, from 1.
        n_steps: training steps of the epoch.
        result: result of this process; to read its losses waits for the device.
        learning_rate: learning rate of its update.
        samples: samples of all micro-batches together.
    """

    step: int
    n_steps: int
    result: StepResult
    learning_rate: float
    samples: int


@dataclass
class Position:
    """Progress of a run; its fields are keys of checkpoints.

    Attributes:
        epoch: number of this epoch, from 0.
        step: training steps of this epoch that are done.
        steps_done: training steps of the run that are done.
        loss: sum over this epoch's micro-batches, or their tokens.
        n_losses: number of terms of this sum.
        first_loss: mean loss of the run's first step.
        learning_rate: learning rate of the epoch's first update.
        history: metrics of the epochs before.
        rolled_back: whether the loss has diverged, and the run continues without delay.
        switching: state of the run's :class:`Switching`, if it has one.
    """

    epoch: int = 0
    step: int = 0
    steps_done: int = 0
    loss: float = 0.0
    n_losses: float = 0
    first_loss: float = nan
    learning_rate: float = nan
    history: list[Epoch] = field(default_factory=list)
    rolled_back: bool = False
    switching: dict[str, Any] | None = None


class DivergedError(UserError, FloatingPointError):
    """The loss is not finite, or far above the first; ``epochs`` had ended before."""

    def __init__(
        self, reason: str, epochs: Sequence[Epoch] = (), more: str = ""
    ) -> None:
        super().__init__(
            f"{reason}: lower optimizer.lr, or warm up with lr.warmup_epochs{more}"
        )
        self.reason = reason
        self.epochs = tuple(epochs)
        self.more = more

    def __reduce__(self) -> tuple[Any, ...]:
        # By default an exception is unpickled from its message, to which advice would be added
        # again in another process.
        return type(self), (self.reason, self.epochs, self.more), self.__dict__

    def all_epochs(self, n: int) -> list[Epoch]:
        """Return the ``n`` epochs of the run; those that did not end are NaN."""
        epochs = [*self.epochs]
        for epoch in range(len(epochs), n):
            epochs.append(Epoch(epoch, nan, nan, nan, nan, nan, nan))
        return epochs


class LoopCallback:
    """Pauses of the loop, at which all updates are applied: here, the ends of epochs only."""

    def steps(self, position: Position, n_steps: int) -> int:
        """Return the steps until the next pause, of the ``n_steps`` that the epoch has left."""
        return n_steps

    def end(self, position: Position) -> None:
        """Act at a pause, unless the loss has diverged. Every rank calls it."""


def fit(
    run: "TrainingRun",
    position: Position,
    callback: LoopCallback,
    on_epoch: Callable[[Epoch], None],
    on_step: Callable[[Step], None],
) -> list[Epoch]:
    """Train from ``position`` on; see :meth:`TrainingRun.run`."""
    for epoch in range(position.epoch, run.options.epochs):
        batches = run.samples.train(run.batch_size, run.options.seed, epoch, run.device)
        # Samples and learning rates follow from epoch and step, so with another length of epochs
        # the rest would not be the run that was saved.
        has_other_length = epoch * len(batches) + position.step != position.steps_done
        if has_other_length or position.step > len(batches):
            raise UserError(
                f"the run was saved after {position.steps_done} steps, in epoch {epoch} after step"
                f" {position.step}, and an epoch now has {len(batches)}: resume it with the data"
                " and batch of before"
            )
        if position.step == 0:
            position.learning_rate = run.rate(position.steps_done)

        # 1. Train on the batches that the epoch has left.
        first_step = position.step
        start = time.perf_counter()
        _train_epoch(run, batches, position, callback, on_step)
        seconds = time.perf_counter() - start

        # 2. Test the weights, and record the epoch. Samples per second leave out the test's time.
        evaluations = evaluate_run(run)
        _check(run, evaluations.test.loss, position, "test")
        metrics = Epoch(
            epoch=epoch,
            train_loss=position.loss / position.n_losses,
            learning_rate=position.learning_rate,
            # Only the steps that were timed, if the run was resumed in this epoch.
            samples_per_second=(len(batches) - first_step) * run.batch_size / seconds,
            **evaluations.metrics(),
        )

        # 3. Pause as the next epoch begins.
        position.history = [*position.history, metrics]
        position.epoch = epoch + 1
        position.step = 0
        position.loss = 0.0
        position.n_losses = 0
        on_epoch(metrics)
        callback.end(position)
    return position.history


def _train_epoch(
    run: "TrainingRun",
    batches: Batches,
    position: Position,
    callback: LoopCallback,
    on_step: Callable[[Step], None],
) -> None:
    """Train on the batches that the epoch has left, from one pause to the next."""
    # After a rollback the run stays without delay.
    switching = None if position.rolled_back else run.switching
    while position.step < len(batches):
        n_left = len(batches) - position.step
        n_steps = min(n_left, callback.steps(position, n_left))
        # A decision needs the pipeline drained, which it is at a pause only.
        if switching:
            n_steps = min(n_steps, switching.steps_to_decision())
        start = time.perf_counter()
        losses = []
        batches_until_pause = batches.between(position.step, position.step + n_steps)
        for index, result in enumerate(run.runtime.run(batches_until_pause)):
            # It stays on the device: to read it here would wait for each step.
            losses.append(result.loss_sum())
            on_step(
                Step(
                    step=position.step + index + 1,
                    n_steps=len(batches),
                    result=result,
                    learning_rate=run.rate(position.steps_done + index),
                    samples=run.batch_size,
                )
            )
            del result  # its memory is free before the next step
        # The only wait of the loop for the device.
        loss = _add_losses(position, losses, run.runtime)
        _check(run, loss, position, "training")
        if switching:
            switching.record_steps(len(losses), time.perf_counter() - start, loss)
            position.switching = switching.state()
        if position.step < len(batches):  # the pause at the end comes after the test
            callback.end(position)


def _add_losses(position: Position, losses: list[Tensor], runtime: Runtime) -> float:
    """Advance ``position`` by these steps; return their mean loss. Every rank calls it.

    ``losses``: the sum and the count of each step, see :meth:`StepResult.loss_sum`.
    """
    # The losses of all steps and of the first, and their counts, summed over the ranks.
    sums = torch.stack([torch.stack(losses).sum(0), losses[0]]).cpu()
    (loss, count), (first_loss, first_count) = runtime.total(sums).tolist()
    if position.steps_done == 0:
        position.first_loss = first_loss / first_count
    position.step += len(losses)
    position.steps_done += len(losses)
    position.loss += loss
    position.n_losses += count
    return float(loss / count)


def _check(run: "TrainingRun", loss: float, position: Position, loss_name: str) -> None:
    """Raise DivergedError if ``loss`` is not finite or too large, and the guard is on."""
    options = run.options
    limit = (
        options.guard_factor * position.first_loss if loss_name == "training" else inf
    )
    # ``not >``, so that a limit of NaN, without a first loss, refuses nothing.
    if options.guard == "off" or (isfinite(loss) and not loss > limit):
        return
    first_loss_text = (
        f" and was {position.first_loss:.4g} at first" if isfinite(loss) else ""
    )
    raise DivergedError(
        f"the {loss_name} loss of epoch {position.epoch} is {loss:.4g}{first_loss_text}, after step"
        f" {position.steps_done}",
        position.history,
    )


def is_best(history: Sequence[Epoch], by: Metric) -> bool:
    """Return whether the last epoch is as good as any; a metric of NaN is not."""
    values: list[float] = [getattr(epoch, by.key) for epoch in history]
    best = min if by.lower_is_better else max
    return values[-1] == best(filter(isfinite, values), default=None)
