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

_SCORES = 2**25  # at most, of a batch of the test: 128 MiB of 32 bits


def cross_entropy(outputs: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """Cross-entropy over all answers alike, in nats.

    Args:
        outputs: ``[..., n_classes]``: of an image, or at each place of a sequence.
        targets: ``[...]``: the right classes.
        options: of torch's ``cross_entropy``.
    """
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), **options)


def _alone(values: Tensor) -> Tensor:
    return values


@dataclass(frozen=True)
class Evaluation:
    """Mean loss, and the shares of answers that are right at first, or among the first five.

    An answer is the class of an image, or the next token at a place of a sequence. Shares of scores
    that are not finite are NaN.
    """

    loss: float
    top1: float
    top5: float


@dataclass(frozen=True)
class Epoch:
    """What one epoch came to. Accuracies are shares of the answers to the test samples."""

    epoch: int
    train_loss: float
    test_loss: float
    top1: float
    top5: float
    learning_rate: float
    samples_per_second: float
    ema_loss: float | None = None  # of the test, with the average of the weights if one is kept
    ema_top1: float | None = None

    def told(self, by: Metric) -> str:
        """How good the model is by now, in short."""
        return f"loss {self.test_loss:.3f}" if by is LOSS else f"{self.top1:.2%}"


@dataclass(frozen=True)
class Step:
    """A training step that is done.

    Attributes:
        step: its number in the epoch, from 1.
        n_steps: those of the epoch.
        result: what this process has seen of it. To read its losses is to wait for the device.
        learning_rate: of its update.
        samples: how many it took, all micro-batches together.
    """

    step: int
    n_steps: int
    result: StepResult
    learning_rate: float
    samples: int


@dataclass
class Position:
    """How far a run has come.

    Attributes:
        epoch: the one under way.
        step: training steps of it that are done.
        steps_done: those of the whole run.
        loss: sum of the losses of its micro-batches so far.
        n_losses: how many they are.
        stretch_loss: their mean over the last stretch.
        first_loss: their mean over the first step of all.
        learning_rate: of the epoch's first update.
        history: of the epochs before.
    """

    epoch: int = 0
    step: int = 0
    steps_done: int = 0
    loss: float = 0.0
    n_losses: float = 0.0
    stretch_loss: float = nan
    first_loss: float = nan
    learning_rate: float = nan
    history: list[Epoch] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "Position":
        """The position whose ``state_dict`` was taken.

        Raises:
            UserError: it is formed otherwise.
        """
        history = state["history"] if isinstance(state, dict) and "history" in state else []
        n_epochs = len(history) if isinstance(history, list) else 0
        epochs = [_EPOCH | _average_of(history[k]) for k in range(n_epochs)]
        expected = cls().state_dict() | {"history": epochs}
        if fault := difference(state, expected, "position"):
            raise UserError(fault)
        return cls(**{**state, "history": [Epoch(**epoch) for epoch in history]})


class DivergedError(UserError, FloatingPointError):
    """The loss is not finite, or far above where it began.

    Args:
        message: that says so.
        epochs: that had ended before.
    """

    def __init__(self, message: str, epochs: Sequence[Epoch] = ()) -> None:
        super().__init__(message)
        self.epochs = tuple(epochs)

    def all_epochs(self, n: int) -> list[Epoch]:
        """Of a run of ``n``: NaN are those that it did not come to the end of."""
        return [*self.epochs, *(Epoch(k, *[nan] * 6) for k in range(len(self.epochs), n))]


_EPOCH = asdict(Epoch(0, *[0.0] * 6))


def _average_of(epoch: Any) -> dict[str, float]:
    """What only some epochs have."""
    names = ("ema_loss", "ema_top1")
    return {n: 0.0 for n in names if isinstance(epoch, dict) and epoch.get(n) is not None}


