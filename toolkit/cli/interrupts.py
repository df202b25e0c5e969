"""SIGTERM where nobody else hears it: a run that is not training, and a sweep's own process.

A training run handles signals itself (`toolkit.training.checkpoint_callback.Signals`), and a rank's
watch does; what a batch system sends means theirs.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

_PATIENCE = 25.0  # seconds in which runs elsewhere save themselves; Slurm kills after 30


class TerminatedError(KeyboardInterrupt):
    """SIGTERM has come."""


@contextmanager
def interrupted() -> Iterator[None]:
    """Have SIGTERM raise :class:`TerminatedError`, unless somebody has a use for it."""
    ranks = os.environ.get("WORLD_SIZE", "1") != "1"  # whose watch wants it
    if ranks or not _is_main() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def raise_it(number: int, frame: FrameType | None) -> None:
        raise TerminatedError

    signal.signal(signal.SIGTERM, raise_it)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def handed_on(under_way: Callable[[], bool]) -> Iterator[None]:
    """Have SIGTERM and SIGINT end runs in processes of this one before this one is interrupted.

    Args:
        under_way: whether any run is.
    """
    if not _is_main():
        yield
        return

    def hand_on(number: int, frame: FrameType | None) -> None:
        for process in multiprocessing.active_children():
            with suppress(OSError):
                os.kill(process.pid or 0, signal.SIGTERM)
        deadline = time.monotonic() + _PATIENCE
        while multiprocessing.active_children() and under_way() and time.monotonic() < deadline:
            time.sleep(0.1)
        raise TerminatedError if number == signal.SIGTERM else KeyboardInterrupt

    before = {n: signal.signal(n, hand_on) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()
