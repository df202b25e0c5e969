"""Simulated timelines: small ones by hand, all of them by what the schedule promises."""

import gc
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.schedule.strategies import programs, quick
from toolkit.cost import UNIT, Hardware, StageCost, recomputing, simulate, unit_costs
from toolkit.cost.timeline import INPUTS
from toolkit.errors import UserError
from toolkit.schedule import PLACEMENTS, STATES, Action, Schedule, catalog, paper_table
from toolkit.schedule.steady_state import footprint, steps_to_time

# A message of 4 bytes takes 2.5 seconds, of 6 bytes 3.5.
SLOW = Hardware("slow", 1.0, memory_bandwidth=inf, link_bandwidth=2.0, link_latency=0.5)
FIRST = StageCost(
    2.0, 3.0, activation_bytes=10.0, output_bytes=4.0, parameter_bytes=8.0
)
SECOND = StageCost(
    1.0, 2.0, activation_bytes=20.0, input_bytes=6.0, parameter_bytes=12.0
)
RULES = (0, 1, "freshest")


def when(timeline, *lanes, step=None):
    """(start, end) of what runs, by "rank name"; a received message is named by its receiver."""
    return {
        f"{span.rank} {span.name}": (span.start, span.end)
        for span in timeline.spans
        if span.lane in (lanes or ("compute",)) and step in (None, span.step)
    }


def held(timeline, rank, kind, time):
    """Bytes just after ``time``."""
    return [
        0.0,
        *(n_bytes for begin, n_bytes in timeline.memory(rank, kind) if begin <= time),
    ][-1]


def catalogue(n):
    """Every method of the catalogue that has a rank for each thing done at once."""
    for placement in PLACEMENTS[1:]:
        for state in STATES:
            if placement != "per_stage":
                yield catalog.data_parallel(n, placement, state)
            for delay in (1, "freshest"):
                yield catalog.cyclic(n, delay, placement, state)
    yield catalog.gradient_accumulation(n, n + 1)
    for m in (n, 2 * n + 1):
        yield catalog.gpipe(n, m)
        yield catalog.one_f_one_b(n, m)
        yield catalog.pipedream_2bw(n, m)
    yield catalog.interleaved_1f1b(2 * n, n, n)


def label(schedule):
    placement = schedule.layout.name
    return f"{schedule.name} {schedule.n_stages}x{schedule.n_microbatches} {placement}"


# By hand


def test_a_stage_that_recomputes():
    """Its activations are there in its backward only, which is longer by its forward."""
    costs = recomputing((FIRST, replace(SECOND, extra_input_bytes=3.0)), [1])
    one = Schedule.from_rank_orders(["0F0 1F0 1B0 0B0"])
    timeline = simulate(one.lower(1), costs, UNIT)
    assert when(timeline) == {
        "0 0F0": (0, 2),
        "0 1F0": (2, 3),
        "0 1B0": (3, 6),
        "0 0B0": (6, 9),
    }
    assert timeline.memory(0, "activations") == [
        (0, 10),
        (2, 10),
        (3, 30),
        (6, 10),
        (9, 0),
    ]
    assert held(timeline, 0, INPUTS, 5) == 3  # as without
    # split: the first half recomputes
    costs = recomputing(
        [replace(FIRST, backward_seconds=4.0, forward_seconds=1.0)], "all"
    )
    timeline = simulate(
        Schedule.from_rank_orders(["0F0 0I0 0W0"]).lower(1), costs, UNIT
    )
    assert when(timeline) == {"0 0F0": (0, 1), "0 0I0": (1, 6), "0 0W0": (6, 6)}
    assert timeline.memory(0, "activations") == [(0, 0), (1, 10), (6, 0)]


def test_a_pipeline_waits_for_its_messages():
    timeline = simulate(catalog.gpipe(2, 1).lower(1), (FIRST, SECOND), SLOW)
    assert when(timeline) == {
        "0 0F0": (0, 2),
        "1 1F0": (4.5, 5.5),
        "1 1B0": (5.5, 7.5),
        "0 0B0": (11, 14),
    }
    sent, gradient = (2, 4.5), (7.5, 11)
    assert when(timeline, "send") == {
        "0 activation": sent,
        "1 activation gradient": gradient,
    }
    assert when(timeline, "receive") == {
        "1 activation": sent,
        "0 activation gradient": gradient,
    }
    assert timeline.step_ends == (14,)
    assert timeline.idle_share == 1 - 8 / (2 * 14)


