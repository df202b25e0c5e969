"""Turn the records of ranks into a timeline."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

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
from toolkit.schedule import Action, Schedule
from toolkit.schedule.program import traffic_of

_MESSAGES = (Action.SEND, Action.RECV)

Occasion = tuple[int, int]  # rank, and position among its events


def timeline_of(schedule: Schedule, records: Sequence[Record]) -> Timeline:
    """Return the timeline of ``records``, from the first event on.

    A message starts when all of its ranks are ready and the one before it on the same way has
    ended; it ends when it is received.
    """
    origin = min(record.events[0].start for record in records)
    messages = _messages(records)
    spans = [
        span._replace(start=span.start - origin, end=span.end - origin)
        for record in records
        for position, event in enumerate(record.events)
        for span in _spans(schedule, record.rank, event, messages.get((record.rank, position)))
    ]
    changes = [
        change._replace(time=change.time - origin)
        for record in records
        for change in _changes(record, origin)
    ]
    ends: defaultdict[int, float] = defaultdict(float)
    for event in (event for record in records for event in record.events):
        if event.instruction.action == Action.UPDATE:
            step = event.instruction.step or 0
            ends[step] = max(ends[step], event.end - origin)
    step_ends = tuple(ends[step] for step in sorted(ends))
    return Timeline(f"{schedule.name}, measured", len(records), spans, changes, step_ends)


def _messages(records: Sequence[Record]) -> dict[Occasion, tuple[float, float]]:
    """Return the start and end of each message, at the events of all of its ranks."""
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
        message = met[0][2].instruction.action in _MESSAGES
        way = key[:2] if message else ("collective", *met[0][2].instruction.peers)
        begin = max(free[way], *(event.start for *_, event in met))
        received = [event.end for *_, event in met if event.instruction.action == Action.RECV]
        free[way] = max(begin, *(received or [event.end for *_, event in met]))
        for rank, position, event in met:
            times[rank, position] = begin, max(begin, *(received or [event.end]))
    return times


def _spans(
    schedule: Schedule, rank: int, event: Event, message: tuple[float, float] | None
) -> Iterator[Span]:
    i = event.instruction
    start, end = message or (event.start, event.end)
    n_bytes, peer = 0.0, None
    if i.action.computes or i.action == Action.PREDICT:
        lane = COMPUTE
    elif i.action == Action.UPDATE:
        lane = UPDATE
    elif i.action.communicates:
        lane, n_bytes, peer = _message(rank, event)
    else:
        return
    slot = event.tick // schedule.timing.ticks_per_slot
    what = (i.label, i.stage, i.microbatch, i.of_step, n_bytes)
    yield Span(rank, lane, start, end, *what, peer, slot)


def _message(rank: int, event: Event) -> tuple[str, float, int | None]:
    """Return lane, bytes through the rank's port, and peer."""
    i = event.instruction
    if i.action in (Action.SEND, Action.RECV):
        lane = SEND if i.action == Action.SEND else RECEIVE
        return lane, event.bytes, i.peers[0]
    sent = float(traffic_of(i, rank).units * event.bytes)
    return (SEND, sent, None) if sent else (RECEIVE, event.bytes, None)


def _changes(record: Record, origin: float) -> Iterator[Change]:
    held = {ACTIVATIONS: 0, WEIGHTS: record.first_weights, GRADIENTS: 0}
    if record.first_weights:
        yield Change(origin, record.rank, WEIGHTS, record.first_weights)
    for event in sorted(record.events, key=lambda event: event.end):
        now = (event.activations, event.weights, event.gradients)
        for kind, n_bytes in zip(held, now, strict=True):
            if n_bytes != held[kind]:
                grows = n_bytes > held[kind] and not event.instruction.action.communicates
                when = event.start if grows else event.end
                yield Change(when, record.rank, kind, n_bytes - held[kind])
                held[kind] = n_bytes
