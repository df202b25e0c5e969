"""Compressed activations between ranks: the trajectory, bytes, and what travels exact."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.runtime import models
from tests.runtime.conform import sgd
from tests.runtime.test_compressed_sums import token_mean, weights
from tests.thorough import THOROUGH
from toolkit.cost import UNIT, boundary_costs, profile, simulate
from toolkit.cost.compression import MESSAGE_CODES
from toolkit.errors import UserError
from toolkit.model import partition
from toolkit.runtime import Distributed, SingleProcess, StepOptions, join, launch
from toolkit.runtime.boundary_codes import BoundaryCodes
from toolkit.runtime.message_layout import Layout, MessageTensor
from toolkit.runtime.quantization import dequantize, quantize
from toolkit.schedule import Action, Buffer, Instruction, after, catalog

SCHEDULES = {
    "1F1B": catalog.one_f_one_b(2, 4),
    "v1 per stage": catalog.cyclic(2, 1, "per_stage"),
    # A tensor that skips a stage crosses several cuts.
    "interleaved": catalog.interleaved_1f1b(4, 2, 2),
    "GPipe": catalog.gpipe(2, 3),
    "zero bubble": catalog.zero_bubble(2, 3),
    "ZB-V": catalog.zb_v(4, 4),
}
CASES = [("1F1B", "int8"), ("v1 per stage", "int4")]
if THOROUGH:
    CASES += [
        ("1F1B", "none"),
        ("1F1B", "bf16"),
        ("interleaved", "int8"),
        ("GPipe", "int4"),
        ("zero bubble", "int8"),
        ("ZB-V", "bf16"),
    ]
N_STEPS, N_BEFORE = 4, 2
# In 16 bits by autocast, with recomputation, a count of the loss, and micro-batches of two sizes.
OTHERS = "1F1B, other options"
RECOMPUTED = StepOptions(precision="bf16", checkpoint="all")


def cut_batch(batch, n_samples):
    inputs, targets = batch
    return inputs[:n_samples].float(), targets[:n_samples]


def train(make, name, compression, **options):
    """Train; return the runtime."""
    schedule = SCHEDULES[name]
    stages = models.cut(models.residual(), schedule)
    runtime = make(
        stages,
        schedule,
        sgd,
        F.cross_entropy,
        boundary_compression=compression,
        **options,
    )
    list(runtime.run(models.make_batches(schedule.n_microbatches, N_STEPS)))
    return runtime


def train_otherwise(make, **options):
    """Weights, in 32 bits, after training with :data:`OTHERS`."""
    schedule = SCHEDULES["1F1B"]
    stages = models.cut(models.residual().float(), schedule)
    runtime = make(
        stages,
        schedule,
        sgd,
        token_mean,
        boundary_compression="int8",
        options=RECOMPUTED,
        **options,
    )
    first, second = models.make_batches(schedule.n_microbatches, 2)
    runtime.step(*cut_batch(first, 12))
    runtime.step(*cut_batch(second, 8))
    return weights(runtime)


def job():
    """What this rank finds: weights, and bytes sent by the ranks."""
    world = join(device="cpu")
    found = {}
    for name, compression in CASES:
        runtime = train(Distributed, name, compression, world=world, record=N_STEPS)
        measured = [row["bytes_sent"] for row in runtime.measurements().by_rank()]
        found[name, compression] = weights(runtime), measured
    found[OTHERS] = train_otherwise(Distributed, world=world)
    return found


@pytest.fixture(scope="module")
def found():
    return launch(job, 2)


# Against one process


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_have_the_bits_of_one_process(found, case):
    expected = weights(train(SingleProcess, *case, order="scheduled"))
    for of_rank in found:
        models.assert_same(of_rank[case][0], expected, 0, 0)


def test_also_with_other_options(found):
    """Autocast, recomputation, a counted loss, unlike micro-batches."""
    expected = train_otherwise(SingleProcess, order="scheduled")
    for of_rank in found:
        models.assert_same(of_rank[OTHERS], expected, 0, 0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bytes_are_those_predicted(found, case):
    name, compression = case
    schedule = SCHEDULES[name]
    example = torch.zeros(3, 1, 6, 6, dtype=torch.float64, device="meta")
    costs = profile(models.cut(models.residual(), schedule), example)
    program = schedule.lower(N_STEPS).verify()
    predicted = simulate(program, boundary_costs(costs, compression), UNIT).bytes_sent()
    whole = simulate(program, costs, UNIT).bytes_sent()
    for of_rank in found:
        _, measured = of_rank[case]
        assert measured == [*predicted]
    if compression != "none":
        assert 0 < sum(predicted) < sum(whole) / 3


def test_the_option_changes_what_is_trained_and_placement_on_one_rank_does_not():
    ended = {}
    for compression in ("none", "bf16", "int8", "int4"):
        runtime = train(SingleProcess, "1F1B", compression, order="scheduled")
        ended[compression] = weights(runtime)
    names = [*ended]
    for index, name in enumerate(names):
        for other in names[index + 1 :]:
            assert models.differ(ended[name], ended[other])
    plain = weights(train(SingleProcess, "1F1B", "none"))
    models.assert_same(ended["none"], plain)


def test_a_state_has_nothing_of_it():
    """Half the steps, a state, and the other half: the same bits."""
    whole = train(SingleProcess, "1F1B", "int4", order="scheduled")
    schedule = SCHEDULES["1F1B"]
    batches = models.make_batches(schedule.n_microbatches, N_STEPS)

    def made():
        stages = models.cut(models.residual(), schedule)
        return SingleProcess(
            stages,
            schedule,
            sgd,
            F.cross_entropy,
            order="scheduled",
            boundary_compression="int4",
        )

    first, second = made(), made()
    list(first.run(batches[:N_BEFORE]))
    state = first.state_dict()
    assert "ranks" not in state
    second.load_state_dict(copy.deepcopy(state))
    list(second.run(batches[N_BEFORE:]))
    models.assert_same(weights(second), weights(whole), 0, 0)


# Against plain torch


def rounded(tensor, compression):
    """What the receiver of a tensor reads."""
    if compression == "bf16":
        return tensor.bfloat16().double()
    code = MESSAGE_CODES[compression]
    content = quantize(tensor.flatten(), code)
    return dequantize(content, tensor.numel(), code, tensor.dtype).view(tensor.shape)


def two_layers():
    torch.manual_seed(3)
    layers = nn.Linear(7, 90), nn.Tanh(), nn.Linear(90, 4)
    return nn.Sequential(*layers).double()


@pytest.mark.parametrize("compression", ["bf16", "int8", "int4"])
def test_two_stages_as_plain_torch_trains_them(compression):
    """x' = Q(x) at the cut, and g' = Q(g) back; the optimizer has the mean of micro-batches."""
    generator = torch.Generator().manual_seed(4)
    batches = []
    for _ in range(3):
        inputs = torch.randn(10, 7, generator=generator, dtype=torch.float64)
        batches.append((inputs, torch.randint(4, (10,), generator=generator)))
    schedule = catalog.gpipe(2, 2)
    runtime = SingleProcess(
        partition(two_layers(), 2, batches[0][0][:5], ["2"]),
        schedule,
        lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        F.cross_entropy,
        order="scheduled",
        boundary_compression=compression,
    )
    list(runtime.run(batches))

    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for inputs, targets in batches:
        optimizer.zero_grad()
        for x, y in zip(inputs.chunk(2), targets.chunk(2), strict=True):
            activation = model[:2](x)
            received = rounded(activation.detach(), compression).requires_grad_()
            (F.cross_entropy(model[2](received), y) / 2).backward()
            activation.backward(rounded(received.grad, compression))
        optimizer.step()
    models.assert_same(weights(runtime), model.state_dict(), 1e-12, 1e-12)


# One message


def test_a_message_by_hand():
    """300 numbers are two blocks; a count, an integer and what is exact come first."""
    tensors = {
        0: torch.full((3, 100), 2.0),
        1: torch.arange(2),
        2: torch.tensor([0.1]),
        3: torch.tensor([1.0, -0.5], dtype=torch.bfloat16),
    }
    layout = Layout.of(tensors).coded({0, 1, 3}, "int8")
    code = MESSAGE_CODES["int8"]
    assert layout.tensors == (
        MessageTensor(1, (2,), torch.int64, torch.int64),
        MessageTensor(2, (1,), torch.float32, torch.float32),
        MessageTensor(0, (3, 100), torch.float32, torch.uint8, code),
        MessageTensor(3, (2,), torch.bfloat16, torch.uint8, code),
    )
    assert layout.n_bytes == 2 * 8 + 4 + (2 * 4 + 300) + (4 + 2)
    assert layout.whole_bytes == 2 * 8 + 4 + 300 * 4 + 2 * 2
    flat = layout.pack(tensors, torch.device("cpu"))
    assert flat[28:].tolist() == [127] * 300 + flat[328:332].tolist() + [127, 192]
    read = layout.unpack(flat)
    assert {place: tensor.dtype for place, tensor in read.items()} == {
        place: tensor.dtype for place, tensor in tensors.items()
    }
    torch.testing.assert_close(read[0], tensors[0])
    assert torch.equal(read[1], tensors[1])
    assert torch.equal(read[2], tensors[2])
    assert read[3].tolist() == [1.0, -0.50390625]  # -64 / 127, in 8 bits of fraction


@pytest.mark.parametrize("compression", ["bf16", "int8", "int4"])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_what_is_passed_on_is_rounded_once(compression, dtype):
    """A second message, with other tensors before it, changes no bit."""
    generator = torch.Generator().manual_seed(5)
    scales = 10.0 ** torch.randint(-2, 3, (64, 1), generator=generator)
    passed_on = (torch.randn(64, 100, generator=generator) * scales).to(dtype)
    other = torch.randn(77, generator=generator)
    codes = BoundaryCodes(compression, (frozenset(), {0}, {0, 1}))
    first, second = (
        Instruction(0, Action.SEND, stage, 0, 0, buffer=Buffer.ACTIVATION, peers=(1,))
        for stage in (0, 1)
    )
    (once,) = codes.received(first, (passed_on,))
    _, twice = codes.received(second, (other, once))
    assert torch.equal(once, twice)
    is_exact = compression == "bf16" and dtype.itemsize == 2
    assert torch.equal(once, passed_on) == is_exact


def test_numbers_that_are_not_finite_are_seen():
    """Loss scaling and the guard rely on it; other blocks stay as they are."""
    codes = BoundaryCodes("int8", (frozenset(), {0}))
    send = Instruction(0, Action.SEND, 0, 0, 0, buffer=Buffer.ACTIVATION, peers=(1,))
    numbers = torch.ones(2 * 256)
    numbers[3] = torch.inf
    (read,) = codes.received(send, (numbers,))
    assert not read[:256].isfinite().any()
    assert torch.equal(read[256:], numbers[256:])


class Crossing(nn.Module):
    """A weight that is used twice, a real input that skips, and integers, cross the cut."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layer = nn.Linear(6, 6)
        self.last = nn.Linear(6, 6)

    def forward(self, ids, mask):
        x = torch.tanh(self.layer(self.embed(ids))) * mask
        x = self.last(x) * mask + ids[..., None]
        return x @ self.embed.weight.T


