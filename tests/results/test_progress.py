"""The bar counts training steps, shows the speed and the loss, and rarely waits for a device."""

import sys
from types import SimpleNamespace

import pytest
import torch

from toolkit.results import Progress, progress
from toolkit.runtime.microbatches import StepResult
from toolkit.training import Step


def train(bar, steps, n_steps=4, loss=1.0, clock=None, seconds=0.5):
    """Training steps of a run, counted from 0 through all epochs; of 8 samples each."""
    for k in steps:
        if clock:
            clock.now += seconds
        found = torch.tensor([] if loss is None else [loss])
        result = StepResult(k, tuple(range(len(found))), found, found)
        bar.trained(Step(k % n_steps + 1, n_steps, result, 0.0125, 8))


@pytest.fixture
def clock(monkeypatch):
    """Time that stands still unless a test adds to it."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@pytest.fixture
def reads(monkeypatch):
    """The number of losses in each mean that is read."""
    found = []
    mean = progress._mean

    def spy(losses):
        found.append(len(losses))
        return mean(losses)

    monkeypatch.setattr(progress, "_mean", spy)
    return found


def last_line(capsys):
    return capsys.readouterr().err.split("\r")[-1]


@pytest.mark.parametrize("note", ["test 97.25%", "last: CDP-v1 97.25%"])
def test_a_terminal_of_80_columns_shows_all_of_a_run(capsys, clock, monkeypatch, note):
    """Accuracy, loss and speed, however many epochs there are."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Progress(180) as bar:
        bar._bar.ncols = 79  # as tqdm reads from a terminal
        bar.ended(123)
        bar.run("CDP-v1, seed 0")
        for k, loss in enumerate([2.0, 1.0, 0.5, 0.1]):
            train(bar, [k], loss=loss, clock=clock, seconds=0.001)
        bar.note(note)
    last = last_line(capsys).rstrip()
    assert len(last) < 80
    assert last.startswith("CDP-v1, seed 0: 124.0/180 epochs |")
    assert "loss 0.900" in last
    assert "8.00k/s" in last
    assert last.endswith(" 97.25%")


def test_what_it_shows(capsys, clock):
    with Progress(2) as bar:
        bar.run("CDP-v2, seed 0")
        for k, loss in enumerate([2.0, 1.0, 0.5, 0.1]):
            train(bar, [k], loss=loss, clock=clock)
        bar.note("test 97%")
    last = last_line(capsys)
    assert "CDP-v2, seed 0:  50%" in last
    assert "1.0/2 epochs" in last
    assert last.rstrip().endswith(
        ", test 97%, train loss 0.900, lr 0.0125, 16 samples/s]"
    )


def test_losses_are_read_when_they_are_shown(capsys, clock, reads):
    """Reading waits for the device: once in ten seconds, and at the end of an epoch.

    The mean is of the epoch so far.
    """
    with Progress(4, interval=10) as bar:
        train(bar, range(50), 25, loss=9.0, clock=clock, seconds=1)
        assert reads == [10, 20, 25, 5, 15, 25]
        train(bar, range(50, 75), 25, loss=9.0, clock=clock, seconds=0.1)
        assert reads[6:] == [25]
        bar.ended(3)
        bar.run("CDP-v1")
        train(bar, range(3), 3, loss=1.0, clock=clock, seconds=0.1)
    assert reads[7:] == [3]
    last = last_line(capsys)
    assert "loss 1.000" in last
    assert "4.0/4 epochs" in last


def test_evaluation_is_not_time_of_a_step(capsys, clock):
    with Progress(2, interval=0) as bar:
        for epoch in range(2):
            train(bar, range(4 * epoch, 4 * epoch + 4), clock=clock, seconds=1)
            clock.now += 1000
    assert "8 samples/s" in last_line(capsys)


def test_the_time_left_is_by_what_this_process_trained(capsys, clock):
    """A run is resumed in the middle of the third of four epochs, after one that ends early."""
    with Progress(14, interval=0) as bar:
        train(bar, range(8, 12), clock=clock)
        assert (bar._bar.n, bar._bar.n - bar._bar.initial) == (3, 1)
        bar.ended(10)
        assert (bar._bar.n, bar._bar.n - bar._bar.initial) == (10, 1)
        bar.run("two")
        clock.now += 1000
        train(bar, range(9, 16), clock=clock)
        assert (bar._bar.n, bar._bar.n - bar._bar.initial) == (14, 2.75)
    last = last_line(capsys)
    assert "14.0/14 epochs" in last
    assert "<00:00," in last
    assert "16 samples/s" in last


@pytest.mark.parametrize(
    ("shown", "end"), [(True, "lr 0.0125, 16 samples/s]"), (False, "")]
)
def test_without_losses_or_a_bar_none_are_read(capsys, clock, reads, shown, end):
    with Progress(1, visible=shown, interval=0) as bar:
        train(bar, range(4), loss=None if shown else 1.0, clock=clock)
    assert not reads
    assert last_line(capsys).rstrip().endswith(end)


@pytest.mark.parametrize("n_steps", [0, 1])
def test_an_error_closes_it(capsys, n_steps):
    """A bar that has not moved is removed."""
    bar = Progress(1)
    train(bar, range(n_steps))
    with pytest.raises(KeyError), bar:
        raise KeyError
    *_, line, rest = capsys.readouterr().err.split("\r")
    if n_steps:
        assert rest.endswith("\n")
    else:
        assert not line.strip() + rest
