"""Messages of codes between ranks: the trajectory, the state, bytes; and errors of sums."""

import copy

import pytest
import torch
from torch.nn import functional as F

from tests.runtime import models
from tests.runtime.conform import sgd
from tests.thorough import THOROUGH
from toolkit.cost import Hardware, compressed_costs, profile, simulate
from toolkit.cost.compression import BLOCK, LOW_RANK, MESSAGE_CODES
from toolkit.errors import UserError
from toolkit.runtime import Distributed, SingleProcess, join, launch
from toolkit.runtime.compressed_sums import SumCompressor
from toolkit.runtime.low_rank import factor, multiply
from toolkit.runtime.quantization import dequantize, quantize
from toolkit.runtime.updater import GradientSum
from toolkit.schedule import Action, Buffer, Instruction, after, catalog

SCHEDULES = {
    "v1": catalog.cyclic(3, 1),
    "v1 rotated": catalog.cyclic(3, 1, chains="rotated"),
    "v2": catalog.cyclic(3, "freshest"),
    "v2 sharded": catalog.cyclic(3, "freshest", state="sharded"),
    "v1 circulating": catalog.cyclic(3, 1, state="circulating"),
    "v2 and model parallel": catalog.cyclic(2, "freshest", "per_stage_and_microbatch"),
}
CASES = [
    ("v1", "int8"),
    ("v1 rotated", "int4"),
    ("v2 sharded", "int8"),
    ("v2", "topk"),
    ("v2", "low_rank"),
]
if THOROUGH:
    CASES += [
        ("v2", "int4"),
        ("v1 circulating", "int8"),
        ("v2 sharded", "int4"),
        ("v2 and model parallel", "int4"),
        ("v1 circulating", "topk"),
        ("v1 rotated", "low_rank"),
        ("v2 sharded", "low_rank"),
    ]
# Gradients, weights and activations, all in few bits.
ALL = "v2 and model parallel"
N_STEPS, N_BEFORE = 6, 3


def token_mean(outputs, targets):
    """A sum with a count, which travels with the gradients."""
    return F.cross_entropy(outputs, targets, reduction="sum"), torch.tensor(
        float(len(targets))
    )


def trained(schedule, make, loss=F.cross_entropy, **options):
    """Weights after all steps; the state after some; weights after all, resumed from there."""
    batches = models.make_batches(schedule.n_microbatches, N_STEPS)

    def made():
        model = models.residual_for(options.get("compression"))
        stages = models.cut(model, schedule)
        return make(stages, schedule, sgd, loss, **options)

    runtime = made()
    list(runtime.run(batches[:N_BEFORE]))
    state = runtime.state_dict()
    list(runtime.run(batches[N_BEFORE:]))
    resumed = made()
    resumed.load_state_dict(state)
    list(resumed.run(batches[N_BEFORE:]))
    return weights(runtime), state, weights(resumed), kept_of(resumed, runtime)


def weights(runtime):
    return copy.deepcopy(runtime.module().state_dict())


def kept_of(*runtimes):
    """What each runtime keeps for the next messages: errors of sums, and weights that travel."""
    found = []
    for runtime in runtimes:
        named = {}
        state = runtime.state_dict()
        for stage, versions in enumerate(state["versions"]):
            for version, tensors in versions.items():
                for name, tensor in tensors.items():
                    named[f"{stage} {version} {name}"] = tensor
        for rank, entries in state["ranks"].items():
            for stage, tensors in entries["errors"].items():
                for receiver, error in tensors.items():
                    named[f"{rank} {stage} {receiver}"] = error
        found.append(named)
    return found


def job():
    """What this rank finds."""
    world = join(device="cpu")
    found = {}
    for name, compression in CASES:
        found[name, compression] = trained(
            SCHEDULES[name], Distributed, world=world, compression=compression
        )
    found["counted"] = trained(
        SCHEDULES["v1"], Distributed, token_mean, world=world, compression="int8"
    )
    found["in order"] = trained(
        SCHEDULES["v1 rotated"],
        Distributed,
        world=world,
        compression="int4",
        overlap=False,
    )
    if THOROUGH:
        found["all"] = trained(
            SCHEDULES[ALL],
            Distributed,
            world=world,
            compression="int4",
            boundary_compression="int8",
        )
    found["bytes"] = {case: sent(world, *case) for case in (*CASES, ("v1", "none"))}
    return found


