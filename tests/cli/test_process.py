"""Signals where no training hears them, and output that cannot be written."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

from toolkit.cli import process as process_module
from toolkit.cli.process import (
    LossyStream,
    TerminatedError,
    forward_signals,
    lossy_output,
    raise_on_sigterm,
)


def test_a_signal_interrupts_and_its_handler_is_restored():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(TerminatedError), raise_on_sigterm():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before


def test_an_existing_handler_is_kept():
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
    """A run elsewhere, which saves itself on SIGTERM."""

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


def test_waiting_for_a_run_ends_after_a_while(monkeypatch):
    monkeypatch.setattr(process_module, "_PATIENCE", 0.1)
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    process.start()
    try:
        with pytest.raises(TerminatedError), forward_signals(lambda: True):
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        process.kill()
        process.join()


FULL = "/dev/full"
needs_full = pytest.mark.skipif(not os.path.exists(FULL), reason="there is no /dev/full")


def test_what_can_be_written_is(capsys):
    with lossy_output():
        print("a word")
        print("another", file=sys.stderr)
        assert isinstance(sys.stdout, LossyStream)
        assert not sys.stdout.isatty()
    assert not isinstance(sys.stdout, LossyStream)
    assert capsys.readouterr() == ("a word\n", "another\n")


@needs_full
def test_a_full_disk():
    with open(FULL, "w") as file:
        stream = LossyStream(file)
        for _ in range(3):
            assert stream.write("a word" * 10_000) == 60_000
            stream.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())  # so that it can be closed


def test_a_reader_that_has_gone():
    """Nothing is written to it later on, by whomever."""
    reads, writes = os.pipe()
    with os.fdopen(writes, "w") as file:
        stream = LossyStream(file)
        os.close(reads)
        for _ in range(3):
            print("a word", file=stream, flush=True)
        assert os.write(writes, b"from elsewhere") == 14


PROGRAM = """
import os, sys
from toolkit.cli.process import lossy_output
with lossy_output():
    print("lost"), print("lost", file=sys.stderr)
    assert not sys.stderr.isatty()
    os.write(1, b"lost"), os.write(2, b"lost")
    assert open(sys.argv[1], "w").fileno() > 2
    assert sys.stdout.encoding
with open(sys.argv[1], "w") as file:
    file.write("done")
"""


def test_closed_streams(tmp_path):
    """Files that are opened later do not take their place."""
    path = tmp_path / "a.txt"
    command = f"{sys.executable} -c '{PROGRAM}' {path} <&- >&- 2>&-"
    subprocess.run(["sh", "-c", command], check=True)
    assert path.read_text() == "done"
