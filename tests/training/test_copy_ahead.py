"""Batches are copied one ahead of the step that reads them, and none is lost."""

from contextlib import contextmanager
from itertools import islice

import pytest
import torch

from tests.training.test_class_folders import CHOSEN, Who
from toolkit.training.data import class_folders, copy_ahead
from toolkit.training.data.copy_ahead import copied_ahead, one_ahead


def noted(n, done):
    """``n`` numbers, each noted as it is read."""
    for k in range(n):
        done.append(f"read {k}")
        yield k


def begin(done):
    def copy(k):
        done.append(f"copy {k}")
        return k

    return copy


def test_the_next_is_read_and_copied_before_a_step_begins():
    done = []
    for k in one_ahead(noted(3, done), begin(done)):
        done.append(f"step {k}")
    assert done == [
        *("read 0", "copy 0", "read 1", "copy 1", "step 0"),
        *("read 2", "copy 2", "step 1", "step 2"),
    ]


@pytest.mark.parametrize("n", range(5))
def test_no_batch_is_lost(n):
    assert [*one_ahead(noted(n, []), begin([]))] == [*range(n)]


@pytest.mark.parametrize("n_steps", [1, 2, 3])
def test_an_early_end_has_read_one_batch_more(n_steps):
    done = []
    assert [*islice(one_ahead(noted(9, done), begin(done)), n_steps)] == [
        *range(n_steps)
    ]
    assert done[-1] == f"copy {n_steps}"


@pytest.fixture
def done(monkeypatch):
    """What a simulated GPU does, in order; its memory is that of the CPU."""
    steps = []

    class Stream:
        def wait_event(self, event):
            steps.append(f"wait for {event}")

    class Copy:
        def __init__(self, tensor):
            self.tensor = tensor

        def record_stream(self, stream):
            steps.append("keep")

    @contextmanager
    def own_stream(device):
        assert device.index == 0
        steps.append("own stream")
        yield
        steps.append("main stream")

    copies = iter(range(100))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(copy_ahead, "own_stream", own_stream)
    monkeypatch.setattr(copy_ahead, "mark", lambda device: f"copy {next(copies)}")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())

    def to(tensor, device, non_blocking):
        assert non_blocking
        return Copy(tensor)

    monkeypatch.setattr(torch.Tensor, "to", to)
    return steps


@pytest.mark.parametrize("gpu", ["cuda", "cuda:0"])
def test_a_step_waits_for_its_own_copy(done, gpu):
    """Which is made on another stream, and whose memory stays until the step has read it."""
    batches = [(torch.full((2,), k), torch.full((2,), -k)) for k in range(3)]
    found = []
    for inputs, targets in copied_ahead(batches, torch.device(gpu)):
        found.append((inputs.tensor, targets.tensor))
        done.append("step")
    assert [int(inputs[0]) for inputs, _ in found] == [0, 1, 2]
    assert [int(targets[0]) for _, targets in found] == [0, -1, -2]
    copy = ["own stream", "main stream"]
    step = ["keep", "keep", "step"]
    assert done == [
        *(*copy, *copy, "wait for copy 0", *step),
        *(*copy, "wait for copy 1", *step),
        *("wait for copy 2", *step),
    ]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_read_ahead_gives_the_same_batches(monkeypatch, num_workers):
    """And keeps its workers for the next epoch, if the reader counts batches."""
    monkeypatch.setattr(class_folders, "normalise", lambda pixels, mean, std: pixels)
    numbers = [(torch.tensor(batch), None) for batch in CHOSEN]

    def epoch(loader, seed):
        return (
            images[:, 1:]
            for images, _ in loader.read(numbers, seed, torch.device("cpu"))
        )

    expected = [*epoch(class_folders._Loaded(Who(), [], 0, 1), 7)]
    monkeypatch.setattr(
        class_folders,
        "copied_ahead",
        lambda batches, device: one_ahead(batches, lambda b: b),
    )
    loader = class_folders._Loaded(Who(), [], num_workers, 1)
    for _ in range(2):
        batches = epoch(loader, 7)
        for whole in expected:
            assert torch.equal(next(batches), whole)
    assert len(loader._idle) == 1
