"""The training loop, and evaluation."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite, nan, prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit.errors import UserError
from toolkit.metric import LOSS, Metric
from toolkit.model import InputSpec
from toolkit.runtime.base import Runtime
from toolkit.runtime.microbatches import StepResult
from toolkit.runtime.state import difference
from toolkit.runtime.step_options import PLAIN, StepOptions
from toolkit.training.data import Batches, SampleSet

_SCORES = 2**25  # at most, for a batch of the test: 128 MiB in 32 bits


def cross_entropy(outputs: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """Cross-entropy over all answers, in nats.

    Args:
        outputs: scores ``[..., n_classes]`` of an image, or of each place of a sequence.
        targets: the right classes ``[...]``.
        options: options of torch's ``cross_entropy``.
    """
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), **options)


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
        test_loss: mean test loss, in nats.
        top1: share of test answers whose highest score is right.
        top5: share of test answers with the right class among the five highest scores.
        learning_rate: learning rate of the epoch's first update.
        samples_per_second: training samples per second.
        ema_loss: test loss with the averaged weights; None if the run keeps no average.
        ema_top1: ``top1`` with the averaged weights; None likewise.
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

    def told(self, by: Metric) -> str:
        """Return the metric ``by`` as short text."""
        return f"loss {self.test_loss:.3f}" if by is LOSS else f"{self.top1:.2%}"


@dataclass(frozen=True)
class Step:
    """A training step that has run.

    Attributes:
        step: its number in the epoch, from 1.
        n_steps: number of steps of the epoch.
        result: this process's result. Reading its losses waits for the device.
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
    """Progress of a run.

    Attributes:
        epoch: number of the current epoch.
        step: training steps of this epoch so far.
        steps_done: training steps of the run so far.
        loss: sum of the losses of this epoch's micro-batches so far.
        n_losses: number of these losses.
        first_loss: mean loss of the run's first step.
        learning_rate: learning rate of the epoch's first update.
        history: the epochs before.
    """

    epoch: int = 0
    step: int = 0
    steps_done: int = 0
    loss: float = 0.0
    n_losses: float = 0.0
    first_loss: float = nan
    learning_rate: float = nan
    history: list[Epoch] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        """Return the progress as plain values; :meth:`of` reads them."""
        return asdict(self)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "Position":
        """Return the position of a ``state_dict``.

        Raises:
            UserError: the state has other keys, or values of other types.
        """
        history = state.get("history") if isinstance(state, dict) else None
        expected = cls().state_dict()
        for epoch in history if isinstance(history, list) else ():
            names = ("ema_loss", "ema_top1")
            own = {n: 0.0 for n in names if isinstance(epoch, dict) and epoch.get(n) is not None}
            expected["history"].append(asdict(Epoch(0, *[0.0] * 6)) | own)
        if fault := difference(state, expected, "position"):
            raise UserError(fault)
        return cls(**{**state, "history": [Epoch(**epoch) for epoch in state["history"]]})


class DivergedError(UserError, FloatingPointError):
    """The loss is not finite, or far above the first.

    Args:
        message: message of the error.
        epochs: the epochs that had ended before.
    """

    def __init__(self, message: str, epochs: Sequence[Epoch] = ()) -> None:
        super().__init__(message)
        self.epochs = tuple(epochs)

    def all_epochs(self, n: int) -> list[Epoch]:
        """Return the ``n`` epochs of the run; those that did not end are NaN."""
        return [*self.epochs, *(Epoch(k, *[nan] * 6) for k in range(len(self.epochs), n))]


class Stretches:
    """Pauses of training: a stretch of steps ends with all updates applied. Here: no pauses."""

    def steps(self, position: Position, n_steps: int) -> int:
        """Return the steps of the next stretch, of the ``n_steps`` that the epoch has left."""
        return n_steps

    def check(self, loss: float, position: Position, which: str = "training") -> None:
        """Check the loss of a stretch, or of the test. Every rank calls this method.

        Raises:
            DivergedError: the loss is not finite.
        """
        if not isfinite(loss):
            raise DivergedError(
                f"the {which} loss of epoch {position.epoch} is {loss}: lower optimizer.lr, or warm"
                " up with lr.warmup_epochs",
                position.history,
            )

    def end(self, position: Position) -> None:
        """Act on a stretch, or an epoch, whose losses have passed :meth:`check`."""


