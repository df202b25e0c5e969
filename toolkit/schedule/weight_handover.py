"""Which way a weight version goes from the rank that makes it to the ranks that read it.

Replicated state: the version goes once along a path of ranks, and each of them keeps it. On three
ranks in cyclic timing, where rank 2 makes version 1 (``=`` held, ``>`` handed on, ``R`` read)::

    rank 2  =====>=====R=====        owner: passes it on, and reads it last
    rank 0       >R====>====         first reader
    rank 1             >R===         second reader, from the first one

Sharded state: a rank holds the version for one op only, and hands it on after that. The owner keeps
its own copy until the next update.
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import chain, groupby
from math import inf
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from toolkit.schedule.instruction import BROADCAST, FREE, WEIGHTS, Instruction
from toolkit.schedule.instruction_lists import FREES, WEIGHT_MESSAGES, InstructionLists

if TYPE_CHECKING:
    from toolkit.schedule.schedule import Schedule


# A plain tuple: there is one for each op, and named fields take four times as long to read.
Read = tuple[int, int, int, bool]
"""First and last tick of a computation with a weight version, its rank, whether a backward."""


class Update(NamedTuple):
    """A weight version is made at ``tick`` on ``ranks``."""

    tick: int
    ranks: tuple[int, ...]


@dataclass
class _Stay:
    """A rank holds a weight version from ``since`` to ``until``."""

    rank: int
    since: int
    until: int


class _Moment(NamedTuple):
    """Ranks that begin to read a weight version at the same tick.

    Attributes:
        start: tick at which they begin.
        ranks: these ranks, ascending.
        end: tick at which the last of them has ended.
        backward: whether they read it in backwards.
    """

    start: int
    ranks: list[int]
    end: int
    backward: bool


class WeightHandover:
    """Adds the messages and the frees of weight versions.

    Args:
        schedule: whose state, owners and rings decide the way.
        lists: the instructions of all ranks, which get more.

    Attributes:
        reads: by stage and version, the reads of all ranks; complete before :meth:`supply`.
    """

    def __init__(self, schedule: "Schedule", lists: InstructionLists) -> None:
        self.lists = lists
        self.owners = schedule.owners
        self.rings = schedule.rings
        self.slot = schedule.timing.ticks_per_slot
        self.is_replicated = schedule.state == "replicated"
        self.circulates = schedule.state == "circulating"
        self.reads: dict[tuple[int, int], list[Read]] = defaultdict(list)

    def supply(
        self, stage: int, version: int, update: Update, next_update: Update | None
    ) -> None:
        """Bring a version from the ranks that made it to all that read it, and free it.

        Args:
            stage: the stage.
            version: its weight version.
            update: the update that made the version.
            next_update: the update that replaces it on the ranks that update; None if none does.
        """
        if self.is_replicated:
            self._hand_on(stage, version, update, next_update)
        else:
            self._travel(stage, version, update, next_update)

    def _hand_on(
        self, stage: int, version: int, update: Update, next_update: Update | None
    ) -> None:
        """Replicated: the version goes once to each rank that reads it, and stays there."""
        reads = sorted(self.reads[stage, version])
        first_start: dict[int, int] = {}  # by rank, in order of the starts
        last_end: dict[int, int] = {}
        for start, end, rank, _ in reads:
            if rank not in first_start:
                first_start[rank] = start
                last_end[rank] = end
            elif end > last_end[rank]:
                last_end[rank] = end

        # 1. Ranks that made the version have it; the others get it along paths from the owner.
        last_use = dict.fromkeys(update.ranks, update.tick)
        handovers = []
        for path in self._handover_paths(stage, first_start):
            source = self.owners[stage]
            for target in path:
                if target not in update.ranks:
                    handovers.append((source, target))
                    source = target

        # 2. The source passes the version on once its own first op with it has begun, and a slot
        # before the target's op. From the end of the paths backwards, no handover may come after
        # a later one: with blocking channels the two ranks would wait for each other.
        handover_ticks = []
        next_tick = inf
        for source, target in reversed(handovers):
            # A rank that only passes the version on counts as if it read it last.
            last_start, *_ = reads[-1]
            source_ready = first_start.get(source, last_start) + self.slot
            target_needs = first_start.get(target, last_start) - self.slot
            next_tick = min(source_ready, target_needs, next_tick)
            handover_ticks.append(int(max(update.tick, next_tick)))
        handover_ticks.reverse()
        for (source, target), tick in zip(handovers, handover_ticks, strict=True):
            self._send(source, target, tick, stage, version)
            last_use[source] = max(last_use[source], tick)
            last_use[target] = tick

        # 3. A rank frees it after its last op with it, or after the update that replaces it.
        for rank, end in last_end.items():
            last_use[rank] = max(last_use[rank], end)
        if next_update is not None:
            for rank in next_update.ranks:
                last_use[rank] = max(last_use[rank], next_update.tick)
        for rank, tick in last_use.items():
            self._free(tick, rank, stage, version)

    def _handover_paths(
        self, stage: int, first_start: dict[int, int]
    ) -> list[list[int]]:
        """Return the two paths of ranks on which a version goes from the owner, in order.

        In order of first reads, the second path has the ranks that begin together with the owner.
        Round a ring, it has the owner's own group.
        """
        if self.rings:
            *other_groups, owner_group = self.rings[stage]
            ring_paths = [*chain.from_iterable(other_groups)], owner_group[:-1]
            return [_until_last_reader(path, first_start) for path in ring_paths]
        owner_start = first_start.get(self.owners[stage])
        earlier_or_later: list[int] = []
        with_owner: list[int] = []
        for rank, start in first_start.items():
            path = with_owner if start == owner_start else earlier_or_later
            path.append(rank)
        return [earlier_or_later, with_owner]

    def _travel(
        self, stage: int, version: int, update: Update, next_update: Update | None
    ) -> None:
        """Sharded: the version goes from op to op; its owner keeps it until the update.

        Where ranks need it at the same moment the owner keeps it for all of its readers instead.
        """
        owner = self.owners[stage]
        moments = self._moments(stage, version)
        at_once = any(len(moment.ranks) > 1 for moment in moments)
        last_tick = update.tick if next_update is None else next_update.tick
        if at_once:
            last_tick = max(last_tick, moments[-1].start)
        owner_stay = _Stay(owner, update.tick, last_tick)
        stays = [owner_stay]
        present = [owner_stay]  # who may still have it as the next moment begins
        # Who hands it on, and until when it used it: to forwards, and, if the state circulates,
        # as another copy to backwards.
        holders = [(owner_stay, update.tick), (owner_stay, update.tick)]

        for start, ranks, end, backward in moments:
            copy = int(self.circulates and backward)
            holder, last_used = holders[copy]

            # 1. Ranks that still have it since the op before need no message.
            stay_of_rank = {
                stay.rank: stay for stay in present if stay.until >= start - self.slot
            }
            stay_of_rank[holder.rank] = holder
            lacking_ranks = [rank for rank in ranks if rank not in stay_of_rank]

            # 2. The others get it: several at once by a broadcast, a single one from the holder.
            if len(lacking_ranks) > 1:
                tick = start
                self._broadcast((owner, *lacking_ranks), tick, stage, version)
            elif lacking_ranks:
                tick = min(start, max(holder.since, last_used, start - self.slot))
                self._send(holder.rank, lacking_ranks[0], tick, stage, version)
                holder.until = max(holder.until, tick)
            for rank in lacking_ranks:
                stay = _Stay(rank, tick, tick)
                stays.append(stay)
                stay_of_rank[rank] = stay
            present = [*stay_of_rank.values()]

            # 3. They hold it until they have read it; a single reader is the next holder.
            for rank in ranks:
                stay_of_rank[rank].until = max(stay_of_rank[rank].until, end)
            if not at_once:
                reader = stay_of_rank[ranks[0]]
                for k, (stay, _) in enumerate(holders):
                    # A rank holds a version once, also where it hands on both copies.
                    if k == copy or stay.rank == reader.rank:
                        holders[k] = (reader, end)

        for stay in stays:
            self._free(stay.until, stay.rank, stage, version)

    def _moments(self, stage: int, version: int) -> list[_Moment]:
        """Return the reads of a version, in order, together where they begin together."""
        reads_in_order = sorted(self.reads[stage, version])
        moments = []
        for start, simultaneous_reads in groupby(reads_in_order, key=itemgetter(0)):
            reads = [*simultaneous_reads]
            ranks = sorted({rank for _, _, rank, _ in reads})
            end = max(end for _, end, _, _ in reads)
            _, _, _, is_backward = reads[0]
            moments.append(_Moment(start, ranks, end, is_backward))
        return moments

    def _send(
        self, source: int, target: int, tick: int, stage: int, version: int
    ) -> None:
        content = (stage, None, None, version, WEIGHTS)
        self.lists.add_message(WEIGHT_MESSAGES, source, target, tick, content)

    def _broadcast(
        self, members: tuple[int, ...], tick: int, stage: int, version: int
    ) -> None:
        """Send a version from the first of ``members`` to all others."""
        content = (stage, None, None, version, WEIGHTS)
        broadcast = Instruction(tick, BROADCAST, *content, members)
        for rank in members:
            self.lists.by_turn[rank][WEIGHT_MESSAGES].append(broadcast)

    def _free(self, tick: int, rank: int, stage: int, version: int) -> None:
        free = Instruction(tick, FREE, stage, version=version, buffer=WEIGHTS)
        self.lists.by_turn[rank][FREES].append(free)


def _until_last_reader(
    path: "list[int] | tuple[int, ...]", readers: dict[int, int]
) -> list[int]:
    """Return ``path`` without the ranks after the last that reads the version."""
    n_ranks = len(path)
    while n_ranks and path[n_ranks - 1] not in readers:
        n_ranks -= 1
    return [*path[:n_ranks]]
