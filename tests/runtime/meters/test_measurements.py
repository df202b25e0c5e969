"""Measurements and timelines, of records by hand and of records that follow a program."""

import pytest
from hypothesis import given

from tests.schedule.strategies import programs, quick
from toolkit.cost import Change
from toolkit.runtime.meters.measurements import Measurements
from toolkit.runtime.meters.meter import Event, RankRecord
from toolkit.schedule import Action, Buffer, Instruction, catalog

PIPELINE = catalog.gpipe(2, 1)


def event(i, start, end, n_bytes=0, activations=0, weights=0, gradients=0, tick=None):  # noqa: PLR0913
    tick = i.tick if tick is None else tick
    return Event(i, tick, start, end, n_bytes, activations, weights, gradients)


def op(tick, action, stage=0, step=0, microbatch=0):
    return Instruction(tick, action, stage, microbatch, step, 0)


def boundary(tick, action, buffer, stage, peer, step=0, microbatch=0):
    return Instruction(tick, action, stage, microbatch, step, None, buffer, (peer,))


def pipeline_records():
    """One step of two ranks; rank 0's clock begins at 10, and each forward keeps 5 or 7 bytes."""
    first = RankRecord(
        0,
        [
            event(op(0, Action.FORWARD), 10, 12, 0, 5, 100),
            event(
                boundary(1, Action.SEND, Buffer.ACTIVATION, 0, 1), 12, 12.25, 40, 5, 100
            ),
            event(
                boundary(3, Action.RECV, Buffer.ACTIVATION_GRADIENT, 1, 1),
                12.5,
                20,
                60,
                5,
                100,
            ),
            event(op(3, Action.BACKWARD), 20, 23, 0, 0, 100, 50),
            event(op(4, Action.UPDATE), 23, 24, 0, 0, 200, 0),
            event(
                Instruction(4, Action.FREE, 0, 0, 0, None, Buffer.ACTIVATION),
                *(24, 24.125, 0, 0, 200, 0),
            ),
            event(
                Instruction(4, Action.FREE, 0, version=0, buffer=Buffer.WEIGHTS),
                *(24.25, 24.5, 0, 0, 100, 0),
            ),
        ],
    )
    second = RankRecord(
        1,
        [
            event(
                boundary(1, Action.RECV, Buffer.ACTIVATION, 0, 0), 10.5, 14, 40, 0, 30
            ),
            event(op(1, Action.FORWARD, 1), 14, 15, 0, 7, 30),
            event(op(2, Action.BACKWARD, 1), 15, 17, 0, 0, 30, 15),
            event(
                boundary(3, Action.SEND, Buffer.ACTIVATION_GRADIENT, 1, 0),
                17,
                17.5,
                60,
                0,
                30,
                15,
            ),
            event(op(3, Action.UPDATE, 1), 18, 19, 0, 0, 60, 0),
        ],
        device_peak=1234,
    )
    return [first, second]


@pytest.fixture
def pipeline():
    return Measurements(PIPELINE, pipeline_records())


# Messages and memory


def test_a_row_a_rank(pipeline):
    first = {"rank": 0, "peak_activations": 5, "peak_weights": 200, "device_peak": None}
    second = {"rank": 1, "peak_activations": 7, "peak_weights": 60, "device_peak": 1234}
    once = {"messages_sent": 1, "messages_received": 1}
    assert pipeline.by_rank() == [
        first | once | {"bytes_sent": 40.0, "bytes_received": 60},
        second | once | {"bytes_sent": 60.0, "bytes_received": 40},
    ]


def test_a_row_has_the_state_of_optimizers_that_are_known(pipeline):
    pipeline.records[1].optimizer_state = 120
    states = [row.get("optimizer_state") for row in pipeline.by_rank()]
    assert states == [None, 120]


def followed(program):
    """Records of ranks that do what the program says: a byte a stage, activation and version."""
    schedule, records = program.schedule, []
    for rank, order in enumerate(program.ranks):
        alive = 0
        held = sum(
            program.first_step + 1 - schedule.oldest_version(j, program.first_step)
            for j in range(schedule.n_stages)
            if rank in schedule.first_holders(j)
        )
        record = RankRecord(rank, first_weights=held)
        for time, i in enumerate(order):
            frees = i.action == Action.FREE
            alive += (i.action == Action.FORWARD) - (
                frees and i.buffer == Buffer.ACTIVATION
            )
            comes = i.action == Action.RECV or (
                i.action == Action.BROADCAST and rank != i.peers[0]
            )
            made = i.action in (Action.UPDATE, Action.PREDICT)
            made |= i.buffer == Buffer.WEIGHTS and comes
            held += made - (frees and i.buffer != Buffer.ACTIVATION)
            n_bytes = int(i.action.communicates)
            record.events.append(event(i, time, time + 1, n_bytes, alive, held))
        records.append(record)
    return records


