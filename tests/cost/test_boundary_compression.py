"""Bytes, memory and time of activations that travel compressed."""

from dataclasses import replace

import pytest

from toolkit.cost import UNIT, StageCost, boundary_costs, simulate
from toolkit.cost.timeline import WORKING
from toolkit.errors import UserError
from toolkit.schedule import catalog

PAIR = (
    StageCost(
        1.0,
        2.0,
        output_bytes=4000.0 + 8.0 + 40.0,
        output_activations=((1000, 4), (4, 2)),
    ),
    # The gradient of 10 further numbers is exact; integers have none.
    StageCost(
        1.0,
        2.0,
        input_bytes=4000.0 + 8.0 + 40.0 + 24.0,
        integer_input_bytes=24.0,
        input_activations=((1000, 4), (4, 2)),
    ),
)


@pytest.mark.parametrize(
    ("compression", "n_bytes"),
    [
        ("none", 4008 + 40),
        ("bf16", 2000 + 8 + 40),
        ("int8", (4 * 4 + 1000) + (4 + 4) + 40),
        ("int4", (4 * 4 + 500) + (4 + 2) + 40),
    ],
)
def test_bytes_of_activations_by_hand(compression, n_bytes):
    """1F1B on 2 ranks: each way a message for each of 3 micro-batches. Memory is the same."""
    program = catalog.one_f_one_b(2, 3).lower(2).verify()
    exact = simulate(program, PAIR, UNIT)
    compressed = simulate(program, boundary_costs(PAIR, compression), UNIT)
    assert compressed.bytes_sent() == (2 * 3 * n_bytes, 2 * 3 * n_bytes)
    for rank in (0, 1):
        assert compressed.peak_memory(rank) == exact.peak_memory(rank)


def test_a_gradient_under_way_takes_its_memory_in_full():
    program = catalog.gpipe(2, 1).lower(1).verify()
    slow = replace(UNIT, link_bandwidth=1.0)
    compressed = simulate(program, boundary_costs(PAIR, "int4"), slow)
    assert compressed.peak_memory(1, WORKING) == 4000 + 8 + 40
    assert compressed.step_ends[-1] == 1 + 562 + 1 + 2 + 562 + 2


def test_numbers_of_16_bits_or_fewer_travel_as_they_are():
    numbers = (100, 4), (100, 2), (100, 1)
    cost = StageCost(1.0, 2.0, output_bytes=700.0, output_activations=numbers)
    (compressed,) = boundary_costs([cost], "bf16")
    assert compressed.sent_output_bytes == 200 + 200 + 100


def test_unknown_activations_are_one_tensor_of_32_bits():
    cost = StageCost(1.0, 2.0, input_bytes=2000.0, output_bytes=4000.0)
    (compressed,) = boundary_costs([cost], "int8")
    assert compressed.sent_output_bytes == 4 * 4 + 1000
    assert compressed.sent_input_gradient_bytes == 2 * 4 + 500


def test_codes_of_activations_take_time():
    slow = replace(UNIT, memory_bandwidth=4000.0)
    first, second = boundary_costs(PAIR, "int8")
    # 1,004 numbers of 4 bytes, which each stage writes in one pass and reads in the other.
    encode, decode = 16.8 * 1.004, 5.3 * 1.004
    assert first.seconds(slow) == pytest.approx((1 + encode, 2 + decode), rel=1e-3)
    assert second.seconds(slow) == pytest.approx((1 + decode, 2 + encode), rel=1e-3)
    # A forward that runs again sends nothing again.
    again = replace(first, recomputes=True)
    assert again.op_seconds(slow)[1] == pytest.approx(3 + decode, rel=1e-3)
    # Rounding to 16 bits takes none.
    (rounded, _) = boundary_costs(PAIR, "bf16")
    assert rounded.seconds(slow) == (1, 2)


def test_refuses_compressions_that_leave_numbers_out():
    assert boundary_costs(PAIR, "none") is PAIR
    with pytest.raises(UserError, match="topk"):
        boundary_costs(PAIR, "topk")
