"""Bytes of compressed messages, and the memory of what they lost."""

from dataclasses import replace
from math import inf

import pytest

from toolkit.cost import (
    UNIT,
    Hardware,
    StageCost,
    compressed_costs,
    simulate,
)
from toolkit.cost.compression import (
    BLOCK_CODES,
    LOW_RANK,
    accuracy_class,
    coarseness,
)
from toolkit.cost.timeline import GRADIENTS, WEIGHTS
from toolkit.errors import UserError
from toolkit.schedule import catalog

COSTS = (StageCost(1.0, 2.0, parameter_bytes=4000.0, statistics_bytes=12.0),) * 2


@pytest.mark.parametrize(
    ("n_numbers", "compression", "n_bytes"),
    [
        (0, "int8", 0),
        (1, "int8", 5),
        (256, "int8", 260),
        (257, "int8", 265),
        (257, "int4", 8 + 129),
        (1000, "int4", 516),
        (0, "topk", 0),
        (256, "topk", 4 + 16 * 2),
        (257, "topk", 2 * (4 + 16 * 2)),
    ],
)
def test_bytes_of_blocks_by_hand(n_numbers, compression, n_bytes):
    assert BLOCK_CODES[compression].n_bytes(n_numbers) == n_bytes


@pytest.mark.parametrize(
    ("matrices", "n_bytes"),
    [
        ([], 0),
        ([(100, 1)], 400),  # a vector, as it is
        ([(16, 16)], 1024),  # factors of 4 columns would have half as many numbers
        ([(17, 16)], 4 * 4 * (17 + 16)),
        ([(2, 100), (100, 30)], 4 * (200 + 4 * 130)),
    ],
)
def test_bytes_of_low_rank_by_hand(matrices, n_bytes):
    assert LOW_RANK.n_bytes(matrices) == n_bytes


def test_low_rank_needs_shapes():
    with pytest.raises(UserError, match="low_rank"):
        compressed_costs(COSTS, "low_rank")
    (cost, _) = compressed_costs(
        [replace(cost, matrices=((100, 10),)) for cost in COSTS], "low_rank"
    )
    assert cost.compressed_gradient_bytes == 4 * 4 * 110 + 12
    assert cost.compressed_weight_bytes == 4 * 4 * 110
    (cost, _) = compressed_costs(
        [replace(cost, matrices=((100, 10),)) for cost in COSTS],
        "low_rank",
        state="sharded",
    )
    assert cost.compressed_weight_bytes == 1016  # in 8 bits


def test_products_of_low_rank_take_time():
    (exact, _) = [replace(cost, matrices=((100, 10),)) for cost in COSTS]
    (coded, _) = compressed_costs([exact] * 2, "low_rank")
    slow = Hardware(
        "slow arithmetic", flops=1e3, memory_bandwidth=1e12, link_bandwidth=1e9
    )
    forward, backward = exact.seconds(slow)
    # 7 products of 1,000 numbers with 4 columns.
    assert coded.seconds(slow) == (forward, backward + 7 * 2 * 4000 / 1e3)


@pytest.mark.parametrize(
    ("compression", "n_passes"),
    [("int8", 46.7), ("int4", 51.4), ("topk", 32.7)],
)
def test_codes_of_blocks_take_time(compression, n_passes):
    exact = COSTS[0]
    (coded, _) = compressed_costs(COSTS, compression)
    slow = Hardware("slow memory", flops=1e12, memory_bandwidth=1e3, link_bandwidth=1e9)
    forward, backward = exact.seconds(slow)
    assert coded.seconds(slow) == pytest.approx((forward, backward + n_passes * 4))
    # A worker hands its sum on once, however many micro-batches it accumulates.
    shared = (forward, backward + n_passes)
    assert coded.seconds(slow, accumulate=4) == pytest.approx(shared)
    # Numbers of 16 bits are encoded as 32-bit ones.
    (half, _) = compressed_costs(COSTS, compression, item_bytes=2)
    assert half.seconds(slow) == pytest.approx((forward, backward + n_passes * 8))


