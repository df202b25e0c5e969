"""What a short training comes to."""

from math import nan
from types import SimpleNamespace

import pytest
import torch

from toolkit.plan import measure
from toolkit.plan.measure import Data
from toolkit.runtime.microbatches import StepResult
from toolkit.schedule import catalog


@pytest.mark.parametrize(
    ("late", "base", "half_width"),
    [
        ((0.9, 0.9, 0.9), (0.9, 0.9, 0.9), 2.6547),  # Agresti and Coull's, of 0.9 and 500
        ((1.0, 1.0), (1.0, 1.0), 0.5381),
        ((0.9, 0.5), (0.5, 0.9), 508.2),  # Student's, of one degree of freedom
        ((0.9,), (0.9,), nan),
    ],
)
def test_an_interval_is_as_wide_as_the_test_images_make_it(late, base, half_width):
    found = measure._difference(late, base, 500)
    assert found.mean == pytest.approx(0)
    assert found.half_width == pytest.approx(half_width, rel=1e-3, nan_ok=True)


def test_findings_of_a_training_by_hand():
    class Fake:
        def __init__(self, losses, cosines):
            self.losses, self.cosines = losses, cosines

        def run(self, batches):
            for step, (loss, _) in enumerate(zip(self.losses, batches, strict=False)):
                found = self.cosines.get(step, ())
                delays = tuple(SimpleNamespace(cosine=c) for c in found)
                yield StepResult(step, (0,), torch.tensor([loss]), torch.empty(0), delays)

        def module(self):
            return torch.nn.Identity()

    batch = (torch.eye(2), torch.tensor([0, 0]))
    data = Data(lambda seed, epoch: [batch], lambda: [batch], True, 2, 2)
    losses = {"DP": [4.0] * 20 + [2.0, 2.0, 100.0], "CDP-v2": [4.0] * 20 + [3.0, 3.0, 100.0]}
    looks = {0: (1.0, 1.0), 5: (0.8, 0.9), 10: (0.6, 0.9)}

    def make(seed, schedule, every):
        return Fake(losses[schedule.name], looks if every else {})

    rules = [catalog.data_parallel(2), catalog.cyclic(2)]
    found = measure.train(make, rules, data, 23, [0, 1], lambda *_: None)
    assert found.loss_ratio == pytest.approx(3 / 2)  # of whole tenths
    assert found.highest == pytest.approx(1.0)
    assert found.cosine == pytest.approx(0.7)  # without the first, at which nothing is late
