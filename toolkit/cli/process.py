"""The process of a command: its rank and its signals."""

import atexit
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING

from toolkit.errors import UserError
from toolkit.terminal import show
from toolkit.torchrun import is_rank_zero, report_error

if TYPE_CHECKING:
    from toolkit.runtime.process_group.world import World

_PATIENCE = 25.0  # seconds in which child runs save themselves; Slurm kills after 30
_interrupted = threading.Event()


def scratch_options() -> list[str]:
    """Return options with which Hydra writes to a temporary folder; for ranks above 0."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    dirs = [
        f"hydra.run.dir={folder}",
        f"hydra.sweep.dir={folder}",
        "hydra.sweep.subdir=.",
    ]
    return ["hydra.output_subdir=null", *dirs]


def check_working_directory() -> None:
    """Raise UserError if the working directory has been removed, where results cannot go."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError(
            "the working directory has been removed: cd to another one"
        ) from None


def report_mistake(message: str) -> None:
    """Print a user's mistake once for all ranks; ranks that have met end here, together."""
    # The watch ends all ranks with this message. If only one rank left, the others would wait.
    world = _world()
    if world is not None:
        world.watch.fail(message)
    report_error(message)
    if is_rank_zero():
        show(f"error: {message}", sys.stderr)


def leave_ranks() -> None:
    """Leave the process group, if this process has joined one."""
    if _world() is not None:
        from toolkit.runtime.process_group.join import leave

        leave()


def _world() -> "World | None":
    """Return the ranks that this process has joined, without loading torch."""
    module = sys.modules.get("toolkit.runtime.process_group.join")
    if module is None:
        return None
    return module.current_world()


def was_interrupted() -> bool:
    """Return whether KeyboardInterrupt was raised; code that it meets may raise another error.

    An import of numpy does, for example: "cannot load module more than once per process".
    """
    return _interrupted.is_set()


def end_pool() -> None:
    """End joblib's processes, if there are any; else Python warns of the semaphores they hold."""
    if "joblib" in sys.modules:
        from joblib.externals.loky import get_reusable_executor

        get_reusable_executor(reuse=True).shutdown(kill_workers=True)


@contextmanager
def interruptible(under_way: Callable[[], bool]) -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM and SIGINT.

    Before, if a run of a sweep is ``under_way``, end child processes and wait until none is. The
    watch of a rank has its own handlers.
    """
    # Python sets handlers in the main thread only. Under torchrun the agent handles the signals.
    is_main_thread = threading.current_thread() is threading.main_thread()
    if not is_main_thread or os.environ.get("WORLD_SIZE", "1") != "1":
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        # First the children: they save their runs, which an end of this process would cut short.
        if under_way():
            for process in multiprocessing.active_children():
                with suppress(OSError):
                    os.kill(process.pid or 0, signal.SIGTERM)
            # They may be in the middle of a training step, or write a checkpoint.
            deadline = time.monotonic() + _PATIENCE
            while (
                multiprocessing.active_children()
                and under_way()
                and time.monotonic() < deadline
            ):
                time.sleep(0.1)
        # Before the exception: code that it meets may turn it into another error.
        _interrupted.set()
        raise KeyboardInterrupt

    _interrupted.clear()
    earlier_handlers = {
        number: signal.signal(number, interrupt)
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        # A caller such as a test or a notebook gets its own handlers back.
        for number, handler in earlier_handlers.items():
            signal.signal(number, handler)
