"""Traces of training steps, by torch.profiler."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import profiler
from torch.cuda import is_available

from toolkit.errors import UserError

WARM_UP = 3
"""Training steps before the first that is traced."""


def check_profile(n_steps: int) -> None:
    """Refuse fewer steps than none."""
    if n_steps < 0:
        raise UserError(f"profile is 0 or more training steps: got {n_steps}")


class Profile:
    """A context in which some training steps are traced.

    Args:
        n_steps: how many of them, after :data:`WARM_UP` others; 0: none.
        path: of the trace, in Chrome's JSON format.
        here: whether this process is the one that is traced.

    Raises:
        UserError: fewer than none.
    """

    def __init__(self, n_steps: int, path: Path, here: bool = True) -> None:
        check_profile(n_steps)
        self.path = path
        self._profiler: profiler.profile | None = None
        self.written = False
        if n_steps and here:
            activities = [profiler.ProfilerActivity.CPU]
            self._profiler = profiler.profile(
                activities=activities + [profiler.ProfilerActivity.CUDA] * is_available(),
                schedule=profiler.schedule(wait=0, warmup=WARM_UP, active=n_steps, repeat=1),
                on_trace_ready=self._write,
                acc_events=True,
            )

    def __enter__(self) -> "Profile":
        if self._profiler:
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it writes into the progress bar
            self._profiler.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def step(self) -> None:
        """A training step is done."""
        if self._profiler:
            with _waiting_for_the_ops():
                self._profiler.step()
        if self.written:
            self._stop()

    def _stop(self) -> None:
        if self._profiler:
            with _waiting_for_the_ops():
                self._profiler.stop()
        self._profiler = None

    def _write(self, finished: profiler.profile) -> None:
        finished.export_chrome_trace(str(self.path))
        self.written = True


@contextmanager
def _waiting_for_the_ops() -> Iterator[None]:
    """Have torch wait for this thread's stream where it would wait for all that its GPU does.

    A receive that was begun early may be among that, of what a rank sends once this one goes on.
    """

    def wait(device: Any = None) -> None:
        torch.cuda.current_stream(device).synchronize()

    for_all, torch.cuda.synchronize = torch.cuda.synchronize, wait
    try:
        yield
    finally:
        torch.cuda.synchronize = for_all
