"""Python's cyclic garbage collector, out of the way of code that makes many small objects."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """No garbage collection within: for code that makes no cycles, and is slowed by the search.

    A program of a million instructions is a million tuples, which the collector would look
    through again and again while it grows.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