def test_ranks_compute_while_they_send():
    """The port is busy from 2 to 7 with both activations; rank 0 computes from 0 to 4."""
    timeline = simulate(catalog.gpipe(2, 2).lower(1), (FIRST, SECOND), SLOW)
    assert when(timeline) == {
        "0 0F0": (0, 2),
        "0 0F1": (2, 4),
        "1 1F0": (4.5, 5.5),
        "1 1F1": (7, 8),
        "1 1B0": (8, 10),
        "1 1B1": (10, 12),
        "0 0B0": (13.5, 16.5),
        "0 0B1": (17, 20),
    }
    sent = [(s.start, s.end) for s in timeline.spans if s.lane == "send"]
    assert sorted(sent) == [(2, 4.5), (4.5, 7), (10, 13.5), (13.5, 17)]
    # A port sends and receives at once
    orders = ["0F0 1F1 1B1 0B0", "0F1 1F0 1B0 0B1"]
    timeline = simulate(
        Schedule.from_rank_orders(orders).lower(1), (FIRST, SECOND), SLOW
    )
    assert when(timeline)["0 1F1"] == when(timeline)["1 1F0"] == (4.5, 5.5)
    spans = [s for s in timeline.spans if s.name == "activation"]
    assert [(s.start, s.end) for s in spans] == [(2, 4.5)] * 4


@pytest.mark.parametrize("n", [2, 3, 5])
def test_an_all_reduce_is_a_ring(n):
    """Stage 1's overlaps with the backward of stage 0; stage 0's waits for the port."""
    timeline = simulate(
        catalog.data_parallel(n, n_stages=2).lower(1), (FIRST, SECOND), SLOW
    )
    late, early = (
        SLOW.collective(Action.ALL_REDUCE, size, range(n)) for size in (8, 12)
    )
    reduced = [
        (s.stage, s.start, s.end) for s in timeline.spans if s.name == "all-reduce"
    ]
    ready = max(8, 5 + early)
    assert set(reduced) == {(1, 5, 5 + early), (0, ready, ready + late)}
    assert len(reduced) == 2 * n
    assert timeline.bytes_sent() == pytest.approx([2 * (n - 1) / n * 20] * n)


@pytest.mark.parametrize("n", [4, 8])
def test_where_links_are_slow_late_weights_are_faster(n):
    """All parameters cross a link in the time of a step. Rotated, ranks send 2(n-1)/n of them."""
    costs = [StageCost(1.0, 2.0, parameter_bytes=1.0)] * n
    machine = replace(UNIT, link_bandwidth=1 / 3)

    def step(schedule):
        program = schedule.lower(steps_to_time(schedule)).verify()
        return simulate(program, costs, machine).step_time

    bound = 2 * (n - 1) / n * 3 * n
    assert step(catalog.cyclic(n, 1, chains="rotated")) == pytest.approx(
        bound, rel=0.02
    )
    # Twice through a port.
    assert step(catalog.cyclic(n, 1)) == pytest.approx(2 * 3 * n, rel=0.02)
    assert bound < 0.85 * step(catalog.data_parallel(n))


@pytest.mark.parametrize("n", [3, 5, 8])
def test_broadcasts_and_reductions_are_trees(n):
    stage = replace(FIRST, parameter_bytes=6.0)
    program = catalog.data_parallel(n, state="sharded", n_stages=1).lower(1)
    timeline = simulate(program, [stage], SLOW)
    tree = SLOW.collective(Action.REDUCE, 6, range(n))
    (owner,) = {s.rank for s in timeline.spans if s.lane == "compute" and s.start == 0}
    assert when(timeline, "send", "receive")[f"{owner} broadcast"] == (0, tree)
    starts = {
        s.rank: s.start for s in timeline.spans if s.lane == "compute" and "F" in s.name
    }
    assert starts == {rank: 0 if rank == owner else tree for rank in range(n)}
    reduce = {(s.start, s.end) for s in timeline.spans if s.name == "reduce"}
    assert reduce == {(tree + 5, tree + 5 + tree)}
    assert timeline.step_ends == (5 + 2 * tree,)


