"""Output that cannot be written is discarded, and the run continues."""

import os
import subprocess
import sys

import pytest

from toolkit.lossy_output import LossyStream, lossy_output

FULL = "/dev/full"


def test_what_can_be_written_is(capsys):
    before = sys.stdout, sys.stderr
    with lossy_output():
        print("a word")
        print("another", file=sys.stderr)
        assert not sys.stdout.isatty()
    assert (sys.stdout, sys.stderr) == before
    assert capsys.readouterr() == ("a word\n", "another\n")


@pytest.mark.skipif(not os.path.exists(FULL), reason="there is no /dev/full")
def test_a_full_disk():
    with open(FULL, "w") as file:
        stream = LossyStream(file)
        for _ in range(3):
            assert stream.write("a word" * 10_000) == 60_000
            stream.flush()
        # So that it can be closed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())


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
import sys
from toolkit.lossy_output import lossy_output
with lossy_output():
    print("lost", flush=True), print("lost", file=sys.stderr)
    assert not sys.stderr.isatty()
    assert open(sys.executable).fileno() > 2  # no later file takes their place
sys.exit(7)
"""


def test_closed_streams():
    command = f"{sys.executable} -c '{PROGRAM}' <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], check=False).returncode == 7
