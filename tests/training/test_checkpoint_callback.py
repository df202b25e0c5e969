"""When a run is saved, which checkpoint is its best, how it stops; without any training."""

import os
import signal
import sys
from types import SimpleNamespace

import pytest

from toolkit.metric import ACCURACY, LOSS
from toolkit.options import SaveOptions, TrainingOptions
from toolkit.training.checkpoint_callback import CheckpointCallback
from toolkit.training.loop import Epoch, Position
from toolkit.training.stop_signals import Signals, StoppedError


class Clock:
    now = 1000.0

    def monotonic(self):
        return self.now


class Checkpoints:
    """The steps that were saved, and which of them as the best."""

    def __init__(self, folder):
        self.folder, self.full = folder, False
        self.steps, self.best = [], []

    def save(self, runtime, rest, step, *, best):
        if self.full:
            raise OSError(28, "No space left on device")
        self.steps.append(step)
        self.best += [step] * best


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(sys.modules[CheckpointCallback.__module__], "time", clock)
    return clock


@pytest.fixture
def make(clock, tmp_path):
    def make(often=None, signals=None, measure=ACCURACY, epochs=1000):
        run = SimpleNamespace(
            runtime=SimpleNamespace(rank=0, writes=True, total=lambda values: values),
            options=TrainingOptions(epochs=epochs, save=often or SaveOptions()),
            samples=SimpleNamespace(form=SimpleNamespace(metric=measure)),
            recorded_options={},
        )
        return CheckpointCallback(run, Checkpoints(tmp_path), signals or Signals())

    return make


def epoch(number, top1):
    """Its loss is as high as its accuracy."""
    return Epoch(number, 1.0, top1, top1, 1.0, 0.1, 1.0)


def train(callback, clock, accuracies, n_steps=4, seconds=0.0):
    """As the loop does: pauses within epochs, and after each of them."""
    position = Position(first_loss=1.0)
    for number, top1 in enumerate(accuracies):
        while position.step < n_steps:
            stretch = min(callback.steps(position, n_steps), n_steps - position.step)
            assert stretch > 0
            clock.now += seconds * stretch
            position.step += stretch
            position.steps_done += stretch
            if position.step < n_steps:
                callback.end(position)
        position.epoch, position.step = number + 1, 0
        position.history = [*position.history, epoch(number, top1)]
        callback.end(position)
    return callback.checkpoints


@pytest.mark.parametrize(
    ("often", "measure", "accuracies", "best"),
    [
        # an epoch as good as the best is saved too
        (SaveOptions(), ACCURACY, [0.5, 0.4, 0.7, 0.7, 0.6], [4, 12, 16]),
        (SaveOptions(epochs=2), ACCURACY, [0.9, 0.5, 0.8, 0.6, 0.9, 0.95], [4, 20, 24]),
        (
            SaveOptions(6, epochs=None),
            ACCURACY,
            [0.9, 0.5, 0.8, 0.6, 0.9, 0.95],
            [4, 20, 24],
        ),
        (SaveOptions(), LOSS, [0.5, 0.4, 0.7, 0.4, 0.6], [4, 8, 16]),
    ],
)
def test_the_best_is_saved_whenever_it_comes(
    make, clock, often, measure, accuracies, best
):
    assert train(make(often, measure=measure), clock, accuracies).best == best


@pytest.mark.parametrize(
    ("often", "steps"),
    [
        (SaveOptions(epochs=1), [4, 8, 12]),
        (SaveOptions(epochs=2), [4, 8]),
        (SaveOptions(epochs=None), []),
        (SaveOptions(steps=3, epochs=None), [3, 4, 6, 9, 12]),
        (SaveOptions(steps=3), [3, 4, 6, 8, 9, 12]),
        # every step takes 30 s, and minutes count from one checkpoint to the next
        (SaveOptions(epochs=None, minutes=1), [2, 4, 6, 8, 10, 12]),
        (SaveOptions(epochs=None, minutes=2), [4, 8, 12]),
        (SaveOptions(epochs=None, minutes=2.5), [4, 9]),
        (SaveOptions(epochs=1, minutes=1.5), [3, 4, 7, 8, 11, 12]),
    ],
)
def test_saves_when_it_is_due(make, clock, often, steps):
    """The first epoch is the best."""
    callback = make(often)
    callback.n_steps = 1
    assert train(callback, clock, [0.3, 0.2, 0.1], seconds=30.0).steps == steps


@pytest.mark.parametrize(
    ("seconds", "lengths"),
    [(0.1, [8, 16, 32, 32]), (0.4, [8] * 4), (4.0, [8, 4, 2, 1, 1])],
)
def test_pauses_keep_a_time_apart(make, clock, seconds, lengths):
    """Twice as many steps where a stretch took less than half of it, half where it took more."""
    callback, position, found = make(), Position(first_loss=1.0), []
    for _ in lengths:
        found.append(callback.steps(position, 10**6))
        clock.now += seconds * found[-1]
        callback.end(position)
    assert found == lengths


@pytest.mark.parametrize(
    ("often", "full", "saved"),
    [
        (SaveOptions(), False, True),
        (SaveOptions(), True, False),
        (SaveOptions(epochs=None), False, False),
    ],
)
def test_a_signal_stops_the_run_after_a_checkpoint(
    make, clock, capsys, often, full, saved
):
    """If it saves any, and this one can be written, also after another that could not."""
    callback = make(often, Signals(signal.SIGTERM))
    callback.checkpoints.full = True
    callback.save(Position())
    callback.checkpoints.full = full
    with pytest.raises(StoppedError, match="SIGTERM") as stopped:
        train(callback, clock, [0.1], n_steps=100)
    assert stopped.value.saved is saved
    assert callback.checkpoints.steps == [8] * saved
    assert capsys.readouterr().err.count("No space left on device") == 1


@pytest.mark.parametrize(("epochs", "stops"), [(1, False), (2, True)])
def test_no_signal_stops_a_finished_run(make, epochs, stops):
    signals = Signals(signal.SIGTERM)
    try:
        make(SaveOptions(epochs=None), signals, epochs=epochs).end(Position(epoch=1))
        assert not stops
    except StoppedError:
        assert stops
    assert signals.agreed == signal.SIGTERM


@pytest.mark.parametrize(
    ("handler", "heard"),
    [(signal.SIG_DFL, signal.SIGHUP), (signal.SIG_IGN, 0)],
    ids=["", "nohup"],
)
def test_the_end_of_the_terminal_is_heard_except_under_nohup(handler, heard):
    """And handlers are restored."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    usual = signal.signal(signal.SIGHUP, handler)
    before = [signal.getsignal(number) for number in numbers]
    try:
        with Signals().heard() as signals:
            assert signal.getsignal(signal.SIGINT) == signals._hear
            os.kill(os.getpid(), signal.SIGHUP)
        assert signals.number == heard
        assert [signal.getsignal(number) for number in numbers] == before
    finally:
        signal.signal(signal.SIGHUP, usual)