def test_an_update_reads_and_writes_weights_gradients_and_momentum():
    """Of 8 bytes each, at 4 bytes a second: 10 seconds, beside the compute lane."""
    machine = replace(SLOW, memory_bandwidth=4.0)
    program = catalog.gradient_accumulation(1, 1).lower(2)
    timeline = simulate(program, [FIRST], machine)
    spans = [(s.start, s.end, s.name) for s in timeline.spans if s.lane == "update"]
    assert spans == [(5, 15, "update 0"), (20, 30, "update 0")]
    assert [(s.start, s.end) for s in timeline.spans if s.name == "0F0"] == [
        (0, 2),
        (15, 17),
    ]
    # State is read and written.
    for state, seconds in ((0.0, 6), (8.0, 10), (16.0, 14)):
        timeline = simulate(program, [FIRST], machine, [state])
        assert {s.end - s.start for s in timeline.spans if s.lane == "update"} == {
            seconds
        }


@pytest.mark.parametrize("bandwidth", [24.0, 4.0])
def test_a_prediction_reads_two_versions_and_writes_one(bandwidth):
    """Of 8 bytes each. It waits for the later one, the ops wait for it, and it is held."""
    program = catalog.cyclic(1, 1, "one", correction="extrapolate").lower(3).verify()
    timeline = simulate(program, [FIRST], replace(SLOW, memory_bandwidth=bandwidth))
    (span,) = (s for s in timeline.spans if s.name == "predict 0")
    updates = {s.step: s for s in timeline.spans if s.name == "update 0"}
    ops = {
        (s.name, s.step): (s.start, s.end)
        for s in timeline.spans
        if s.lane == "compute"
    }
    assert (span.lane, span.step) == ("compute", 2)
    assert span.start == max(updates[0].end, ops["0B0", 1][1])
    assert span.end == ops["0F0", 2][0] == span.start + 24 / bandwidth
    made = [
        c.bytes
        for c in timeline.changes
        if c.kind == "weights" and c.time == span.start
    ]
    assert made.count(8) == 1 + [s.start for s in updates.values()].count(span.start)


@pytest.mark.parametrize(
    "schedule", [catalog.data_parallel(3), catalog.zero_bubble(3, 4)]
)
def test_an_update_makes_weights_beside_those_that_it_renews(schedule):
    """As ranks do, and as the program counts them."""
    program = schedule.lower(4).verify()
    timeline = simulate(program, unit_costs(3), replace(UNIT, memory_bandwidth=4.0))
    peaks = [
        max(held for _, held in timeline.memory(r, kind="weights")) for r in range(3)
    ]
    assert peaks == [*program.peak_weights()]


def test_ranks_of_different_speeds():
    machine = replace(UNIT, speeds=(1.0, 0.5, 4.0))
    timeline = simulate(
        catalog.one_f_one_b(3, 1).lower(1), unit_costs(3, backward=2.0), machine
    )
    assert when(timeline) == {
        "0 0F0": (0, 1),
        "1 1F0": (1, 3),
        "2 2F0": (3, 3.25),
        "2 2B0": (3.25, 3.75),
        "1 1B0": (3.75, 7.75),
        "0 0B0": (7.75, 9.75),
    }


def test_slow_weights_stay_until_they_are_sent():
    """A broadcast to two takes 40 seconds, an op 3 at most: the owner has made the next version
    before, and keeps both until the older is sent."""
    schedule = catalog.data_parallel(3, state="sharded", n_stages=1, delay=1)
    machine = replace(UNIT, link_bandwidth=FIRST.parameter_bytes / 20)
    timeline = simulate(schedule.lower(4).verify(), [FIRST], machine)
    sent = [s for s in timeline.spans if s.name == "broadcast" and s.lane == "send"]
    assert [s.end - s.start for s in sent] == [40, 40, 40]
    for s in sent[1:]:
        times = (s.start, s.end - 1, s.end)
        assert [held(timeline, s.rank, "weights", time) for time in times] == [
            16,
            16,
            8,
        ]


# By what schedules promise


HALVES = [catalog.zero_bubble(n, 2 * n) for n in (1, 2, 5)]
HALVES += [
    v(2 * n, 2 * n)
    for v in (catalog.zb_v, catalog.v_half, catalog.v_min)
    for n in (1, 2, 5)
]


