"""``status.json`` in a run's folder: whether it runs, has ended, and how."""

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from toolkit.errors import UserError
from toolkit.files import write_json

FINISHED, FAILED, STOPPED, RUNNING = "finished", "failed", "stopped", "running"
STATUS = "status.json"


@dataclass(frozen=True)
class Status:
    """What became of a run.

    Attributes:
        state: ``running``, also of a run that was killed; ``finished``, ``failed`` or ``stopped``.
        options: its command line.
        message: why it failed.
        objective: what a sweep makes as large, or as small, as can be.
    """

    state: str
    options: Sequence[str] = ()
    message: str | None = None
    objective: float | None = None


def write_status(folder: Path, status: Status) -> None:
    """Have ``folder`` tell it, if anything can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / STATUS, asdict(status))
    except OSError:
        return  # as when the disk is full; the run goes on, and says so where it matters


def fail(folder: Path, message: str) -> None:
    """Have ``folder`` tell that its run has failed, unless it tells already how it has ended."""
    status = read_status(folder)
    if status is not None and status.state == RUNNING:
        write_status(folder, replace(status, state=FAILED, message=message))


def is_under_way(folder: Path) -> bool:
    """Whether some process has a run in ``folder`` that has not ended."""
    status = read_status(folder)
    if status is None or status.state != RUNNING:
        return False
    try:
        with alone_in(folder):
            return False
    except ValueError:
        return True


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Within, no other process has a run in ``folder``, as far as its file system can tell.

    Raises:
        ValueError: one has.
    """
    held = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another process is at work in {folder}: wait until it has ended, or give another"
                " hydra.run.dir"
            ) from None
        except OSError:
            pass  # nothing can be locked there
        yield
    finally:
        os.close(held)


def read_status(folder: Path) -> Status | None:
    """What ``folder`` tells; None if it tells nothing that can be read."""
    try:
        return Status(**json.loads((folder / STATUS).read_text()))
    except (OSError, ValueError, TypeError):
        return None
