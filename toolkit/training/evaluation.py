"""What weights are worth: the test of a model, and the loss that it is trained by."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import isfinite, nan, prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit.model import InputSpec
from toolkit.runtime.microbatch_losses import cross_entropies, separable
from toolkit.runtime.step_options import PLAIN, StepOptions
from toolkit.training.data import Batch

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
class Evaluations:
    """What the weights after an epoch are worth.

    Attributes:
        test: of the weights that the run reads out.
        average: of the averaged weights, if the run keeps an average.
        published: of the late weights of micro-batch 0, if the run asks for that.
    """

    test: Evaluation
    average: Evaluation | None
    published: Evaluation | None

    def metrics(self) -> dict[str, Any]:
        """Return the fields of an :class:`Epoch`."""
        average = self.average
        published = self.published
        return {
            "test_loss": self.test.loss,
            "top1": self.test.top1,
            "top5": self.test.top5,
            "ema_loss": average.loss if average else None,
            "ema_top1": average.top1 if average else None,
            "published_loss": published.loss if published else None,
            "published_top1": published.top1 if published else None,
        }


def evaluate_run(run: "TrainingRun") -> Evaluations:
    """Test the weights that the options name; every rank tests a share of the samples."""
    runtime = run.runtime
    batch_size = evaluated_at_once(run.samples.form, run.batch_size)
    share = run.samples.test(batch_size, run.device, runtime.rank, runtime.n_ranks)
    model = runtime.module()

    def test_with(weights: Mapping[str, Tensor] | None) -> Evaluation:
        return evaluate(model, share, runtime.total, weights, run.step_options)

    test = test_with(
        runtime.extrapolated() if run.options.readout == "extrapolated" else None
    )
    average_weights = runtime.averages()
    average = test_with(average_weights) if average_weights else None
    published = None
    if run.options.readout == "as_published":
        # None without delay: late weights are then the newest.
        late_weights = runtime.late_weights()
        published = test_with(late_weights) if late_weights else test
    return Evaluations(test, average, published)


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
    values = F.cross_entropy(
        scores, classes, ignore_index=IGNORED, reduction="none", **options
    )
    sums = values.view(n_microbatches, -1).sum(1)
    # As many tokens in each micro-batch, so a row is one micro-batch.
    counts = (classes != IGNORED).view(n_microbatches, -1).sum(1)
    return sums, counts


@separable(_cross_entropies)
def cross_entropy(outputs: Tensor, targets: Tensor, **options: Any) -> Any:
    """Cross-entropy, in nats, of scores ``[..., n_classes]`` and right classes ``[...]``.

    Args:
        outputs: scores.
        targets: classes ``[b]``, or tokens ``[b, length]``; :data:`IGNORED` tokens do not count.
        options: those of torch's ``cross_entropy``.

    Returns:
        The mean over samples; of tokens the sum and their number, since micro-batches may differ
        in how many count.
    """
    scores = outputs.flatten(0, -2)
    classes = targets.flatten()
    if targets.dim() == 1:
        return F.cross_entropy(scores, classes, **options)
    total = F.cross_entropy(
        scores, classes, ignore_index=IGNORED, reduction="sum", **options
    )
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
    # By module, since a frozen batch norm is in evaluation mode while the others train.
    modes = {module: module.training for module in model.modules()}
    model.eval()
    # By batch: loss, answers right first, and among the first five, and number of answers.
    sums: list[Tensor] = []
    for inputs, targets in batches:
        with options.autocast(inputs.device):
            outputs = torch.func.functional_call(model, dict(weights or {}), (inputs,))
        # Scores of 16 bits are tested in 32; float64 stays.
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        # ``[..., 5]``: column k says whether the class with the k-th highest score is the right
        # one. An ignored target, -100, is none of the classes and so never right.
        is_right = outputs.topk(min(5, outputs.shape[-1])).indices == targets[..., None]
        loss = F.cross_entropy(
            outputs.flatten(0, -2),
            targets.flatten(),
            ignore_index=IGNORED,
            reduction="sum",
        )
        answers = (
            loss,
            is_right[..., 0].sum(),
            is_right.sum(),
            (targets != IGNORED).sum(),
        )
        # Kept on the device: to read them here would wait for every batch.
        sums.append(torch.stack([number.double() for number in answers]))
    for module, mode in modes.items():
        module.training = mode
    # A rank without samples still calls `total`, for which all others wait.
    rank_sums = (
        torch.stack(sums).sum(0).cpu() if sums else torch.zeros(4, dtype=torch.float64)
    )
    loss, top1, top5, n_answers = total(rank_sums).tolist()
    if not isfinite(loss):
        return Evaluation(loss / n_answers, nan, nan)
    return Evaluation(loss / n_answers, top1 / n_answers, top5 / n_answers)
