"""Measure a rank while it runs its program; the timeline that the ranks of a job make."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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
from toolkit.runtime.meters.running_costs import Stopwatch
from toolkit.runtime.rank import Rank
from toolkit.runtime.stage import Values
from toolkit.runtime.streams import finish_stream
from toolkit.runtime.updater import Weights
from toolkit.schedule import Action, Buffer, Instruction, Program, Schedule
from toolkit.schedule.overlapped_weights import most_weights
from toolkit.schedule.program import most_by_slot
from toolkit.schedule.traffic import NOTHING, Traffic, received_of, traffic_of


class Event(NamedTuple):
    """An instruction as it was executed.

    ``tick`` counts from the start of the record, over all of its programs. ``start`` and ``end``
    are seconds since all ranks started together. ``bytes`` were sent or received; the bytes of
    activations, weights and gradients are those held afterwards.
    """

    instruction: Instruction
    tick: int
    start: float
    end: float
    bytes: int
    activations: int
    weights: int
    gradients: int


@dataclass
class Record:
    """The measurements of a rank.

    Attributes:
        rank: number of the rank.
        events: its instructions, in the order of its program.
        first_weights: bytes of weights before the first event.
        programs: number of training steps, and the first, of each program.
        device_peak: peak bytes that CUDA had allocated; None on the CPU.
    """

    rank: int
    events: list[Event] = field(default_factory=list)
    first_weights: int = 0
    programs: list[tuple[int, int]] = field(default_factory=list)
    device_peak: int | None = None


class Meter:
    """Measures a rank.

    Activations are what autograd saves in the forward of a stage, shared storage once: neither
    weights, nor buffers, nor the stage's inputs.

    Args:
        rank: number of the rank.
        device: where it computes.
        origin: performance counter's time, in seconds, at which time 0 is.
    """

    def __init__(self, rank: int, device: torch.device, origin: float) -> None:
        self.record = Record(rank)
        self.activations = _Saved()
        self.stopwatch: Stopwatch | None = None  # takes the times, too
        self._device = device
        self._origin = origin
        self._tick = 0  # at which the program began
        self._n_before = 0  # events of the programs before
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def begin(self, rank: Rank) -> None:
        """Start to measure a program."""
        if not self.record.events:
            self.record.first_weights = _held(rank.weights)
        self._n_before = len(self.record.events)

    def perform(self, rank: Rank, i: Instruction, do: Callable[[Instruction], int]) -> None:
        """Execute an instruction by ``do``, which returns its bytes, and record it."""
        finish_stream(self._device)
        start = self.now()
        n_bytes = do(i)
        finish_stream(self._device)
        self.note(rank, i, start, n_bytes)

    def note(self, rank: Rank, i: Instruction, start: float, n_bytes: int) -> None:
        """Record an instruction that started at ``start`` and ends now. Any thread may call it."""
        end = self.now()
        live_bytes = (self.activations.bytes, _held(rank.weights), _summed(rank))
        self.record.events.append(Event(i, self._tick + i.tick, start, end, n_bytes, *live_bytes))
        if self.stopwatch is not None:
            self.stopwatch.add(i, end - start)

    def finish(self, program: Program) -> None:
        """Finish ``program``, and sort its events into its order."""
        self.record.programs.append((program.n_steps, program.first_step))
        position_of = {i: position for position, i in enumerate(program.ranks[self.record.rank])}
        program_events = self.record.events[self._n_before :]
        self.record.events[self._n_before :] = sorted(
            program_events, key=lambda event: position_of[event.instruction]
        )
        self._tick += (program.n_slots + 1) * program.schedule.timing.ticks_per_slot
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
            self.record.device_peak = max(peak, self.record.device_peak or 0)

    def now(self) -> float:
        """Return the seconds since all ranks started together."""
        return time.perf_counter() - self._origin


class _Saved:
    """Bytes that autograd keeps of the watched forwards."""

    def __init__(self) -> None:
        self.bytes = self.peak = 0
        self._holders: Counter[int] = Counter()  # of each storage

    @contextmanager
    def watch(self, weights: Weights, inputs: Values, buffers: list[Tensor]) -> Iterator[None]:
        """Count what autograd saves within, except these tensors."""
        excluded_storages = {_storage(tensor) for tensor in (*weights.values(), *inputs, *buffers)}

        def keep(tensor: Tensor) -> "Tensor | _Holder":
            # Detached, or a result kept by its own node would hold on to itself.
            detached = tensor.detach()
            return detached if _storage(tensor) in excluded_storages else _Holder(detached, self)

        def give(saved: "Tensor | _Holder") -> Tensor:
            return saved.tensor if isinstance(saved, _Holder) else saved

        with torch.autograd.graph.saved_tensors_hooks(keep, give):
            yield

    def count(self, tensor: Tensor, change: int) -> None:
        """Add to, or take from, those that keep the storage of ``tensor``."""
        storage = _storage(tensor)
        before, after = self._holders[storage], self._holders[storage] + change
        self._holders[storage] = after
        if not (before and after):
            self.bytes += change * tensor.untyped_storage().nbytes()
            self.peak = max(self.peak, self.bytes)
        if not after:
            del self._holders[storage]


class _Holder:
    """A tensor that autograd keeps; it counts as long as autograd keeps this object."""

    def __init__(self, tensor: Tensor, saved: _Saved) -> None:
        self.tensor = tensor
        self.saved = saved
        saved.count(tensor, 1)

    def __del__(self) -> None:
        self.saved.count(self.tensor, -1)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _held(versions: dict[tuple, Weights]) -> int:
    # Lists, since other threads put in and take out meanwhile.
    return sum(tensor.nbytes for weights in list(versions.values()) for tensor in weights.values())


def _summed(rank: Rank) -> int:
    totals = list(rank.sums.values())
    return sum(tensor.nbytes for total in totals for tensor in list(total.tensors.values()))


def count_operations(run: Callable[[], object]) -> Counter[str]:
    """Count the operations that ``run`` dispatches, by name: on a GPU, about its kernel launches.

    Views, allocations and marks for the profiler do not count. Code compiled by torch.compile is
    not seen.
    """
    with _Counting() as counting:
        run()
    return counting.found


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        if not function.is_view and not name.startswith(("empty", "_record_function")):
            self.found[name] += 1
        return function(*arguments, **(options or {}))


@dataclass(frozen=True)
class Measurements:
    """The records of all ranks, ``records[rank]``, of a run of ``schedule``.

    ``stage_bytes`` are the bytes of each stage's weights, if known.
    """

    schedule: Schedule
    records: Sequence[Record]
    stage_bytes: Sequence[int] = ()

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
                    traffic = traffic_of(event.instruction, record.rank)
                    total_bytes = n_bytes + traffic.units * event.bytes
                    slot[record.rank] = Traffic(messages + traffic.messages, total_bytes)
        return tuple(map(tuple, total))

    def activations(self) -> tuple[tuple[int, ...], ...]:
        """Return the peak bytes of activations in each slot: ``[rank][slot]``.

        A release at the start of a slot comes before the slot.
        """
        tick = self.schedule.timing.ticks_per_slot
        levels = map(_levels, self.records)
        return tuple(
            tuple(most_by_slot(rank_levels, self._n_slots, tick)) for rank_levels in levels
        )

    def peak_activations(self) -> tuple[int, ...]:
        """Return the peak bytes of activations, by rank."""
        return tuple(max(event.activations for event in record.events) for record in self.records)

    def peak_weights(self) -> tuple[int, ...]:
        """Return the peak bytes of weights, all versions, by rank."""
        return tuple(
            max(record.first_weights, *(event.weights for event in record.events))
            for record in self.records
        )

    def most_weights(self) -> tuple[float, ...]:
        """Return the most bytes of weights that each rank could hold, whenever messages arrived.

        Empty if ``stage_bytes`` is.
        """
        if not self.stage_bytes:
            return ()
        programs = [self.schedule.lower(*steps) for steps in self.records[0].programs]
        return tuple(
            map(
                max,
                zip(*(most_weights(p, self.stage_bytes) for p in programs), strict=True),
            )
        )

    def by_rank(self) -> list[dict[str, int | float | None]]:
        """Return a row a rank: peaks in bytes; messages and bytes sent and received.

        ``most_weights`` is what the rank could hold at most, if ``stage_bytes`` are known.

        Collectives count as in :meth:`sent`.
        """
        activations, weights = self.peak_activations(), self.peak_weights()
        most_weights = self.most_weights()
        rows = []
        for rank, record in enumerate(self.records):
            row: dict[str, int | float | None] = {
                "rank": rank,
                "peak_activations": activations[rank],
                "peak_weights": weights[rank],
                "device_peak": record.device_peak,
            }
            if self.stage_bytes:
                row["most_weights"] = most_weights[rank]
            for direction, traffic in (("sent", traffic_of), ("received", received_of)):
                event_traffic = [
                    (traffic(event.instruction, rank), event.bytes) for event in record.events
                ]
                row[f"messages_{direction}"] = sum(moved.messages for moved, _ in event_traffic)
                row[f"bytes_{direction}"] = float(
                    sum(moved.units * n_bytes for moved, n_bytes in event_traffic)
                )
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
                record,
                events=[
                    event._replace(start=event.start - origin, end=event.end - origin)
                    for event in record.events
                ],
            )
            for record in self.records
        ]
        messages = _messages(records)
        spans = [
            span
            for record in records
            for position, event in enumerate(record.events)
            if (span := self._span(record.rank, event, messages.get((record.rank, position))))
            is not None
        ]
        changes = [change for record in records for change in _changes(record)]
        ends: defaultdict[int, float] = defaultdict(float)
        for event in (event for record in records for event in record.events):
            if event.instruction.action == Action.UPDATE:
                step = event.instruction.step or 0
                ends[step] = max(ends[step], event.end)
        name = f"{self.schedule.name}, measured"
        return Timeline(
            name, len(records), spans, changes, tuple(ends[step] for step in sorted(ends))
        )

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
        details = (i.label, i.stage, i.microbatch, i.of_step, n_bytes)
        return Span(rank, lane, start, end, *details, peer, slot)

    @property
    def _n_slots(self) -> int:
        last_tick = max(event.tick for record in self.records for event in record.events)
        return -(-last_tick // self.schedule.timing.ticks_per_slot)


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
        n_seen: Counter[tuple] = Counter()
        for position, event in enumerate(record.events):
            if event.instruction.action.communicates:
                key = event.instruction.meeting(record.rank)
                meetings[*key, n_seen[key]].append((record.rank, position, event))
                n_seen[key] += 1
    times = {}
    free_at: defaultdict[tuple, float] = defaultdict(float)  # when each way is free again
    for key, participants in sorted(
        meetings.items(), key=lambda item: max(event.end for *_, event in item[1])
    ):
        i = participants[0][2].instruction
        is_message = i.action in (Action.SEND, Action.RECV)
        channel = key[:2] if is_message else ("collective", *i.peers)
        begin = max(free_at[channel], *(event.start for *_, event in participants))
        received = [
            event.end for *_, event in participants if event.instruction.action == Action.RECV
        ]
        free_at[channel] = max(begin, *(received or [event.end for *_, event in participants]))
        for rank, position, event in participants:
            times[rank, position] = begin, max(begin, *(received or [event.end]))
    return times


def _changes(record: Record) -> Iterator[Change]:
    live_bytes = {ACTIVATIONS: 0, WEIGHTS: record.first_weights, GRADIENTS: 0}
    if record.first_weights:
        yield Change(0.0, record.rank, WEIGHTS, record.first_weights)
    for event in sorted(record.events, key=lambda event: event.end):
        new_bytes = (event.activations, event.weights, event.gradients)
        for kind, n_bytes in zip(live_bytes, new_bytes, strict=True):
            if n_bytes != live_bytes[kind]:
                grows = n_bytes > live_bytes[kind] and not event.instruction.action.communicates
                moment = event.start if grows else event.end
                yield Change(moment, record.rank, kind, n_bytes - live_bytes[kind])
                live_bytes[kind] = n_bytes
