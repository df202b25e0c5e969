"""The catalogue of methods: each is one choice of timing, placement, weights and state.

Every function raises UserError for sizes and options that are invalid or contradict each other. To
add a method, write its function, register it below, and add its conf file. :data:`METHODS` has all.
"""

from collections.abc import Callable, Sequence
from functools import partial

from toolkit.errors import UserError, whole
from toolkit.schedule import bidirectional, pipeline_orders, timing, v_schedules
from toolkit.schedule.correction import Correction
from toolkit.schedule.pipeline_orders import Item
from toolkit.schedule.placement import IN_ORDER, ROTATED
from toolkit.schedule.registry import FACTORIES as FACTORIES
from toolkit.schedule.registry import METHODS as METHODS
from toolkit.schedule.registry import Method, register
from toolkit.schedule.schedule import Schedule
from toolkit.schedule.schedule_names import delay_label, schedule_name
from toolkit.schedule.spec import carries_spec
from toolkit.schedule.staleness import FRESHEST, Delay
from toolkit.schedule.validate import check_forwards, check_groups


@carries_spec
def data_parallel(
    n: int,
    placement: str = "per_microbatch",
    state: str = "replicated",
    *,
    delay: Delay = 0,
    n_stages: int | None = None,
    accumulate: int = 1,
    correction: str | Correction = "none",
) -> Schedule:
    """Data parallelism: ``n`` workers at the same moment.

    Args:
        n: workers; micro-batches of a step, M, unless they accumulate.
        placement: ``per_microbatch`` (a rank each), ``one`` (all in flight on one device) or
            ``per_stage_and_microbatch`` (times model parallelism).
        state: ``replicated``, ``sharded`` (ZeRO) or ``circulating``; see :class:`Schedule`.
        delay: as in :class:`Schedule`; other than 0 it studies staleness apart from timing.
        n_stages: stages of the model, by default ``n``.
        accumulate: micro-batches that each worker runs one after another in a step, k: M = k n.
        correction: what is done about late weights; see :class:`Correction`.
    """
    s, n, k = _sizes(n_stages, n, accumulate)
    rule = delay_label(delay, s, k * n)
    if rule == " delay 0":
        rule = ""
    name = schedule_name("DP" + rule, state, correction if rule else "none", k)
    op_timing = timing.simultaneous(s, n, k)
    return Schedule(
        name,
        s,
        k * n,
        op_timing,
        placement,
        delay,
        state,
        accumulate=k,
        correction=correction,
    )


@carries_spec
def cyclic(  # noqa: PLR0913 - options, by keyword
    n: int,
    delay: Delay = FRESHEST,
    placement: str = "per_microbatch",
    state: str = "replicated",
    *,
    n_stages: int | None = None,
    chains: str = IN_ORDER,
    accumulate: int = 1,
    groups: int | None = None,
    correction: str | Correction = "none",
) -> Schedule:
    """Cyclic data parallelism: ``n`` workers staggered uniformly. Source: arXiv 2403.08837.

    Args:
        n: workers; micro-batches of a step, M, unless they accumulate.
        delay: ``1`` is the paper's CDP-v1, ``"freshest"`` its CDP-v2; as in :class:`Schedule`. If
            the timing cannot honour it, the error shows the grid, with brackets around the op.
        placement: any; ``per_stage`` makes it a pipeline.
        state: as in :func:`data_parallel`.
        n_stages: stages of the model, by default ``n``.
        chains: ``in_order``, the paper's, or ``rotated``, often faster where links are slow and
            stages have equal parameters; see :data:`toolkit.schedule.placement.CHAINS`.
        accumulate: as in :func:`data_parallel`.
        groups: divides ``n``; workers of a group start together, and groups are staggered. Sums and
            weights pass through a group within a slot, over its fast links if a machine is a
            group. None: every worker is a group; 1: all start at once, as in DP.
        correction: as in :func:`data_parallel`.
    """
    s, n, k = _sizes(n_stages, n, accumulate)
    check_groups(groups, n)
    rule = delay_label(delay, s, k * n)
    rule = {"": "-v2", " delay 1": "-v1"}.get(rule, rule)
    if chains == ROTATED:
        rule += " rotated"
    if groups not in (None, n):
        rule += " 1 group" if groups == 1 else f" {groups} groups"
    name = schedule_name(f"CDP{rule}", state, correction, k)
    op_timing = timing.cyclic(s, n, k, groups)
    return Schedule(
        name, s, k * n, op_timing, placement, delay, state, chains, k, correction
    )


