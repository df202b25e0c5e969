"""Rank orders as text and CSV: there and back, into torch, and what is refused."""

import csv
import io
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.schedule.strategies import quick, schedules
from tests.schedule.test_pipeline_orders import torchs
from toolkit.errors import UserError
from toolkit.schedule import Kind, Op, Schedule, Timing, catalog
from toolkit.schedule.placement import Assigned

PIPELINES = [
    catalog.gpipe(3, 5),
    catalog.one_f_one_b(1, 2),
    catalog.interleaved_1f1b(6, 5, 3),
    catalog.zero_bubble(4, 6),
    catalog.v_half(6, 6),
    catalog.dualpipe_v(6, 6),
    catalog.cyclic(3, placement="per_stage"),
    catalog.pipedream_2bw(2, 3),
    catalog.data_parallel(1, delay=2, n_stages=3),
]
TIMES = {Op(Kind.FORWARD, 0, 0): 0, Op(Kind.BACKWARD, 0, 0): 3}
HALF_SLOTS = Schedule("halves", 1, 1, Timing(TIMES, 5, ticks_per_slot=2), "per_stage")
APART = Assigned(((0, 0), (2, 2)), "per_stage")
IDLE = replace(catalog.cyclic(2, placement="per_stage"), name="idle", placement=APART)


@given(schedules())
@quick
def test_what_is_written_is_read_back(schedule):
    """Any schedule at all: it is refused, or none of its timing is lost."""
    try:
        text = schedule.to_csv()
    except UserError as error:
        assert "the CSV format" in str(error)  # noqa: PT017 - nothing else may be wrong
        return
    back = Schedule.from_csv(text, delay=schedule.delay)
    assert (back.timing, back.staleness) == (schedule.timing, schedule.staleness)
    assert (back.n_ranks, back.layout.name) == (schedule.n_ranks, "per_stage")
    for j in range(schedule.n_stages):
        assert {*back.layout.ranks(j)} == {*schedule.layout.ranks(j)}
    back.lower(3).verify()


@pytest.mark.parametrize("delay", [1, "freshest"])
def test_a_pipeline_that_does_not_drain_has_a_period_in_its_file(delay):
    """Read as if it drained, CDP would be data parallelism."""
    text = catalog.cyclic(2, delay, "per_stage").to_csv()
    assert text == "0F0 period=4,,0F1,0B0,,0B1\n,1F0,1B0,1F1,1B1,\n"
    back = Schedule.from_csv(text, delay=delay)
    assert (back.period, back.staleness) == (4, catalog.cyclic(2, delay).staleness)
    assert Schedule.from_csv(text, delay=delay, period=4) == back
    drained = text.replace(" period=4", "")
    assert Schedule.from_csv(drained, delay="freshest").staleness == ((0, 0), (0, 0))
    assert Schedule.from_csv(drained, delay=delay, period=4) == back
    with pytest.raises(UserError, match="cannot read weights 0 steps late"):
        Schedule.from_csv(text)
    with pytest.raises(UserError, match="the file has period=4: got period=6"):
        Schedule.from_csv(text, delay=delay, period=6)
    for text in (
        "0F0,0B0\n1F0 period=9,1B0\n",
        "0F0  period=9,0B0 period=9\n1F0,1B0\n",
    ):
        assert Schedule.from_csv(text).period == 9


@pytest.mark.parametrize(
    "schedule", PIPELINES, ids=lambda s: f"{s.name} {s.n_stages}x{s.n_microbatches}"
)
def test_torch_reads_it(schedule):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    if not hasattr(schedules, "_validate_schedule"):
        pytest.skip("this torch has no _validate_schedule")
    rows = csv.reader(io.StringIO(schedule.to_csv()))
    actions = {
        r: [schedules._Action.from_str(cell) for cell in row]
        for r, row in enumerate(rows)
    }
    found = schedules._validate_schedule(
        actions, schedule.n_ranks, schedule.n_stages, schedule.n_microbatches
    )
    assert found == {j: schedule.rank(j, 0) for j in range(schedule.n_stages)}


