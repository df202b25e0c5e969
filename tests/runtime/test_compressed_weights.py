"""Weights that are handed on as codes: the reference, the same bits everywhere, feedback."""

import copy

import pytest
import torch
from torch.nn import functional as F

from tests.runtime import compressed_reference, models, reference
from tests.runtime.conform import sgd
from toolkit.cost.compression import MESSAGE_CODES
from toolkit.errors import UserError
from toolkit.runtime import SingleProcess
from toolkit.runtime.compressed_form import CODES
from toolkit.runtime.compressed_weights import WeightCompressor
from toolkit.runtime.message_layout import Layout, Layouts
from toolkit.runtime.quantization import dequantize
from toolkit.runtime.rank import Rank
from toolkit.schedule import Action, Buffer, Instruction, catalog

INT8, INT4 = MESSAGE_CODES["int8"], MESSAGE_CODES["int4"]
SCHEDULES = {
    "v1": catalog.cyclic(3, 1),
    "v1 rotated": catalog.cyclic(3, 1, chains="rotated"),
    "v1 by 5 workers": catalog.cyclic(5, 1, n_stages=2),
    "v1 late": catalog.cyclic(2, 2),
    "v1 and model parallel": catalog.cyclic(3, 1, "per_stage_and_microbatch"),
    "v2": catalog.cyclic(3, "freshest"),
    "v2 accumulating": catalog.cyclic(2, accumulate=2),
    "v2 and model parallel": catalog.cyclic(3, "freshest", "per_stage_and_microbatch"),
    "v1 sharded": catalog.cyclic(3, 1, state="sharded"),
    "v2 sharded": catalog.cyclic(3, "freshest", state="sharded"),
    "v1 circulating": catalog.cyclic(3, 1, state="circulating"),
}
HANDS_ON = [
    name for name in SCHEDULES if "sharded" not in name and "circulating" not in name
]


def runtime_of(schedule, compression):
    stages = models.cut(models.residual_for(compression), schedule)
    return SingleProcess(
        stages,
        schedule,
        sgd,
        F.cross_entropy,
        order="scheduled",
        compression=compression,
    )


# The trajectory


