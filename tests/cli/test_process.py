"""Signals where no training hears them, and the messages of errors."""

import json
import multiprocessing
import os
import signal
import sys
import time

import pytest

from toolkit.cli import process as process_module
from toolkit.cli.explain import explain
from toolkit.cli.process import interruptible, was_interrupted


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_interrupts_and_its_handler_is_restored(number):
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), interruptible(lambda: False):
        os.kill(os.getpid(), number)
    assert was_interrupted()
    assert signal.getsignal(number) == before


def test_ranks_leave_it_to_their_watch(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    before = signal.getsignal(signal.SIGTERM)
    with interruptible(lambda: False):
        assert signal.getsignal(signal.SIGTERM) == before


def work(folder):
    """A run elsewhere, which saves itself on SIGTERM."""

    def save(*_):
        time.sleep(0.3)
        (folder / "saved").touch()

    signal.signal(signal.SIGTERM, save)
    (folder / "begun").touch()
    time.sleep(60)


@pytest.fixture
def child(tmp_path):
    """A process at work; it and the handlers of signals are gone at the end."""
    process = multiprocessing.get_context("fork").Process(target=work, args=(tmp_path,))
    process.start()
    while not (tmp_path / "begun").exists():
        time.sleep(0.01)
    yield process
    process.kill()
    process.join()


def test_runs_elsewhere_save_themselves_first(tmp_path, child):
    saved = tmp_path / "saved"
    with pytest.raises(KeyboardInterrupt), interruptible(lambda: not saved.exists()):
        os.kill(os.getpid(), signal.SIGTERM)
    assert saved.exists()


def test_waiting_for_a_run_ends_after_a_while(monkeypatch, child):
    monkeypatch.setattr(process_module, "_PATIENCE", 0.1)
    with pytest.raises(KeyboardInterrupt), interruptible(lambda: True):
        os.kill(os.getpid(), signal.SIGTERM)


def test_torchrun_gets_the_message_for_the_end_of_its_output(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    process_module.report_mistake("stages is 1 or more: got 0")
    assert capsys.readouterr().err == "error: stages is 1 or more: got 0\n"
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert message["extraInfo"]["py_callstack"] == "stages is 1 or more: got 0"


def test_an_error_of_a_folder_names_its_option(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "seed=1", "hydra.run.dir=/nowhere/a"])
    error = FileNotFoundError(2, "No such file or directory", "/nowhere/a/b")
    assert (
        explain(error, "train") == "hydra.run.dir=/nowhere/a: No such file or directory"
    )
    other = FileNotFoundError(2, "No such file or directory", "/elsewhere")
    assert explain(other, "train") == "/elsewhere: No such file or directory"
