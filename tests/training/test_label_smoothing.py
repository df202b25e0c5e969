"""The training loss is smoothed; what is tested is not."""

import pytest
import torch
from torch.nn import functional as F

from tests.cli.test_presets import composed
from tests.experiments.command import TINY
from toolkit.cli import build_run
from toolkit.training import evaluate

CPU = torch.device("cpu")


def losses(label_smoothing):
    """Of training and testing; the weights do not change."""
    config = composed("train", *TINY, f"label_smoothing={label_smoothing}", "optimizer.lr=0")
    run = build_run(config)
    (epoch,) = run.run()
    return run, epoch


def test_smoothing_is_for_training():
    _, plain = losses(0)
    run, smoothed = losses(0.25)
    assert smoothed.test_loss == plain.test_loss
    tested = evaluate(run.runtime.module(), run.samples.test(16, CPU))
    assert tested.loss == pytest.approx(smoothed.test_loss)
    assert smoothed.train_loss != plain.train_loss


def test_smoothed_loss_by_hand():
    torch.manual_seed(0)
    outputs, targets = torch.randn(4, 5), torch.tensor([0, 4, 2, 1])
    run, _ = losses(0.25)
    found = run.runtime._engine.loss(outputs, targets)
    uniform = -F.log_softmax(outputs, 1).mean()
    torch.testing.assert_close(found, 0.75 * F.cross_entropy(outputs, targets) + 0.25 * uniform)


@pytest.mark.parametrize("value", [-0.1, 1, 1.5])
def test_refuses(value):
    message = f"label_smoothing is 0 or more, and below 1: got {float(value)}"
    with pytest.raises(ValueError, match=message):
        build_run(composed("train", *TINY, f"label_smoothing={value}"))
