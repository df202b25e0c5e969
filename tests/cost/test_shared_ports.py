"""Ports whose bandwidth messages share: rates and ends by hand, and the simulator's use of them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.cost import UNIT, StageCost, simulate
from toolkit.cost.shared_ports import SharedPorts, fair_rates
from toolkit.schedule import catalog


def test_fair_rates():
    assert fair_rates(()) == ()
    assert fair_rates(((0, 1),)) == (1,)
    # 0 and 1 leave by port 0; 1 and 2 enter by port 11, and 3 takes what 2 leaves of port 2.
    rates = fair_rates(((0, 10), (0, 11), (2, 11), (2, 12), (3, 11)))
    assert rates == pytest.approx((2 / 3, 1 / 3, 1 / 3, 2 / 3, 1 / 3))


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(5, 9)), max_size=12))
def test_rates_fill_ports_and_no_more(pairs):
    rates = fair_rates(tuple(pairs))
    users = {
        port: [k for k, own in enumerate(pairs) if port in own] for port in range(10)
    }
    load = {port: sum(rates[k] for k in users[port]) for port in users}
    assert max(load.values()) <= 1 + 1e-9
    # Each is held up by a full port on which none is faster.
    for k, own in enumerate(pairs):
        held_up = [port for port in own if load[port] > 1 - 1e-9]
        assert any(
            all(rates[j] <= rates[k] + 1e-9 for j in users[port]) for port in held_up
        )


def test_ends():
    ports = SharedPorts()
    ports.begin(0.0, {1: (2.0, (0, 5)), 2: (3.0, (0, 6))})
    assert ports.next_end() == 4.0  # each at half of the rate
    ports.begin(1.0, {3: (0.5, (1, 6))})
    assert ports.next_end() == 2.0
    assert ports.end(2.0) == [3]
    assert ports.end(ports.next_end()) == [1]
    assert ports.next_end() == pytest.approx(5.0)  # 3 seconds of work of 5: never idle
    assert ports.end(ports.next_end()) == [2]
    assert ports.next_end() == float("inf")


def sends(schedule, *, shared, **links):
    """Start and end of each message, by sender, receiver, name and stage."""
    cost = StageCost(
        0.0, 0.0, parameter_bytes=1.0, forward_seconds=1.0, backward_seconds=2.0
    )
    machine = replace(UNIT, shared_ports=shared, **(links or {"link_bandwidth": 0.5}))
    found = simulate(schedule.lower(4).verify(), (cost,) * schedule.n_stages, machine)
    spans = [span for span in found.spans if span.lane == "send"]
    return {(s.rank, s.peer, s.name, s.stage, s.step): (s.start, s.end) for s in spans}


@pytest.mark.parametrize("shared", [False, True])
def test_a_latency_occupies_a_port_as_bytes_do(shared):
    schedule = catalog.cyclic(3, "freshest")
    bytes_only = sends(schedule, shared=shared)
    assert sends(schedule, shared=shared, link_latency=2.0) == bytes_only
    both = sends(schedule, shared=shared, link_latency=1.0, link_bandwidth=1.0)
    assert both == bytes_only


def test_messages_of_a_port_take_longer_together():
    """In CDP-v2 rank 2 sends each stage to ranks 0 and 1, which need it at different times."""
    schedule = catalog.cyclic(3, "freshest")
    alone, together = (sends(schedule, shared=shared) for shared in (False, True))
    assert alone.keys() == together.keys()
    assert {end - start for start, end in alone.values()} == {2.0}
    seconds = [end - start for start, end in together.values()]
    assert min(seconds) == 2.0 < max(seconds)


def test_one_message_at_a_time_is_as_before():
    schedule = catalog.one_f_one_b(2, 4)  # two ranks: a port has one peer
    assert sends(schedule, shared=True) == sends(schedule, shared=False)
    schedule = catalog.data_parallel(3)
    assert sends(schedule, shared=True) == sends(schedule, shared=False)
