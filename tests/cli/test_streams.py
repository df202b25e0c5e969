"""What cannot be printed is lost, and nothing else."""

import os
import subprocess
import sys

import pytest

from toolkit.cli.process import LossyStream, lossy_output

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
