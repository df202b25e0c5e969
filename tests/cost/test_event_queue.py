"""Which message gets a port, and when."""

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.schedule.strategies import programs, quick
from toolkit.cost import UNIT, StageCost, simulate, unit_costs
from toolkit.cost.timeline import RECEIVE, SEND
from toolkit.schedule import Action, catalog
from toolkit.schedule.dependencies import needs


def test_who_is_ready_need_not_wait_for_who_is_not():
    """The program hands on stage 0 first, which is needed first; it is updated last."""
    schedule = catalog.cyclic(2, 1, n_stages=4)
    machine = replace(UNIT, link_bandwidth=1)
    costs = [replace(cost, parameter_bytes=1) for cost in unit_costs(4)]
    timeline = simulate(schedule.lower(4).verify(), costs, machine)
    sent = [
        s for s in timeline.spans if (s.rank, s.lane, s.name) == (1, "send", "weights")
    ]
    assert [s.stage for s in sorted(sent, key=lambda s: s.slot)][:4] == [0, 1, 2, 3]
    assert [s.stage for s in sorted(sent, key=lambda s: s.start)][:4] == [3, 2, 1, 0]


def test_a_port_is_not_kept_for_a_message_that_is_not_ready():
    """Rank 2's gradient is ready at 25.5; what comes to rank 1 before it in the program is not."""
    forward, backward, sent = [3, 1, 2, 2, 3, 3], [2, 2, 2, 1, 2, 4], [1, 2, 2, 1, 1, 1]
    costs = [
        StageCost(f, b, output_bytes=n, input_bytes=before)
        for f, b, n, before in zip(
            forward, backward, sent, [0, *sent[:-1]], strict=True
        )
    ]
    machine = replace(UNIT, link_bandwidth=1)
    timeline = simulate(catalog.zb_v(6, 2).lower(1).verify(), costs, machine)
    (op,) = (s for s in timeline.spans if s.name == "2I0")
    found = [s for s in timeline.spans if (s.rank, s.stage, s.microbatch) == (2, 2, 0)]
    (message,) = (
        s for s in found if (s.lane, s.name) == ("send", "activation gradient")
    )
    assert op.end == message.start == 25.5


def test_what_an_op_waits_for_goes_before_a_reduction():
    """The slower rank ends its backward last, and both are ready at once; the other is the root."""
    program = catalog.data_parallel(2, "per_stage_and_microbatch").lower(1).verify()
    roots = {
        i.peers[0]
        for order in program.ranks
        for i in order
        if i.action == Action.ALL_REDUCE
    }
    machine = replace(
        UNIT, link_bandwidth=1, speeds=[1.0 + (rank in roots) for rank in range(4)]
    )
    costs = [StageCost(1.0, 1.0, input_bytes=1.0, parameter_bytes=5.0)] * 2
    timeline = simulate(program, costs, machine)
    (reduced,) = {
        s.start for s in timeline.spans if (s.name, s.stage) == ("all-reduce", 1)
    }
    passed_on = {
        (s.start, s.end) for s in timeline.spans if s.name == "activation gradient"
    }
    assert passed_on == {(1.5, 2.5), (3, 4)}
    assert reduced == 4


@pytest.mark.parametrize("state", ["sharded", "circulating"])
def test_a_message_waits_for_ops_before_its_lookahead_alone(state):
    """Rank 0 begins late. Its weights of slot 3 leave while its op of slot 1 still runs."""
    schedule = catalog.cyclic(2, 1, state=state)
    costs = [replace(cost, parameter_bytes=1) for cost in unit_costs(2)]
    timeline = simulate(
        schedule.lower(2).verify(), costs, replace(UNIT, link_bandwidth=1)
    )
    (op,) = (s for s in timeline.spans if (s.name, s.step) == ("1F0", 0))
    (message,) = (
        s
        for s in timeline.spans
        if (s.rank, s.lane, s.stage, s.slot) == (0, SEND, 1, 3)
    )
    assert message.name == "weights"
    assert message.slot - schedule.lookahead == op.slot == 1
    assert (message.start, message.end) == (op.start, op.end) == (2, 3)
    assert max(s.end for s in timeline.spans) == 10


LANES = {Action.SEND: "send", Action.RECV: "receive"}


@given(programs(states=("replicated",)), st.sampled_from([0.2, 1.0, 3.0]), st.data())
@quick
def test_no_message_waits_while_both_its_ports_idle(program, bandwidth, data):
    size = st.integers(1, 4).map(float)
    stage = st.builds(StageCost, size, size, output_bytes=size, parameter_bytes=size)
    costs = [data.draw(stage) for _ in range(program.schedule.n_stages)]
    timeline = simulate(program, costs, replace(UNIT, link_bandwidth=bandwidth))
    busy = defaultdict(list)
    ports = {*LANES.values()}
    for s in timeline.spans:
        # Or a collective, which takes both ports.
        is_message = s.peer in range(timeline.n_ranks)
        for lane in ports & {s.lane} if is_message or s.lane not in ports else ports:
            busy[s.rank, lane].append((s.start, s.end))
    for rank, peer, ready, start in messages(program, timeline):
        assert ready <= start
        for begin, end in sorted(busy[rank, "send"] + busy[peer, "receive"]):
            if begin <= ready + 1e-9:
                ready = max(ready, end)
        assert start <= ready + 1e-9


def messages(program, timeline):
    """Sender, receiver, when it could start and when it does, for each message."""
    spans = {}
    for s in timeline.spans:
        lane = s.lane if s.peer is not None else None
        spans[s.rank, s.name, s.stage, s.microbatch, s.step, lane, s.peer] = s
    passed = defaultdict(list)  # (tick, seconds) of the ends of ops
    found = []
    for rank, order in enumerate(program.ranks):
        ends = []
        for i, waits in zip(order, needs(order, rank), strict=True):
            lane, peer = LANES.get(i.action), i.peers[0] if i.action in LANES else None
            ready = max((ends[p] for p in waits), default=0.0)
            span = spans.get(
                (rank, i.label, i.stage, i.microbatch, i.of_step, lane, peer)
            )
            ends.append(span.end if span else ready)
            if i.action.computes:
                passed[rank].append((i.tick, span.end))
            elif i.action == Action.SEND:
                found.append(
                    (rank, peer, i.tick - program.schedule.lookahead, ready, span.start)
                )
    for rank, peer, opens, ready, start in found:
        before = [end for tick, end in passed[rank] + passed[peer] if tick < opens]
        yield rank, peer, max(ready, *before) if before else ready, start


def test_ranks_of_a_machine_share_its_port():
    schedule = catalog.cyclic(4, 1, groups=2)
    machines = replace(
        UNIT, link_bandwidth=0.1, ranks_per_machine=2, local_bandwidth=1e3
    )
    line = simulate(schedule.lower(6).verify(), unit_costs(4), machines)
    for lane in (SEND, RECEIVE):
        remote = [
            (span.rank // 2, span.start, span.end)
            for span in line.spans
            if span.lane == lane and span.rank // 2 != span.peer // 2
        ]
        for machine in range(2):
            times = sorted(when for at, *when in remote if at == machine)
            assert all(end <= start + 1e-9 for (_, end), (start, _) in pairwise(times))