@pytest.mark.parametrize(
    ("schedule", "backward"),
    [
        *((s, 1.0) for n in (1, 2, 3, 5) for s in catalogue(n)),
        *((s, 2.0) for s in HALVES),
    ],
    ids=lambda value: label(value) if isinstance(value, Schedule) else "",
)
def test_a_program_runs_as_its_schedule_says(schedule, backward):
    """In units: the period, the starts of ops, and each rank's activations and bytes sent."""
    program = schedule.lower(4).verify()
    timeline = simulate(program, unit_costs(schedule.n_stages, backward), UNIT)
    assert timeline.step_time == pytest.approx(schedule.period, rel=1e-12)
    ranks = range(schedule.n_ranks)
    peaks = tuple(timeline.peak_memory(rank, "activations") for rank in ranks)
    assert peaks == program.peak_activations()
    # A pipeline without a flush need not fill at once, but is simulated so
    fills_at_once = schedule.layout.name == "per_stage" and schedule.max_staleness > 0
    if backward == 1.0 and not fills_at_once:
        tick = schedule.timing.ticks_per_slot
        expected = {
            str(op): start / tick for op, start in schedule.timing.starts.items()
        }
        found = {
            s.name: s.start
            for s in timeline.spans
            if s.lane == "compute" and s.step == 0
        }
        assert found == pytest.approx(expected)
    cost = StageCost(1.0, backward, parameter_bytes=3.0)
    sent = simulate(program, [cost] * schedule.n_stages, SLOW).bytes_sent()
    by_slot = program.traffic()
    assert sent == pytest.approx(
        [3 * float(sum(s[rank].units for s in by_slot)) for rank in ranks]
    )


@pytest.mark.parametrize("n", [1, 2, 8])
@pytest.mark.parametrize("delay", RULES)
def test_one_device_does_everything_in_turn(delay, n):
    schedule = (
        catalog.cyclic(n, delay, "one") if delay else catalog.data_parallel(n, "one")
    )
    timeline = simulate(schedule.lower(steps_to_time(schedule)), unit_costs(n), UNIT)
    assert timeline.step_time == 2 * n * n
    assert timeline.idle_share == 0
    total = n * (n + 1) / 2 if delay else n * n
    assert timeline.peak_memory(kind="activations") == total


@pytest.mark.parametrize(
    "schedule",
    [
        catalog.cyclic(6, placement="per_stage"),
        catalog.cyclic(6, 1),
        catalog.cyclic(4, 1, state="sharded"),
        catalog.cyclic(6, 1, chains="rotated"),
        catalog.pipedream_2bw(4, 4),
    ],
    ids=label,
)
def test_rates_are_those_of_a_long_training(schedule):
    """Where messages take time, and the first and last steps are other than those between."""
    stage = replace(FIRST, flops=1.0, backward_flops=2.0, parameter_bytes=3.0)
    stages = [replace(stage, flops=1.0 + j / 8) for j in range(schedule.n_stages)]

    lengths = steps_to_time(schedule), 64
    few, many = (simulate(schedule.lower(n_steps), stages, SLOW) for n_steps in lengths)
    assert few.step_time == pytest.approx(many.step_time, rel=0.05)
    assert few.idle_share == pytest.approx(many.idle_share, abs=0.03)
    assert few.bytes_a_step() == pytest.approx(many.bytes_a_step(), rel=1e-12)


@pytest.mark.parametrize(
    "schedule",
    [
        catalog.cyclic(4, 3),
        catalog.cyclic(4, 2, accumulate=2),
        catalog.cyclic(4, 3, state="sharded"),
        catalog.data_parallel(4, delay=2, state="sharded"),
        catalog.published(4, state="sharded"),
        *(catalog.data_parallel(8, delay=delay, n_stages=4) for delay in range(4)),
        *(
            make(rule, 4)
            for make in paper_table.SETTINGS.values()
            for rule in paper_table.RULES
        ),
    ],
    ids=label,
)
def test_what_is_sent_in_a_step_is_the_footprints(schedule):
    """Gradients and weights, however late these are read, as simulated and as counted."""
    stages = [StageCost(1.0, 1.0, parameter_bytes=1.0)] * schedule.n_stages
    timeline = simulate(schedule.lower(steps_to_time(schedule)), stages, UNIT)
    counted = footprint(schedule)
    expected = counted.traffic * counted.ranks * schedule.n_stages
    assert sum(timeline.bytes_a_step()) == pytest.approx(float(expected))


