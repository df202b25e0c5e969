"""Candidates of a plan whose messages are compressed."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter

from toolkit.cost import Costs, Hardware, compressed_costs
from toolkit.cost.compression import (
    COMPRESSIONS,
    MESSAGE_CODES,
    SIXTEEN_BITS,
    coarseness,
)
from toolkit.cost.slow_link_rivals import DDP_COMPRESSIONS, ddp_costs
from toolkit.cost.worker_forms import BUCKETS
from toolkit.errors import UserError, check_choice
from toolkit.plan.candidates import Candidate
from toolkit.runtime.rank_compression import check_handed_on
from toolkit.schedule import Schedule


def with_compressions(
    all_candidates: Sequence[Candidate], compressions: Sequence[str]
) -> list[Candidate]:
    """Return all candidates, each followed by those with its messages compressed, if it has any.

    Args:
        all_candidates: whose messages are exact; those of a schedule stand side by side.
        compressions: of ``toolkit.cost.compression.COMPRESSIONS``; exact messages are always tried.

    Raises:
        UserError: a compression is unknown, or there is none.
    """
    if isinstance(compressions, str) or not compressions:
        raise UserError(
            f"compressions: got {compressions!r}; expected a list such as [none,int8]"
        )
    for compression in compressions:
        check_choice("compressions", compression, COMPRESSIONS)
    lossy = sorted(
        {*compressions} - {"none"}, key=lambda name: (coarseness(name), name)
    )
    if not lossy:
        return [*all_candidates]
    expanded: list[Candidate] = []
    for _, group in groupby(all_candidates, key=attrgetter("spec")):
        candidates = [*group]
        expanded += candidates
        schedule = candidates[0].schedule
        for compression in lossy:
            for candidate in candidates:
                # The devices of a rank hold shards, which blocks of codes do not follow.
                if candidate.width > 1 and compression in MESSAGE_CODES:
                    continue
                if takes_compression(schedule, candidate.partition, compression):
                    expanded.append(replace(candidate, compression=compression))
    return expanded


def takes_compression(schedule: Schedule, partition: str, compression: str) -> bool:
    """Whether a runtime compresses messages of gradients or weights so.

    Args:
        schedule: that ranks follow.
        partition: of a candidate; ``buckets`` of torch's DistributedDataParallel.
        compression: of the messages, other than ``none``.
    """
    if partition == BUCKETS:
        return schedule.n_ranks > 1 and compression in DDP_COMPRESSIONS
    layout = schedule.layout
    if all(len(layout.ranks(stage)) == 1 for stage in range(schedule.n_stages)):
        return False  # gradients and weights stay where they are
    if compression in SIXTEEN_BITS:
        return True
    try:
        check_handed_on(schedule, MESSAGE_CODES[compression])
    except UserError:
        return False
    return True


def costs_of_messages(candidate: Candidate, costs: Costs, hardware: Hardware) -> Costs:
    """Return the costs of a candidate's stages with its messages.

    Args:
        candidate: the candidate.
        costs: of its stages, with exact messages.
        hardware: the machines.
    """
    schedule = candidate.schedule
    if candidate.compression == "none":
        return costs
    if candidate.partition == BUCKETS:
        return ddp_costs(costs, hardware, schedule.n_ranks, candidate.compression)[0]
    return compressed_costs(costs, candidate.compression, state=schedule.state)
