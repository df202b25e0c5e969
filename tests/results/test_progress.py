from types import SimpleNamespace

import pytest
import torch

from toolkit.results import Progress, progress
from toolkit.runtime.microbatches import StepResult
from toolkit.training import Step


def steps(losses, n_steps=None, images=8, learning_rate=0.1):
    """A training step a loss; one without is a rank's that has computed none."""
    for k, loss in enumerate(losses):
        found = torch.tensor([] if loss is None else [loss])
        result = StepResult(k, tuple(range(len(found))), found, found)
        yield Step(k + 1, n_steps or len(losses), result, learning_rate, images)


@pytest.fixture
def clock(monkeypatch):
    """Time stands still, but for what a test adds to it."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@pytest.fixture
def reads(monkeypatch):
    """The numbers of losses that are averaged, each time that some are read."""
    found = []
    mean = progress._mean

    def spy(losses):
        found.append(len(losses))
        return mean(losses)

    monkeypatch.setattr(progress, "_mean", spy)
    return found


def last_line(capsys):
    return capsys.readouterr().err.split("\r")[-1]


def test_counts_epochs_in_steps(capsys):
    with Progress(2) as bar:
        bar.run("CDP-v2, seed 0")
        for _ in range(2):
            for step in range(1, 4):
                bar.step(step, 3)
        bar.note("test 97%")
    last = last_line(capsys)
    assert "CDP-v2, seed 0: 100%" in last
    assert "2.0/2 epochs" in last
    assert "test 97%" in last


def test_shows_what_training_comes_to(capsys, clock):
    with Progress(2) as bar:
        bar.run("CDP-v2, seed 0")
        for step in steps([2.0, 1.0, 0.5, 0.1], learning_rate=0.0125):
            clock.now += 0.5
            bar.trained(step)
        bar.note("test 97%")
    last = last_line(capsys)
    assert "CDP-v2, seed 0:  50%" in last
    assert "1.0/2 epochs" in last
    assert last.rstrip().endswith(", 16 samples/s, loss 0.900, lr 0.0125, test 97%]")


def test_tells_the_time_left(capsys):
    with Progress(2, interval=0) as bar:
        for step in steps([1.0] * 2):
            bar.trained(step)
    assert "<00:00," in last_line(capsys)


def test_losses_are_read_when_they_are_shown(clock, reads):
    """To read one waits for the device: so once every ten seconds, and at the end of an epoch."""
    with Progress(3, interval=10) as bar:
        for _ in range(2):
            for step in steps([1.0] * 25):
                clock.now += 1
                bar.trained(step)
    assert reads == [10, 20, 25, 30, 40, 50]


def test_the_mean_loss_is_of_the_last_steps(capsys, reads):
    with Progress(1, interval=1000) as bar:
        for step in steps([9.0] * 100 + [1.0] * 50):
            bar.trained(step)
    assert reads == [50]
    assert "loss 1.000" in last_line(capsys)


def test_a_new_run_has_losses_of_its_own(capsys):
    with Progress(2, interval=1000) as bar:
        for name, loss in (("DP", 9.0), ("CDP-v1", 1.0)):
            bar.run(name)
            for step in steps([loss] * 3):
                bar.trained(step)
    last = last_line(capsys)
    assert "loss 1.000" in last
    assert "2.0/2 epochs" in last


def test_a_test_between_epochs_is_not_the_time_of_a_step(capsys, clock):
    with Progress(2, interval=0) as bar:
        for _ in range(2):
            for step in steps([1.0] * 3):
                clock.now += 1
                bar.trained(step)
            clock.now += 1000
    assert "8 samples/s" in last_line(capsys)


def test_a_resumed_run_goes_on_from_where_it_was(capsys, clock):
    """The first step that is seen is the sixth of the third epoch, of which there are four."""
    with Progress(4, interval=0) as bar:
        for k in range(5, 20):
            result = StepResult(2 * 20 + k, (), torch.tensor([]), torch.tensor([]))
            clock.now += 0.5
            bar.trained(Step(k + 1, 20, result, 0.1, 8))
            if k == 5:
                assert "2.3/4 epochs" in last_line(capsys)
    last = last_line(capsys)
    assert "3.0/4 epochs" in last
    assert "16 samples/s" in last


def test_a_run_that_is_resumed_after_others_goes_on_from_where_it_was(capsys, clock):
    """Of two runs of two epochs the second one has done the first step of its second epoch."""
    with Progress(4, interval=0) as bar:
        for name, trained in (("one", range(8)), ("two", range(5, 8))):
            bar.run(name)
            for k in trained:
                result = StepResult(k, (), torch.tensor([]), torch.tensor([]))
                clock.now += 0.5
                bar.trained(Step(k % 4 + 1, 4, result, 0.1, 8))
                if (name, k) == ("two", 5):
                    assert "3.5/4 epochs" in last_line(capsys)
    assert "4.0/4 epochs" in last_line(capsys)


def test_the_time_left_goes_by_what_was_trained(clock):
    """Of 10 epochs 2 were trained before; then one takes 10 s, and the run ends without more."""
    with Progress(20, interval=0) as bar:
        bar.run("one")
        for k in range(8, 12):
            clock.now += 2.5
            result = StepResult(k, (), torch.tensor([]), torch.tensor([]))
            bar.trained(Step(k % 4 + 1, 4, result, 0.1, 8))
        trained = bar._bar.n - bar._bar.initial
        assert (bar._bar.n, trained) == (3, 1)
        bar.ended(10)
        assert (bar._bar.n, bar._bar.n - bar._bar.initial) == (10, trained)


def test_a_rank_without_losses_shows_the_rest(capsys, reads):
    with Progress(1) as bar:
        for step in steps([None] * 3):
            bar.trained(step)
    last = last_line(capsys)
    assert not reads
    assert "samples/s, lr 0.1]" in last


def test_what_is_not_shown_reads_nothing(capsys, reads):
    with Progress(1, shown=False, interval=0) as bar:
        for step in steps([1.0] * 3):
            bar.trained(step)
    assert not reads
    assert not capsys.readouterr().err


def test_is_closed_by_an_error(capsys):
    bar = Progress(1)
    bar.step(1, 2)
    with pytest.raises(KeyError), bar:
        raise KeyError
    assert capsys.readouterr().err.endswith("\n")


def test_an_error_before_the_first_step_stands_alone(capsys):
    with pytest.raises(KeyError), Progress(1):
        raise KeyError
    *_, line, rest = capsys.readouterr().err.split("\r")
    assert not line.strip()
    assert rest == ""