@given(programs(), st.sampled_from([0.0, 0.5, 4.0, 9.0]))
@quick
def test_memory_is_that_of_the_spans(program, latency):
    """Activations from a forward to the end of its backward; a sum of gradients from whichever
    contribution is there first, however late messages are."""
    stages = unit_costs(program.schedule.n_stages)
    timeline = simulate(program, stages, replace(UNIT, link_latency=latency))
    forwards, backwards, begun = {}, {}, {}
    for s in timeline.spans:
        key = (s.rank, s.stage, s.microbatch, s.step)
        kind = s.computed if s.lane == "compute" else ""
        if kind == "F":
            forwards[key] = s.start
        elif kind in ("B", "I", "W"):
            backwards[key] = max(backwards.get(key, 0.0), s.end)
        received = (s.lane, s.name) == ("receive", "gradient") and s.peer is not None
        if kind in ("B", "W") or received:
            at = (s.rank, s.stage, s.step)
            begun[at] = min(begun.get(at, inf), s.end)
    assert forwards.keys() == backwards.keys()
    changes, expected = Counter(), Counter()
    for key, start in forwards.items():
        changes[key[0], start] += 1
        changes[key[0], backwards[key]] -= 1
    for change in timeline.changes:
        if change.kind == "activations":
            expected[change.rank, change.time] += change.bytes
    assert {k: n for k, n in changes.items() if n} == {
        k: n for k, n in expected.items() if n
    }
    gained = [c for c in timeline.changes if c.kind == "gradients" and c.bytes > 0]
    assert sorted((c.rank, c.time) for c in gained) == sorted(
        (rank, when) for (rank, _, _), when in begun.items()
    )


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("delay", RULES)
@pytest.mark.parametrize("bandwidth", [1.0, 10.0])
def test_sharded_weights_are_fetched_a_little_ahead(bandwidth, delay, n):
    """However early they are there: what a rank holds does not grow with the model."""
    make = partial(catalog.cyclic, delay=delay) if delay else catalog.data_parallel
    schedule = make(n, state="sharded")
    program = schedule.lower(steps_to_time(schedule))
    timeline = simulate(program, unit_costs(n), replace(UNIT, link_bandwidth=bandwidth))
    held = max(timeline.peak_memory(rank, "weights") for rank in range(n))
    assert held <= max(program.peak_weights()) + 2


@st.composite
def machines(draw):
    number = st.sampled_from([0.5, 1.0, 3.0, inf])
    speeds = tuple(draw(st.sampled_from([0.5, 1.0, 2.0])) for _ in range(36))
    bandwidths = draw(number), draw(number)
    return Hardware(
        "random", 1.0, *bandwidths, draw(st.sampled_from([0.0, 0.25, 4.0])), inf, speeds
    )


@st.composite
def costs(draw, n_stages):
    number = st.integers(0, 5).map(float)
    return [StageCost(*(draw(number) for _ in range(6))) for _ in range(n_stages)]


@given(programs(), machines(), st.data())
@quick
def test_any_program_on_any_machine(program, hardware, data):
    """Ops and updates wait for what they need and for each other; memory is never negative; and
    what is left is as new."""
    stages = data.draw(costs(program.schedule.n_stages))
    timeline = simulate(program, stages, hardware)
    ops = {(s.name, s.step): s for s in timeline.spans if s.lane == "compute"}
    for (name, step), span in ops.items():
        before = f"{span.stage}F" if "B" in name else f"{span.stage - 1}F"
        if "B" in name or ("F" in name and span.stage > 0):
            assert span.start >= ops[f"{before}{span.microbatch}", step].end
    for rank, instructions in enumerate(program.ranks):
        own = [span for span in timeline.spans if span.rank == rank]
        computed, updates = (
            [s for s in own if s.lane == lane] for lane in ("compute", "update")
        )
        for spans in (computed, updates):
            assert all(a.end <= b.start for a, b in pairwise(spans))
        assert [s[5:8] for s in computed if not s.name.startswith("predict")] == [
            (i.stage, i.microbatch, i.step) for i in instructions if i.action.computes
        ]
        for update in updates:
            seconds = (
                5 * stages[update.stage].parameter_bytes / hardware.memory_bandwidth
            )
            assert update.end - update.start == pytest.approx(
                seconds / hardware.speed(rank)
            )
            contributions = [
                s
                for s in own
                if (s.stage, s.step) == (update.stage, update.step)
                and (
                    (s.lane == "compute" and s.computed in "BW")
                    or (s.lane, s.name) == ("receive", "gradient")
                    or s.name in ("all-reduce", "reduce")
                )
            ]
            assert all(s.end <= update.start for s in contributions)
        made = [i for i in instructions if i.action == Action.UPDATE]
        newest = [i.stage for i in made if i.version == program.steps.stop]
        left = {"weights": sum(stages[stage].parameter_bytes for stage in newest)}
        for kind in ("activations", "weights", "gradients"):
            assert all(n_bytes >= 0 for _, n_bytes in timeline.memory(rank, kind))
            assert held(timeline, rank, kind, inf) == left.get(kind, 0)
    assert len(timeline.step_ends) == program.n_steps