def test_inputs_integers_and_tied_weights_travel_exact():
    example = torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 3, 1)
    stages = partition(Crossing(), 2, example, ["last"], check=False)
    boundary = stages.boundaries[1]
    kinds = [(part.dtype, part.batched) for part in boundary]
    assert (torch.int64, True) in kinds
    assert (torch.float32, False) in kinds
    assert kinds.count((torch.float32, True)) == 2
    (place,) = stages.activations(1)
    assert boundary[place].shape == (2, 3, 6)

    codes = BoundaryCodes.of(stages, "int4")
    ids = torch.arange(6).view(2, 3)
    count = torch.tensor(7.3)  # of the loss, behind gradients
    tensors = *stages[0](ids, torch.rand(2, 3, 1)), count
    for stage, buffer in ((0, Buffer.ACTIVATION), (1, Buffer.ACTIVATION_GRADIENT)):
        i = Instruction(0, Action.SEND, stage, 0, 0, buffer=buffer, peers=(1,))
        read = codes.received(i, tensors)
        is_exact = [torch.equal(*pair) for pair in zip(read, tensors, strict=True)]
        assert is_exact.count(False) == 1
        assert not is_exact[place]


# Refused


def made(schedule, compression="int8", **options):
    stages = models.cut(models.residual(), schedule)
    options = {"order": "scheduled", **options}
    return SingleProcess(
        stages,
        schedule,
        sgd,
        F.cross_entropy,
        boundary_compression=compression,
        **options,
    )


