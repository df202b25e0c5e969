"""The catalogue of methods: each is one choice of timing, placement, weights and state.

Every function raises UserError for sizes and options that are invalid or contradict each other. To
add a method, write its function (of a pipeline: in :mod:`toolkit.schedule.pipeline_methods`),
register it below, and add its conf file. :data:`METHODS` has all.
"""

from functools import partial

from toolkit.schedule import timing
from toolkit.schedule.correction import Correction
from toolkit.schedule.factories import carries_spec, whole_sizes
from toolkit.schedule.pipeline_methods import (
    INTERLEAVED,
    chimera,
    dualpipe,
    dualpipe_v,
    eager_1f1b,
    gpipe,
    hanayo,
    interleaved_1f1b,
    looped_bfs,
    one_f_one_b,
    one_f_one_b_v,
    pipedream,
    pipedream_2bw,
    v_half,
    v_min,
    zb_h2,
    zb_v,
    zero_bubble,
)
from toolkit.schedule.reduction_order import IN_ORDER, ROTATED
from toolkit.schedule.registry import FACTORIES, METHODS, Method, register
from toolkit.schedule.schedule import Schedule
from toolkit.schedule.schedule_names import delay_label, schedule_name
from toolkit.schedule.staleness import FRESHEST, Delay
from toolkit.schedule.validate import check_groups

__all__ = [
    "FACTORIES",
    "METHODS",
    "Method",
    "cdp_v1",
    "cdp_v2",
    "chimera",
    "cyclic",
    "data_parallel",
    "dp",
    "dualpipe",
    "dualpipe_v",
    "eager_1f1b",
    "gpipe",
    "gradient_accumulation",
    "hanayo",
    "interleaved_1f1b",
    "looped_bfs",
    "one_f_one_b",
    "one_f_one_b_v",
    "pipedream",
    "pipedream_2bw",
    "published",
    "v_half",
    "v_min",
    "weipipe",
    "zb_h2",
    "zb_v",
    "zero_bubble",
]


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
    s, n, k = whole_sizes(n_stages, n, accumulate)
    rule = delay_label(delay, s, k * n)
    if rule == " delay 0":
        rule = ""
    # Without late weights nothing is corrected, so that the name does not say it.
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
            stages have equal parameters; see :data:`toolkit.schedule.reduction_order.CHAINS`.
        accumulate: as in :func:`data_parallel`.
        groups: divides ``n``; workers of a group start together, and groups are staggered. Sums and
            weights pass through a group within a slot, over its fast links if a machine is a
            group. None: every worker is a group; 1: all start at once, as in DP.
        correction: as in :func:`data_parallel`.
    """
    s, n, k = whole_sizes(n_stages, n, accumulate)
    check_groups(groups, n)
    rule = delay_label(delay, s, k * n)
    # The paper's names: v1 reads every weight one step late, v2 the freshest that the timing
    # allows.
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
    s, m, _ = whole_sizes(n_stages, n)
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
    s, n, k = whole_sizes(n_stages, n, accumulate)
    rule = "WeiPipe" if state == "circulating" else f"WeiPipe {state}"
    name = schedule_name(rule, accumulate=k)
    op_timing = timing.interleaved(s, n, k)
    return Schedule(name, s, k * n, op_timing, placement, state=state, accumulate=k)


@carries_spec
def gradient_accumulation(n_stages: int, n_microbatches: int) -> Schedule:
    """Accumulate gradients on one device, with one update a step; arguments as :func:`gpipe`."""
    s, m, _ = whole_sizes(n_stages, n_microbatches)
    return Schedule(_ACCUMULATION, s, m, timing.simultaneous(s, 1, m), "one")


# The one registry: conf, the explorer, tables and the conformance suites read it.
_ACCUMULATION = "gradient accumulation"
_CDP = "arXiv 2403.08837"
_ZERO = "arXiv 1910.02054"
_PIPEDREAM_2BW = "arXiv 2006.09503"
_MEGATRON = "arXiv 2104.04473"
_ZERO_BUBBLE = "arXiv 2401.10241"
_V_SHAPES = "arXiv 2405.15362"
_DUALPIPE = "arXiv 2412.19437"
# A default: tables and plans set it to the ranks that there are, see method_sizes.
_RANKS = {"n_ranks": 2}
_SHARDED = {"state": "sharded"}

# Name, label in tables, function, kind, source, options that the method fixes, stages of a rank.
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
        INTERLEAVED,
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
