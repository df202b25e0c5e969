"""What functions of the catalogue share: checked sizes, and schedules that carry their specs."""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from inspect import signature
from typing import ParamSpec

from toolkit.errors import whole
from toolkit.schedule.schedule import Schedule
from toolkit.schedule.spec import ScheduleSpec
from toolkit.schedule.validate import check_forwards

_P = ParamSpec("_P")


def carries_spec(factory: Callable[_P, Schedule]) -> Callable[_P, Schedule]:
    """Let the schedules that a function builds carry the plain values of its call."""
    parameters = signature(factory)

    # `wraps` keeps the signature, by which specs and sizes find out what a method takes.
    @wraps(factory)
    def build(*args: _P.args, **kwargs: _P.kwargs) -> Schedule:
        schedule = factory(*args, **kwargs)
        arguments = parameters.bind(*args, **kwargs).arguments
        # Its name is in the registry by now: the catalogue registers all functions before any is
        # called.
        spec = ScheduleSpec.from_call(factory.__name__, arguments)
        # The schedule has its sizes as Python's own numbers.
        spec = replace(spec, stages=schedule.n_stages, microbatches=schedule.n_workers)
        return schedule.with_spec(spec)

    return build


def whole_sizes(
    n_stages: int | None, n_workers: int, accumulate: int = 1
) -> tuple[int, int, int]:
    """Return the numbers of stages (by default of workers), workers, and micro-batches of each."""
    n = whole(n_workers, "the number of micro-batches", 1)
    s = n if n_stages is None else whole(n_stages, "the number of stages", 1)
    k = whole(accumulate, "accumulate, the micro-batches of a worker,", 1)
    check_forwards(s, k * n)
    return s, n, k
