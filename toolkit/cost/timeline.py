"""Spans and memory of training steps: predicted by the simulator or measured by a runtime."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import pandas as pd

COMPUTE, UPDATE, SEND, RECEIVE = LANES = ("compute", "update", "send", "receive")
ACTIVATIONS, WEIGHTS, GRADIENTS = "activations", "weights", "gradients"
INPUTS, OPTIMIZER, WORKING = "stage inputs", "optimizer", "working"
KINDS = (OPTIMIZER, WEIGHTS, GRADIENTS, INPUTS, ACTIVATIONS, WORKING)

_HOST = 0  # the thread that launches kernels
_MOMENT = 1e-12  # relative rounding of equal sums of seconds
_TIME_AND_BYTES = itemgetter(0, 3)  # of a Change


class Span(NamedTuple):
    """The time for which a rank is busy with an op, an update, or a message.

    Args:
        rank: that is busy.
        lane: one of ``LANES``.
        start: seconds.
        end: seconds.
        name: label, such as ``2F1`` for stage and micro-batch of a forward.
        stage: that computes, updates, or is moved.
        microbatch: None for updates and for messages of weights and sums.
        step: the training step; of sent weights, the step that first uses them.
        bytes: that pass through the rank's port.
        peer: rank at the other end of a message; None for compute and collectives.
        slot: of the schedule.
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
        """The letter of a compute span's op: F, B, I or W; p for a weight prediction."""
        return self.name.lstrip("0123456789")[:1]


class Change(NamedTuple):
    """A change of the memory of a rank.

    Args:
        time: seconds.
        rank: whose memory changes.
        kind: one of ``KINDS``.
        bytes: that it gains; it loses them if negative.
    """

    time: float
    rank: int
    kind: str
    bytes: float


