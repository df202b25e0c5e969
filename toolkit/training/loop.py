"""The training loop, and evaluation."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from toolkit.runtime import SingleProcess
from toolkit.training.data import Batches, ImageSet


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


def fit(
    runtime: SingleProcess,
    images: ImageSet,
    *,
    epochs: int,
    batch_size: int,
    seed: int,
    device: torch.device,
    on_epoch: Callable[[Epoch], None] = lambda epoch: None,
    on_step: Callable[[int, int], None] = lambda step, n_steps: None,
) -> list[Epoch]:
    """Train for ``epochs`` and evaluate after each.

    Args:
        runtime: trains; its model is on ``device``.
        images: training and test images.
        batch_size: images a training step, all micro-batches together.
        seed: of the order of the images and their augmentation.
        on_epoch: called with each epoch's metrics.
        on_step: called after each step with its number in the epoch, from 1, and their number.

    Raises:
        FloatingPointError: the training loss is no longer finite.
    """
    history = []
    for epoch in range(epochs):
        batches = images.train(batch_size, seed, epoch, device)
        rate = runtime.learning_rates[0]
        start = time.perf_counter()
        losses = []
        for result in runtime.run(batches):
            losses.append(result.loss)
            on_step(len(losses), len(batches))
        train_loss = float(torch.stack(losses).mean())
        seconds = time.perf_counter() - start
        if not torch.isfinite(torch.tensor(train_loss)):
            raise FloatingPointError(
                f"the training loss of epoch {epoch} is {train_loss}: lower optimizer.lr, or warm"
                " up with lr.warmup_epochs"
            )
        test = evaluate(runtime.module(), images.test(max(batch_size, 256), device))
        done = Epoch(
            epoch=epoch,
            train_loss=train_loss,
            test_loss=test.loss,
            top1=test.top1,
            top5=test.top5,
            learning_rate=rate,
            images_per_second=len(batches) * batch_size / seconds,
        )
        history.append(done)
        on_epoch(done)
    return history


@torch.no_grad()
def evaluate(model: nn.Module, batches: Batches) -> Evaluation:
    """Test ``model`` on ``batches``; its mode is afterwards what it was."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    n = 0
    loss = torch.zeros(())
    top1 = top5 = torch.zeros((), dtype=torch.long)
    for inputs, targets in batches:
        outputs = model(inputs)
        first = outputs.topk(min(5, outputs.shape[1])).indices == targets[:, None]
        loss = loss + F.cross_entropy(outputs, targets, reduction="sum").cpu()
        top1 = top1 + first[:, 0].sum().cpu()
        top5 = top5 + first.sum().cpu()
        n += len(targets)
    for module, mode in modes.items():
        module.training = mode
    return Evaluation(float(loss) / n, int(top1) / n, int(top5) / n)