# The names of conf/schedule
dp, cdp_v2 = data_parallel, cyclic
cdp_v1 = partial(cyclic, delay=1)


@carries_spec
def published(
    n: int,
    placement: str = "per_microbatch",
    state: str = "replicated",
    *,
    n_stages: int = 4,
) -> Schedule:
    """CDP-v2 in the paper's published code: simultaneous workers with delayed weights.

    Stage j of worker w reads weights one step late where j < S - 1 - w. With n = S the delays are
    those of CDP-v2; with more workers, as in that code (n = 8, S = 4), a stagger needs longer ones.
    Arguments as :func:`data_parallel`.
    """
    s, m, _ = _sizes(n_stages, n)
    delay = []
    for stage in range(s):
        delay.append([int(stage < s - 1 - worker) for worker in range(m)])
    name = schedule_name("CDP-v2 as published", state)
    return Schedule(name, s, m, timing.simultaneous(s, m), placement, delay, state)


@carries_spec
def weipipe(
    n: int,
    placement: str = "per_microbatch",
    state: str = "circulating",
    *,
    n_stages: int | None = None,
    accumulate: int = 1,
) -> Schedule:
    """WeiPipe-Interleave: activations stay, and weights and their gradients go round the workers.

    Each worker follows the one before it by a stage, and alternates the backwards of a micro-batch
    with the forwards of its next one. A training step drains: (n-1)/(k S + n-1) of its slots are
    idle. Weights start at their owner, and sums skip it until their last micro-batch; in the
    authors' code sums pass every worker. Source: WeiPipe, PPoPP 2025.

    Args:
        n: workers; M = k n micro-batches.
        placement: as in :func:`data_parallel`.
        state: as in :class:`Schedule`.
        n_stages: stages of the model, by default ``n``. If fewer, workers meet at a stage, whose
            owner then sends its weights to all.
        accumulate: micro-batches that each worker runs in a step, k.
    """
    s, n, k = _sizes(n_stages, n, accumulate)
    rule = "WeiPipe" if state == "circulating" else f"WeiPipe {state}"
    name = schedule_name(rule, accumulate=k)
    op_timing = timing.interleaved(s, n, k)
    return Schedule(name, s, k * n, op_timing, placement, state=state, accumulate=k)


@carries_spec
def gradient_accumulation(n_stages: int, n_microbatches: int) -> Schedule:
    """Accumulate gradients on one device, with one update a step; arguments as :func:`gpipe`."""
    s, m, _ = _sizes(n_stages, n_microbatches)
    return Schedule(_ACCUMULATION, s, m, timing.simultaneous(s, 1, m), "one")


@carries_spec
def gpipe(n_stages: int, n_microbatches: int) -> Schedule:
    """GPipe: all forwards, then all backwards. Source: arXiv 1811.06965.

    Args:
        n_stages: stages of the model, S; each has a rank.
        n_microbatches: micro-batches of a training step, M.
    """
    return _pipeline("GPipe", pipeline_orders.gpipe, n_stages, n_microbatches)


@carries_spec
def one_f_one_b(n_stages: int, n_microbatches: int) -> Schedule:
    """1F1B, with a flush at each step; arguments as :func:`gpipe`. Source: arXiv 2006.09503."""
    return _pipeline("1F1B", pipeline_orders.one_f_one_b, n_stages, n_microbatches)


