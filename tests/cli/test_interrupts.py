"""SIGTERM where no training hears it."""

import multiprocessing
import os
import signal
import time

import pytest

from toolkit.cli import process as process_module
from toolkit.cli.process import TerminatedError, forward_signals, raise_on_sigterm


def test_a_signal_interrupts_and_is_given_back():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(TerminatedError), raise_on_sigterm():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before


def test_who_has_a_use_for_it_keeps_it():
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
    try:
        with raise_on_sigterm():
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [1]


def test_ranks_leave_it_to_their_watch(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    before = signal.getsignal(signal.SIGTERM)
    with raise_on_sigterm():
        assert signal.getsignal(signal.SIGTERM) == before


def work(folder):
    """A run elsewhere, which saves itself when it is told to end."""

    def save(*_):
        time.sleep(0.3)
        (folder / "saved").touch()

    signal.signal(signal.SIGTERM, save)
    (folder / "begun").touch()
    time.sleep(60)


@pytest.mark.parametrize(
    ("number", "error"),
    [(signal.SIGTERM, TerminatedError), (signal.SIGINT, KeyboardInterrupt)],
)
def test_runs_elsewhere_save_themselves_first(tmp_path, number, error):
    process = multiprocessing.get_context("fork").Process(target=work, args=(tmp_path,))
    saved, begun = tmp_path / "saved", tmp_path / "begun"
    process.start()
    while not begun.exists():
        time.sleep(0.01)
    try:
        with pytest.raises(error), forward_signals(lambda: not saved.exists()):
            os.kill(os.getpid(), number)
        assert saved.exists()
    finally:
        process.kill()
        process.join()


def test_a_run_that_does_not_end_is_not_waited_for_long(monkeypatch):
    monkeypatch.setattr(process_module, "_PATIENCE", 0.1)
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    process.start()
    try:
        with pytest.raises(TerminatedError), forward_signals(lambda: True):
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        process.kill()
        process.join()
