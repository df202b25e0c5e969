"""The training loop, and evaluation."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, nan, prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit.errors import UserError
from toolkit.metric import LOSS, Metric
from toolkit.model import InputSpec
from toolkit.runtime.base import Runtime
from toolkit.runtime.microbatch_losses import cross_entropies, separable
from toolkit.runtime.microbatches import StepResult
from toolkit.runtime.step_options import PLAIN, StepOptions
from toolkit.training.data import Batch, Batches

if TYPE_CHECKING:
    from toolkit.training.training_run import TrainingRun

_MAX_SCORES = 2**25  # scores of a test batch: 128 MiB in 32 bits


@dataclass(frozen=True)
class Evaluation:
    """Result of a test.

    An answer is the class of an image, or the next token at a place of a sequence. The shares are
    NaN if the loss is not finite.

    Attributes:
        loss: mean cross-entropy, in nats.
        top1: share of answers whose highest score is right.
        top5: share of answers with the right class among the five highest scores.
    """

    loss: float
    top1: float
    top5: float


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

    def __init__(self, reason: str, epochs: Sequence[Epoch] = (), more: str = "") -> None:
        super().__init__(f"{reason}: lower optimizer.lr, or warm up with lr.warmup_epochs{more}")
        self.reason = reason
        self.epochs = tuple(epochs)

    def all_epochs(self, n: int) -> list[Epoch]:
        """Return the ``n`` epochs of the run; those that did not end are NaN."""
        return [*self.epochs, *(Epoch(epoch, *[nan] * 6) for epoch in range(len(self.epochs), n))]


class LoopCallback:
    """Pauses of the loop, at which all updates are applied: here, the ends of epochs only."""

    def steps(self, position: Position, n_steps: int) -> int:
        """Return the steps until the next pause, of the ``n_steps`` that the epoch has left."""
        return n_steps

    def end(self, position: Position) -> None:
        """Act at a pause, at which the loss has not diverged. Every rank calls it."""


def fit(
    run: "TrainingRun",
    position: Position,
    callback: LoopCallback,
    on_epoch: Callable[[Epoch], None],
    on_step: Callable[[Step], None],
) -> list[Epoch]:
    """Train from ``position`` on; see :meth:`TrainingRun.run`."""
    runtime = run.runtime
    for epoch in range(position.epoch, run.options.epochs):
        batches = run.samples.train(run.batch_size, run.options.seed, epoch, run.device)
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

        # 2. Test the newest weights, and the averaged ones; every rank tests a share.
        batch_size = evaluated_at_once(run.samples.form, run.batch_size)
        share = run.samples.test(batch_size, run.device, runtime.rank, runtime.n_ranks)
        model = runtime.module()
        readout_weights = runtime.extrapolated() if run.options.readout == "extrapolated" else None
        test = evaluate(model, share, runtime.total, readout_weights, run.step_options)
        _check(run, test.loss, position, "test")
        average_weights = runtime.averages()
        ema_test = None
        if average_weights:
            ema_test = evaluate(model, share, runtime.total, average_weights, run.step_options)
        published_test = None
        if run.options.readout == "as_published":
            published_test = test
            late_weights = runtime.late_weights()
            if late_weights:
                published_test = evaluate(
                    model, share, runtime.total, late_weights, run.step_options
                )

        # 3. Record the epoch, and pause as the next one begins.
        metrics = Epoch(
            epoch=epoch,
            train_loss=position.loss / position.n_losses,
            test_loss=test.loss,
            top1=test.top1,
            top5=test.top5,
            learning_rate=position.learning_rate,
            samples_per_second=(len(batches) - first_step) * run.batch_size / seconds,
            ema_loss=ema_test.loss if ema_test else None,
            ema_top1=ema_test.top1 if ema_test else None,
            published_loss=published_test.loss if published_test else None,
            published_top1=published_test.top1 if published_test else None,
        )
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
    switching = None if position.rolled_back else run.switching
    while position.step < len(batches):
        n_left = len(batches) - position.step
        n_steps = min(n_left, callback.steps(position, n_left))
        if switching:
            n_steps = min(n_steps, switching.steps_to_decision())
        start = time.perf_counter()
        losses = []
        batches_until_pause = batches.between(position.step, position.step + n_steps)
        for index, result in enumerate(run.runtime.run(batches_until_pause)):
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
    limit = options.guard_factor * position.first_loss if loss_name == "training" else inf
    if options.guard == "off" or (isfinite(loss) and not loss > limit):
        return
    first_loss_text = f" and was {position.first_loss:.4g} at first" if isfinite(loss) else ""
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


IGNORED = -100
"""Target without a right class, such as padding: it counts neither in losses nor in accuracies."""


def _cross_entropies(
    outputs: Tensor, targets: Tensor, n_microbatches: int, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """Return what :func:`cross_entropy` returns of each micro-batch, ``[n]``."""
    scores = outputs.flatten(0, -2)
    classes = targets.flatten()
    if targets.dim() == 1:
        return cross_entropies(scores, classes, n_microbatches, **options)
    values = F.cross_entropy(scores, classes, ignore_index=IGNORED, reduction="none", **options)
    sums = values.view(n_microbatches, -1).sum(1)
    counts = (classes != IGNORED).view(n_microbatches, -1).sum(1)
    return sums, counts


@separable(_cross_entropies)
def cross_entropy(outputs: Tensor, targets: Tensor, **options: Any) -> Any:
    """Cross-entropy, in nats, of scores ``[..., n_classes]`` and right classes ``[...]``.

    Args:
        outputs: scores.
        targets: classes ``[b]``, or tokens ``[b, length]``, of which :data:`IGNORED` do not count.
        options: those of torch's ``cross_entropy``.

    Returns:
        The mean over samples; of tokens the sum and their number, since micro-batches may differ
        in how many count.
    """
    scores = outputs.flatten(0, -2)
    classes = targets.flatten()
    if targets.dim() == 1:
        return F.cross_entropy(scores, classes, **options)
    total = F.cross_entropy(scores, classes, ignore_index=IGNORED, reduction="sum", **options)
    return total, (classes != IGNORED).sum()


def evaluated_at_once(form: InputSpec, batch_size: int) -> int:
    """Return the batch size of the test: at least 256, unless the scores take too much memory."""
    return max(1, min(max(batch_size, 256), _MAX_SCORES // prod(form.output(1))))


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    total: Callable[[Tensor], Tensor] = lambda values: values,
    weights: Mapping[str, Tensor] | None = None,
    options: StepOptions = PLAIN,
) -> Evaluation:
    """Test ``model`` on ``batches`` in evaluation mode, and restore the mode of each module.

    Args:
        model: the model to test.
        batches: test samples.
        total: function that sums over all ranks, if each tests a share.
        weights: weights by name, in place of the model's own.
        options: options whose precision the model computes in.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    # By batch: loss, answers right first, and among the first five, and number of answers.
    sums: list[Tensor] = []
    for inputs, targets in batches:
        with options.autocast(inputs.device):
            outputs = torch.func.functional_call(model, dict(weights or {}), (inputs,))
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        is_right = outputs.topk(min(5, outputs.shape[-1])).indices == targets[..., None]
        loss = F.cross_entropy(
            outputs.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        answers = (loss, is_right[..., 0].sum(), is_right.sum(), (targets != IGNORED).sum())
        # Kept on the device: to read them here would wait for every batch.
        sums.append(torch.stack([number.double() for number in answers]))
    for module, mode in modes.items():
        module.training = mode
    rank_sums = torch.stack(sums).sum(0).cpu() if sums else torch.zeros(4, dtype=torch.float64)
    loss, top1, top5, n_answers = total(rank_sums).tolist()
    if not isfinite(loss):
        return Evaluation(loss / n_answers, nan, nan)
    return Evaluation(loss / n_answers, top1 / n_answers, top5 / n_answers)