@carries_spec
def eager_1f1b(n_stages: int, n_microbatches: int) -> Schedule:
    """1F1B with up to 2S-1 micro-batches under way, so that messages have a slot to travel in.

    Arguments as :func:`gpipe`. Source: arXiv 2211.05322.
    """
    return _pipeline("Eager1F1B", pipeline_orders.eager_1f1b, n_stages, n_microbatches)


@carries_spec
def looped_bfs(n_stages: int, n_microbatches: int, n_ranks: int) -> Schedule:
    """GPipe where rank r has stages r, r + n_ranks, ... Source: arXiv 2211.05953.

    Args:
        n_stages: stages of the model, a multiple of ``n_ranks``.
        n_microbatches: micro-batches of a training step, M.
        n_ranks: devices.
    """
    make = partial(pipeline_orders.looped_bfs, n_ranks=whole(n_ranks, "n_ranks", 1))
    return _pipeline("looped BFS", make, n_stages, n_microbatches)


@carries_spec
def interleaved_1f1b(n_stages: int, n_microbatches: int, n_ranks: int) -> Schedule:
    """1F1B where rank r has stages r, r + n_ranks, ... Source: arXiv 2104.04473.

    Args:
        n_stages: stages of the model, a multiple of ``n_ranks``.
        n_microbatches: of a training step; a multiple of max(1, n_microbatches // n_ranks).
        n_ranks: devices.
    """
    make = partial(
        pipeline_orders.interleaved_1f1b, n_ranks=whole(n_ranks, "n_ranks", 1)
    )
    return _pipeline(_INTERLEAVED, make, n_stages, n_microbatches)


@carries_spec
def zero_bubble(n_stages: int, n_microbatches: int) -> Schedule:
    """ZB-H1: 1F1B with split backwards; arguments as :func:`gpipe`. Source: arXiv 2401.10241."""
    return _pipeline("ZB-H1", pipeline_orders.zero_bubble, n_stages, n_microbatches)


@carries_spec
def zb_h2(n_stages: int, n_microbatches: int) -> Schedule:
    """ZB-H2: no bubble from 2S-1 micro-batches on, which every rank holds; the paper's ZB-2P.

    With fewer micro-batches its forwards lead by less, and it is never slower than ZB-H1: with
    S = M = 8 a step takes 31 slots, as ZB-H1's; the paper's order takes 34. Arguments as
    :func:`gpipe`. Source: arXiv 2401.10241, section 2.
    """
    return _pipeline("ZB-H2", pipeline_orders.zb_h2, n_stages, n_microbatches)


@carries_spec
def zb_v(n_stages: int, n_microbatches: int) -> Schedule:
    """ZB-V: the memory of 1F1B; no bubble from 2p-1 micro-batches on. Source: arXiv 2401.10241.

    Args:
        n_stages: stages of the model, 2p for p ranks; rank r has r and 2p-1-r.
        n_microbatches: micro-batches of a training step, M.
    """
    return _pipeline("ZB-V", v_schedules.zb_v, n_stages, n_microbatches)


@carries_spec
def v_half(n_stages: int, n_microbatches: int) -> Schedule:
    """V-Half: as :func:`zb_v`, half the memory and bubble of 1F1B. Source: arXiv 2405.15362."""
    return _pipeline("V-Half", v_schedules.v_half, n_stages, n_microbatches)


@carries_spec
def v_min(n_stages: int, n_microbatches: int) -> Schedule:
    """V-Min: as :func:`zb_v`, a third of the memory of 1F1B. Source: arXiv 2405.15362."""
    return _pipeline("V-Min", v_schedules.v_min, n_stages, n_microbatches)


@carries_spec
def one_f_one_b_v(n_stages: int, n_microbatches: int) -> Schedule:
    """1F1B-V: as :func:`zb_v`, two thirds of the memory of 1F1B. Source: arXiv 2405.15362."""
    return _pipeline("1F1B-V", v_schedules.one_f_one_b_v, n_stages, n_microbatches)