def test_pairs_take_one_slot_or_two():
    """A forward and a backward of one rank start together; unfolded, one after the other."""
    orders = ["0F0 0F1;0B0 0B1", "1F0 1B0 1F1 1B1"]
    pair = Op(Kind.FORWARD, 0, 1), Op(Kind.BACKWARD, 0, 0)
    schedule = Schedule.from_rank_orders(orders)
    assert schedule.grid().splitlines()[1:] == [
        "rank 0 0F0 .   .   0F1;0B0 .   .   0B1",
        "rank 1 .   1F0 1B0 .       1F1 1B1 .",
    ]
    assert schedule.timing.pairs == dict([pair])
    assert Schedule.from_rank_orders([["0F0", pair, "0B1"], orders[1]]) == schedule
    text = schedule.to_csv()
    assert text == "0F0,,,(0F1;0B0)OVERLAP_F_B,,,0B1\n,1F0,1B0,,1F1,1B1,\n"
    assert Schedule.from_csv(text) == schedule
    assert (
        Schedule.from_csv(text.replace("(0F1;0B0)OVERLAP_F_B", "0F1;0B0")) == schedule
    )
    apart = Schedule.from_csv(text, unfold=True)
    assert apart == Schedule.from_rank_orders(["0F0 0F1 0B0 0B1", orders[1]])
    assert not apart.timing.pairs


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        (["0F0 0B0;0F1 0B1"], "a forward and then a backward .*: got 0B0;0F1"),
        (["0F0 0F1;0B1 0B0"], "another micro-batch, .*: got 0F1;0B1"),
        (["0F0 0F1;0B0;0F2 0B1 0B2"], "0F1;0B0;0F2' has 3 ops"),
        (["0F0 0F1;0X0 0B1"], "rank 0, op 1: '0X0' is not an op"),
        (["0F0 0F1;1B0 1F1 1B1 0B0 0B1 1F0"], "rank 0 waits at 0F1 for 1F0"),
    ],
)
def test_pairs_that_cannot_be_are_refused(orders, message):
    with pytest.raises(UserError, match=message):
        Schedule.from_rank_orders(orders)


def test_a_timing_pairs_what_starts_together_on_one_rank():
    starts = {Op(kind, 0, m): 2 * m + kind for kind in list(Kind)[:2] for m in range(2)}
    forward, backward = Op(Kind.FORWARD, 0, 1), Op(Kind.BACKWARD, 0, 0)
    with pytest.raises(UserError, match="start in the same slot"):
        Timing(starts, 4, pairs={forward: backward})
    together = starts | {forward: starts[backward]}
    with pytest.raises(UserError, match="same slot of the steady state"):
        Schedule("none", 1, 2, Timing(together, 4), "per_stage")
    Schedule("pair", 1, 2, Timing(together, 4, pairs={forward: backward}), "per_stage")
    with pytest.raises(UserError, match="runs on one rank: got 0F1;0B0"):
        Schedule(
            "apart",
            1,
            2,
            Timing(together, 4, pairs={forward: backward}),
            "per_microbatch",
        )


WITH_MESSAGES = (
    "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD\n"
    "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"
)


def test_communication_is_compared_with_what_is_inferred():
    expected = Schedule.from_rank_orders(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"])
    assert Schedule.from_csv(WITH_MESSAGES) == expected


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("0SEND_F0", "0SEND_F7", "row 1, column 3: 0SEND_F7 is no message"),
        ("1RECV_F0", "0RECV_F0", "row 2, column 1: 0RECV_F0 is no message"),
        ("0RESHARD", "1RESHARD", "row 1, column 11: 1RESHARD is no message"),
        ("0RECV_B1", "", "row 1 has no 0RECV_B1"),
    ],
)
def test_other_communication_is_refused(old, new, message):
    with pytest.raises(UserError, match=message):
        Schedule.from_csv(WITH_MESSAGES.replace(old, new, 1))


