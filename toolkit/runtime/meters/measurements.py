"""The measurements of all ranks of a job."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from toolkit.cost.timeline import Timeline
from toolkit.runtime.meters.meter import Record
from toolkit.runtime.meters.recorder import timeline_of
from toolkit.schedule import Action, Buffer, Schedule
from toolkit.schedule.program import most_by_slot, received_of, traffic_of


class Sent(NamedTuple):
    """Messages and bytes; collectives count in their usual forms (see Program.traffic)."""

    messages: int = 0
    bytes: Fraction = Fraction()


@dataclass(frozen=True)
class Measurements:
    """The records of all ranks, by rank.

    Attributes:
        schedule: what was run.
        records: ``records[rank]``.
    """

    schedule: Schedule
    records: Sequence[Record]

    def sent(self, *buffers: Buffer) -> tuple[tuple[Sent, ...], ...]:
        """Return what each rank sent of ``buffers``: ``[slot][rank]``.

        A message counts in the slot that begins when the program sends it.
        """
        total = [[Sent()] * len(self.records) for _ in range(self._n_slots + 1)]
        for record in self.records:
            for event in record.events:
                i = event.instruction
                if i.buffer in buffers and i.action not in (Action.RECV, Action.FREE):
                    slot = total[event.tick // self.schedule.timing.ticks_per_slot]
                    so_far, more = slot[record.rank], traffic_of(i, record.rank)
                    slot[record.rank] = Sent(
                        so_far.messages + more.messages, so_far.bytes + more.units * event.bytes
                    )
        return tuple(map(tuple, total))

    def activations(self) -> tuple[tuple[int, ...], ...]:
        """Return the peak bytes of activations in each slot: ``[rank][slot]``.

        A release at the start of a slot comes before the slot.
        """
        tick = self.schedule.timing.ticks_per_slot
        levels = map(_levels, self.records)
        return tuple(tuple(most_by_slot(found, self._n_slots, tick)) for found in levels)

    def peak_activations(self) -> tuple[int, ...]:
        """Return the peak bytes of activations, by rank."""
        return tuple(max(event.activations for event in r.events) for r in self.records)

    def peak_weights(self) -> tuple[int, ...]:
        """Return the peak bytes of weights, all versions, by rank."""
        return tuple(
            max(r.first_weights, *(event.weights for event in r.events)) for r in self.records
        )

    def by_rank(self) -> list[dict[str, int | float | None]]:
        """Return a row a rank: peaks in bytes; messages and bytes sent and received.

        Collectives count as in :meth:`sent`.
        """
        every, peaks = self.sent(*Buffer), self.peak_activations()
        rows: list[dict[str, int | float | None]] = []
        for rank, record in enumerate(self.records):
            sent = [of_rank[rank] for of_rank in every]
            received = [(received_of(e.instruction, rank), e.bytes) for e in record.events]
            rows.append(
                {
                    "rank": rank,
                    "peak_activations": peaks[rank],
                    "peak_weights": self.peak_weights()[rank],
                    "device_peak": record.device_peak,
                    "messages_sent": sum(of_slot.messages for of_slot in sent),
                    "bytes_sent": float(sum(of_slot.bytes for of_slot in sent)),
                    "messages_received": sum(found.messages for found, _ in received),
                    "bytes_received": float(sum(found.units * n for found, n in received)),
                }
            )
        return rows

    def timeline(self) -> Timeline:
        """Return the timeline. A message starts when the last of its ranks is ready for it."""
        return timeline_of(self.schedule, self.records)

    @property
    def _n_slots(self) -> int:
        last = max(event.tick for record in self.records for event in record.events)
        return -(-last // self.schedule.timing.ticks_per_slot)


def _levels(record: Record) -> Iterator[tuple[int, int]]:
    """Yield (tick, bytes of activations) after each forward and each release."""
    for event in record.events:
        i = event.instruction
        released = i.action == Action.FREE and i.buffer == Buffer.ACTIVATION
        if released or i.action == Action.FORWARD:
            yield event.tick, event.activations