@pytest.mark.parametrize(
    ("schedule", "compression", "message"),
    [
        (catalog.gpipe(2, 2), "topk", "topk.*none, bf16, int8, int4"),
        (catalog.gpipe(2, 2), "fp16", "fp16.*none, bf16, int8, int4"),
        (catalog.data_parallel(2), "int8", "int8.*DP sends none.*per_stage"),
        (catalog.cyclic(2, state="sharded"), "bf16", "bf16.*sends none.*one_f_one_b"),
        (catalog.gradient_accumulation(2, 2), "int4", "sends none"),
    ],
)
def test_refuses_what_would_do_nothing(schedule, compression, message):
    with pytest.raises(UserError, match=message) as error:
        made(schedule, compression)
    assert "\n" not in str(error.value)


def test_refuses_runtimes_that_send_nothing():
    with pytest.raises(UserError, match="boundary_compression=int8 needs order=sched"):
        made(catalog.gpipe(2, 2), order="grouped")


def test_refuses_ranks_of_several_devices():
    schedule = catalog.gpipe(2, 2)
    stages = models.cut(models.residual(), schedule)
    with pytest.raises(UserError, match="width=2 takes no boundary_compression=int8"):
        Distributed(
            stages,
            schedule,
            sgd,
            F.cross_entropy,
            width=2,
            parallelize=lambda stage, mesh: stage,
            boundary_compression="int8",
        )


def test_a_schedule_may_begin_without_messages_of_activations():
    """Its later phase sends some."""
    made(after([(catalog.cyclic(2), 2)], catalog.gpipe(2, 2)))
