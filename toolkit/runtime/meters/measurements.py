"""The measurements of all ranks of a job, and the timeline that they make."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from toolkit.cost.timeline import (
    ACTIVATIONS,
    COMPUTE,
    GRADIENTS,
    RECEIVE,
    SEND,
    UPDATE,
    WEIGHTS,
    Change,
    Span,
    Timeline,
)
from toolkit.runtime.meters.meter import Event, Record
from toolkit.schedule import Action, Buffer, Schedule
from toolkit.schedule.program import NOTHING, Traffic, most_by_slot, received_of, traffic_of


@dataclass(frozen=True)
class Measurements:
    """The records of all ranks, ``records[rank]``, of a run of ``schedule``."""

    schedule: Schedule
    records: Sequence[Record]

    def sent(self, *buffers: Buffer) -> tuple[tuple[Traffic, ...], ...]:
        """Return the messages, and bytes as units, of ``buffers`` by sender: ``[slot][rank]``.

        A message counts in the slot that begins when the program sends it; collectives count in
        their usual forms (see ``Program.traffic``).
        """
        total = [[NOTHING] * len(self.records) for _ in range(self._n_slots + 1)]
        for record in self.records:
            for event in record.events:
                if event.instruction.buffer in buffers:
                    slot = total[event.tick // self.schedule.timing.ticks_per_slot]
                    messages, n_bytes = slot[record.rank]
                    more = traffic_of(event.instruction, record.rank)
                    moved = n_bytes + more.units * event.bytes
                    slot[record.rank] = Traffic(messages + more.messages, moved)
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
        return tuple(max(r.first_weights, *(e.weights for e in r.events)) for r in self.records)

    def by_rank(self) -> list[dict[str, int | float | None]]:
        """Return a row a rank: peaks in bytes; messages and bytes sent and received.

        Collectives count as in :meth:`sent`.
        """
        activations, weights = self.peak_activations(), self.peak_weights()
        rows = []
        for rank, record in enumerate(self.records):
            row: dict[str, int | float | None] = {
                "rank": rank,
                "peak_activations": activations[rank],
                "peak_weights": weights[rank],
                "device_peak": record.device_peak,
            }
            for way, traffic in (("sent", traffic_of), ("received", received_of)):
                moved = [(traffic(e.instruction, rank), e.bytes) for e in record.events]
                row[f"messages_{way}"] = sum(found.messages for found, _ in moved)
                row[f"bytes_{way}"] = float(sum(found.units * n for found, n in moved))
            rows.append(row)
        return rows

    def timeline(self) -> Timeline:
        """Return the timeline, from the first event on.

        A message starts when all of its ranks are ready and the one before it on the same way has
        ended; it ends when it is received.
        """
        origin = min(record.events[0].start for record in self.records)
        records = [
            replace(
                r, events=[e._replace(start=e.start - origin, end=e.end - origin) for e in r.events]
            )
            for r in self.records
        ]
        messages = _messages(records)
        spans = [
            span
            for r in records
            for position, event in enumerate(r.events)
            if (span := self._span(r.rank, event, messages.get((r.rank, position)))) is not None
        ]
        changes = [change for record in records for change in _changes(record)]
        ends: defaultdict[int, float] = defaultdict(float)
        for event in (event for record in records for event in record.events):
            if event.instruction.action == Action.UPDATE:
                step = event.instruction.step or 0
                ends[step] = max(ends[step], event.end)
        name = f"{self.schedule.name}, measured"
        return Timeline(name, len(records), spans, changes, tuple(ends[k] for k in sorted(ends)))

    def _span(self, rank: int, event: Event, message: tuple[float, float] | None) -> Span | None:
        i = event.instruction
        n_bytes, peer = 0.0, None
        if i.action.computes or i.action == Action.PREDICT:
            lane = COMPUTE
        elif i.action == Action.UPDATE:
            lane = UPDATE
        elif i.action in (Action.SEND, Action.RECV):
            lane = SEND if i.action == Action.SEND else RECEIVE
            n_bytes, peer = event.bytes, i.peers[0]
        elif i.action.communicates:  # bytes through the rank's port
            sent = float(traffic_of(i, rank).units * event.bytes)
            lane, n_bytes = (SEND, sent) if sent else (RECEIVE, event.bytes)
        else:
            return None
        start, end = message or (event.start, event.end)
        slot = event.tick // self.schedule.timing.ticks_per_slot
        what = (i.label, i.stage, i.microbatch, i.of_step, n_bytes)
        return Span(rank, lane, start, end, *what, peer, slot)

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


def _messages(records: Sequence[Record]) -> dict[tuple[int, int], tuple[float, float]]:
    """Return the start and end of each message by rank and position of all of its events."""
    meetings: defaultdict[tuple, list[tuple[int, int, Event]]] = defaultdict(list)
    for record in records:
        seen: Counter[tuple] = Counter()
        for position, event in enumerate(record.events):
            if event.instruction.action.communicates:
                key = event.instruction.meeting(record.rank)
                meetings[*key, seen[key]].append((record.rank, position, event))
                seen[key] += 1
    times = {}
    free: defaultdict[tuple, float] = defaultdict(float)  # when each way is free again
    for key, met in sorted(meetings.items(), key=lambda item: max(e.end for *_, e in item[1])):
        i = met[0][2].instruction
        is_message = i.action in (Action.SEND, Action.RECV)
        way = key[:2] if is_message else ("collective", *i.peers)
        begin = max(free[way], *(event.start for *_, event in met))
        received = [e.end for *_, e in met if e.instruction.action == Action.RECV]
        free[way] = max(begin, *(received or [event.end for *_, event in met]))
        for rank, position, event in met:
            times[rank, position] = begin, max(begin, *(received or [event.end]))
    return times


def _changes(record: Record) -> Iterator[Change]:
    held = {ACTIVATIONS: 0, WEIGHTS: record.first_weights, GRADIENTS: 0}
    if record.first_weights:
        yield Change(0.0, record.rank, WEIGHTS, record.first_weights)
    for event in sorted(record.events, key=lambda event: event.end):
        now = (event.activations, event.weights, event.gradients)
        for kind, n_bytes in zip(held, now, strict=True):
            if n_bytes != held[kind]:
                grows = n_bytes > held[kind] and not event.instruction.action.communicates
                when = event.start if grows else event.end
                yield Change(when, record.rank, kind, n_bytes - held[kind])
                held[kind] = n_bytes