PROGRAM = catalog.gpipe(3, 2).lower(1)


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ((catalog.gpipe(3, 2), unit_costs(3), UNIT), "Schedule"),
        ((PROGRAM, unit_costs(0), UNIT), "3 stages.* 0"),
        ((PROGRAM, unit_costs(4), UNIT), "3 stages.* 4"),
        ((PROGRAM, unit_costs(3), UNIT, [1.0]), "optimizer_bytes.*3.* 1"),
        (
            (PROGRAM, unit_costs(3), replace(UNIT, speeds=(1.0, 1.0))),
            "speeds.*3 ranks.* 2",
        ),
        (
            (PROGRAM, unit_costs(3), replace(UNIT, memories=(1.0, 1.0))),
            "memories.*3 ranks.* 2",
        ),
    ],
)
def test_rejects_what_does_not_match_the_program(arguments, value):
    with pytest.raises(UserError, match=value):
        simulate(*arguments)
    # More ranks than needed.
    simulate(PROGRAM, unit_costs(3), replace(UNIT, speeds=(1.0,) * 4))


def test_two_machines_take_less_time_in_two_groups_than_in_one_or_four():
    """All parameters cross the one port of a machine in the time of a step."""
    machines = replace(
        UNIT, link_bandwidth=1 / 2, ranks_per_machine=2, local_bandwidth=1e3
    )
    plans = catalog.cyclic(4, groups=2), catalog.data_parallel(4), catalog.cyclic(4)
    grouped, *others = (
        simulate(
            plan.lower(steps_to_time(plan)).verify(), unit_costs(4), machines
        ).step_time
        for plan in plans
    )
    assert grouped < 0.8 * min(others)


@pytest.mark.parametrize("state", STATES)
def test_programs_and_timelines_are_freed_without_the_collector(state):
    schedule = catalog.cyclic(4, state=state)
    hardware = Hardware("slow", 1.0, inf, link_bandwidth=1.0, shared_ports=True)
    gc.collect()
    gc.disable()
    try:
        timeline = simulate(schedule.lower(3).verify(), unit_costs(4), hardware)
        assert timeline.step_time > 0
        del timeline
        assert gc.collect() == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("overlap", [1.0, 0.75])
def test_a_pair_starts_when_both_can_and_ends_at_once(overlap):
    """Rank 0 waits with 0F1 for the gradient that 0B0 needs; rank 1 waits for both to end.

    slot   0   1   2   3       4   5   6
    rank 0 0F0 .   .   0F1;0B0 .   .   0B1
    rank 1 .   1F0 1B0 .       1F1 1B1 .
    """
    schedule = Schedule.from_rank_orders(["0F0 0F1;0B0 0B1", "1F0 1B0 1F1 1B1"])
    machine = replace(UNIT, overlap_time=overlap)
    timeline = simulate(
        schedule.lower(1).verify(), unit_costs(2, backward=2.0), machine
    )
    spans = {s.name: (s.start, s.end) for s in timeline.spans if s.lane == "compute"}
    end = 4 + 3 * overlap
    assert spans == {
        "0F0": (0, 1),
        "1F0": (1, 2),
        "1B0": (2, 4),
        "0F1": (4, 4 + overlap),
        "0B0": (4 + overlap, end),
        "1F1": (end, end + 1),
        "1B1": (end + 1, end + 3),
        "0B1": (end + 3, end + 5),
    }
