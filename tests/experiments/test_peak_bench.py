"""The peak of a GPU's memory: what is predicted, and on a GPU that it is what is measured."""

import pytest
import torch

from tests.experiments.command import EXPERIMENTS
from toolkit.cost import profile
from toolkit.model import build, partition
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
    one = sum(cost.kept_bytes for cost in profile(stages, images))
    together = peak.foreseen("resnet8", catalog.data_parallel(4, "one"), images, 64)
    assert together == pytest.approx(4 * one, rel=0.02)  # gradients and the last op's come on top
    shifted = peak.foreseen("resnet8", catalog.cyclic(4, placement="one"), images, 64)
    assert 0.45 * together < shifted < 0.8 * together


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_allocator_agrees(peak):
    images = torch.randn(32, 3, 64, 64, device="cuda")
    for schedule in (catalog.data_parallel(4, "one"), catalog.cyclic(4, placement="one")):
        measured = peak.held("resnet18", schedule, images, 64)
        assert measured == pytest.approx(peak.foreseen("resnet18", schedule, images, 64), rel=0.1)
