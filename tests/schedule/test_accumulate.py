"""Workers that accumulate gradients: k micro-batches each, one update, the traffic of one."""

from fractions import Fraction
from itertools import product

import pytest

from toolkit.errors import UserError
from toolkit.schedule import (
    Action,
    Buffer,
    Kind,
    Op,
    Schedule,
    catalog,
    steady_state,
    timing,
)
from toolkit.schedule.steady_state import belongs_to

RULES = {name: catalog.METHODS[name] for name in ("dp", "cdp_v1", "cdp_v2")}
STATES = ["replicated", "sharded"]
every_rule = pytest.mark.parametrize("rule", RULES)


@pytest.mark.parametrize(
    ("s", "n", "k"), [*product(range(1, 5), range(1, 5), range(1, 4))]
)
def test_every_op_starts_at_its_formula(s, n, k):
    """Micro-batch r n + w is the r-th of worker w, 2S slots after the one before it."""
    for rule, stagger in (("dp", 0), ("cdp_v1", Fraction(2 * s, n))):
        schedule = RULES[rule](n, n_stages=s, accumulate=k)
        assert (schedule.n_microbatches, schedule.n_workers, schedule.n_ranks) == (
            k * n,
            n,
            n,
        )
        assert schedule.period == 2 * s * k
        for r, w, j in product(range(k), range(n), range(s)):
            m, first = r * n + w, w * stagger + r * 2 * s
            tick = schedule.timing.ticks_per_slot
            assert schedule.timing.starts[Op(Kind.FORWARD, j, m)] == (first + j) * tick
            assert (
                schedule.timing.starts[Op(Kind.BACKWARD, j, m)]
                == (first + 2 * s - 1 - j) * tick
            )
            assert [schedule.rank(j, m, step) for step in range(3)] == [w] * 3


@every_rule
@pytest.mark.parametrize("n", range(2, 6))
@pytest.mark.parametrize("k", [2, 3])
def test_activations_are_those_of_one_micro_batch(rule, n, k):
    most = n * n if rule == "dp" else n * (n + 1) // 2
    for state in STATES:
        one, each, both = (
            RULES[rule](n, placement=placement, state=state, accumulate=k)
            for placement in ("one", "per_microbatch", "per_stage_and_microbatch")
        )
        assert (
            steady_state(one).peak_activations
            == steady_state(each).peak_activations
            == most
        )
        assert one.lower(3).verify().peak_activations() == (most,)
        assert each.lower(3).peak_activations() == (n,) * n
        assert both.lower(3).peak_activations() == (1,) * most


def sent(schedule):
    """(messages, stages) of gradients that all ranks send for a step, and of weights."""
    program, found = schedule.lower(5).verify(), []
    for buffer in (Buffer.GRADIENT, Buffer.WEIGHTS):
        peers = [
            len(i.peers)
            for i in (i for rank in program.ranks for i in rank if belongs_to(i, 2))
            if i.buffer == buffer and i.action.communicates and i.action != Action.RECV
        ]
        found.append((len(peers), sum(peers)))
    return found


@every_rule
@pytest.mark.parametrize("n", range(2, 6))
@pytest.mark.parametrize("state", STATES)
def test_gradients_travel_as_often_as_without(rule, n, state):
    once, twice, thrice = (
        sent(RULES[rule](n, state=state, accumulate=k)) for k in (1, 2, 3)
    )
    assert once[0] == twice[0] == thrice[0] > (0, 0)
    if state == "replicated":
        assert once == twice == thrice
    elif n > 2:  # sharded weights are gathered anew for each micro-batch
        assert once[1] < twice[1] < thrice[1]


@pytest.mark.parametrize(("n", "k"), [*product(range(1, 6), (1, 2, 3))])
def test_a_pipeline_that_accumulates_is_pipedream_2bw(n, k):
    own = catalog.cyclic(n, 1, "per_stage", accumulate=k)
    assert own.timing == timing.pipelined(n, k * n)
    assert own.lower(3).verify().ranks == catalog.pipedream_2bw(n, k * n).lower(3).ranks


@pytest.mark.parametrize(("s", "k"), [*product(range(1, 5), range(1, 5))])
def test_one_worker_is_gradient_accumulation(s, k):
    plain = catalog.gradient_accumulation(s, k)
    own = [
        make(1, placement="one", n_stages=s, accumulate=k) for make in RULES.values()
    ]
    assert [schedule.timing for schedule in own] == [plain.timing] * 3
    assert own[0].lower(3).ranks == plain.lower(3).ranks


@pytest.mark.parametrize("accumulate", [0, 1.0, True, "1", 2])
def test_refuses_what_does_not_divide_the_micro_batches(accumulate):
    with pytest.raises(UserError, match=f"accumulate .*got {accumulate!r}"):
        Schedule("own", 2, 3, timing.cyclic(2, 3), accumulate=accumulate)
