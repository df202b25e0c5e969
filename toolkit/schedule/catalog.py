"""The named methods: each is one choice of timing, placement, weights and state."""

from toolkit.schedule import timing
from toolkit.schedule.schedule import Schedule
from toolkit.schedule.staleness import FRESHEST, Delay


def data_parallel(
    n: int,
    placement: str = "per_microbatch",
    state: str = "replicated",
    *,
    delay: Delay = 0,
    n_stages: int | None = None,
) -> Schedule:
    """Data parallelism: ``n`` micro-batches at the same moment.

    Args:
        n: micro-batches of a step, M.
        placement: ``per_microbatch`` (a rank each), ``one`` (all in flight on one device) or
            ``per_stage_and_microbatch`` (times model parallelism).
        state: ``replicated``, or ``sharded`` (ZeRO).
        delay: 0; larger values, or a matrix, study staleness apart from timing.
        n_stages: stages of the model, ``n`` unless given.
    """
    s, m = _sizes(n_stages, n)
    return Schedule(_name("DP", state), s, m, timing.simultaneous(s, m), placement, delay, state)


def cyclic(
    n: int,
    delay: Delay = FRESHEST,
    placement: str = "per_microbatch",
    state: str = "replicated",
    *,
    n_stages: int | None = None,
) -> Schedule:
    """Cyclic data parallelism: ``n`` micro-batches staggered uniformly over the step.

    Args:
        n: micro-batches of a step, M.
        delay: ``1`` is the paper's CDP-v1, ``"freshest"`` its CDP-v2.
        placement: any; ``per_stage`` makes it a pipeline.
        state: ``replicated``, or ``sharded`` (ZeRO).
        n_stages: stages of the model, ``n`` unless given.

    Source: arXiv 2403.08837.
    """
    s, m = _sizes(n_stages, n)
    rule = {1: "CDP-v1", FRESHEST: "CDP-v2"}.get(delay if isinstance(delay, int | str) else -1)
    name = _name(rule or "CDP", state)
    return Schedule(name, s, m, timing.cyclic(s, m), placement, delay, state)


def gradient_accumulation(n_stages: int, n_microbatches: int) -> Schedule:
    """One device, one micro-batch after another, one update."""
    s, m = _sizes(n_stages, n_microbatches)
    return Schedule("gradient accumulation", s, m, timing.sequential(s, m), "one")


def _name(rule: str, state: str) -> str:
    return f"ZeRO-{rule}" if state == "sharded" else rule


def _sizes(n_stages: int | None, n_microbatches: int) -> tuple[int, int]:
    n_stages = n_microbatches if n_stages is None else n_stages
    for what, value in (("stages", n_stages), ("micro-batches", n_microbatches)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"the number of {what} is a whole number, 1 or more: got {value!r}")
    return n_stages, n_microbatches
