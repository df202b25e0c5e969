"""The peak of a GPU's memory: what is predicted, and on a GPU that it is what is measured."""

import weakref

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.experiments.command import EXPERIMENTS
from tests.thorough import more
from toolkit.cost import profile, simulate
from toolkit.cost.hardware import UNIT
from toolkit.model import build, partition
from toolkit.model.analysis import tensors_in
from toolkit.runtime import Recipe, SingleProcess
from toolkit.runtime.recipe import PLAIN
from toolkit.schedule import catalog


@pytest.fixture
def peak(monkeypatch):
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    from benchmarks import peak

    return peak


def test_all_together_keep_what_each_keeps(peak):
    images = torch.empty(8, 3, 64, 64, device="meta")
    with torch.device("meta"):
        stages = partition(build("resnet8", 1000, 64), 4, images)
    one = sum(cost.kept_bytes + cost.extra_input_bytes for cost in profile(stages, images))
    together = peak.foreseen("resnet8", catalog.data_parallel(4, "one"), images, PLAIN)
    assert together == pytest.approx(4 * one, rel=0.02)  # gradients and the last op's come on top
    shifted = peak.foreseen("resnet8", catalog.cyclic(4, placement="one"), images, PLAIN)
    assert 0.45 * together < shifted < 0.8 * together


@pytest.mark.parametrize("recipe", [Recipe("bf16"), Recipe(checkpoint="all")])
def test_the_recipe_is_foreseen(peak, recipe):
    images = torch.empty(8, 3, 64, 64, device="meta")
    plain, less = (
        peak.foreseen("resnet8", catalog.data_parallel(4, "one"), images, which)
        for which in (PLAIN, recipe)
    )
    assert less < 0.7 * plain


@pytest.mark.parametrize("delay", more(["freshest"], [1, "freshest"]))
def test_the_versions_that_stay_between_steps_are_left_out(peak, delay):
    """As the measured peak leaves them out."""
    images = torch.randn(1, 3, 32, 32)
    stages = partition(build("resnet8", 1000, 32), 3, images)
    schedule = catalog.cyclic(3, delay, "one")
    runtime = SingleProcess(
        stages, schedule, lambda p: torch.optim.SGD(p, 0.01), F.cross_entropy, "scheduled"
    )
    runtime.step(images.repeat(3, 1, 1, 1), torch.zeros(3, dtype=torch.long))
    kept = [weights for versions in runtime._versions for weights in versions.values()]
    at_rest = sum(tensor.nbytes for weights in kept for tensor in weights.values())
    assert at_rest > sum(p.nbytes for p in stages.model.parameters())
    costs = profile(stages, images)
    timeline = peak.with_gradients_between(simulate(schedule.lower(3, 1), costs, UNIT), costs)
    found = peak.foreseen("resnet8", schedule, images, PLAIN)
    assert found == pytest.approx(timeline.peak_memory() - at_rest)


class SetAside(TorchDispatchMode):
    """The bytes that live tensors take, and the most of them so far; on the meta device, too."""

    def __init__(self):
        super().__init__()
        self.sizes, self.bytes, self.most = {}, 0, 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        found = function(*arguments, **(options or {}))
        for tensor in tensors_in(found):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes()
                self.bytes += storage.nbytes()
                self.most = max(self.most, self.bytes)
                weakref.finalize(storage, self.forget, storage._cdata)
        return found

    def forget(self, storage):
        self.bytes -= self.sizes.pop(storage)


@pytest.mark.parametrize(
    ("recipe", "within"), [(PLAIN, 0.03), (Recipe(checkpoint="all"), 0.15)], ids=["plain", "again"]
)
@pytest.mark.parametrize(
    "schedule",
    [catalog.data_parallel(4, "one"), catalog.cyclic(4, placement="one")],
    ids=lambda schedule: schedule.name,
)
def test_torch_sets_aside_what_is_foreseen(peak, schedule, recipe, within):
    """But for what an op needs while it runs, and on a GPU cuDNN and the allocator's blocks."""
    images = torch.empty(32, 3, 64, 64, device="meta")
    with torch.device("meta"):
        stages = partition(build("resnet18", 1000, 64), 4, images)
    runtime = SingleProcess(
        stages,
        schedule,
        lambda p: torch.optim.SGD(p, 0.01),
        F.cross_entropy,
        "scheduled",
        recipe=recipe,
    )
    batch = images.repeat(4, 1, 1, 1), torch.zeros(128, dtype=torch.long, device="meta")
    with SetAside() as found:
        runtime.step(*batch)
        at_rest, found.most = found.bytes, 0
        for result in runtime.run([batch] * 2):
            del result
    expected = peak.foreseen("resnet18", schedule, images, recipe)
    assert found.most - at_rest == pytest.approx(expected, rel=within)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("recipe", [PLAIN, Recipe("bf16"), Recipe(checkpoint="all")])
def test_the_allocator_agrees(peak, recipe):
    images = torch.randn(32, 3, 64, 64, device="cuda")
    for schedule in (catalog.data_parallel(4, "one"), catalog.cyclic(4, placement="one")):
        _, asked_for = peak.held("resnet18", schedule, images, recipe)
        expected = peak.foreseen("resnet18", schedule, images, recipe)
        assert asked_for == pytest.approx(expected, rel=0.1)
