"""The pilot's data, measurements and predictions."""

import copy
from functools import partial
from math import nan
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from toolkit.cost import Hardware, unit_costs
from toolkit.model import Images
from toolkit.plan import pilot_training
from toolkit.plan.candidates import Candidate
from toolkit.plan.measure import Data, step_memory
from toolkit.plan.pilot_bench import _predicted, _speed
from toolkit.plan.predictions import Limits, Predictor
from toolkit.runtime.meters.predicted_vs_measured import equal_stages
from toolkit.runtime.microbatches import StepResult
from toolkit.schedule import ScheduleSpec, catalog
from toolkit.training.data import synthetic

CPU = torch.device("cpu")


def test_images_are_in_the_type_of_the_model():
    found = Data(synthetic(20, 8, 4, 4, 1), 4, CPU, torch.float64)
    for pixels, _ in (next(found.train(0)), *found.test()):
        assert pixels.dtype == torch.float64


@pytest.mark.parametrize(
    ("late", "base", "half_width"),
    [
        # Agresti and Coull's, of 0.9 and 500.
        ((0.9, 0.9, 0.9), (0.9, 0.9, 0.9), 2.6547),
        ((1.0, 1.0), (1.0, 1.0), 0.5381),
        ((0.9, 0.5), (0.5, 0.9), 508.2),  # Student's, of one degree of freedom
        ((0.9,), (0.9,), nan),
    ],
)
def test_an_interval_is_as_wide_as_the_test_images_make_it(late, base, half_width):
    found = pilot_training._difference(late, base, 500)
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
                yield StepResult(
                    step, (0,), torch.tensor([loss]), torch.empty(0), delays
                )

        def module(self):
            return nn.Identity()

    batch = (torch.eye(2), torch.tensor([0, 0]))
    samples = SimpleNamespace(form=Images(1, 1, 2, 4), train=lambda *_: [batch])
    samples.test = samples.train
    data = Data(samples, 2, CPU)
    losses = {
        "DP": [4.0] * 20 + [2.0, 2.0, 100.0],
        "CDP-v2": [4.0] * 20 + [3.0, 3.0, 100.0],
    }
    looks = {0: (1.0, 1.0), 5: (0.8, 0.9), 10: (0.6, 0.9)}

    def make(seed, schedule, every):
        return Fake(losses[schedule.name], looks if every else {})

    rules = {"DP": catalog.data_parallel(2), "CDP-v2": catalog.cyclic(2)}
    found = pilot_training.train_by(make, rules, data, 23, [0, 1], lambda *_: None)
    assert found.loss_ratio == pytest.approx(3 / 2)  # of whole tenths
    assert found.highest == pytest.approx(1.0)
    assert (found.chance, found.frequent) == (1 / 4, 1.0)
    assert not found.learned  # the most frequent class is right as often
    # Without the first, at which nothing is late.
    assert found.cosine == pytest.approx(0.7)


def test_a_device_holds_what_the_schedule_holds():
    """Stages that are alike: N micro-batches under DP, (N + 1)/2 under CDP."""
    n, width, batch = 4, 8, 2
    one = n * batch * width * 4  # bytes of the outputs of the tanhs of a micro-batch
    inputs, make = torch.randn(n * batch, width), partial(torch.optim.SGD, lr=0.1)
    schedules = catalog.data_parallel(n, "one"), catalog.cyclic(n, placement="one")
    held = [
        step_memory(
            equal_stages(n, width, batch), schedule, (inputs, inputs), make, F.mse_loss
        )
        for schedule in schedules
    ]
    # The loss keeps what it compares in the last stage, beside what is counted of the model.
    assert [peak for peak, _ in held] == [n * one, (n + 1) * one / 2]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpus_peak_excludes_the_optimizers_state():
    """Such as a momentum, which the first step creates."""
    inputs = torch.randn(2, 2048, device="cuda")

    def peak(**options):
        stages = equal_stages(2, 2048, 1)
        stages.model.cuda()
        make = partial(torch.optim.SGD, lr=0.1, **options)
        schedule = catalog.data_parallel(2, "one")
        return step_memory(stages, schedule, (inputs, inputs), make, F.mse_loss)[1]

    assert peak(momentum=0.9) == pytest.approx(peak(), rel=0.1)


class Frozen(nn.Sequential):
    """Its first norm stays in evaluation mode."""

    def train(self, mode=True):
        super().train(mode)
        self[0].eval()
        return self


@pytest.mark.parametrize("training", [True, False])
def test_running_statistics_are_those_of_the_last_images(training):
    torch.manual_seed(0)
    model = Frozen(nn.BatchNorm1d(2), nn.BatchNorm1d(2)).train(training)
    frozen = copy.deepcopy(model[0].state_dict())
    batches = [(3 + torch.randn(64, 2), None) for _ in range(4)]
    pilot_training.settle_norms(model, iter(batches))
    inputs = [model[0](x) for x, _ in batches]
    mean = torch.stack([x.mean(0) for x in inputs]).mean(0)
    torch.testing.assert_close(model[1].running_mean, mean)
    assert all(torch.equal(frozen[k], v) for k, v in model[0].state_dict().items())


def test_predictions_include_slack_latency_and_the_optimizers_state():
    slow = Hardware("slow", 1.0, 1e9, 1e9, link_latency=1.0)
    candidate, costs = Candidate(ScheduleSpec("gpipe", 2, 2), 1), unit_costs(2)
    found, without = (
        _predicted(candidate, costs, Predictor(slow, Limits(), words), (0.5, 2.0))
        for words in (1.0, 0.0)
    )
    usual, quick, long, free = (one.seconds for one in found)
    assert free == pytest.approx(6, rel=1e-3)
    assert usual > free + 1
    assert quick < usual < long
    assert found[0].memory - without[0].memory == costs[0].parameter_bytes
    assert _speed(found, found) == (1, 1, 1)
    assert _speed([*found[:2], found[0], found[3]], found) == (usual / long, 1, 1)
