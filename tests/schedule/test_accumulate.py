"""Workers that accumulate gradients: k micro-batches each, one update, the traffic of one."""

from fractions import Fraction
from itertools import product
from textwrap import dedent

import pytest

from toolkit.errors import UserError
from toolkit.schedule import Action, Buffer, Kind, Op, Schedule, catalog, steady_state, timing
from toolkit.schedule.steady_state import belongs_to

RULES = {
    "DP": catalog.data_parallel,
    "CDP-v1": lambda n, *args, **more: catalog.cyclic(n, 1, *args, **more),
    "CDP-v2": lambda n, *args, **more: catalog.cyclic(n, "freshest", *args, **more),
}
STATES = ["replicated", "sharded"]

DP = """
    slot   0   1   2   3   4   5   6   7   8    9    10   11   12   13   14   15
    rank 0 0F0 1F0 1B0 0B0 0F2 1F2 1B2 0B2 0F0' 1F0' 1B0' 0B0' 0F2' 1F2' 1B2' 0B2'
    rank 1 0F1 1F1 1B1 0B1 0F3 1F3 1B3 0B3 0F1' 1F1' 1B1' 0B1' 0F3' 1F3' 1B3' 0B3'
"""
CDP = """
    slot   0   1   2   3   4   5   6   7   8    9    10   11   12   13   14   15   16   17
    rank 0 0F0 1F0 1B0 0B0 0F2 1F2 1B2 0B2 0F0' 1F0' 1B0' 0B0' 0F2' 1F2' 1B2' 0B2' .    .
    rank 1 .   .   0F1 1F1 1B1 0B1 0F3 1F3 1B3  0B3  0F1' 1F1' 1B1' 0B1' 0F3' 1F3' 1B3' 0B3'
"""
PIPELINE = """
    slot   0   1   2   3   4   5   6   7   8   9
    rank 0 0F0 .   0F1 0B0 0F2 0B1 0F3 0B2 .   0B3
    rank 1 .   1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 .
"""


@pytest.mark.parametrize(
    ("schedule", "expected", "n_steps"),
    [
        (catalog.data_parallel(2, accumulate=2), DP, 2),
        (catalog.cyclic(2, accumulate=2), CDP, 2),
        (catalog.cyclic(2, 1, "per_stage", accumulate=2), PIPELINE, 1),
    ],
    ids=["DP", "CDP", "pipeline"],
)
def test_literal_timeline(schedule, expected, n_steps):
    assert schedule.grid(n_steps) == dedent(expected).strip("\n")


@pytest.mark.parametrize(("s", "n", "k"), [*product(range(1, 5), range(1, 5), range(1, 4))])
def test_every_op_starts_at_its_formula(s, n, k):
    """Micro-batch r n + w is the r-th of worker w, 2S slots after the one before it."""
    for rule, stagger in (("DP", 0), ("CDP-v1", Fraction(2 * s, n))):
        schedule = RULES[rule](n, n_stages=s, accumulate=k)
        assert (schedule.n_microbatches, schedule.n_workers, schedule.n_ranks) == (k * n, n, n)
        assert schedule.period == 2 * s * k
        for r, w, j in product(range(k), range(n), range(s)):
            m, first = r * n + w, w * stagger + r * 2 * s
            tick = schedule.timing.ticks_per_slot
            assert schedule.timing.starts[Op(Kind.FORWARD, j, m)] == (first + j) * tick
            assert schedule.timing.starts[Op(Kind.BACKWARD, j, m)] == (first + 2 * s - 1 - j) * tick
            assert [schedule.rank(j, m, step) for step in range(3)] == [w] * 3


@pytest.mark.parametrize("n", range(2, 6))
@pytest.mark.parametrize("k", [2, 3])
def test_activations_are_those_of_one_micro_batch(n, k):
    for rule, state in product(RULES, STATES):
        most = n * n if rule == "DP" else n * (n + 1) // 2
        one = RULES[rule](n, "one", state, accumulate=k)
        assert one.lower(3).verify().peak_activations() == (most,)
        assert steady_state(one).peak_activations == most
        each = RULES[rule](n, "per_microbatch", state, accumulate=k)
        assert each.lower(3).peak_activations() == (n,) * n
        assert steady_state(each).peak_activations == most
        split = RULES[rule](n, "per_stage_and_microbatch", state, accumulate=k)
        assert split.n_ranks == (n * n if rule == "DP" else n * (n + 1) // 2)
        assert split.lower(3).peak_activations() == (1,) * split.n_ranks


def gradients(schedule):
    """(messages, stages) of gradients that all ranks send for a step; weights likewise."""
    program, step = schedule.lower(5).verify(), 2
    sent = {buffer: [0, 0] for buffer in (Buffer.GRADIENT, Buffer.WEIGHTS)}
    for i in (i for rank in program.ranks for i in rank if belongs_to(i, step)):
        if i.action in (Action.SEND, Action.ALL_REDUCE, Action.REDUCE, Action.BROADCAST):
            sent[i.buffer][0] += 1
            sent[i.buffer][1] += len(i.peers)
    return sent


@pytest.mark.parametrize("n", range(2, 6))
def test_gradients_travel_as_often_as_without(n):
    for rule, placement, state in product(RULES, ["per_microbatch"], STATES):
        once, twice, thrice = (
            gradients(RULES[rule](n, placement, state, accumulate=k)) for k in (1, 2, 3)
        )
        assert once[Buffer.GRADIENT][0] > 0
        assert once[Buffer.GRADIENT] == twice[Buffer.GRADIENT] == thrice[Buffer.GRADIENT]
        if state == "replicated":
            assert once == twice == thrice
        elif n > 2:  # sharded weights are gathered anew for each micro-batch
            assert once[Buffer.WEIGHTS] < twice[Buffer.WEIGHTS] < thrice[Buffer.WEIGHTS]


@pytest.mark.parametrize("n", range(1, 6))
@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_pipeline_that_accumulates_is_pipedream_2bw(n, k):
    own = catalog.cyclic(n, 1, "per_stage", accumulate=k)
    assert own.timing == timing.pipelined(n, k * n)
    assert own.lower(3).verify().ranks == catalog.pipedream_2bw(n, k * n).lower(3).ranks


@pytest.mark.parametrize(("s", "k"), [*product(range(1, 5), range(1, 5))])
def test_one_worker_is_gradient_accumulation(s, k):
    plain = catalog.gradient_accumulation(s, k)
    for make in RULES.values():
        own = make(1, "one", n_stages=s, accumulate=k)
        assert own.timing == plain.timing
    assert catalog.data_parallel(1, n_stages=s, accumulate=k).lower(3).ranks == plain.lower(3).ranks


@pytest.mark.parametrize("accumulate", [0, 1.0, True, "1", 2])
def test_refuses_what_does_not_divide_the_micro_batches(accumulate):
    with pytest.raises(UserError, match=f"accumulate .*got {accumulate!r}"):
        Schedule("own", 2, 3, timing.cyclic(2, 3), accumulate=accumulate)
    if accumulate != 2:
        with pytest.raises(UserError, match=f"accumulate.*{accumulate}"):
            catalog.cyclic(2, accumulate=accumulate)
