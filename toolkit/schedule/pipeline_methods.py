"""The pipelines of the catalogue: a rank for each stage, or for the stages that it has.

Sizes are checked, and errors raised, as in :mod:`toolkit.schedule.catalog`.
"""

from collections.abc import Callable, Sequence
from functools import partial

from toolkit.errors import UserError, whole
from toolkit.schedule import bidirectional, pipeline_orders, timing, v_schedules
from toolkit.schedule.correction import Correction
from toolkit.schedule.factories import carries_spec, whole_sizes
from toolkit.schedule.pipeline_orders import Item
from toolkit.schedule.schedule import Schedule
from toolkit.schedule.schedule_names import schedule_name
from toolkit.schedule.staleness import FRESHEST

INTERLEAVED = "interleaved 1F1B"


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
    return _pipeline(INTERLEAVED, make, n_stages, n_microbatches)


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
    s, m, _ = whole_sizes(n_stages, n_microbatches)
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
    s, m, _ = whole_sizes(n_stages, n_microbatches)
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
    s, m, _ = whole_sizes(n_stages, n_microbatches)
    return Schedule.from_rank_orders(make(s, m), name=name)