@carries_spec
def hanayo(n_stages: int, n_microbatches: int, n_ranks: int) -> Schedule:
    """1F1B in waves: micro-batches go down and up the ranks W times. Source: arXiv 2308.15762.

    Args:
        n_stages: stages of the model, 2 W ``n_ranks``.
        n_microbatches: micro-batches of a training step; best a multiple of ``n_ranks``.
        n_ranks: devices.
    """
    make = partial(v_schedules.hanayo, n_ranks=whole(n_ranks, "n_ranks", 1))
    return _pipeline("Hanayo", make, n_stages, n_microbatches)


@carries_spec
def chimera(n_stages: int, n_microbatches: int) -> Schedule:
    """1F1B in two directions at once; every rank has two stages. Source: arXiv 2107.06925.

    Args:
        n_stages: stages of the model and ranks, an even number.
        n_microbatches: micro-batches of a training step, half of them in each direction; best a
            multiple of the stages.
    """
    return _pipeline("Chimera", bidirectional.chimera, n_stages, n_microbatches)


@carries_spec
def dualpipe(n_stages: int, n_microbatches: int) -> Schedule:
    """Two directions and overlapped pairs of a forward and a backward. Source: arXiv 2412.19437.

    Args:
        n_stages: stages of the model and ranks, an even number.
        n_microbatches: micro-batches of a training step, an even number, two per stage or more.
    """
    return _pipeline("DualPipe", bidirectional.dualpipe, n_stages, n_microbatches)


@carries_spec
def dualpipe_v(n_stages: int, n_microbatches: int) -> Schedule:
    """DualPipe folded to a V, with one copy of the weights. Source: arXiv 2412.19437.

    Args:
        n_stages: stages of the model, 2p for p ranks; rank r has r and 2p-1-r.
        n_microbatches: micro-batches of a training step, one per stage or more.
    """
    return _pipeline("DualPipeV", bidirectional.dualpipe_v, n_stages, n_microbatches)


@carries_spec
def pipedream(
    n_stages: int, n_microbatches: int, *, correction: str | Correction = "none"
) -> Schedule:
    """PipeDream: 1F1B without flush, on the weights that are the newest as a forward starts.

    With a micro-batch a step, as in the paper, stage j reads weights S-1-j steps late. Arguments as
    :func:`pipedream_2bw`. Source: arXiv 1806.03377.
    """
    s, m, _ = _sizes(n_stages, n_microbatches)
    name = schedule_name("PipeDream", correction=correction)
    return Schedule(
        name, s, m, timing.pipelined(s, m), "per_stage", FRESHEST, correction=correction
    )


@carries_spec
def pipedream_2bw(
    n_stages: int, n_microbatches: int, *, correction: str | Correction = "none"
) -> Schedule:
    """PipeDream-2BW: 1F1B without flush, every weight one step late; CDP-v1 if M = S.

    Arguments as :func:`gpipe`, and ``correction``: see :class:`Correction`. Source: arXiv
    2006.09503.
    """
    s, m, _ = _sizes(n_stages, n_microbatches)
    if m < s:  # two weight versions do not suffice
        raise UserError(
            f"PipeDream-2BW takes a micro-batch per stage or more: got {m} for {s}"
        )
    name = schedule_name("PipeDream-2BW", correction=correction)
    op_timing = timing.pipelined(s, m)
    return Schedule(name, s, m, op_timing, "per_stage", delay=1, correction=correction)


_MakeOrders = Callable[[int, int], Sequence[Sequence[Item]]]


def _pipeline(
    name: str, make: _MakeOrders, n_stages: int, n_microbatches: int
) -> Schedule:
    """Return the schedule of the rank orders that ``make`` returns for the checked sizes."""
    s, m, _ = _sizes(n_stages, n_microbatches)
    return Schedule.from_rank_orders(make(s, m), name=name)


def _sizes(
    n_stages: int | None, n_workers: int, accumulate: int = 1
) -> tuple[int, int, int]:
    """Return the numbers of stages (by default of workers), workers, and micro-batches of each."""
    n = whole(n_workers, "the number of micro-batches", 1)
    s = n if n_stages is None else whole(n_stages, "the number of stages", 1)
    k = whole(accumulate, "accumulate, the micro-batches of a worker,", 1)
    check_forwards(s, k * n)
    return s, n, k