@dataclass(frozen=True)
class Timeline:
    """Spans and memory changes of some training steps.

    Attributes:
        name: label in figures.
        n_ranks: number of ranks.
        spans: busy times of every rank and lane.
        changes: memory changes of every rank.
        step_ends: ``[n_steps]`` seconds at which each training step's last update ended.
        steady: steady-state steps, counted from the timeline's first. Rates use these; if empty,
            all steps but the first.
    """

    name: str
    n_ranks: int
    spans: Sequence[Span] = field(repr=False)
    changes: Sequence[Change] = field(repr=False)
    step_ends: tuple[float, ...] = field(repr=False)
    steady: range = range(0)

    @property
    def end(self) -> float:
        """Seconds at which the last rank has finished."""
        return max(span.end for span in self.spans)

    @property
    def step_time(self) -> float:
        """Seconds per step in the steady state; of a single step, its duration."""
        steps = self._timed()
        # Steps overlap: each counts from the end of the one before, or their times would count
        # twice.
        begin = 0.0
        if steps[0] > 0:
            begin = self.step_ends[steps[0] - 1]
        return (self.step_ends[steps[-1]] - begin) / len(steps)

    @property
    def idle_share(self) -> float:
        """Share of all ranks' time without compute, over the steps of :attr:`step_time`.

        Without steady steps it is inexact where steps overlap: a share below 0 counts as 0.
        """
        if self.steady and self.steady[0] > 0:
            return self._idle_share_of_steady()
        # Only the compute of whole steps counts. What ranks do after the end of the last step would
        # overlap with the next step.
        steps = self._timed()
        step_of = self._steps_from_0()
        busy_seconds = sum(
            span.end - span.start
            for span in self.spans
            if span.lane == COMPUTE and step_of(span) in steps
        )
        seconds_per_step = self.step_time if len(self.step_ends) > 1 else self.end
        busy_share = busy_seconds / len(steps) / (self.n_ranks * seconds_per_step)
        return max(0.0, 1 - busy_share)

    def _idle_share_of_steady(self) -> float:
        """Return the share of idle time between the ends of two steady steps.

        Only compute in that time counts, whatever its step. A rank may get ahead of the others for
        a few steps. The compute of as many steps then takes more time than there is::

            ends of steps       |- step 5 -|- step 6 -|
            a rank's compute   [  6  ][  7  ][  8  ]        clipped at both ends
        """
        begin = self.step_ends[self.steady[0] - 1]
        end = self.step_ends[self.steady[-1]]
        busy_seconds = 0.0
        for span in self.spans:
            if span.lane == COMPUTE and span.start < end and span.end > begin:
                busy_seconds += min(span.end, end) - max(span.start, begin)
        return 1 - busy_seconds / (self.n_ranks * (end - begin))

    def _timed(self) -> range:
        """Return the steps that rates use."""
        return self.steady or range(1, len(self.step_ends)) or range(1)

    def _steps_from_0(self) -> Callable[[Span], int]:
        """Return a function from a span to its step counted from 0; -1 without a step."""
        computed_steps = [
            span.step
            for span in self.spans
            if span.lane == COMPUTE and span.step is not None
        ]
        first_step = min(computed_steps, default=0)

        def step_from_0(span: Span) -> int:
            if span.step is None:
                return -1
            return span.step - first_step

        return step_from_0

    def memory(
        self, rank: int | None = None, kind: str | None = None
    ) -> list[tuple[float, float]]:
        """Return the memory held over time: pairs of seconds and bytes from then on.

        Args:
            rank: one rank, or None for all together.
            kind: one of ``KINDS``, or None for all together.
        """
        curve: list[tuple[float, float]] = []
        live_bytes = moment_start = 0.0
        for when, _, _, n_bytes in self._changes_in_order(rank, kind):
            live_bytes += n_bytes
            # Simultaneous changes count together. Otherwise a buffer that is freed as another one
            # is allocated would give a peak that no rank has.
            if curve and when - moment_start <= _MOMENT * when:
                curve[-1] = (when, live_bytes)
            else:
                curve.append((when, live_bytes))
                moment_start = when
        return curve

    def _changes_in_order(self, rank: int | None, kind: str | None) -> list[Change]:
        """Return memory changes by time; at one time, what is freed comes first."""
        changes = self.changes
        if rank is not None:
            changes = self._changes_of[rank]
        if kind is not None:
            changes = [change for change in changes if change.kind == kind]
        return sorted(changes, key=_TIME_AND_BYTES)

    @cached_property
    def _changes_of(self) -> list[list[Change]]:
        """Memory changes, ``[rank]``."""
        changes_of_rank: list[list[Change]] = [[] for _ in range(self.n_ranks)]
        for change in self.changes:
            changes_of_rank[change.rank].append(change)
        return changes_of_rank

    def peak_memory(self, rank: int | None = None, kind: str | None = None) -> float:
        """Return the most bytes held at once; arguments as in :meth:`memory`."""
        # The maximum of :meth:`memory`, without a tuple for each of its points: plans ask for many
        # peaks of long timelines.
        changes = self._changes_in_order(rank, kind)
        if not changes:
            return 0.0
        peak_bytes = -inf
        live_bytes = 0.0
        moment_start = changes[0].time
        for when, _, _, n_bytes in changes:
            if when - moment_start > _MOMENT * when:
                # The moment before is over: what is held at its end counts.
                peak_bytes = max(peak_bytes, live_bytes)
                moment_start = when
            live_bytes += n_bytes
        return max(peak_bytes, live_bytes)

    def at_peak(self, rank: int) -> dict[str, float]:
        """Return bytes by kind at the moment at which ``rank`` holds the most."""
        # All kinds together decide on the moment: a kind's own peak may be at another one.
        when, _ = max(self.memory(rank), key=lambda point: point[1], default=(0.0, 0.0))
        bytes_of_kind = dict.fromkeys(KINDS, 0.0)
        for change in self._changes_of[rank]:
            if change.time <= when:
                bytes_of_kind[change.kind] += change.bytes
        return bytes_of_kind

    def bytes_sent(self, steps: range | None = None) -> tuple[float, ...]:
        """Return the bytes that each rank sent in ``steps`` (the first is 0), or in all."""
        step_of = self._steps_from_0()
        sent_bytes = [0.0] * self.n_ranks
        for span in self.spans:
            if span.lane == SEND and (steps is None or step_of(span) in steps):
                sent_bytes[span.rank] += span.bytes
        return tuple(sent_bytes)

    def bytes_a_step(self) -> tuple[float, ...]:
        """Return the bytes that each rank sends per steady step; the mean of all if none is."""
        # The first and the last steps send other numbers of bytes than those between.
        n_steps = len(self.steady or self.step_ends)
        return tuple(
            n_bytes / n_steps for n_bytes in self.bytes_sent(self.steady or None)
        )

    def to_frame(self) -> "pd.DataFrame":
        """Return the spans as a pandas DataFrame, one row each."""
        import pandas as pd

        return pd.DataFrame(self.spans, columns=Span._fields)

    def to_chrome_trace(self, path: str | Path) -> None:
        """Write a Perfetto or chrome://tracing trace: a process per rank, a row per lane.

        Args:
            path: JSON file to write; an existing file is replaced.
        """
        events: list[dict] = []
        for rank in range(self.n_ranks):
            process = {"ph": "M", "pid": rank, "name": "process_name"}
            events.append(process | {"tid": 0, "args": {"name": f"rank {rank}"}})
            for lane_number, lane in enumerate(LANES):
                events.append(
                    process
                    | {
                        "name": "thread_name",
                        "tid": lane_number,
                        "args": {"name": lane},
                    }
                )
            for when, n_bytes in self.memory(rank):
                counter = {"ph": "C", "pid": rank, "name": "memory", "ts": when * 1e6}
                events.append(counter | {"args": {"bytes": n_bytes}})
        for span in self.spans:
            args = {
                key: value for key, value in span._asdict().items() if value is not None
            }
            for key in ("rank", "lane", "name", "start", "end"):
                del args[key]
            lane_number = LANES.index(span.lane)
            bar = {"ph": "X", "pid": span.rank, "tid": lane_number, "cat": span.lane}
            start = span.start * 1e6  # in microseconds
            end = span.end * 1e6
            events.append(
                bar | {"name": span.name, "ts": start, "dur": end - start, "args": args}
            )
        Path(path).write_text(
            json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
        )

    def to_kineto_traces(self, folder: str | Path) -> None:
        """Write a trace per rank in torch.profiler's form, for Holistic Trace Analysis (HTA).

        Ops, updates and messages are kernels, a stream per lane, and messages are named as NCCL's.
        Launches take no time. HTA takes whole microseconds.

        Args:
            folder: where to write ``rank_0.json`` and so on; created if missing.
        """
        Path(folder).mkdir(parents=True, exist_ok=True)
        spans_of_rank: list[list[Span]] = [[] for _ in range(self.n_ranks)]
        for span in self.spans:
            spans_of_rank[span.rank].append(span)
        for rank, spans in enumerate(spans_of_rank):
            info = {"backend": "nccl", "rank": rank, "world_size": self.n_ranks}
            trace = {
                "schemaVersion": 1,
                "distributedInfo": info,
                "traceEvents": _kineto(spans),
            }
            (Path(folder) / f"rank_{rank}.json").write_text(json.dumps(trace))


