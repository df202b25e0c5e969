"""What happened when, on which rank: predicted by the simulator or measured by a runtime."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from toolkit.schedule import Kind

if TYPE_CHECKING:
    import pandas as pd

COMPUTE, UPDATE, SEND, RECEIVE = "compute", "update", "send", "receive"
LANES = (COMPUTE, UPDATE, SEND, RECEIVE)
COMPUTED = (*(kind.letter for kind in Kind), "p")  # ops as their names have them, and predictions
ACTIVATIONS, WEIGHTS, GRADIENTS = "activations", "weights", "gradients"
INPUTS, OPTIMIZER, WORKING = "stage inputs", "optimizer", "working"
KINDS = (OPTIMIZER, WEIGHTS, GRADIENTS, INPUTS, ACTIVATIONS, WORKING)


_MOMENT = 1e-12  # of the time: what sums of seconds that should be equal differ by


class Span(NamedTuple):
    """``rank`` is busy on ``lane`` from ``start`` to ``end``, in seconds.

    ``step`` is the training step that it is of; of weights that are sent, the one that begins with
    them. ``peer`` is the other end of a message, None for computing and collectives; ``bytes`` what
    a message moves through the rank's port; ``slot`` the one in which the schedule has it.
    """

    rank: int
    lane: str
    start: float
    end: float
    name: str
    stage: int
    microbatch: int | None
    step: int | None
    bytes: float = 0.0
    peer: int | None = None
    slot: int | None = None

    @property
    def computed(self) -> str:
        """On the compute lane: which of ``COMPUTED``, by its name."""
        return self.name.lstrip("0123456789")[:1]


class Change(NamedTuple):
    """``rank`` gains (or loses) ``bytes`` of ``kind`` at ``time``."""

    time: float
    rank: int
    kind: str
    bytes: float


@dataclass(frozen=True)
class Timeline:
    """Spans, and changes of memory, of some training steps.

    Attributes:
        name: what figures call it.
        n_ranks: ranks, from 0.
        spans: busy times of every rank and lane.
        changes: of the memory of every rank.
        step_ends: when the last update of each training step had ended, in seconds.
        steady: the training steps of the steady state, counted from the timeline's first. Rates
            are of these; if there are none, of all steps but the first.
    """

    name: str
    n_ranks: int
    spans: Sequence[Span]
    changes: Sequence[Change]
    step_ends: tuple[float, ...]
    steady: range = range(0)

    def __repr__(self) -> str:
        return (
            f"Timeline({self.name!r}, ranks={self.n_ranks}, steps={len(self.step_ends)},"
            f" spans={len(self.spans)}, changes={len(self.changes)})"
        )

    @property
    def end(self) -> float:
        """When the last rank has finished, in seconds."""
        return max(span.end for span in self.spans)

    @property
    def step_time(self) -> float:
        """Seconds from step to step in the steady state; of a single step, all of it."""
        begin, end, steps = self._timed()
        return (end - begin) / len(steps)

    @property
    def idle_share(self) -> float:
        """The share of all ranks' time in which they do not compute, while training goes on.

        It is of the same training steps as :attr:`step_time`; of a single step, from its start to
        its end. Measured over few overlapping steps it is rough, and may be below 0.
        """
        _, _, steps = self._timed()
        of = self._steps_from_0()
        busy = sum(s.end - s.start for s in self.spans if s.lane == COMPUTE and of(s) in steps)
        span = self.step_time if len(self.step_ends) > 1 else self.end
        return 1 - busy / len(steps) / (self.n_ranks * span)

    def _timed(self) -> tuple[float, float, range]:
        """Begin and end, in seconds, of the training steps of which rates are; and which."""
        ends = self.step_ends
        if self.steady:
            return ends[self.steady[0] - 1], ends[self.steady[-1]], self.steady
        if len(ends) > 1:
            return ends[0], ends[-1], range(1, len(ends))
        return 0.0, ends[0], range(1)

    def _steps_from_0(self) -> Callable[[Span], int]:
        """Of a span its training step, counted from the first here; -1 if it is of none."""
        computed = (span.step for span in self.spans if span.lane == COMPUTE)
        first = min((step for step in computed if step is not None), default=0)
        return lambda span: -1 if span.step is None else span.step - first

    def memory(self, rank: int | None = None, kind: str | None = None) -> list[tuple[float, float]]:
        """(time, bytes from then on), of one rank or all, of one kind or all."""
        of_ranks = self.changes if rank is None else self._changes_of[rank]
        changes = sorted(
            (change.time, change.bytes) for change in of_ranks if kind in (None, change.kind)
        )
        curve: list[tuple[float, float]] = []
        held = begun = 0.0
        for when, change in changes:  # at one moment what is freed and what is made cancel
            held += change
            if curve and when - begun <= _MOMENT * when:
                curve[-1] = (when, held)
            else:
                curve.append((when, held))
                begun = when
        return curve

    @cached_property
    def _changes_of(self) -> list[list[Change]]:
        """By rank."""
        found: list[list[Change]] = [[] for _ in range(self.n_ranks)]
        for change in self.changes:
            found[change.rank].append(change)
        return found

    def peak_memory(self, rank: int | None = None, kind: str | None = None) -> float:
        """The most bytes held at once."""
        return max((held for _, held in self.memory(rank, kind)), default=0.0)

    def at_peak(self, rank: int) -> dict[str, float]:
        """Bytes of each kind that a rank holds when it holds the most."""
        when, _ = max(self.memory(rank), key=lambda point: point[1], default=(0.0, 0.0))
        held = dict.fromkeys(KINDS, 0.0)
        for change in self._changes_of[rank]:
            if change.time <= when:
                held[change.kind] += change.bytes
        return held

    def bytes_sent(self) -> tuple[float, ...]:
        """Bytes that each rank sent, collectives included."""
        sent = [0.0] * self.n_ranks
        for span in self.spans:
            if span.lane == SEND:
                sent[span.rank] += span.bytes
        return tuple(sent)

    def bytes_a_step(self) -> tuple[float, ...]:
        """Bytes that each rank sends in a training step of the steady state.

        A message counts for its step, whenever it is sent. If no step is known to be steady, the
        mean over all steps is returned.
        """
        if not self.steady:
            return tuple(n_bytes / len(self.step_ends) for n_bytes in self.bytes_sent())
        of = self._steps_from_0()
        sent = [0.0] * self.n_ranks
        for span in self.spans:
            if span.lane == SEND and of(span) in self.steady:
                sent[span.rank] += span.bytes
        return tuple(n_bytes / len(self.steady) for n_bytes in sent)

    def to_frame(self) -> "pd.DataFrame":
        """The spans as a pandas DataFrame, one row each."""
        import pandas as pd

        return pd.DataFrame(self.spans, columns=Span._fields)

    def to_chrome_trace(self, path: str | Path) -> None:
        """Write a trace that Perfetto and chrome://tracing open: a process a rank, a row a lane.

        A row more names the slots, where the spans know theirs.
        """
        events: list[dict] = []
        slots = self._slots()
        for rank in range(self.n_ranks):
            events.append(_metadata("process_name", rank, 0, f"rank {rank}"))
            for lane, name in enumerate((*LANES, "slots")):
                events.append(_metadata("thread_name", rank, lane, name))
            for slot, (start, end) in sorted(slots[rank].items()):
                events.append(_complete(f"slot {slot}", rank, len(LANES), start, end))
        for span in self.spans:
            named = ("stage", "microbatch", "step", "bytes", "peer", "slot")
            args = {key: value for key in named if (value := getattr(span, key)) is not None}
            event = _complete(span.name, span.rank, LANES.index(span.lane), span.start, span.end)
            events.append(event | {"cat": span.lane, "args": args})
        for rank in range(self.n_ranks):
            for when, held in self.memory(rank):
                args = {"bytes": held}
                event = {"ph": "C", "name": "memory", "pid": rank, "ts": when * 1e6, "args": args}
                events.append(event)
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

    def _slots(self) -> list[dict[int, tuple[float, float]]]:
        """By rank, of each slot: the start of its first op and the end of its last."""
        found: list[dict[int, tuple[float, float]]] = [{} for _ in range(self.n_ranks)]
        for span in self.spans:
            if span.lane == COMPUTE and span.slot is not None:
                times = found[span.rank]
                start, end = times.get(span.slot, (span.start, span.end))
                times[span.slot] = min(start, span.start), max(end, span.end)
        return found


def _complete(name: str, rank: int, lane: int, start: float, end: float) -> dict:
    duration = (end - start) * 1e6
    return {"ph": "X", "name": name, "pid": rank, "tid": lane, "ts": start * 1e6, "dur": duration}


def _metadata(kind: str, rank: int, lane: int, name: str) -> dict:
    return {"ph": "M", "name": kind, "pid": rank, "tid": lane, "args": {"name": name}}
