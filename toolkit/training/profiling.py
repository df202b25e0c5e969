"""Training steps in detail: traces by torch.profiler."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import profiler

from toolkit.errors import UserError

WARM_UP = 3
"""Training steps before the first that is traced."""


def check_profile(n_steps: int) -> None:
    """Raise UserError if ``n_steps`` is negative."""
    if n_steps < 0:
        raise UserError(f"profile is 0 or more training steps: got {n_steps}")


class Profile:
    """A context in which ``n_steps`` training steps are traced, after :data:`WARM_UP` others.

    Args:
        n_steps: number of steps to trace; 0: none.
        path: file of the trace, in Chrome's JSON format.
        traces: whether to trace this process.
    """

    def __init__(self, n_steps: int, path: Path, traces: bool = True) -> None:
        check_profile(n_steps)
        self.path = path
        self.written = False
        self._profiler: profiler.profile | None = None
        if n_steps and traces:
            activities = [profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(profiler.ProfilerActivity.CUDA)
            self._profiler = profiler.profile(
                activities=activities,
                schedule=profiler.schedule(
                    wait=0, warmup=WARM_UP, active=n_steps, repeat=1
                ),
                on_trace_ready=self._write,
                acc_events=True,
            )

    def __enter__(self) -> "Profile":
        if self._profiler:
            # Or it writes into the progress bar.
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")
            self._profiler.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._profiler:
            with _current_stream_only():
                self._profiler.stop()
        self._profiler = None

    def step(self) -> None:
        """Count a training step, after it has run."""
        if self._profiler:
            with _current_stream_only():
                self._profiler.step()
        if self.written:
            # Ended at once, so that the steps after it are as fast as before.
            self.__exit__()

    def _write(self, finished: profiler.profile) -> None:
        finished.export_chrome_trace(str(self.path))
        self.written = True


@contextmanager
def _current_stream_only() -> Iterator[None]:
    """Make the profiler wait for this thread's stream instead of the whole GPU.

    The GPU may have a receive that was posted early, and whose sender waits for this rank: to wait
    for it would be a deadlock.
    """

    def wait(device: Any = None) -> None:
        torch.cuda.current_stream(device).synchronize()

    original = torch.cuda.synchronize
    torch.cuda.synchronize = wait
    try:
        yield
    finally:
        torch.cuda.synchronize = original
