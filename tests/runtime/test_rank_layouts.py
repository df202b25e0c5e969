"""Whether a loss returns a count, found before the first message."""

import pytest
import torch

from toolkit.runtime.losses import LossValue
from toolkit.runtime.message_layout import Layout
from toolkit.runtime.microbatches import BatchReader
from toolkit.runtime.rank_layouts import LossTrial

CPU = torch.device("cpu")
N_MICROBATCHES = 2
BATCH = 3
SCORES = Layout.of({0: torch.empty(BATCH, 5)})


def sum_and_count(outputs, targets):
    return LossValue(outputs[0].sum(), torch.tensor(float(len(targets))))


def mean(outputs, targets):
    return LossValue(outputs[0].mean())


def failing(outputs, targets):
    raise ZeroDivisionError


def trial_of(loss, microbatches):
    n_samples = BATCH * N_MICROBATCHES
    batch = torch.zeros(n_samples, 4), torch.ones(n_samples)
    source = BatchReader([batch], N_MICROBATCHES, lambda step: microbatches, 0, CPU)
    return LossTrial(loss, source, len(microbatches))


@pytest.mark.parametrize("microbatches", [[0], [1], [0, 1]], ids=str)
@pytest.mark.parametrize(
    ("loss", "counted"), [(sum_and_count, True), (mean, False), (failing, False)]
)
def test_a_loss_is_tried_on_zeros(loss, counted, microbatches):
    """On one micro-batch, whatever this rank reads; the batch is still there for the step."""
    shapes = []

    def noting(outputs, targets):
        shapes.append((outputs[0].shape, targets.shape))
        assert not outputs[0].any()
        return loss(outputs, targets)

    trial = trial_of(noting, microbatches)
    assert trial.is_counted(SCORES, CPU) == counted
    assert shapes == [((BATCH, 5), (BATCH,))]
    (share,) = trial.source
    assert len(share[1]) == BATCH * len(microbatches)


def test_a_rank_that_reads_nothing_leaves_the_answer_to_others():
    assert not trial_of(sum_and_count, []).is_counted(SCORES, CPU)


def test_a_trial_leaves_the_random_generators():
    def drawing(outputs, targets):
        return sum_and_count((outputs[0] * torch.rand(BATCH, 1),), targets)

    before = torch.get_rng_state()
    assert trial_of(drawing, [0]).is_counted(SCORES, CPU)
    assert torch.equal(torch.get_rng_state(), before)