def _kineto(spans: Sequence[Span]) -> list[dict]:
    """Return the events of one rank: kernels, their launches, and training steps."""
    events: list[dict] = []
    steps: dict[int, list[int]] = {}
    # HTA finds the launch of a kernel by their common correlation.
    for correlation, span in enumerate(spans, 1):
        start = round(span.start * 1e6)
        end = round(span.end * 1e6)
        stream = LANES.index(span.lane) + 1
        span_arguments = {
            "stage": span.stage,
            "step": span.step,
            "bytes": span.bytes,
            "peer": span.peer,
        }
        args = {
            "stream": stream,
            "device": span.rank,
            "correlation": correlation,
            **span_arguments,
        }
        name = span.name
        if span.lane in (SEND, RECEIVE):
            name = f"ncclKernel {name}"
        kernel = {
            "ph": "X",
            "cat": "kernel",
            "name": name,
            "pid": span.rank,
            "tid": stream,
        }
        events.append(kernel | {"ts": start, "dur": end - start, "args": args})
        launch = {
            "cat": "cuda_runtime",
            "name": "cudaLaunchKernel",
            "tid": _HOST,
            "dur": 0,
        }
        events.append(
            kernel | launch | {"ts": start, "args": {"correlation": correlation}}
        )
        if span.lane == COMPUTE and span.step is not None:
            # HTA finds training steps by annotations of the profiler, which span all ops of a step.
            steps[span.step] = [*steps.get(span.step, ()), start, end]
    for step, span_times in steps.items():
        begin = min(span_times)
        event = {"ph": "X", "name": f"ProfilerStep#{step}", "pid": spans[0].rank}
        event |= {"cat": "user_annotation", "tid": _HOST}
        events.append(event | {"ts": begin, "dur": max(span_times) - begin, "args": {}})
    return events