def fit(
    runtime: Runtime,
    samples: SampleSet,
    *,
    epochs: int,
    batch_size: int,
    seed: int,
    device: torch.device,
    rate: Callable[[int], float],
    on_epoch: Callable[[Epoch], None] = lambda epoch: None,
    on_step: Callable[[Step], None] = lambda step: None,
    position: Position | None = None,
    stretches: Stretches | None = None,
    options: StepOptions = PLAIN,
) -> list[Epoch]:
    """Train for ``epochs`` and evaluate after each.

    Args:
        runtime: the runtime that trains, its model on ``device``. If it is one of many ranks, all
            of them make this call, and get the same metrics.
        samples: samples for training and for the test.
        epochs: epochs of the run, those before ``position`` included.
        batch_size: samples of a training step, all micro-batches together.
        seed: seed of the order of the samples and of their augmentation.
        device: device of the batches.
        rate: function from a training step to the learning rate of its update, for the metrics.
        on_epoch: function that is called with each epoch's metrics.
        on_step: function that is called after each step.
        position: place to start from; the runtime has the state of that place.
        stretches: places to pause at.
        options: the runtime's options; the tests compute in its precision.

    Returns:
        metrics of each epoch, those before ``position`` included.

    Raises:
        DivergedError: the loss is not finite.
        UserError: epochs had another number of steps before ``position``.
    """
    position = position or Position()
    stretches = stretches or Stretches()
    for epoch in range(position.epoch, epochs):
        batches = samples.train(batch_size, seed, epoch, device)
        moved = epoch * len(batches) + position.step != position.steps_done
        if moved or position.step > len(batches):
            raise UserError(
                f"the run was saved after {position.steps_done} steps, in epoch {epoch} after step"
                f" {position.step}, and an epoch now has {len(batches)}: resume it with the data"
                " and batch of before"
            )
        start, first_step = time.perf_counter(), position.step
        if position.step == 0:
            position.learning_rate = rate(position.steps_done)
        while (left := len(batches) - position.step) > 0:
            n_steps = min(left, stretches.steps(position, left))
            losses = []
            part = batches.between(position.step, position.step + n_steps)
            for k, result in enumerate(runtime.run(part)):
                losses.append(result.losses)
                now = rate(position.steps_done + k)
                on_step(Step(position.step + k + 1, len(batches), result, now, batch_size))
                del result  # its memory is free before the next step
            stretches.check(_add_losses(position, losses, runtime), position)
            if position.step < len(batches):
                stretches.end(position)
        seconds = time.perf_counter() - start
        n_at_once = evaluated_at_once(samples.form, batch_size)
        share = samples.test(n_at_once, device, runtime.rank, runtime.n_ranks)
        model = runtime.module()
        test = evaluate(model, share, runtime.total, options=options)
        stretches.check(test.loss, position, "test")
        ema = None
        if averages := runtime.averages():
            ema = evaluate(model, share, runtime.total, averages, options)
        done = Epoch(
            epoch=epoch,
            train_loss=position.loss / position.n_losses,
            test_loss=test.loss,
            top1=test.top1,
            top5=test.top5,
            learning_rate=position.learning_rate,
            samples_per_second=(len(batches) - first_step) * batch_size / seconds,
            ema_loss=ema.loss if ema else None,
            ema_top1=ema.top1 if ema else None,
        )
        position.history = [*position.history, done]
        position.epoch, position.step, position.loss, position.n_losses = epoch + 1, 0, 0.0, 0.0
        on_epoch(done)
        stretches.end(position)
    return position.history


def _add_losses(position: Position, losses: list[Tensor], runtime: Runtime) -> float:
    """Advance ``position`` by a stretch of steps; return their mean loss. Every rank calls it."""
    loss, n = _sum(losses, runtime)
    if position.steps_done == 0:
        first, n_first = _sum(losses[:1], runtime)
        position.first_loss = first / n_first
    position.step += len(losses)
    position.steps_done += len(losses)
    position.loss, position.n_losses = position.loss + loss, position.n_losses + n
    return loss / n


def _sum(losses: list[Tensor], runtime: Runtime) -> tuple[float, int]:
    """Return the sum of all ranks' losses, and their number."""
    mine = torch.cat(losses).double().cpu()
    loss, n = runtime.total(torch.tensor([mine.sum(), len(mine)])).tolist()
    return loss, int(n)


def evaluated_at_once(form: InputSpec, batch_size: int) -> int:
    """Return the batch size of the test: at least 256, unless the scores take too much memory."""
    return max(1, min(max(batch_size, 256), _SCORES // prod(form.output(1))))


def is_best(history: Sequence[Epoch], by: Metric) -> bool:
    """Return whether the last epoch is as good as any; a metric of NaN is not."""
    values: list[float] = [getattr(epoch, by.key) for epoch in history]
    best = min if by.lower_is_better else max
    return values[-1] == best(filter(isfinite, values), default=None)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Batches,
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
    sums: list[Tensor] = []  # by batch: loss, answers right first, and among the first five
    n_answers = 0
    for inputs, targets in batches:
        with options.autocast(inputs.device):
            outputs = torch.func.functional_call(model, dict(weights or {}), (inputs,))
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        right = outputs.topk(min(5, outputs.shape[-1])).indices == targets[..., None]
        loss = cross_entropy(outputs, targets, reduction="sum")
        # Kept on the device: to read them here would wait for every batch.
        sums.append(torch.stack([n.double() for n in (loss, right[..., 0].sum(), right.sum())]))
        n_answers += targets.numel()
    for module, mode in modes.items():
        module.training = mode
    mine = torch.stack(sums).sum(0).tolist() if sums else [0.0] * 3
    loss, top1, top5, n = total(torch.tensor([*mine, n_answers], dtype=torch.float64)).tolist()
    if not isfinite(loss):
        return Evaluation(loss / n, nan, nan)
    return Evaluation(loss / n, top1 / n, top5 / n)
