"""The named methods: each is one choice of timing, placement, weights and state."""

from toolkit.schedule import orders, timing
from toolkit.schedule.chains import IN_ORDER, ROTATED
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
    chains: str = IN_ORDER,
) -> Schedule:
    """Cyclic data parallelism: ``n`` micro-batches staggered uniformly over the step.

    Args:
        n: micro-batches of a step, M.
        delay: ``1`` is the paper's CDP-v1, ``"freshest"`` its CDP-v2.
        placement: any; ``per_stage`` makes it a pipeline.
        state: ``replicated``, or ``sharded`` (ZeRO).
        n_stages: stages of the model, ``n`` unless given.
        chains: ``in_order``, or ``rotated``: the same bytes and updates on every rank; but sums
            wait longer, gradients are held longer, and messages bunch where a backward ends.

    Source: arXiv 2403.08837.
    """
    s, m = _sizes(n_stages, n)
    rule = {1: "CDP-v1", FRESHEST: "CDP-v2"}.get(delay if isinstance(delay, int | str) else -1)
    name = _name(rule or "CDP", state) + (" rotated" if chains == ROTATED else "")
    return Schedule(name, s, m, timing.cyclic(s, m), placement, delay, state, chains)


def gradient_accumulation(n_stages: int, n_microbatches: int) -> Schedule:
    """One device, one micro-batch after another, one update."""
    s, m = _sizes(n_stages, n_microbatches)
    return Schedule("gradient accumulation", s, m, timing.sequential(s, m), "one")


def gpipe(n_stages: int, n_microbatches: int) -> Schedule:
    """All forwards, then all backwards. Source: arXiv 1811.06965."""
    return _pipeline("GPipe", orders.gpipe(*_sizes(n_stages, n_microbatches)))


def one_f_one_b(n_stages: int, n_microbatches: int) -> Schedule:
    """One forward, one backward, with a flush at each step. Source: arXiv 2006.09503."""
    return _pipeline("1F1B", orders.one_f_one_b(*_sizes(n_stages, n_microbatches)))


def interleaved_1f1b(n_stages: int, n_microbatches: int, n_ranks: int) -> Schedule:
    """1F1B with several stages a rank: rank r has stages r, r + n_ranks, ...

    Source: arXiv 2104.04473.
    """
    s, m = _sizes(n_stages, n_microbatches)
    return _pipeline("interleaved 1F1B", orders.interleaved_1f1b(s, m, n_ranks))


def zero_bubble(n_stages: int, n_microbatches: int) -> Schedule:
    """1F1B with split backwards, ZB-H1. Source: arXiv 2401.10241."""
    return _pipeline("ZB-H1", orders.zero_bubble(*_sizes(n_stages, n_microbatches)))


def pipedream_2bw(n_stages: int, n_microbatches: int) -> Schedule:
    """1F1B without flush, every weight one step late. With as many micro-batches as stages it is
    CDP-v1 on per-stage ranks. Source: arXiv 2006.09503.

    Raises:
        ValueError: fewer micro-batches than stages, which two weight versions cannot serve.
    """
    s, m = _sizes(n_stages, n_microbatches)
    if m < s:
        raise ValueError(f"PipeDream-2BW takes a micro-batch a stage or more: got {m} for {s}")
    return Schedule("PipeDream-2BW", s, m, timing.pipelined(s, m), "per_stage", delay=1)


def _pipeline(name: str, rank_orders: orders.Orders) -> Schedule:
    return Schedule.from_rank_orders(rank_orders, name=name)


def _name(rule: str, state: str) -> str:
    return f"ZeRO-{rule}" if state == "sharded" else rule


def _sizes(n_stages: int | None, n_microbatches: int) -> tuple[int, int]:
    n_stages = n_microbatches if n_stages is None else n_stages
    for what, value in (("stages", n_stages), ("micro-batches", n_microbatches)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"the number of {what} is a whole number, 1 or more: got {value!r}")
    return n_stages, n_microbatches