# The one registry: conf, the explorer, tables and the conformance suites read it.
_ACCUMULATION = "gradient accumulation"
_INTERLEAVED = "interleaved 1F1B"
_CDP = "arXiv 2403.08837"
_ZERO = "arXiv 1910.02054"
_PIPEDREAM_2BW = "arXiv 2006.09503"
_MEGATRON = "arXiv 2104.04473"
_ZERO_BUBBLE = "arXiv 2401.10241"
_V_SHAPES = "arXiv 2405.15362"
_DUALPIPE = "arXiv 2412.19437"
_RANKS = {"n_ranks": 2}
_SHARDED = {"state": "sharded"}

register(
    Method("dp", "DP", data_parallel, "data_parallel"),
    Method("cdp_v1", "CDP-v1", cyclic, "cyclic", _CDP, {"delay": 1}),
    Method("cdp_v2", "CDP-v2", cyclic, "cyclic", _CDP),
    Method("published", "CDP-v2 as published", published, "data_parallel", _CDP),
    Method(
        "gradient_accumulation", _ACCUMULATION, gradient_accumulation, "data_parallel"
    ),
    Method("gpipe", "GPipe", gpipe, "pipeline", "arXiv 1811.06965"),
    Method("one_f_one_b", "1F1B", one_f_one_b, "pipeline", _PIPEDREAM_2BW),
    Method("eager_1f1b", "Eager1F1B", eager_1f1b, "pipeline", "arXiv 2211.05322"),
    Method(
        "looped_bfs",
        "looped BFS",
        looped_bfs,
        "pipeline",
        "arXiv 2211.05953",
        _RANKS,
        2,
    ),
    Method(
        "interleaved_1f1b",
        _INTERLEAVED,
        interleaved_1f1b,
        "pipeline",
        _MEGATRON,
        _RANKS,
        2,
    ),
    Method("zero_bubble", "ZB-H1", zero_bubble, "pipeline", _ZERO_BUBBLE),
    Method("zb_h2", "ZB-H2", zb_h2, "pipeline", _ZERO_BUBBLE),
    Method("zb_v", "ZB-V", zb_v, "pipeline", _ZERO_BUBBLE, stages_per_rank=2),
    Method("v_half", "V-Half", v_half, "pipeline", _V_SHAPES, stages_per_rank=2),
    Method("v_min", "V-Min", v_min, "pipeline", _V_SHAPES, stages_per_rank=2),
    Method(
        "one_f_one_b_v",
        "1F1B-V",
        one_f_one_b_v,
        "pipeline",
        _V_SHAPES,
        stages_per_rank=2,
    ),
    Method("hanayo", "Hanayo", hanayo, "pipeline", "arXiv 2308.15762", _RANKS, 2),
    Method("chimera", "Chimera", chimera, "pipeline", "arXiv 2107.06925"),
    Method("dualpipe", "DualPipe", dualpipe, "pipeline", _DUALPIPE),
    Method(
        "dualpipe_v", "DualPipeV", dualpipe_v, "pipeline", _DUALPIPE, stages_per_rank=2
    ),
    Method("pipedream", "PipeDream", pipedream, "pipeline", "arXiv 1806.03377"),
    Method("pipedream_2bw", "PipeDream-2BW", pipedream_2bw, "pipeline", _PIPEDREAM_2BW),
    Method("zero_dp", "ZeRO-DP", data_parallel, "data_parallel", _ZERO, _SHARDED),
    Method(
        "weipipe",
        "WeiPipe",
        weipipe,
        "data_parallel",
        "PPoPP 2025",
        {"state": "circulating"},
    ),
    Method(
        "zero_cdp_v1", "ZeRO-CDP-v1", cyclic, "cyclic", _CDP, {"delay": 1, **_SHARDED}
    ),
    Method("zero_cdp_v2", "ZeRO-CDP-v2", cyclic, "cyclic", _CDP, _SHARDED),
)