def sent(world, name, compression):
    """Bytes that this rank sends in all steps; those predicted of all ranks."""
    schedule = SCHEDULES[name]
    stages = models.cut(models.residual_for(compression), schedule)
    runtime = Distributed(
        stages,
        schedule,
        sgd,
        F.cross_entropy,
        world=world,
        compression=compression,
        record=N_STEPS,
    )
    list(runtime.run(models.make_batches(schedule.n_microbatches, N_STEPS)))
    measured = [row["bytes_sent"] for row in runtime.measurements().by_rank()]
    x = torch.zeros(3, 1, 6, 6, dtype=torch.float64)
    costs = profile(models.cut(models.residual_for(compression), schedule), x)
    costs = compressed_costs(costs, compression, item_bytes=8, state=schedule.state)
    program = schedule.lower(N_STEPS).verify()
    timeline = simulate(program, costs, Hardware("test", 1e9, 1e9, 1e9))
    return measured, [*timeline.bytes_sent()]


@pytest.fixture(scope="module")
def found():
    return launch(job, 3)


@pytest.fixture(scope="module")
def alone():
    """The same trajectories in this process."""
    options = {"order": "scheduled"}
    by_case = {}
    for name, compression in CASES:
        by_case[name, compression] = trained(
            SCHEDULES[name], SingleProcess, compression=compression, **options
        )
    by_case["counted"] = trained(
        SCHEDULES["v1"], SingleProcess, token_mean, compression="int8", **options
    )
    by_case["in order"] = by_case["v1 rotated", "int4"]
    if THOROUGH:
        by_case["all"] = trained(
            SCHEDULES[ALL],
            SingleProcess,
            compression="int4",
            boundary_compression="int8",
            **options,
        )
    return by_case


@pytest.mark.parametrize(
    "case", [*CASES, "counted", "in order", *["all"] * THOROUGH], ids=str
)
def test_ranks_follow_the_trajectory_of_one_process(found, alone, case):
    expected, state, resumed, (kept, _) = alone[case]
    models.assert_same(resumed, expected, 0, 0)
    assert kept
    for of_rank in found:
        ended, rank_state, resumed_there, (errors_resumed, errors_whole) = of_rank[case]
        models.assert_same(ended, expected, 1e-10, 1e-10)
        models.assert_same(resumed_there, ended, 0, 0)
        models.assert_same(errors_resumed, errors_whole, 0, 0)
        models.assert_same(errors_whole, kept, 1e-10, 1e-10)
        assert rank_state["ranks"].keys() == state["ranks"].keys()


@pytest.mark.parametrize("case", [*CASES, ("v1", "none")], ids=str)
def test_bytes_are_those_predicted(found, case):
    for of_rank in found:
        measured, predicted = of_rank["bytes"][case]
        assert measured == predicted
    assert sum(measured) > 0


def test_a_state_goes_from_ranks_to_one_process(found, alone):
    """The rank's state, continued in this process."""
    schedule = SCHEDULES["v1 rotated"]
    ended, state, *_ = found[1]["v1 rotated", "int4"]
    stages = models.cut(models.residual(), schedule)
    runtime = SingleProcess(
        stages, schedule, sgd, F.cross_entropy, order="scheduled", compression="int4"
    )
    runtime.load_state_dict(state)
    list(runtime.run(models.make_batches(3, N_STEPS)[N_BEFORE:]))
    models.assert_same(weights(runtime), ended, 1e-10, 1e-10)


# One message


SEND = Instruction(0, Action.SEND, stage=0, step=0, buffer=Buffer.GRADIENT, peers=(1,))


def total(numbers):
    return GradientSum({"w": numbers.clone(), "count": torch.tensor(3.0)})


@pytest.mark.parametrize("code", MESSAGE_CODES.values(), ids=MESSAGE_CODES)
def test_a_message_by_hand(code):
    """The first is the rounded sum; the second, that of the sum and what the first lost."""
    generator = torch.Generator().manual_seed(len(code.name))
    first, second = torch.randn(2, 20, 30, generator=generator, dtype=torch.float64)

    def rounded(numbers):
        if code == LOW_RANK:
            content = factor(numbers.flatten(), [(20, 30)], code)
            return multiply(content, [(20, 30)], code, torch.float64).view(20, 30)
        content = quantize(numbers.flatten(), code)
        return dequantize(content, 600, code, torch.float64).view(20, 30)

    compressor = SumCompressor(code)
    one = compressor.compress(SEND, total(first), {"w"}).decoded()
    other = compressor.compress(SEND, total(second), {"w"}).decoded()
    torch.testing.assert_close(one["w"], rounded(first), rtol=0, atol=0)
    torch.testing.assert_close(
        other["w"], rounded(second + first - rounded(first)), rtol=0, atol=0
    )
    assert one["count"] == 3
    # What has been sent differs from what should have been by one message's error.
    lost = compressor.errors[0][1].view(20, 30)
    torch.testing.assert_close(one["w"] + other["w"] + lost, first + second)
    assert lost.abs().max() > 0


