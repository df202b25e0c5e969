"""The predicted peak of a GPU's memory, against torch on the meta device and on a GPU."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from tests.thorough import more
from toolkit.cost import profile
from toolkit.model import build, partition
from toolkit.model.analysis import Live
from toolkit.runtime import SingleProcess, StepOptions
from toolkit.runtime.step_options import PLAIN
from toolkit.schedule import catalog

DP, CDP = catalog.data_parallel(4, "one"), catalog.cyclic(4, placement="one")
AGAIN = StepOptions(checkpoint="all")
MORE = [
    catalog.cyclic(4, 2, "one"),
    catalog.cyclic(4, placement="one", accumulate=2),
    replace(CDP, name="CDP-v2 predicted", correction="extrapolate"),
    catalog.data_parallel(4, "one", delay=1),
    catalog.gradient_accumulation(4, 6),
]


@pytest.fixture
def peak(benchmark_module):
    return benchmark_module("peak")


def test_simultaneous_workers_keep_n_times_the_activations(peak):
    images = torch.empty(8, 3, 64, 64, device="meta")
    with torch.device("meta"):
        stages = partition(build("resnet8", 1000, 64), 4, images)
    costs = profile(stages, images)
    one = sum(cost.kept_bytes + cost.extra_input_bytes for cost in costs)
    together = peak.foreseen("resnet8", DP, images, PLAIN)
    assert together == pytest.approx(4 * one, rel=0.02)  # gradients and the last op's come on top
    shifted = peak.foreseen("resnet8", CDP, images, PLAIN)
    of_an_op = max(max(cost.working_bytes) for cost in costs)
    assert 0.45 * together < shifted - of_an_op < 0.8 * together
    for less in (StepOptions("bf16"), AGAIN):
        assert peak.foreseen("resnet8", DP, images, less) < 0.7 * together


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        *((schedule, options) for schedule in (DP, CDP) for options in (PLAIN, AGAIN)),
        *((schedule, PLAIN) for schedule in more([], MORE)),
    ],
    ids=lambda value: getattr(value, "name", None) or value.checkpoint,
)
def test_meta_tensors_have_the_predicted_peak(peak, schedule, options):
    """Without cuDNN's workspace and the allocator's blocks, which only a GPU has."""
    images = torch.empty(8, 3, 64, 64, device="meta")
    with torch.device("meta"):
        stages = partition(build("resnet18", 1000, 64), 4, images)

    def optimizer(parameters):
        return torch.optim.SGD(parameters, 0.01)

    runtime = SingleProcess(
        stages, schedule, optimizer, F.cross_entropy, "scheduled", options=options
    )
    n = schedule.n_microbatches
    batch = images.repeat(n, 1, 1, 1), torch.zeros(n * 8, dtype=torch.long, device="meta")
    with Live() as found:
        for _ in range(2):  # by then no version is left that was made outside
            runtime.step(*batch)
        at_rest, found.most = found.bytes, 0
        for result in runtime.run([batch] * 2):
            del result
    expected = peak.foreseen("resnet18", schedule, images, options)
    assert found.most - at_rest == pytest.approx(expected, rel=0.005)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", [PLAIN, StepOptions("bf16"), AGAIN])
def test_cuda_allocator_has_the_predicted_peak(peak, options):
    images = torch.randn(32, 3, 64, 64, device="cuda")
    for schedule in (DP, CDP):
        _, asked_for = peak.held("resnet18", schedule, images, options)
        expected = peak.foreseen("resnet18", schedule, images, options)
        assert asked_for == pytest.approx(expected, rel=0.1)
