"""Signals that end a run at its next pause."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

ECHO = 2.0
"""Seconds in which a repeated signal counts as the same one: torchrun passes to its ranks what
Slurm sends to every process."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StoppedError(Exception):
    """The signal ``number`` ended the run, after a checkpoint if it was ``saved``."""

    def __init__(self, number: int, *, saved: bool) -> None:
        super().__init__(signal.Signals(number).name)
        self.saved = saved


@dataclass
class Signals:
    """SIGTERM, SIGINT and SIGHUP, remembered until the run can pause; a second ends it at once."""

    number: int = 0  # that this process received; 0: none
    agreed: int = 0  # that all ranks know of; 0: none
    at: float = 0.0  # time of the first, in seconds

    @contextmanager
    def heard(self) -> Iterator["Signals"]:
        """Handle the signals, except SIGHUP under nohup; without effect outside the main thread."""
        # nohup ignores SIGHUP, so that a closed terminal does not end the run.
        ignored_signals = (
            {signal.SIGHUP}
            if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            else set()
        )
        try:
            earlier_handlers = {
                signal_number: signal.signal(signal_number, self._hear)
                for signal_number in SIGNALS
                if signal_number not in ignored_signals
            }
        except ValueError:
            earlier_handlers = {}
        try:
            yield self
        finally:
            for number, handler in earlier_handlers.items():
                signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.number:
            self.number = number
            self.at = now
        elif now - self.at >= ECHO:
            # The second signal: the user does not want to wait for the pause.
            raise KeyboardInterrupt
