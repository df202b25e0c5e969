"""Losses of all micro-batches in one call are those of each, and so are their gradients."""

import functools
import warnings
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from toolkit.model.structure import Results
from toolkit.runtime import separable
from toolkit.runtime.losses import checked_loss
from toolkit.runtime.meters.operations import count_operations
from toolkit.runtime.microbatch_losses import MicrobatchLosses, all_losses
from toolkit.runtime.step_options import PLAIN
from toolkit.training.evaluation import cross_entropy

N = 4


@functools.wraps(cross_entropy)  # which copies the mark of a separable loss
def halved(outputs, targets):
    return 0.5 * cross_entropy(outputs, targets)


@dataclass
class Scaled:
    """Has no hash, as all data classes that compare."""

    factor: float

    def __call__(self, outputs, targets):
        return self.factor * F.cross_entropy(outputs, targets)


def _of_scaled(outputs, targets, n_microbatches, factor):
    losses = F.cross_entropy(outputs, targets, reduction="none")
    return losses.view(n_microbatches, -1).mean(1) * sum(factor)


@separable(_of_scaled)
def scaled(outputs, targets, factor):
    return F.cross_entropy(outputs, targets) * sum(factor)


RESULTS, _ = Results.of(
    torch.zeros(1), lambda value: isinstance(value, torch.Tensor), "model"
)


def classes(shape, ignored=False):
    targets = torch.randint(5, shape)
    if ignored:
        targets.view(-1)[::3] = -100
    return targets


IMAGES = torch.Size([N * 6, 5])
TEXTS = torch.Size([N * 2, 7, 5])
SEPARABLE = {
    "torch": (F.cross_entropy, IMAGES, classes(IMAGES[:1])),
    "ignored": (F.cross_entropy, IMAGES, classes(IMAGES[:1], ignored=True)),
    "smoothed": (
        partial(F.cross_entropy, label_smoothing=0.1),
        IMAGES,
        classes(IMAGES[:1], True),
    ),
    "probabilities": (F.cross_entropy, IMAGES, torch.rand(IMAGES).double()),
    "a module": (nn.CrossEntropyLoss(label_smoothing=0.2), IMAGES, classes(IMAGES[:1])),
    "the outer of two partials": (
        partial(partial(F.cross_entropy, label_smoothing=0.5), label_smoothing=0.1),
        IMAGES,
        classes(IMAGES[:1]),
    ),
    "squares": (F.mse_loss, IMAGES, torch.rand(IMAGES).double()),
    "a module of squares": (nn.MSELoss(), IMAGES, torch.rand(IMAGES).double()),
    "images": (
        partial(cross_entropy, label_smoothing=0.1),
        IMAGES,
        classes(IMAGES[:1]),
    ),
    "texts": (cross_entropy, TEXTS, classes(TEXTS[:2], ignored=True)),
}
OTHERS = {
    "a function of the script": lambda x, y: F.cross_entropy(x, y),
    "weights of classes": partial(F.cross_entropy, weight=torch.ones(5).double()),
    "a module with weights": nn.CrossEntropyLoss(weight=torch.ones(5).double()),
    "sums": nn.CrossEntropyLoss(reduction="sum"),
    "sums of a function": partial(F.cross_entropy, reduction="sum"),
    "a function around a separable one": halved,
    "an object without a hash": Scaled(2.0),
    "an option that changes in place": partial(scaled, factor=[1.0, 2.0]),
    "an option on the device": partial(scaled, factor=torch.ones(2).double()),
    "a subclass": type("Own", (nn.CrossEntropyLoss,), {})(),
}


def of_step(loss, outputs, targets):
    """The losses, their counts and the gradient of outputs, one by one and in one call."""
    found = []
    for in_one_call in (False, True):
        losses = MicrobatchLosses(
            loss, checked_loss(loss, PLAIN, RESULTS), PLAIN, RESULTS
        )
        leaf = outputs.clone().requires_grad_()
        compute = losses if in_one_call else losses._one_by_one
        value = compute((leaf,), targets, N)
        value.value.sum().backward()
        found.append((value.value, value.count, leaf.grad))
    return found


@pytest.mark.parametrize("name", SEPARABLE)
@pytest.mark.filterwarnings("ignore:loss. got a mean over")
def test_one_call_equals_a_call_of_each(name):
    loss, shape, targets = SEPARABLE[name]
    outputs = torch.randn(shape, dtype=torch.float64)
    apart, together = of_step(loss, outputs, targets)
    torch.testing.assert_close(together, apart, rtol=1e-12, atol=1e-14)
    losses = MicrobatchLosses(loss, checked_loss(loss, PLAIN, RESULTS), PLAIN, RESULTS)
    assert losses.in_one_call() is not None
    # As few operations as for a single micro-batch, and at most four for its mean.
    single = count_operations(lambda: loss(outputs, targets)).total()
    assert (
        count_operations(lambda: losses((outputs,), targets, N)).total() <= single + 4
    )


@pytest.mark.parametrize("name", OTHERS)
def test_other_losses_are_called_for_each(name):
    loss = OTHERS[name]
    losses = MicrobatchLosses(loss, checked_loss(loss, PLAIN, RESULTS), PLAIN, RESULTS)
    assert losses.in_one_call() is None
    outputs = torch.randn(IMAGES, dtype=torch.float64)
    targets = classes(IMAGES[:1])
    expected = [
        loss(x, y) for x, y in zip(outputs.chunk(N), targets.chunk(N), strict=True)
    ]
    torch.testing.assert_close(
        losses((outputs,), targets, N).value, torch.stack(expected)
    )


def test_an_argument_by_position_is_not_lost():
    @separable(lambda scale, outputs, targets, n_microbatches: None)
    def loss(scale, outputs, targets):
        return scale * F.cross_entropy(outputs, targets)

    assert all_losses(loss) is not None
    assert all_losses(partial(loss, 2.0)) is None


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_squares_of_unlike_shapes_stay_within_their_microbatch():
    outputs, targets = torch.randn(N * 3, 1).double(), torch.randn(N * 3).double()
    apart, together = of_step(F.mse_loss, outputs, targets)
    torch.testing.assert_close(together, apart, rtol=1e-12, atol=1e-14)


def test_only_the_first_losses_are_examined():
    calls = []

    @separable(lambda outputs, targets, n: F.cross_entropy(outputs, targets).expand(n))
    def loss(outputs, targets):
        calls.append(1)
        return F.cross_entropy(outputs, targets)

    losses = MicrobatchLosses(loss, checked_loss(loss, PLAIN, RESULTS), PLAIN, RESULTS)
    for _ in range(40):
        losses.examine((torch.randn(IMAGES),), classes(IMAGES[:1]), N)
    assert len(calls) == 64


def test_several_outputs_belong_together_as_the_loss_says():
    results, _ = Results.of(
        (torch.zeros(1), torch.zeros(1)),
        lambda value: isinstance(value, torch.Tensor),
        "model",
    )
    loss = cross_entropy
    assert (
        MicrobatchLosses(
            loss, checked_loss(loss, PLAIN, results), PLAIN, results
        ).in_one_call()
        is None
    )


def test_means_over_some_targets_are_warned_of_in_the_first_steps():
    loss = F.cross_entropy
    losses = MicrobatchLosses(loss, checked_loss(loss, PLAIN, RESULTS), PLAIN, RESULTS)
    outputs = (torch.randn(IMAGES, dtype=torch.float64),)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for k in range(40):
            losses.examine(outputs, classes(IMAGES[:1], ignored=k == 3), N)
    assert len(caught) == 1
