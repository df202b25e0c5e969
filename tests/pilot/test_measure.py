"""What a short training comes to."""

from types import SimpleNamespace

import pytest
import torch

from toolkit.pilot import measure
from toolkit.pilot.data import Data
from toolkit.runtime.result import StepResult
from toolkit.schedule import catalog


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