@given(programs())
@quick
def test_ranks_that_follow_the_program_measure_what_it_says(program):
    found = Measurements(program.schedule, followed(program))
    assert found.peak_activations() == program.peak_activations()
    assert found.activations() == program.activations()
    assert found.peak_weights() == program.peak_weights()
    expected = program.traffic()
    sent = found.sent(Buffer.GRADIENT, Buffer.WEIGHTS)
    nothing = ((0, 0),) * len(program.ranks)
    assert [*sent] + [nothing] * (len(expected) - len(sent)) == [*expected]
    rows = found.by_rank()
    for what in ("messages", "bytes"):
        ways = [
            sum(row[f"{what}_{way}"] for row in rows) for way in ("sent", "received")
        ]
        assert ways[0] == pytest.approx(ways[1])


# Timelines


def spans_of(timeline):
    return {(s.rank, s.lane, s.name): (s.start, s.end) for s in timeline.spans}


def test_a_timeline(pipeline):
    """A message lasts from when the last is ready for it to when it has been received."""
    found = pipeline.timeline()
    assert found.name == "GPipe, measured"
    assert found.n_ranks == 2
    assert spans_of(found) == {
        (0, "compute", "0F0"): (0, 2),
        (0, "send", "activation"): (2, 4),
        (1, "receive", "activation"): (2, 4),
        (1, "compute", "1F0"): (4, 5),
        (1, "compute", "1B0"): (5, 7),
        (1, "send", "activation gradient"): (7, 10),
        (0, "receive", "activation gradient"): (7, 10),
        (0, "compute", "0B0"): (10, 13),
        (1, "update", "update 1"): (8, 9),
        (0, "update", "update 0"): (13, 14),
    }
    assert len(found.spans) == 10
    sent = next(s for s in found.spans if s.lane == "send" and s.rank == 0)
    # stage, micro-batch, step, bytes, peer, slot.
    assert sent[5:] == (0, 0, 0, 40, 1, 1)
    received = next(s for s in found.spans if s.lane == "receive" and s.rank == 0)
    assert received[5:] == (1, 0, 0, 60, 1, 3)
    assert found.step_ends == (14,)
    assert found.bytes_sent() == (40, 60)
    links = {(s.rank, s.peer): s.bytes for s in found.spans if s.lane == "send"}
    assert links == {(0, 1): 40, (1, 0): 60}


def test_memory_is_gained_at_the_start_and_lost_at_the_end(pipeline):
    found = pipeline.timeline()
    assert [change for change in found.changes if change.rank == 0] == [
        Change(0, 0, "activations", 5),
        Change(0, 0, "weights", 100),
        Change(13, 0, "activations", -5),
        Change(10, 0, "gradients", 50),
        Change(13, 0, "weights", 100),
        Change(14, 0, "gradients", -50),
        Change(14.5, 0, "weights", -100),
    ]
    assert found.memory(1, "activations") == [(4, 7), (7, 0)]
    assert found.peak_memory(1, "weights") == 60


SEND, RECV = Action.SEND, Action.RECV
LATE_SEND = boundary(1, SEND, Buffer.ACTIVATION, 0, 1)
LATE_RECV = boundary(1, RECV, Buffer.ACTIVATION, 0, 0)


def version(tick, action, peer):
    return Instruction(tick, action, 0, version=3, buffer=Buffer.WEIGHTS, peers=(peer,))


def part(stage, action, peer):
    return Instruction(stage, action, stage, None, 0, None, Buffer.GRADIENT, (peer,))


def reduced(stage, *peers):
    return Instruction(
        stage, Action.ALL_REDUCE, stage, None, 0, None, Buffer.GRADIENT, peers
    )


BROADCAST = Instruction(1, Action.BROADCAST, 0, None, None, 1, Buffer.WEIGHTS, (1, 0))