def test_the_largest_numbers_of_each_block_travel():
    code = MESSAGE_CODES["topk"]
    numbers = torch.linspace(-1, 1, 2 * BLOCK + 5)[torch.randperm(2 * BLOCK + 5)]
    content = quantize(numbers, code)
    assert len(content) == code.n_bytes(len(numbers)) == 3 * (4 + 2 * 16)
    read = dequantize(content, len(numbers), code, numbers.dtype)
    for block, read_block in zip(numbers.split(BLOCK), read.split(BLOCK), strict=True):
        n_kept = min(len(block), 16)
        places = block.abs().topk(n_kept).indices
        half_a_scale = float(block.abs().max()) / 127 / 2
        torch.testing.assert_close(
            read_block[places], block[places], rtol=0, atol=1.01 * half_a_scale
        )
        assert read_block.count_nonzero() <= n_kept
        read_block[places] = 0
        assert not read_block.any()


def test_what_is_not_sent_is_sent_later():
    """A sum that stays the same arrives in full in the mean of many messages."""
    compressor = SumCompressor(MESSAGE_CODES["topk"])
    numbers = torch.linspace(0.1, 1, BLOCK)
    received = torch.zeros(BLOCK)
    n_messages = 400
    for _ in range(n_messages):
        received += compressor.compress(SEND, total(numbers), {"w"}).decoded()["w"]
    torch.testing.assert_close(received / n_messages, numbers, rtol=0, atol=0.05)


def test_a_sum_that_is_not_finite_leaves_no_error():
    compressor = SumCompressor(MESSAGE_CODES["int8"])
    broken = compressor.compress(
        SEND, total(torch.tensor([1.0, torch.inf])), {"w"}
    ).decoded()
    assert not broken["w"].isfinite().any()
    whole = compressor.compress(
        SEND, total(torch.tensor([1.0, 127.0])), {"w"}
    ).decoded()
    assert whole["w"].tolist() == [1.0, 127.0]


# Convergence


def found_weights(compression, error_feedback=True):
    """Two weights after many steps of CDP-v1 on 2 ranks. Rank 0 hands its sum on.

    The optimum is (0, 0.5). There the ranks' gradients of the first weight are large and opposite;
    only rank 0 has one of the second, which is small.
    """
    inputs = torch.tensor(
        [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 0.0]], dtype=torch.float64
    )
    targets = torch.tensor([[10.0], [0.5], [-10.0], [0.0]], dtype=torch.float64)
    return models.two_weights(
        [(inputs, targets)] * 300, compression, "sums", error_feedback=error_feedback
    )


def test_error_feedback_is_needed():
    """Without it the small gradient is lost for ever."""
    optimum = torch.tensor([0.0, 0.5], dtype=torch.float64)
    assert (found_weights("none") - optimum).norm() < 0.01
    assert (found_weights("int4") - optimum).norm() < 0.1
    assert (found_weights("int4", error_feedback=False) - optimum).norm() > 0.4


# Refused


def test_refuses_what_is_not_handed_on():
    def made(schedule, compression="int8", order="scheduled"):
        stages = models.cut(models.residual(), schedule)
        return SingleProcess(
            stages, schedule, sgd, F.cross_entropy, order=order, compression=compression
        )

    for schedule, message in (
        (catalog.data_parallel(2), "cdp_v1"),
        (catalog.data_parallel(2, state="sharded"), "cdp_v1"),
        (catalog.gpipe(2, 2), "GPipe"),
        (after([(catalog.cyclic(2), 2)], catalog.cyclic(2, 1)), "bf16"),
    ):
        with pytest.raises(UserError, match=message):
            made(schedule)
    with pytest.raises(UserError, match="scheduled"):
        made(catalog.cyclic(2, 1), order="grouped")
    with pytest.raises(UserError, match="fp16"):
        made(catalog.cyclic(2, 1), "fp16")


def test_refuses_the_errors_of_another_training(alone):
    _, state, *_ = alone["v1", "int8"]
    schedule = SCHEDULES["v1"]

    def load(changed, compression):
        stages = models.cut(models.residual(), schedule)
        SingleProcess(
            stages,
            schedule,
            sgd,
            F.cross_entropy,
            order="scheduled",
            compression=compression,
        ).load_state_dict(changed)

    with pytest.raises(UserError, match="int8"):
        load(state, "none")
    for ranks in ({0: {"buckets": []}}, {0: {"errors": {0: {1: torch.zeros(10**6)}}}}):
        with pytest.raises(UserError, match="rank 0"):
            load(state | {"ranks": ranks}, "int8")
    load({name: entry for name, entry in state.items() if name != "ranks"}, "int8")
