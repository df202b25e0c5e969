"""Timelines: memory, traffic, tables and traces."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cost.test_simulate import FIRST, SECOND, SLOW, costs, machines
from tests.schedule.strategies import programs, quick
from toolkit.cost import (
    UNIT,
    Change,
    Hardware,
    Span,
    StageCost,
    Timeline,
    simulate,
    unit_costs,
)
from toolkit.cost.timeline import KINDS, LANES
from toolkit.cost.worker_forms import steady_timeline
from toolkit.schedule import catalog, steady_state
from toolkit.schedule.steady_state import steps_to_time

KINETO = ("kernel", "cuda_runtime", "user_annotation")


def timeline(spans=(), changes=(), n_ranks=2, step_ends=(1.0,)):
    return Timeline("hand", n_ranks, spans, changes, step_ends)


def compute(rank, start, end, step=0):
    return Span(rank, "compute", start, end, "0F0", 0, 0, step)


def message(source, target, n_bytes):
    return [
        Span(source, "send", 0.0, 1.0, "weights", 0, None, None, n_bytes, target),
        Span(target, "receive", 0.0, 1.0, "weights", 0, None, None, n_bytes, source),
    ]


CHANGES = [
    Change(2.0, 0, "activations", -3.0),
    Change(0.0, 0, "activations", 3.0),
    Change(2.0, 0, "activations", 4.0),
    Change(1.0, 1, "activations", 5.0),
    Change(1.0, 0, "weights", 7.0),
]


@pytest.mark.parametrize(
    ("rank", "kind", "curve", "peak"),
    [
        (0, "activations", [(0, 3), (2, 4)], 4),  # freed before the next is made
        (0, None, [(0, 3), (1, 10), (2, 11)], 11),
        (None, "activations", [(0, 3), (1, 8), (2, 9)], 9),
        (None, None, [(0, 3), (1, 15), (2, 16)], 16),
        (1, "weights", [], 0),
    ],
)
def test_memory(rank, kind, curve, peak):
    found = timeline(changes=CHANGES)
    assert found.memory(rank, kind) == curve
    assert found.peak_memory(rank, kind) == peak


def test_rates_are_of_the_steady_steps():
    """A step of 4 seconds twice, after one and before one in which it is otherwise."""
    sent = [
        Span(0, "send", 9.0 + step, 10.0 + step, "w", 0, None, step, n_bytes, 1)
        for step, n_bytes in ((5, 1.0), (6, 10.0), (6, 2.0), (7, 12.0), (8, 100.0))
    ]
    begin = Span(1, "compute", 0.0, 1.0, "0F0", 0, 0, 5)
    found = replace(
        timeline([begin, *sent], step_ends=(7.0, 11.0, 15.0, 16.0)), steady=range(1, 3)
    )
    assert found.step_time == 4
    assert found.bytes_a_step() == (12, 0)
    assert replace(found, steady=range(0)).step_time == 3
    assert replace(found, steady=range(0)).bytes_a_step() == (125 / 4, 0)
    assert found.bytes_sent() == (125, 0)
    assert timeline(step_ends=(5.0,)).step_time == 5
    spans = [compute(0, 0.0, 3.0), compute(1, 1.0, 2.0), *message(0, 1, 1.0)]
    assert timeline(spans).idle_share == pytest.approx(1 - 4 / 6)
    # The first step takes longer where ranks are new to it
    spans = [
        compute(0, 0.0, 100.0),
        compute(0, 100.0, 101.0, 1),
        compute(0, 102.0, 103.0, 2),
    ]
    assert timeline(spans, n_ranks=1, step_ends=(100.0, 102.0, 104.0)).idle_share == 0.5
    # Ends of overlapping steps can be nearer than the time that their ops take.
    assert timeline(spans, n_ranks=1, step_ends=(100.0, 100.5, 101.0)).idle_share == 0


def test_a_rank_that_gets_ahead_is_not_less_than_idle():
    """Steps 1 and 2 take 5 seconds; the rank has done half of the first before that time."""
    spans = [compute(0, 4.0 * step, 4.0 * step + 4.0, step) for step in range(4)]
    ahead = timeline(spans, n_ranks=1, step_ends=(6.0, 9.0, 11.0, 16.0))
    assert ahead.idle_share == 0
    assert replace(ahead, steady=range(1, 3)).idle_share == 0
    late = [*spans[:3], compute(0, 12.0, 13.0, 3)]
    found = timeline(late, n_ranks=1, step_ends=(6.0, 9.0, 14.0))
    assert replace(found, steady=range(1, 3)).idle_share == 1 - 7 / 8


def test_groups_in_rotated_chains_are_not_less_than_idle():
    """Ranks get ahead in the first steps, and so do less than whole steps in the timed ones."""
    seconds = ((1.3, 0.9), (1.0, 1.8), (1.7, 0.9), (1.3, 2.2))
    costs = [
        StageCost(
            0, 0, parameter_bytes=1e6, forward_seconds=f / 1e3, backward_seconds=b / 1e3
        )
        for f, b in seconds
    ]
    schedule = catalog.cyclic(4, 1, groups=2, chains="rotated")
    found = steady_timeline(schedule, costs, Hardware.preset("ethernet_10"))
    assert found.idle_share == pytest.approx(0, abs=1e-6)


def test_what_a_rank_holds_at_its_peak():
    """Not each kind at its own: activations are highest before the gradients are there."""
    changes = [
        Change(0.0, 0, "weights", 4.0),
        Change(1.0, 0, "activations", 9.0),
        Change(2.0, 0, "activations", -3.0),
        Change(2.0, 0, "gradients", 5.0),
        Change(2.0, 1, "gradients", 50.0),
        Change(3.0, 0, "activations", -6.0),
    ]
    held = timeline(changes=changes).at_peak(0)
    expected = {"weights": 4, "activations": 6, "gradients": 5}
    assert held == dict.fromkeys(KINDS, 0) | expected
    assert timeline(changes=changes).peak_memory(0) == 15


def test_a_moment_of_which_two_sums_of_seconds_differ():
    """0.1 + 0.2 and 0.3: what is freed then is no longer there for what is made."""
    changes = [
        Change(0.0, 0, "activations", 1.0),
        Change(0.1 + 0.2, 0, "activations", -1.0),
    ]
    changes.append(Change(0.3, 1, "activations", 1.0))
    found = timeline(changes=changes)
    assert 0.3 < 0.1 + 0.2
    assert found.peak_memory() == 1
    assert found.memory(kind="activations") == [(0.0, 1.0), (0.1 + 0.2, 1.0)]


@pytest.mark.parametrize(("n", "s"), [(6, 4), (8, 3), (7, 7), (1, 1)])
def test_all_ranks_peak_is_that_of_the_schedule(n, s):
    """Though stages begin at fractions of slots."""
    schedule = catalog.cyclic(n, n_stages=s)
    found = simulate(schedule.lower(steps_to_time(schedule)), unit_costs(s), UNIT)
    assert (
        found.peak_memory(kind="activations") == steady_state(schedule).peak_activations
    )


@pytest.mark.parametrize("n_steps", [2, 3, 7])
def test_staggered_workers_are_never_idle_however_few_steps_are_simulated(n_steps):
    """What they do after the end of the last step would be done beside the next."""
    found = simulate(catalog.cyclic(4).lower(n_steps), unit_costs(4), UNIT)
    assert found.idle_share == pytest.approx(0)
    assert (
        simulate(catalog.gpipe(2, 2).lower(n_steps), unit_costs(2), UNIT).idle_share
        > 0.3
    )


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_the_peak_is_the_highest_point_of_the_memory(kind):
    program = catalog.cyclic(4, state="sharded").lower(3).verify()
    hardware = replace(SLOW, shared_ports=True)
    timeline = simulate(program, unit_costs(4), hardware, [0.5] * 4)
    for rank in (None, *range(4)):
        highest = max(
            (n_bytes for _, n_bytes in timeline.memory(rank, kind)), default=0
        )
        assert timeline.peak_memory(rank, kind) == highest


def test_to_frame():
    found = simulate(catalog.gpipe(2, 2).lower(1), (FIRST, SECOND), SLOW)
    frame = found.to_frame()
    assert tuple(frame.columns) == Span._fields
    assert len(frame) == len(found.spans)
    sent = frame[frame.lane == "send"]
    assert sent.bytes.sum() == sum(found.bytes_sent()) == 2 * (4 + 6)


def test_to_chrome_trace(tmp_path):
    """One 4-byte message from rank 0 to rank 1, 2 s to 4.5 s, and the rows that show it."""
    found = simulate(catalog.gpipe(2, 1).lower(1), (FIRST, SECOND), SLOW)
    found.to_chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in events
        if e["name"] == "thread_name"
    }
    assert names == {
        (rank, k): lane for rank in range(2) for k, lane in enumerate(LANES)
    }
    processes = {
        e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"
    }
    assert processes == {0: "rank 0", 1: "rank 1"}
    assert {
        "ph": "X",
        "name": "activation",
        "cat": "send",
        "pid": 0,
        "tid": LANES.index("send"),
        "ts": 2e6,
        "dur": 2.5e6,
        "args": {
            "stage": 0,
            "microbatch": 0,
            "step": 0,
            "bytes": 4.0,
            "peer": 1,
            "slot": 1,
        },
    } in events
    assert sum(e["ph"] == "X" for e in events) == len(found.spans)
    memory = [
        (e["ts"], e["args"]["bytes"])
        for e in events
        if e["ph"] == "C" and e["pid"] == 0
    ]
    assert memory == [(1e6 * time, n_bytes) for time, n_bytes in found.memory(0)]


def test_to_kineto_traces(tmp_path):
    """A file per rank; each kernel has one launch, and a message one kernel at each end."""
    found = simulate(catalog.gpipe(2, 1).lower(1), (FIRST, SECOND), SLOW)
    found.to_kineto_traces(tmp_path / "kineto")
    kernels = []
    for rank in range(2):
        trace = json.loads((tmp_path / "kineto" / f"rank_{rank}.json").read_text())
        assert trace["distributedInfo"] == {
            "backend": "nccl",
            "rank": rank,
            "world_size": 2,
        }
        by_kind = {
            kind: [e for e in trace["traceEvents"] if e["cat"] == kind]
            for kind in KINETO
        }
        assert sum(map(len, by_kind.values())) == len(trace["traceEvents"])
        own, launches, (step,) = by_kind.values()
        numbers = [e["args"]["correlation"] for e in launches]
        assert (
            numbers
            == [e["args"]["correlation"] for e in own]
            == [*range(1, len(own) + 1)]
        )
        assert step["name"] == "ProfilerStep#0"
        assert len(own) == sum(span.rank == rank for span in found.spans)
        kernels += own
    moved = [e for e in kernels if e["name"] == "ncclKernel activation"]
    assert [(e["pid"], e["args"]["peer"], e["ts"], e["dur"]) for e in moved] == [
        (0, 1, 2_000_000, 2_500_000),
        (1, 0, 2_000_000, 2_500_000),
    ]
    assert {e["args"]["stream"] for e in kernels if e["name"] == "0F0"} == {1}


@given(programs(), machines(), st.data())
@quick
def test_a_lane_does_one_thing_at_a_time(program, hardware, data):
    """So a trace's rows can be drawn; and what is sent is received at the same moment."""
    found = simulate(program, data.draw(costs(program.schedule.n_stages)), hardware)
    for lane in LANES:
        for rank in range(found.n_ranks):
            here = [s for s in found.spans if (s.rank, s.lane) == (rank, lane)]
            spans = sorted((s.start, s.end) for s in here if s.end > s.start)
            assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    ends = {"send": [], "receive": []}
    for s in found.spans:
        assert s.end >= s.start >= 0
        if s.peer is not None:
            pair = (s.rank, s.peer) if s.lane == "send" else (s.peer, s.rank)
            ends[s.lane].append((pair, s.start, s.end, s.name, s.bytes))
    assert sorted(ends["send"]) == sorted(ends["receive"])
