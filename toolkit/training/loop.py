"""The training loop, and evaluation."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit.runtime.interface import Runtime
from toolkit.runtime.result import StepResult
from toolkit.training.data import Batches, ImageSet


def _alone(values: Tensor) -> Tensor:
    return values


@dataclass(frozen=True)
class Evaluation:
    """Mean loss, and the shares of images whose class is the first, or among the first five."""

    loss: float
    top1: float
    top5: float


@dataclass(frozen=True)
class Epoch:
    """What one epoch came to. Accuracies are shares of the test images."""

    epoch: int
    train_loss: float
    test_loss: float
    top1: float
    top5: float
    learning_rate: float
    images_per_second: float
    ema_top1: float | None = None  # with the average of the weights, where one is kept


@dataclass(frozen=True)
class Step:
    """A training step that is done.

    Attributes:
        step: its number in the epoch, from 1.
        n_steps: those of the epoch.
        result: what this process has seen of it. To read its losses is to wait for the device.
        learning_rate: of its update; where many ranks train, of the epoch's first.
        images: how many it took, all micro-batches together.
    """

    step: int
    n_steps: int
    result: StepResult
    learning_rate: float
    images: int


def fit(
    runtime: Runtime,
    images: ImageSet,
    *,
    epochs: int,
    batch_size: int,
    seed: int,
    device: torch.device,
    on_epoch: Callable[[Epoch], None] = lambda epoch: None,
    on_step: Callable[[Step], None] = lambda step: None,
) -> list[Epoch]:
    """Train for ``epochs`` and evaluate after each.

    Args:
        runtime: trains; its model is on ``device``. Where it is one of many ranks, all of them
            call this alike, and get the same metrics.
        images: training and test images.
        batch_size: images a training step, all micro-batches together.
        seed: of the order of the images and their augmentation.
        on_epoch: called with each epoch's metrics.
        on_step: called after each step.

    Raises:
        FloatingPointError: the training loss is no longer finite.
    """
    history = []
    for epoch in range(epochs):
        batches = images.train(batch_size, seed, epoch, device)
        rate = next_rate = runtime.learning_rates[0]
        start = time.perf_counter()
        losses = []
        for step, result in enumerate(runtime.run(batches), start=1):
            losses.append(result.losses)
            on_step(Step(step, len(batches), result, next_rate, batch_size))
            next_rate = runtime.learning_rates[0]
        mine = torch.cat(losses).double().cpu()
        loss, n_losses = runtime.total(torch.tensor([mine.sum(), len(mine)])).tolist()
        train_loss = loss / n_losses
        seconds = time.perf_counter() - start
        if not isfinite(train_loss):
            raise FloatingPointError(
                f"the training loss of epoch {epoch} is {train_loss}: lower optimizer.lr, or warm"
                " up with lr.warmup_epochs"
            )
        share = images.test(max(batch_size, 256), device, runtime.rank, runtime.n_ranks)
        test = evaluate(runtime.module(), share, runtime.total)
        ema_top1 = None
        if averages := runtime.averages():
            ema_top1 = evaluate(runtime.module(), share, runtime.total, averages).top1
        done = Epoch(
            epoch=epoch,
            train_loss=train_loss,
            test_loss=test.loss,
            top1=test.top1,
            top5=test.top5,
            learning_rate=rate,
            images_per_second=len(batches) * batch_size / seconds,
            ema_top1=ema_top1,
        )
        history.append(done)
        on_epoch(done)
    return history


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Batches,
    total: Callable[[Tensor], Tensor] = _alone,
    weights: Mapping[str, Tensor] | None = None,
) -> Evaluation:
    """Test ``model`` on ``batches``; its mode is afterwards what it was.

    Args:
        model: with the weights to test, or all but ``weights``.
        batches: test images.
        total: sums over all ranks, where each tests a share.
        weights: by name, in the place of the model's own.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    sums: list[Tensor] = []  # of each batch: losses, first, among the first five; on its device
    n_images = 0
    for inputs, targets in batches:
        outputs = torch.func.functional_call(model, dict(weights or {}), (inputs,))
        first = outputs.topk(min(5, outputs.shape[1])).indices == targets[:, None]
        loss = F.cross_entropy(outputs, targets, reduction="sum")
        sums.append(torch.stack([loss.double(), first[:, 0].sum().double(), first.sum().double()]))
        n_images += len(targets)
    for module, mode in modes.items():
        module.training = mode
    summed = torch.stack(sums).sum(0).tolist() if sums else [0.0] * 3
    loss, top1, top5, n = total(torch.tensor([*summed, n_images], dtype=torch.float64))
    return Evaluation(float(loss / n), float(top1 / n), float(top5 / n))
