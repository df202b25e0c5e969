"""What stages keep and need while they run, by hand: inputs, memory of ops, optimizer states."""

from dataclasses import replace

from tests.cost.test_simulate import FIRST, SECOND, SLOW, when
from toolkit.cost import UNIT, recomputing, simulate
from toolkit.schedule import Schedule, catalog


def test_stages_keep_their_inputs_until_the_backward():
    """All of them from their arrival; on one rank what no stage before keeps, from the forward."""
    second = replace(SECOND, extra_input_bytes=1.0)
    apart = simulate(catalog.gpipe(2, 1).lower(1), (FIRST, second), SLOW)
    assert apart.memory(0, "stage inputs") == []
    assert apart.memory(1, "stage inputs") == [(4.5, 6), (7.5, 0)]  # until 1B0 ends
    together = simulate(
        catalog.data_parallel(1, n_stages=2).lower(1), (FIRST, second), SLOW
    )
    at = when(together)
    assert together.memory(0, "stage inputs") == [
        (at["0 1F0"][0], 1),
        (at["0 1B0"][1], 0),
    ]


def working(**in_ops):
    names = {f"{name}_working_bytes": n_bytes for name, n_bytes in in_ops.items()}
    return replace(FIRST, **names), replace(SECOND, extra_input_bytes=1.0, **names)


def test_what_an_op_needs_while_it_runs():
    one = Schedule.from_rank_orders(["0F0 1F0 1B0 0B0"]).lower(1)
    costs = working(forward=2.0, backward=5.0)
    found = simulate(one, costs, UNIT).memory(0, "working")
    assert found == [(0, 2), (2, 2), (3, 5), (5, 5), (8, 0)]
    again = simulate(one, recomputing(costs, "all"), UNIT).memory(0, "working")
    assert again == [(3, 5), (6, 5), (11, 0)]
    # All of it, in the backward.
    more = recomputing(working(forward=7.0, backward=5.0), "all")
    assert simulate(one, more, UNIT).memory(0, "working") == [(3, 7), (6, 7), (11, 0)]


def test_what_goes_from_stage_to_stage_is_held_until_it_is_used():
    """A gradient by who has made it, then by who waits for it; outputs that nobody keeps, too."""
    costs = working(forward=0.0, backward=0.0)
    apart = simulate(catalog.gpipe(2, 1).lower(1), costs, SLOW)
    sent = when(apart, "send")
    for rank, name, n_bytes in ((0, "activation", 1), (1, "activation gradient", 6)):
        start, end = sent[f"{rank} {name}"]
        assert apart.memory(rank, "working") == [(start, n_bytes), (end, 0)]
    assert when(apart, "receive")["0 activation gradient"][1] == when(apart)["0 0B0"][0]
    waiting = Schedule.from_rank_orders(["0F0 0F1 1F0 1B0 1F1 0B0 1B1 0B1"])
    together = simulate(waiting.lower(1), costs, UNIT)
    starts = {name: start for name, (start, _) in when(together).items()}
    ends = {name: end for name, (_, end) in when(together).items()}
    assert together.memory(0, "working") == [(ends["0 1B0"], 6), (starts["0 0B0"], 0)]
    made = [(ends["0 0F0"], 1), (ends["0 0F1"], 2)]
    assert together.memory(0, "stage inputs") == [
        *made,
        (ends["0 1B0"], 1),
        (ends["0 1B1"], 0),
    ]


def test_who_updates_a_stage_keeps_the_state_of_its_optimizer():
    schedule = catalog.data_parallel(2, state="sharded")
    state = [5.0, 7.0]
    sharded = simulate(schedule.lower(2), (FIRST, SECOND), UNIT, state)
    assert {sharded.peak_memory(rank, "optimizer") for rank in range(2)} == set(state)
    whole = simulate(catalog.data_parallel(2).lower(2), (FIRST, SECOND), UNIT, state)
    without = simulate(catalog.data_parallel(2).lower(2), (FIRST, SECOND), UNIT)
    assert [whole.peak_memory(r) - without.peak_memory(r) for r in range(2)] == [12, 12]