@pytest.mark.parametrize(
    ("schedule_class", "per_rank"),
    [
        ("ScheduleGPipe", 1),
        ("ScheduleLoopedBFS", 2),
        ("ScheduleInterleaved1F1B", 2),
        ("ScheduleInterleavedZeroBubble", 1),
        ("ScheduleInterleavedZeroBubble", 3),
        ("ScheduleZBVZeroBubble", 2),
        ("ScheduleDualPipeV", 2),
    ],
)
@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 6), (4, 8)])
def test_orders_and_messages_of_torch_are_read(schedule_class, per_rank, p, m):
    """That torch infers the same messages: a file with others is refused."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    gpipe = schedule_class == "ScheduleGPipe"
    method = "_get_pipeline_order" if gpipe else "_calculate_single_rank_operations"
    rounds = {
        "number_of_rounds": m // p,
        "microbatches_per_round": p,
        "_n_microbatches": m,
    }
    stages = {"n_local_stages": per_rank, "_stages": [None] * per_rank}
    stages |= dict.fromkeys(("num_stages", "_num_stages"), p * per_rank)
    orders = torchs(schedule_class, method, p, pp_group_size=p, **rounds, **stages)
    schedule = Schedule.from_rank_orders(orders)
    assert (schedule.n_ranks, schedule.n_stages, schedule.n_microbatches) == (
        p,
        p * per_rank,
        m,
    )
    lowered = schedules._add_send_recv(
        {
            r: [*map(schedules._Action.from_str, order.split())]
            for r, order in enumerate(orders)
        },
        stage_to_rank=lambda j: schedule.rank(j, 0),
        num_stages=schedule.n_stages,
    )
    text = "\n".join(",".join(map(str, lowered[r])) for r in sorted(lowered))
    assert "SEND_F" in text
    assert Schedule.from_csv(text) == schedule


@pytest.mark.parametrize("name", ["a,b.csv", "a,b"])
def test_a_file_may_have_a_comma_in_its_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text("0F0,0B0")
    for source in (name, str(tmp_path / name), tmp_path / name):
        assert Schedule.from_csv(source).to_csv() == "0F0,0B0\n"
    with pytest.raises(
        UserError, match=r"c,d.csv cannot be read \(No such file or directory\)"
    ):
        Schedule.from_csv("c,d.csv")


@pytest.mark.parametrize(
    "text",
    ["0F0,,,0B0\n,1F0,1B0", "0F0, 0B0\n\n1F0,1B0\n\n", "\ufeff0F0,0B0\r\n1F0,1B0\r\n"],
    ids=["ragged", "spaces", "spreadsheet"],
)
def test_other_programs_files_are_read(text, tmp_path):
    path = tmp_path / "schedule.csv"
    path.write_text(text, encoding="utf-8", newline="")
    assert Schedule.from_csv(path).to_csv() == "0F0,,,0B0\n,1F0,1B0,\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,1C0", "row 2, column 2: '1C0' is not an op"),
        ("0F0,,0B", "row 1, column 3: '0B' is not an op"),
        ("0F0,-1B0", "row 1, column 2: '-1B0' is not an op"),
        ("0F0 period=x,0B0", "row 1, column 1: '0F0 period=x' is not an op"),
        ("0F0 0B0,", "row 1, column 1: '0F0 0B0' is not an op"),
        (
            "0F0 period=4,0B0 period=6",
            r"one period: got period=4 \(row 1, column 1\) and period=6 \(row 1, column 2\)",
        ),
        ("0F0 period=0,0B0", "a period .* got 0"),
    ],
)
def test_a_misspelt_cell_is_named(text, message):
    with pytest.raises(UserError, match=message):
        Schedule.from_csv(text)


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        (["0F0 0B0", "1F0 1X0"], "rank 1, op 1: '1X0' is not an op"),
        ("0F0 0B0", "one for each rank: got '0F0 0B0'"),
        ([[(7, 0, 0)]], r"rank 0, op 0: \(7, 0, 0\) is not an op"),
        ([[Op(Kind.FORWARD, 0.5, 0)]], r"rank 0, op 0: '0.5F0' is not an op"),
        ([["0F0", Op(Kind.BACKWARD, 0, -1)]], "rank 0, op 1: '0B-1' is not an op"),
        (
            ["0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1", "2F0 2B0 2F1 2B1"],
            "rank 0 waits at 0B0 for 1B0; rank 1 waits at 1F1 for 0F1; rank 2 waits at 2F0 for 1F0",
        ),
        (["0F0 0B0", ""], r"every rank has something to do: got 2 ranks, idle: \[1\]"),
        ([], "every rank has something to do"),
        (
            ["0F0 0B0 0F1"],
            "stage 0 of micro-batch 1 needs .* a backward .*: found forward;",
        ),
        (["0F0 0B0 2F0 2B0"], "stage 1 of micro-batch 0 .*: found nothing"),
        (["0F0 0B0 0F11 0B1"], "stage 0 of micro-batch 1 .*: found backward;"),
        (["0F0 0B0", "1F0 0F0 1B0"], "0F0 is done twice: on rank 0 and on rank 1"),
        (["0F0 1B0", "1F0 0B0"], "activations stay where they were made"),
        (["0F0 0W0 0I0"], "rank 0 waits at 0W0 for 0I0"),
    ],
)
def test_orders_that_make_no_schedule_are_refused(orders, message):
    with pytest.raises(UserError, match=message):
        Schedule.from_rank_orders(orders)


FORWARD = Op(Kind.FORWARD, 0, 0)


@pytest.mark.parametrize(
    ("orders", "place", "value"),
    [
        (b"0F0 0B0", "orders", "b'0F0 0B0'"),
        (FORWARD, "orders", repr(FORWARD)),
        ([b"0F0 0B0"], "rank 0", "b'0F0 0B0'"),
        (["0F0 0B0", bytearray(b"1F0")], "rank 1", "bytearray(b'1F0')"),
        ([None], "rank 0", "None"),
        ([FORWARD], "rank 0", repr(FORWARD)),
        ([[None]], "rank 0, op 0", "None"),
        ([["0F0", 3]], "rank 0, op 1", "3"),
        ([[True]], "rank 0, op 0", "True"),
        ([[2.5]], "rank 0, op 0", "2.5"),
        ([range(3)], "rank 0, op 0", "0"),
        ([[b"0F0"]], "rank 0, op 0", "b'0F0'"),
        ([[b"ab"]], "rank 0, op 0", "b'ab'"),
        ([[""]], "rank 0, op 0", "''"),
        ([[()]], "rank 0, op 0", "()"),
        ([[{}]], "rank 0, op 0", "{}"),
        ([[("0F1", None)]], "rank 0, op 0", "None"),
        ([[["0F1", "0B0", "0F2"]]], "rank 0, op 0", "['0F1', '0B0', '0F2']"),
        ([[[["0F1", "0B0"], "0F2"]]], "rank 0, op 0", "['0F1', '0B0']"),
        *(
            ([["0F0", Op(kind, 0, 0)]], "rank 0, op 1", repr(Op(kind, 0, 0)))
            for kind in (None, "F", 9, -1, 1.0, True)
        ),
        ([[Op(Kind.FORWARD, None, 0)]], "rank 0, op 0", "'NoneF0'"),
    ],
)
def test_content_that_is_no_order_is_refused(orders, place, value):
    with pytest.raises(UserError) as error:
        Schedule.from_rank_orders(orders)
    message = str(error.value)
    assert message.startswith(place)
    assert value in message
    assert place == "orders" or "0F0" in message  # an example of what is expected


PIECES = ("", ",", "\n", "0", "F", "9B9", "-1", "\0", "ü", "1W0", "0I0", '"')
EDITS = st.tuples(st.floats(0, 1), st.integers(0, 6), st.sampled_from(PIECES))


@given(st.sampled_from(PIPELINES), st.lists(EDITS, min_size=1, max_size=3))
@quick
def test_a_damaged_file_is_refused_or_makes_a_valid_program(schedule, edits):
    text = schedule.to_csv()
    for share, n_removed, piece in edits:
        begin = int(share * len(text))
        text = text[:begin] + piece + text[begin + n_removed :]
    with suppress(UserError):
        Schedule.from_csv(text).lower(2).verify()


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("none.csv", None, "No such file or directory"),
        ("picture.csv", b"\x89PNG\xff\xfe", "it is not text"),
    ],
)
def test_a_file_that_cannot_be_read(name, content, why, tmp_path):
    path = tmp_path / name
    if content:
        path.write_bytes(content)
    for source in (path, str(path)):
        with pytest.raises(UserError, match=rf"{name} cannot be read \({why}\)"):
            Schedule.from_csv(source)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (catalog.data_parallel(2), "DP has up to 2 ranks per stage"),
        (
            catalog.cyclic(3, placement="per_stage_and_microbatch"),
            "CDP-v2 has up to 3 ranks",
        ),
        (catalog.data_parallel(2, "one"), "placement 'one'"),
        (HALF_SLOTS, "halves .* 2 start times in a slot"),
        (IDLE, "ops of every rank: rank 1 of idle"),
    ],
)
def test_only_pipelines_are_written(schedule, message):
    with pytest.raises(UserError, match=message):
        schedule.to_csv()


@pytest.mark.parametrize("source", ["/dev/zero", "\0" + "0F0"])
def test_no_file_is_refused(source):
    with pytest.raises(UserError, match="cannot be read"):
        Schedule.from_csv(source)


def test_a_file_too_large_to_be_read(tmp_path):
    """A sparse one: its size costs nothing."""
    path = tmp_path / "orders.csv"
    with path.open("wb") as file:
        file.truncate(20 * 2**30)
    with pytest.raises(UserError, match=f"{path} cannot be read .*bytes"):
        Schedule.from_csv(path)


def test_a_wrong_cell_is_named_with_its_file(tmp_path):
    path = tmp_path / "other_tool.csv"
    path.write_text("rank,op\n0,forward\n")
    with pytest.raises(UserError, match=rf"{path}, row 1, column 1: 'rank'"):
        Schedule.from_csv(path)
    with pytest.raises(UserError, match=r"^row 1, column 1: 'rank'"):
        Schedule.from_csv(path.read_text())
