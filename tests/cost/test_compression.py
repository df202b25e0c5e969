"""Bytes of compressed messages, and the memory of what they lost."""

import pytest

from toolkit.cost import UNIT, StageCost, compressed_costs, simulate
from toolkit.cost.compression import quantized_bytes
from toolkit.cost.timeline import GRADIENTS
from toolkit.errors import UserError
from toolkit.schedule import catalog

COSTS = (StageCost(1.0, 2.0, parameter_bytes=4000.0, statistics_bytes=12.0),) * 2


@pytest.mark.parametrize(
    ("n_numbers", "bits", "n_bytes"),
    [(0, 8, 0), (1, 8, 5), (256, 8, 260), (257, 8, 265), (257, 4, 8 + 129), (1000, 4, 516)],
)
def test_bytes_by_hand(n_numbers, bits, n_bytes):
    assert quantized_bytes(n_numbers, bits) == n_bytes


@pytest.mark.parametrize(("compression", "n_bytes"), [("int8", 1016 + 12), ("int4", 516 + 12)])
def test_simulated_bytes_and_memory(compression, n_bytes):
    """CDP-v1 on 2 ranks: rank 0 hands on the sums of both stages, and keeps what they lost."""
    program = catalog.cyclic(2, 1).lower(4).verify()
    exact = simulate(program, COSTS, UNIT)
    compressed = simulate(program, compressed_costs(COSTS, compression), UNIT)
    sums_sent = [span.bytes for span in compressed.spans if span.bytes == n_bytes]
    assert sums_sent
    saved = exact.bytes_sent()[0] - compressed.bytes_sent()[0]
    assert saved == 4 * 2 * (4012 - n_bytes)
    kept_bytes = [compressed.memory(rank, GRADIENTS)[-1][1] for rank in (0, 1)]
    assert kept_bytes == [8000, 0]


def test_refuses_other_compressions():
    assert compressed_costs(COSTS, "none") is COSTS
    with pytest.raises(UserError, match="int2"):
        compressed_costs(COSTS, "int2")


def test_16_bits_halve_gradients_and_weights_and_keep_no_errors():
    (cost, _) = compressed_costs(COSTS, "bf16")
    assert (cost.sent_gradient_bytes, cost.sent_weight_bytes) == (2012, 2000)
    assert cost.error_bytes == 0
