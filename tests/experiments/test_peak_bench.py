"""The predicted peak of a GPU's memory, against torch on the meta device and on a GPU."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.library_memory import BACKWARD, FORWARD, LibraryMemory
from tests.stages import cut
from tests.thorough import more
from toolkit.cost import profile
from toolkit.cost.library_workspace import add_library_workspace
from toolkit.model import build, partition
from toolkit.model.peak_memory import LiveMemory
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
    together = peak.predict_peak(DP, peak.meta_costs("resnet8", 4, images, PLAIN))
    # Gradients and the last op's come on top.
    assert together == pytest.approx(4 * one, rel=0.02)
    shifted = peak.predict_peak(CDP, peak.meta_costs("resnet8", 4, images, PLAIN))
    of_an_op = max(max(cost.working_bytes) for cost in costs)
    assert 0.45 * together < shifted - of_an_op < 0.8 * together
    for less in (StepOptions("bf16"), AGAIN):
        smaller_costs = peak.meta_costs("resnet8", 4, images, less)
        assert peak.predict_peak(DP, smaller_costs) < 0.7 * together


def peak_of_meta_tensors(schedule, options, stages, images, memory):
    """Peak bytes of training steps on the meta device above those that stay between them."""

    def optimizer(parameters):
        return torch.optim.SGD(parameters, 0.01)

    runtime = SingleProcess(
        stages, schedule, optimizer, F.cross_entropy, "scheduled", options=options
    )
    n = schedule.n_microbatches
    batch = (
        images.repeat(n, 1, 1, 1),
        torch.zeros(n * 8, dtype=torch.long, device="meta"),
    )
    with memory:
        for _ in range(2):  # by then no version is left that was made outside
            runtime.step(*batch)
        at_rest = memory.bytes
        memory.restart()
        for result in runtime.run([batch] * 2):
            del result
    return memory.most - at_rest


def stages_of_resnet18(images):
    with torch.device("meta"):
        return cut(build("resnet18", 1000, 64), 4, images)


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        (CDP, PLAIN),
        *more([], [(CDP, AGAIN), (DP, PLAIN), (DP, AGAIN)]),
        *((schedule, PLAIN) for schedule in more([], MORE)),
    ],
    ids=lambda value: getattr(value, "name", None) or value.checkpoint,
)
def test_meta_tensors_have_the_predicted_peak(peak, schedule, options):
    """Without cuDNN's workspace and the allocator's blocks, which only a GPU has."""
    images = torch.empty(8, 3, 64, 64, device="meta")
    measured = peak_of_meta_tensors(
        schedule, options, stages_of_resnet18(images), images, LiveMemory()
    )
    costs = peak.meta_costs("resnet18", schedule.n_stages, images, options)
    assert measured == pytest.approx(peak.predict_peak(schedule, costs), rel=0.005)


@pytest.mark.parametrize(
    ("schedule", "options"),
    [(CDP, AGAIN), *more([], [(DP, PLAIN)])],
    ids=lambda value: getattr(value, "name", None) or value.checkpoint,
)
def test_workspaces_of_a_stand_in_are_in_the_predicted_peak(peak, schedule, options):
    """They are more of the peak than the tolerance of the test on a GPU."""
    images = torch.empty(8, 3, 64, 64, device="meta")
    stages = stages_of_resnet18(images)
    workspaces = {FORWARD: 60_000_000, BACKWARD: 125_000_000}
    memory = LibraryMemory(workspaces)
    measured = peak_of_meta_tensors(schedule, options, stages, images, memory)
    costs = peak.meta_costs("resnet18", 4, images, options)
    with LibraryMemory(workspaces) as meter:
        costs_with_workspace = add_library_workspace(
            costs, stages, images, memory=meter
        )
    with_workspace = peak.predict_peak(schedule, costs_with_workspace)
    assert measured == pytest.approx(with_workspace, rel=0.005)
    assert with_workspace > 1.1 * peak.predict_peak(schedule, costs)


class Allocator:
    """A stand-in for CUDA's: the bytes in use and their peak, set by hand."""

    bytes = most = 0

    def restart(self):
        self.most = self.bytes


def test_a_peak_at_the_ends_of_operations_has_no_workspace(peak):
    """Each operation leaves 40 bytes, and takes 100 more while it runs."""
    allocator = Allocator()
    allocator.bytes = 7

    class Operation(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            allocator.most = max(allocator.most, allocator.bytes + 140)
            allocator.bytes += 40
            return func(*args, **(kwargs or {}))

    with Operation(), peak.PeakAtOpEnds(allocator) as op_ends:
        values = torch.ones(10)
        values = values + 1
        allocator.bytes -= 80
        values.add_(1)
    assert op_ends.bytes == 7 + 80
    assert allocator.most == 7 + 40 + 140


def test_measured_peaks_of_a_stand_in_are_the_predicted_ones(peak, monkeypatch):
    """With workspace as the allocator sees them, and of tensors at the ends of operations."""
    memory = LibraryMemory({FORWARD: 2_000_000, BACKWARD: 3_000_000})

    def memory_stats(device):
        return {
            f"{kind}_bytes.all.{name}": n_bytes
            for kind in ("allocated", "requested")
            for name, n_bytes in (("current", memory.bytes), ("peak", memory.most))
        }

    monkeypatch.setattr("torch.cuda.memory_stats", memory_stats)
    monkeypatch.setattr(
        "torch.cuda.reset_peak_memory_stats", lambda device: memory.restart()
    )
    images = torch.randn(4, 3, 32, 32)
    with memory:
        measured = peak.measure_peak("resnet8", CDP, images, PLAIN)
    costs = peak.meta_costs("resnet8", 4, images, PLAIN)
    stages = partition(build("resnet8", 1000, 32), 4, images)
    with LibraryMemory(memory.workspaces) as meter:
        costs_with_workspace = add_library_workspace(
            costs, stages, images, memory=meter
        )
    with_workspace = peak.predict_peak(CDP, costs_with_workspace)
    assert measured.tensors == pytest.approx(peak.predict_peak(CDP, costs), rel=0.01)
    assert (
        measured.requested
        == measured.allocated
        == pytest.approx(with_workspace, rel=0.01)
    )
    assert measured.requested > 1.2 * measured.tensors


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", [PLAIN, StepOptions("bf16"), AGAIN])
def test_cuda_allocator_has_the_predicted_peak(peak, options):
    """In float32 an H200 held 0.5 GB more than tensors should: cuDNN's workspace, if both hold."""
    images = torch.randn(32, 3, 64, 64, device="cuda")
    costs = peak.meta_costs("resnet18", 4, images, options)
    costs_with_workspace = peak.measured_costs("resnet18", costs, images, options)
    for schedule in (DP, CDP):
        measured = peak.measure_peak("resnet18", schedule, images, options)
        of_tensors = peak.predict_peak(schedule, costs)
        assert measured.tensors == pytest.approx(of_tensors, rel=0.1)
        with_workspace = peak.predict_peak(schedule, costs_with_workspace)
        assert measured.requested == pytest.approx(with_workspace, rel=0.1)