@pytest.mark.parametrize(
    "ranks",
    [
        # From when the last is ready for it to when it is received, whoever comes first.
        ([(LATE_SEND, 1, 1.1, (5, 6))], [(LATE_RECV, 5, 6, (5, 6))]),
        ([(LATE_SEND, 5, 5.1, (5, 6))], [(LATE_RECV, 1, 6, (5, 6))]),
        # Clocks that differ a little: no time runs backwards.
        ([(LATE_SEND, 5, 5.1, (5, 5))], [(LATE_RECV, 1, 4, (5, 5))]),
        # A version is sent twice, and one the other way; each meets its own receive.
        (
            [
                (version(0, SEND, 1), 0, 1, (5, 6)),
                (version(1, SEND, 1), 1, 2, (10, 12)),
                (version(2, RECV, 1), 2, 30, (20, 30)),
            ],
            [
                (version(0, RECV, 0), 5, 6, (5, 6)),
                (version(1, RECV, 0), 10, 12, (10, 12)),
                (version(2, SEND, 0), 20, 21, (20, 30)),
            ],
        ),
        # A message begins when the one before it there has been received; other ways are free.
        (
            [
                (part(0, SEND, 1), 1, 1.5, (1, 4)),
                (part(1, SEND, 1), 2, 2.5, (6, 7)),
                (part(2, SEND, 1), 3, 3.5, (4, 6)),
                (part(3, SEND, 1), 20, 20.5, (20, 22)),
                (part(0, RECV, 1), 0, 9, (5, 9)),
            ],
            [
                (part(0, RECV, 0), 0, 4, (1, 4)),
                (part(1, RECV, 0), 0, 7, (6, 7)),
                (part(2, RECV, 0), 0, 6, (4, 6)),
                (part(3, RECV, 0), 0, 22, (20, 22)),
                (part(0, SEND, 0), 5, 5.5, (5, 9)),
            ],
        ),
        # Collectives queue in their group, and not behind those of others.
        (
            [
                (reduced(0, 0, 1), 1, 5, (2, 5)),
                (reduced(1, 0, 1), 1, 8, (5, 8)),
                (reduced(2, 0, 1, 2), 1, 4, (3, 4)),
            ],
            [
                (reduced(0, 0, 1), 2, 5, (2, 5)),
                (reduced(1, 0, 1), 3, 9, (5, 9)),
                (reduced(2, 0, 1, 2), 1, 4, (3, 4)),
            ],
            [(reduced(2, 0, 1, 2), 3, 4, (3, 4))],
        ),
        # Nor do they behind messages between the same ranks, whichever sends.
        (
            [(part(1, SEND, 1), 0, 1, (0, 5)), (reduced(0, 0, 1), 2, 9, (2, 9))],
            [(part(1, RECV, 0), 0, 5, (0, 5)), (reduced(0, 0, 1), 2, 9, (2, 9))],
        ),
        (
            [(part(1, RECV, 1), 0, 5, (0, 5)), (reduced(0, 0, 1), 2, 9, (2, 9))],
            [(part(1, SEND, 0), 0, 1, (0, 5)), (reduced(0, 0, 1), 2, 9, (2, 9))],
        ),
    ],
)
def test_when_messages_begin_and_end(ranks):
    """Each instruction, its start and end, and those of its message."""
    records = [
        RankRecord(
            rank,
            [event(op(0, Action.UPDATE), 0, 0), *(event(*of[:3], 8) for of in own)],
        )
        for rank, own in enumerate(ranks)
    ]
    found = Measurements(catalog.cyclic(3, 1), records).timeline().spans
    for rank, own in enumerate(ranks):
        spans = [s for s in found if s.rank == rank and s.lane != "update"]
        assert [(s.start, s.end) for s in spans] == [of[3] for of in own]
        for s, (i, *_) in zip(spans, own, strict=True):
            peer = i.peers[0] if i.action in (SEND, RECV) else None
            lane = "receive" if i.action == RECV else "send"
            assert (s.stage, s.peer, s.lane, s.slot) == (i.stage, peer, lane, i.tick)


def test_collectives_begin_when_the_last_rank_has_come():
    """Each ends where it was done."""
    records = [
        RankRecord(0, [event(reduced(0, 0, 1), 0, 7, 80), event(BROADCAST, 8, 11, 80)]),
        RankRecord(1, [event(reduced(0, 0, 1), 4, 6, 80), event(BROADCAST, 6, 10, 80)]),
    ]
    found = Measurements(catalog.data_parallel(2), records).timeline()
    assert spans_of(found) == {
        (0, "send", "all-reduce"): (4, 7),
        (1, "send", "all-reduce"): (4, 6),
        (1, "send", "broadcast"): (8, 10),
        (0, "receive", "broadcast"): (8, 11),
    }
    assert {(s.bytes, s.peer) for s in found.spans} == {(80, None)}
    assert found.bytes_sent() == (80, 160)


def test_steps_end_with_their_last_update():
    """On whichever rank; of two steps that overlap."""
    records = [
        RankRecord(
            0, [event(op(k, Action.UPDATE, 0, k), 2 + k, 3 + k) for k in (4, 5)]
        ),
        RankRecord(
            1,
            [
                event(op(k, Action.UPDATE, 1, k), 1 + 9 * (k - 4), 9 * (k - 4) + 2)
                for k in (4, 5)
            ],
        ),
    ]
    found = Measurements(PIPELINE, records).timeline()
    assert found.step_ends == (6, 10)  # seconds since 1, the first of all
    assert found.step_time == 4


LANES = {
    Action.PREDICT: "compute",
    Action.UPDATE: "update",
    SEND: "send",
    RECV: "receive",
}


@given(programs())
@quick
def test_every_message_of_a_program_finds_its_other_end(program):
    """Sent and received from one moment to one other, and as often."""
    found = Measurements(program.schedule, followed(program)).timeline()
    drawn = [i for order in program.ranks for i in order if i.action != Action.FREE]
    ends = {"send": [], "receive": []}
    for s, i in zip(found.spans, drawn, strict=True):
        assert 0 <= s.start <= s.end
        assert s.name == i.label
        if i.action.computes or i.action in LANES:
            assert s.lane == LANES.get(i.action, "compute")
        if s.peer is not None:
            pair = (s.rank, s.peer) if s.lane == "send" else (s.peer, s.rank)
            ends[s.lane].append(
                (pair, s.start, s.end, s.name, s.stage, s.slot, s.bytes)
            )
    assert sorted(ends["send"]) == sorted(ends["receive"])
    assert len(found.step_ends) == program.n_steps