def test_accumulated_microbatches_share_the_codes_of_their_sum():
    slow = Hardware("slow memory", 1.0, memory_bandwidth=1e3, link_bandwidth=inf)
    exact = [replace(cost, statistics_bytes=0.0) for cost in COSTS]
    coded = compressed_costs(exact, "int8")

    def backward_seconds(program, costs):
        spans = simulate(program, costs, slow).spans
        backwards = [span for span in spans if span.rank == 0 and span.computed == "B"]
        return sum(span.end - span.start for span in backwards)

    for accumulate in (1, 3):
        program = catalog.cyclic(2, 1, accumulate=accumulate).lower(6).verify()
        added = backward_seconds(program, coded) - backward_seconds(program, exact)
        # Two stages in each of 6 steps.
        assert added == pytest.approx(2 * 6 * 46.7 * 4)


@pytest.mark.parametrize(
    ("compression", "n_bytes"),
    [("int8", 1016 + 12), ("int4", 516 + 12), ("topk", 144 + 12)],
)
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


@pytest.mark.parametrize(
    ("compression", "state", "n_bytes"),
    [
        ("int8", "replicated", 1016),
        ("int4", "replicated", 516),
        ("topk", "replicated", 144),
        ("int8", "sharded", 1016),
        ("int4", "sharded", 1016),  # no differences, so weights keep 8 bits
    ],
)
def test_simulated_bytes_of_weights(compression, state, n_bytes):
    program = catalog.cyclic(2, 1, state=state).lower(4).verify()
    compressed = compressed_costs(COSTS, compression, state=state)
    spans = simulate(program, compressed, UNIT).spans
    sent = {span.bytes for span in spans if span.name == "weights"}
    assert sent == {n_bytes}


def test_memory_of_weights_by_hand():
    """CDP-v2 on 2 ranks, stage 1, which both read fresh, by the times of its versions::

    owner, rank 1    exact weights, and the versions that travel
    rank 0           freed 0, and keeps it until 1 comes, and so on: one more, now and then
    """
    schedule = catalog.cyclic(2, "freshest")
    program = schedule.lower(5).verify()
    exact = simulate(program, COSTS, UNIT)
    compressed = simulate(program, compressed_costs(COSTS, "int8"), UNIT)
    assert {schedule.owners[stage] for stage in (0, 1)} == {1}

    def at(timeline, rank, when):
        values = [
            value for time, value in timeline.memory(rank, WEIGHTS) if time <= when
        ]
        return values[-1]

    times = sorted({time for time, _ in compressed.memory(0, WEIGHTS)})
    # The same messages take less time, so both are compared at the start and for the peak.
    assert at(compressed, 1, 0) - at(exact, 1, 0) == 2 * 4000
    assert (
        compressed.peak_memory(1, WEIGHTS) == exact.peak_memory(1, WEIGHTS) + 2 * 4000
    )
    assert compressed.peak_memory(0, WEIGHTS) == exact.peak_memory(0, WEIGHTS)
    # Never without a base: what rank 0 has freed stays until the next version has come.
    assert min(at(compressed, 0, time) for time in times) >= 2 * 4000
    assert min(at(exact, 0, time) for time in times) < 2 * 4000


def test_classes_of_accuracy():
    levels = [
        coarseness(name)
        for name in ("none", "fp16", "bf16", "int8", "int4", "topk", "low_rank")
    ]
    assert levels == [0, 1, 1, 2, 3, 4, 5]
    replicated = accuracy_class("int8", is_late=True)
    sharded = accuracy_class("int8", is_late=True, state="sharded")
    assert sharded.startswith(replicated)
    assert sharded != replicated
    assert accuracy_class("none", is_late=True, state="sharded") == "late weights"


def test_refuses_other_compressions():
    assert compressed_costs(COSTS, "none") is COSTS
    with pytest.raises(UserError, match="int2"):
        compressed_costs(COSTS, "int2")


def test_16_bits_halve_gradients_and_weights_and_keep_no_errors():
    (cost, _) = compressed_costs(COSTS, "bf16")
    assert (cost.sent_gradient_bytes, cost.sent_weight_bytes) == (2012, 2000)
    assert cost.error_bytes == 0


def test_a_class_of_accuracy_says_in_how_many_bits_activations_are():
    def words(compression, boundary_compression, is_late=False):
        return accuracy_class(
            compression, is_late=is_late, boundary_compression=boundary_compression
        )

    assert words("none", "int8") == "activations in 8 bits"
    assert words("none", "bf16") == "activations in 16 bits"
    assert words("none", "int4", is_late=True) == "late weights, activations in 4 bits"
    assert words("bf16", "none") == "16-bit messages"
    assert words("bf16", "int8") == "16-bit messages, activations in 8 bits"