class Stretches:
    """Where training pauses: after each stretch of steps all updates are in. Here: never."""

    def steps(self, position: Position, n_steps: int) -> int:
        """Steps of the next stretch, of the ``n_steps`` that the epoch has left."""
        return n_steps

    def check(self, position: Position) -> None:
        """A stretch has ended. Every rank calls it alike.

        Raises:
            DivergedError: the loss is no longer finite.
        """
        self._check("training", position.stretch_loss, position)

    def check_test(self, loss: float, position: Position) -> None:
        """An epoch has been tested, of which ``position`` does not tell yet; as :meth:`check`."""
        self._check("test", loss, position)

    def _check(self, which: str, loss: float, position: Position) -> None:
        if not isfinite(loss):
            raise DivergedError(
                f"the {which} loss of epoch {position.epoch} is {loss}: lower optimizer.lr, or warm"
                " up with lr.warmup_epochs",
                position.history,
            )

    def end(self, position: Position) -> None:
        """What has ended has been checked, and the epoch, if it has ended, is in the history."""


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
        batch_size: samples a training step, all micro-batches together.
        seed: seed of the order of the samples and of their augmentation.
        rate: function from a training step to the learning rate of its update, for the metrics.
        on_epoch: function that is called with each epoch's metrics.
        on_step: function that is called after each step.
        position: place at which to go on; the runtime has the state of that place.
        stretches: places at which to pause.
        options: the runtime's options; the tests compute in its precision.

    Raises:
        DivergedError: the loss is no longer finite.
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
        start, begun_at = time.perf_counter(), position.step
        _train(runtime, batches, batch_size, position, stretches, rate, on_step)
        seconds = time.perf_counter() - start
        n_tested = evaluated_at_once(samples.form, batch_size)
        share = samples.test(n_tested, device, runtime.rank, runtime.n_ranks)
        model = runtime.module()
        test = evaluate(model, share, runtime.total, options=options)
        stretches.check_test(test.loss, position)
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
            samples_per_second=(len(batches) - begun_at) * batch_size / seconds,
            ema_loss=ema.loss if ema else None,
            ema_top1=ema.top1 if ema else None,
        )
        position.history = [*position.history, done]
        position.epoch, position.step, position.loss, position.n_losses = epoch + 1, 0, 0.0, 0.0
        on_epoch(done)
        stretches.end(position)
    return position.history


def _train(
    runtime: Runtime,
    batches: Batches,
    batch_size: int,
    position: Position,
    stretches: Stretches,
    rate: Callable[[int], float],
    on_step: Callable[[Step], None],
) -> None:
    """Train on what is left of an epoch, stretch by stretch; ``position`` goes along."""
    n_steps = len(batches)
    if position.step == 0:
        position.learning_rate = rate(position.steps_done)
    while position.step < n_steps:
        left = n_steps - position.step
        stretch = min(left, stretches.steps(position, left))
        losses = []
        part = batches.between(position.step, position.step + stretch)
        for k, result in enumerate(runtime.run(part)):
            losses.append(result.losses)
            now = rate(position.steps_done + k)
            on_step(Step(position.step + k + 1, n_steps, result, now, batch_size))
            del result  # and what it keeps, before the next step
        loss, n = _sum(losses, runtime)
        if position.steps_done == 0:
            first, of = _sum(losses[:1], runtime)
            position.first_loss = first / of
        position.step += stretch
        position.steps_done += stretch
        position.loss, position.n_losses = position.loss + loss, position.n_losses + n
        position.stretch_loss = loss / n
        stretches.check(position)
        if position.step < n_steps:
            stretches.end(position)


def evaluated_at_once(form: InputSpec, batch_size: int) -> int:
    """Samples of a batch of the test: many, but of large answers few, whose scores take memory."""
    return max(1, min(max(batch_size, 256), _SCORES // prod(form.output(1))))


def is_best(history: Sequence[Epoch], by: Metric) -> bool:
    """Whether the last epoch is as good as any; one that ended in no number is not."""
    values: list[float] = [getattr(epoch, by.key) for epoch in history]
    best = min if by.lower_is_better else max
    return values[-1] == best(filter(isfinite, values), default=None)


def _sum(losses: list[Tensor], runtime: Runtime) -> tuple[float, int]:
    """All ranks' losses of steps, and how many they are."""
    mine = torch.cat(losses).double().cpu()
    loss, n = runtime.total(torch.tensor([mine.sum(), len(mine)])).tolist()
    return loss, int(n)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Batches,
    total: Callable[[Tensor], Tensor] = _alone,
    weights: Mapping[str, Tensor] | None = None,
    options: StepOptions = PLAIN,
) -> Evaluation:
    """Test ``model`` on ``batches``; its mode is afterwards what it was.

    Args:
        model: the model to test.
        batches: test samples.
        total: function that sums over all ranks, if each tests a share.
        weights: weights by name, in the place of the model's own.
        options: a options, in whose precision the model computes.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    sums: list[Tensor] = []  # of each batch: losses, first, among the first five; on its device
    n_answers = 0
    for inputs, targets in batches:
        with options.autocast(inputs.device):
            outputs = torch.func.functional_call(model, dict(weights or {}), (inputs,))
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        first = outputs.topk(min(5, outputs.shape[-1])).indices == targets[..., None]
        loss = cross_entropy(outputs, targets, reduction="sum")
        found = loss, first[..., 0].sum(), first.sum()
        sums.append(torch.stack([number.double() for number in found]))
        n_answers += targets.numel()
    for module, mode in modes.items():
        module.training = mode
    summed = torch.stack(sums).sum(0).tolist() if sums else [0.0] * 3
    loss, top1, top5, n = total(torch.tensor([*summed, n_answers], dtype=torch.float64))
    if not isfinite(loss):
        return Evaluation(float(loss / n), nan, nan)
    return Evaluation(float(loss / n), float(top1 / n), float(top5 / n))
