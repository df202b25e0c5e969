"""What the ranks of a run have measured together: memory, messages, and a timeline."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

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
from toolkit.runtime.meters.meter import Event, RankRecord
from toolkit.schedule import Action, Buffer, Schedule
from toolkit.schedule.overlapped_weights import most_weights
from toolkit.schedule.program import most_by_slot
from toolkit.schedule.traffic import NOTHING, Traffic, received_of, traffic_of


@dataclass(frozen=True)
class Measurements:
    """The records of all ranks of a run.

    Attributes:
        schedule: schedule of the run, with phases or without.
        records: ``records[rank]``.
        stage_bytes: bytes of each stage's weights; empty if they are not known.
    """

    schedule: Schedule
    records: Sequence[RankRecord]
    stage_bytes: Sequence[int] = ()

    def sent(self, *buffers: Buffer) -> tuple[tuple[Traffic, ...], ...]:
        """Return the messages, and bytes as units, of ``buffers`` by sender: ``[slot][rank]``.

        A message counts in the slot that begins when the program sends it; collectives count in
        their usual forms (see ``Program.traffic``).
        """
        # One row more than slots: a message may begin at the end of the last one.
        sent = [[NOTHING] * len(self.records) for _ in range(self._n_slots + 1)]
        for record in self.records:
            rank = record.rank
            for event in record.events:
                if event.instruction.buffer in buffers:
                    slot = self._slot(event)
                    messages, n_bytes = sent[slot][rank]
                    traffic = traffic_of(event.instruction, rank)
                    sent[slot][rank] = Traffic(
                        messages + traffic.messages,
                        n_bytes + traffic.units * event.bytes,
                    )
        return tuple(map(tuple, sent))

    def activations(self) -> tuple[tuple[int, ...], ...]:
        """Return the peak bytes of activations in each slot: ``[rank][slot]``.

        A release at the start of a slot comes before the slot.
        """
        ticks_per_slot = self.schedule.timing.ticks_per_slot
        activations = []
        for record in self.records:
            levels = _activation_levels(record)
            activations.append(
                tuple(most_by_slot(levels, self._n_slots, ticks_per_slot))
            )
        return tuple(activations)

    def peak_activations(self) -> tuple[int, ...]:
        """Return the peak bytes of activations, by rank."""
        peaks = []
        for record in self.records:
            peaks.append(max(event.activations for event in record.events))
        return tuple(peaks)

    def peak_weights(self) -> tuple[int, ...]:
        """Return the peak bytes of weights, all versions, by rank."""
        peaks = []
        for record in self.records:
            peaks.append(
                max(record.first_weights, *(event.weights for event in record.events))
            )
        return tuple(peaks)

    def most_weights(self) -> tuple[float, ...]:
        """Return the most bytes of weights that each rank could hold, whenever messages arrived.

        Empty if ``stage_bytes`` is.
        """
        if not self.stage_bytes:
            return ()
        bounds_of_programs = []
        for steps in self.records[0].programs:
            # Records name programs by their steps only, so that they are small to send to one rank.
            program = self.schedule.lower(*steps)
            bounds_of_programs.append(most_weights(program, self.stage_bytes))
        return tuple(map(max, zip(*bounds_of_programs, strict=True)))

    def by_rank(self) -> list[dict[str, int | float | None]]:
        """Return a row per rank: peaks in bytes; messages and bytes sent and received.

        Collectives count as in :meth:`sent`. With ``stage_bytes`` there is also
        :meth:`most_weights`. Of a rank that is several devices all is of the first of them.
        """
        activations = self.peak_activations()
        weights = self.peak_weights()
        weight_bounds = self.most_weights()
        rows = []
        for rank, record in enumerate(self.records):
            row: dict[str, int | float | None] = {
                "rank": rank,
                "peak_activations": activations[rank],
                "peak_weights": weights[rank],
                "device_peak": record.device_peak,
            }
            if weight_bounds:
                row["most_weights"] = weight_bounds[rank]
            if record.optimizer_state is not None:
                row["optimizer_state"] = record.optimizer_state
            for direction, traffic_at in (
                ("sent", traffic_of),
                ("received", received_of),
            ):
                n_messages, n_bytes = NOTHING
                for event in record.events:
                    traffic = traffic_at(event.instruction, rank)
                    n_messages += traffic.messages
                    n_bytes += traffic.units * event.bytes
                row[f"messages_{direction}"] = n_messages
                row[f"bytes_{direction}"] = float(n_bytes)
            rows.append(row)
        return rows

    def timeline(self) -> Timeline:
        """Return the timeline, from the first event on.

        A message starts when all of its ranks are ready and the one before it on the same way has
        ended; it ends when it is received.
        """
        origin = min(record.events[0].start for record in self.records)
        message_times = _message_times(self.records)
        spans = []
        changes: list[Change] = []
        step_ends: defaultdict[int, float] = defaultdict(float)  # of the last update
        for record in self.records:
            changes += _memory_changes(record, origin)
            for position, event in enumerate(record.events):
                times = message_times.get(
                    (record.rank, position), (event.start, event.end)
                )
                span = self._span(record.rank, event, times, origin)
                if span is not None:
                    spans.append(span)
                if event.instruction.action == Action.UPDATE:
                    step = event.instruction.step or 0
                    step_ends[step] = max(step_ends[step], event.end - origin)
        ends = tuple(step_ends[step] for step in sorted(step_ends))
        name = f"{self.schedule.name}, measured"
        return Timeline(name, len(self.records), spans, changes, ends)

    def _span(
        self, rank: int, event: Event, times: tuple[float, float], origin: float
    ) -> Span | None:
        i = event.instruction
        n_bytes = 0.0
        peer = None
        if i.action.computes or i.action == Action.PREDICT:
            lane = COMPUTE
        elif i.action == Action.UPDATE:
            lane = UPDATE
        elif i.action in (Action.SEND, Action.RECV):
            lane = RECEIVE
            if i.action == Action.SEND:
                lane = SEND
            n_bytes = event.bytes
            peer = i.peers[0]
        elif i.action.communicates:
            # Of a collective the bytes through the rank's port count.
            lane = SEND
            n_bytes = float(traffic_of(i, rank).units * event.bytes)
            if n_bytes == 0:
                lane = RECEIVE
                n_bytes = event.bytes
        else:
            return None
        start, end = times
        return Span(
            rank,
            lane,
            start - origin,
            end - origin,
            i.label,
            i.stage,
            i.microbatch,
            i.of_step,
            n_bytes,
            peer,
            self._slot(event),
        )

    def _slot(self, event: Event) -> int:
        return event.tick // self.schedule.timing.ticks_per_slot

    @property
    def _n_slots(self) -> int:
        last_tick = 0
        for record in self.records:
            for event in record.events:
                last_tick = max(last_tick, event.tick)
        return -(-last_tick // self.schedule.timing.ticks_per_slot)


def _activation_levels(record: RankRecord) -> Iterator[tuple[int, int]]:
    """Yield (tick, bytes of activations) after each forward and each release."""
    for event in record.events:
        i = event.instruction
        released = i.action == Action.FREE and i.buffer == Buffer.ACTIVATION
        if released or i.action == Action.FORWARD:
            yield event.tick, event.activations


def _message_times(
    records: Sequence[RankRecord],
) -> dict[tuple[int, int], tuple[float, float]]:
    """Return the start and end of each message by rank and position of all of its events."""
    # 1. Find the events of each message: at a rendezvous of ranks, the k-th of each rank.
    participants_of: defaultdict[tuple, list[tuple[int, int, Event]]] = defaultdict(
        list
    )
    for record in records:
        n_seen: Counter[tuple] = Counter()
        for position, event in enumerate(record.events):
            if event.instruction.action.communicates:
                meeting = event.instruction.meeting(record.rank)
                message = (*meeting, n_seen[meeting])
                participants_of[message].append((record.rank, position, event))
                n_seen[meeting] += 1

    # 2. In the order of their ends: a message begins when all of its ranks are ready and the one
    # before it on the same channel has ended.
    times = {}
    channel_free_at: defaultdict[tuple, float] = defaultdict(lambda: -inf)
    last_ends = {}
    for message, participants in participants_of.items():
        last_ends[message] = max(event.end for _, _, event in participants)
    for message in sorted(participants_of, key=last_ends.__getitem__):
        participants = participants_of[message]
        i = participants[0][2].instruction
        channel = ("collective", *i.peers)
        if i.action in (Action.SEND, Action.RECV):
            channel = message[:2]
        # A message of ranks 0 and 1, with each rank's own event, and when it counts as under way::
        #
        #     rank 0     ready |--send--|
        #     rank 1          ready |------recv------|
        #     message               |=================|   starts when the channel is free, too
        start = max(
            channel_free_at[channel], *(event.start for _, _, event in participants)
        )
        # A send may end on the sender long before the message is there.
        receive_ends = [
            event.end
            for _, _, event in participants
            if event.instruction.action == Action.RECV
        ]
        channel_free_at[channel] = max(start, *(receive_ends or [last_ends[message]]))
        for rank, position, event in participants:
            times[rank, position] = start, max(start, *(receive_ends or [event.end]))
    return times


def _memory_changes(record: RankRecord, origin: float) -> Iterator[Change]:
    live_bytes = {ACTIVATIONS: 0, WEIGHTS: record.first_weights, GRADIENTS: 0}
    if record.first_weights:
        yield Change(0.0, record.rank, WEIGHTS, record.first_weights)
    # Each event has the bytes at its end, so changes are found between consecutive ends.
    for event in sorted(record.events, key=lambda event: event.end):
        new_bytes = (event.activations, event.weights, event.gradients)
        for kind, n_bytes in zip(live_bytes, new_bytes, strict=True):
            change = n_bytes - live_bytes[kind]
            if change != 0:
                # An op allocates as it starts; a message that arrives, at its end.
                is_allocation = change > 0 and not event.instruction.action.communicates
                moment = event.end
                if is_allocation:
                    moment = event.start
                yield Change(moment - origin, record.rank, kind, change)
                live_bytes[kind] = n_bytes