@pytest.mark.parametrize("compression", MESSAGE_CODES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_follows_the_reference(name, compression):
    schedule = SCHEDULES[name]
    runtime = runtime_of(schedule, compression)
    stage_of = models.stage_of(runtime.stages)
    batches = models.make_batches(schedule.n_microbatches)
    expected = compressed_reference.trajectory(
        models.residual_for(compression),
        stage_of,
        schedule,
        batches,
        reference.sgd,
        compression,
    )
    for n_steps, states in ((3, expected[:3]), (2, expected[3:])):  # two programs
        start = runtime.steps_done
        list(runtime.run(batches[start : start + n_steps]))
        models.assert_same(runtime.module().state_dict(), states[-1], 1e-9, 1e-10)


@pytest.mark.parametrize("name", SCHEDULES)
def test_all_ranks_compute_with_the_same_bits(name, monkeypatch):
    """Of a version each rank has its own copy, equal to the owner's."""
    read = {}
    forward = Rank._forward

    def noted(rank, i):
        copies = read.setdefault((i.stage, i.version), {})
        copies[id(rank)] = {
            name: x.clone() for name, x in rank.weights[i.weights].items()
        }
        forward(rank, i)

    monkeypatch.setitem(Rank.execute.__globals__["_METHODS"], Action.FORWARD, noted)
    schedule = SCHEDULES[name]
    runtime = runtime_of(schedule, "int4")
    list(runtime.run(models.make_batches(schedule.n_microbatches)))
    n_compared = 0
    for copies in read.values():
        first, *others = copies.values()
        for other in others:
            models.assert_same(other, first, 0, 0)
            n_compared += 1
    assert n_compared > len(read) / 2


def test_pipelines_hand_on_no_weights():
    for schedule in (catalog.pipedream_2bw(2, 3), catalog.cyclic(3, 1, "per_stage")):
        with pytest.raises(UserError, match="bf16"):
            runtime_of(schedule, "int8")


# The state


@pytest.mark.parametrize("name", ["v1 rotated", "v2", "v2 sharded", "v1 circulating"])
def test_a_state_has_what_travels_and_the_exact_weights(name):
    schedule = SCHEDULES[name]
    batches = models.make_batches(schedule.n_microbatches, 6)
    runtime = runtime_of(schedule, "int8")
    list(runtime.run(batches[:3]))
    state = runtime.state_dict()
    models.assert_same(state["model"], runtime.module().state_dict(), 0, 0)
    for versions in state["versions"]:
        travelling = versions[3]
        exact = {name: state["model"][name] for name in travelling}
        difference = [(exact[name] - travelling[name]).abs().max() for name in exact]
        assert 0 < max(difference) < 0.01
    list(runtime.run(batches[3:]))
    ended = runtime.state_dict()
    resumed = runtime_of(schedule, "int8")
    resumed.load_state_dict(copy.deepcopy(state))
    list(resumed.run(batches[3:]))
    torch.testing.assert_close(resumed.state_dict(), ended, rtol=0, atol=0)


def test_refuses_messages_of_another_training():
    runtime = runtime_of(SCHEDULES["v2 sharded"], "int8")
    state = runtime.state_dict()
    for messages in (
        {2: {0: {}}},
        {2: {9: {CODES: torch.zeros(3, dtype=torch.uint8)}}},
        {2: {0: {CODES: torch.zeros(10**5, dtype=torch.uint8)}}},
        {2: {0: {CODES: torch.zeros(3)}}},
        {7: {0: {CODES: torch.zeros(3, dtype=torch.uint8)}}},
    ):
        ranks = {0: {"errors": {}, "weights": messages}}
        with pytest.raises(UserError, match="rank 0"):
            runtime.load_state_dict(state | {"ranks": ranks})
    runtime.load_state_dict(state)


def test_takes_one_schedule():
    runtime = runtime_of(SCHEDULES["v1"], "int8")
    with pytest.raises(UserError, match="bf16"):
        runtime.set_schedule(SCHEDULES["v2"])


# One message

OWNED = {0: {}}


def weights_of(numbers):
    return {"w": numbers.clone(), "phase": torch.complex(numbers[:3], numbers[:3])}


@pytest.mark.parametrize("code", [INT8, INT4], ids=["int8", "int4"])
def test_differences_by_hand(code):
    """Two messages, on the owner and after a chain of two receivers."""
    generator = torch.Generator().manual_seed(code.bits)
    first, second, third = torch.randn(3, 600, generator=generator, dtype=torch.float64)
    owner = WeightCompressor(code, [0], differences=True)
    receivers = [WeightCompressor(code, [], differences=True) for _ in range(2)]

    def rounded(message):
        return dequantize(message.tensors[CODES], 600, code, torch.float64)

    hat = weights_of(first)
    copies = [weights_of(first), weights_of(first)]
    lost = []
    for version, numbers in ((1, second), (2, third)):
        key = 0, version
        before = hat["w"]
        hat = owner.encode(key, weights_of(numbers), hat)
        message = owner.messages[key]
        torch.testing.assert_close(hat["w"], before + rounded(message), rtol=0, atol=0)
        for index, receiver in enumerate(receivers):
            copies[index] = receiver.receive(key, message, copies[index])
            message = receiver.messages[key]
            models.assert_same(copies[index], hat, 0, 0)
        lost.append((numbers - hat["w"]).abs().max())
        assert torch.equal(hat["phase"], weights_of(numbers)["phase"])
    # What a message lost is in the next: the error stays that of one message.
    largest_code = 2 ** (code.bits - 1) - 1
    largest_difference = (
        2 * torch.stack([first, second, third]).abs().max() * (1 + 1 / 7)
    )
    assert max(lost) <= largest_difference / largest_code / 2


def test_a_receiver_keeps_what_the_next_message_adds_to():
    receiver = WeightCompressor(INT8, [], differences=True)
    owner = WeightCompressor(INT8, [0], differences=True)
    start = weights_of(torch.arange(4.0))
    owner.encode((0, 1), weights_of(torch.arange(4.0) + 1), start)
    receiver.free((0, 0), start, is_newest=True)
    found = receiver.receive((0, 1), owner.messages[0, 1], None)
    torch.testing.assert_close(found["w"], torch.arange(4.0) + 1)
    assert not receiver.bases
    receiver.free((0, 0), start, is_newest=False)  # the next one has come
    assert not receiver.bases


def test_messages_of_a_sharded_state_have_8_bits():
    owner = WeightCompressor(INT4, [0], differences=False)
    versions = {0: {3: weights_of(torch.linspace(-1, 1, 300))}, 1: {3: {}}}
    exact = versions[0][3]
    owner.encode_all(versions)
    assert len(owner.messages[0, 3].tensors[CODES]) == 300 + 2 * 4
    torch.testing.assert_close(versions[0][3]["w"], exact["w"], rtol=0, atol=0.5 / 127)
    assert not torch.equal(versions[0][3]["w"], exact["w"])


def test_layouts_carry_exact_weights_between_programs():
    weights = {"w": torch.randn(20), "phase": torch.zeros(2, dtype=torch.complex64)}
    exact = Layouts((), (), (), (Layout.of(weights),), (Layout.of(weights),))
    layouts = exact.with_compression(INT4, INT8)
    send = Instruction(0, Action.SEND, 0, version=1, buffer=Buffer.WEIGHTS, peers=(1,))
    assert layouts.of(send).n_bytes == 4 + 20 + 16
    assert layouts.with_exact_weights().of(send).n_bytes == 80 + 16
    owner = WeightCompressor(INT4, [0], differences=False)
    hat = owner.encode((0, 1), weights, None)
    flat = layouts.pack(send, owner.messages[0, 1], torch.device("cpu"))
    models.assert_same(layouts.unpack(send, flat).decoded(None), hat, 0, 0)


# Convergence


def found_weights(compression, error_feedback=True):
    """The weights after many steps of CDP-v1 on 2 ranks.

    The first weight swings around 0, so differences of the second, which goes to 0.5, are small
    compared with its own. Only the owner has a gradient of the second, so no message of sums
    rounds it.
    """
    inputs = torch.tensor(
        [[1.0, 0.0], [0.0, 0.0], [1.0, 0.0], [0.0, 1.0]], dtype=torch.float64
    )
    targets = torch.tensor([[10.0], [0.0], [10.0], [0.5]], dtype=torch.float64)
    swinging = torch.tensor([[-10.0], [0.0], [-10.0], [0.5]], dtype=torch.float64)
    batches = [(inputs, targets), (inputs, swinging)] * 200
    return models.two_weights(
        batches, compression, "weights", error_feedback=error_feedback
    )


def test_error_feedback_of_weights_is_needed():
    """Without it passes never see the second weight change, and it runs away."""
    assert abs(found_weights("none")[1] - 0.5) < 0.01
    assert abs(found_weights("int4")[1] - 0.5) < 0.1
    assert abs(found_weights("int4", error_feedback=False)[1] - 0.5) > 1
