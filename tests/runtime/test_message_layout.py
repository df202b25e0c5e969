"""Layouts: what a message is made of, byte by byte, and what every run really sends."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from tests.runtime import conform, models
from tests.schedule.strategies import quick
from toolkit.model import partition
from toolkit.model.analysis import meta_copy
from toolkit.runtime import SingleProcess
from toolkit.runtime.message_layout import Layout, Layouts, Part, find_layouts, weights_layout
from toolkit.runtime.microbatch_norm import MicrobatchNorm
from toolkit.runtime.rank import Rank
from toolkit.runtime.stage import StageRunner
from toolkit.runtime.updater import GradientSum
from toolkit.schedule import Action, Buffer, Instruction, catalog

CPU = torch.device("cpu")
DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
)


def layout(*parts):
    """Of tensors 0, 1, ... with these shapes and types."""
    return Layout.of({k: torch.empty(s, dtype=d) for k, (s, d) in enumerate(parts)})


@st.composite
def tensors(draw):
    """Any number of tensors, of any shape and type, with any bytes; some not contiguous."""
    found = {}
    for k in range(draw(st.integers(0, 6))):
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        dtype = draw(st.sampled_from(DTYPES))
        highest = 1 if dtype == torch.bool else 100
        n = math.prod(shape)
        values = draw(st.lists(st.integers(0, highest), min_size=n, max_size=n))
        tensor = torch.tensor(values, dtype=dtype).view(shape)
        found[f"place {k}"] = tensor.mT if tensor.dim() > 1 and draw(st.booleans()) else tensor
    return found


# A message


def test_largest_elements_first():
    """So that every tensor is aligned, and those of one type lie side by side."""
    places = [
        (part.place, part.dtype)
        for part in layout(
            ((3,), torch.bool),
            ((2,), torch.float32),
            ((), torch.float64),
            ((1,), torch.uint8),
            ((5,), torch.float32),
            ((2, 2), torch.int64),
        ).parts
    ]
    assert places == [
        (2, torch.float64),
        (5, torch.int64),
        (1, torch.float32),
        (4, torch.float32),
        (0, torch.bool),
        (3, torch.uint8),
    ]


def test_a_message_by_hand():
    given_tensors = {
        "flag": torch.tensor(True),
        "ids": torch.tensor([1, 256]),
        "none": torch.empty(0, 3),
        "weight": torch.tensor([[1.0, 0.0]]),
    }
    found = Layout.of(given_tensors)
    assert found.parts == (
        Part("ids", (2,), torch.int64, torch.int64),
        Part("none", (0, 3), torch.float32, torch.float32),
        Part("weight", (1, 2), torch.float32, torch.float32),
        Part("flag", (), torch.bool, torch.bool),
    )
    assert found.n_bytes == 2 * 8 + 0 + 2 * 4 + 1
    flat = found.pack(given_tensors, CPU)
    assert flat.dtype == torch.uint8
    assert flat.tolist() == [
        *(1, 0, 0, 0, 0, 0, 0, 0),
        *(0, 1, 0, 0, 0, 0, 0, 0),
        *(0, 0, 0x80, 0x3F),
        *(0, 0, 0, 0),
        1,
    ]


def test_an_empty_message():
    found = Layout.of({})
    flat = found.pack({}, CPU)
    assert found.n_bytes == flat.nbytes == 0
    assert found.unpack(flat) == {}
    assert found.by_dtype(flat) == []


@given(tensors())
@quick
def test_what_is_packed_is_unpacked(given_tensors):
    """Bit for bit, without padding, and aligned."""
    found = Layout.of(given_tensors)
    assert found.n_bytes == sum(x.nbytes for x in given_tensors.values())
    flat = found.pack(given_tensors, CPU)
    assert (flat.shape, flat.dtype) == ((found.n_bytes,), torch.uint8)
    unpacked = found.unpack(flat)
    assert unpacked.keys() == given_tensors.keys()
    for place, tensor in given_tensors.items():
        assert unpacked[place].dtype == tensor.dtype
        assert unpacked[place].shape == tensor.shape
        assert torch.equal(unpacked[place], tensor)
        if tensor.numel():
            offset = unpacked[place].data_ptr() - flat.data_ptr()
            assert offset % tensor.dtype.itemsize == 0
            assert 0 <= offset <= found.n_bytes - tensor.nbytes


@given(tensors())
@quick
def test_the_pieces_by_type_are_the_message(given_tensors):
    """Each byte once, each type once; to add up pieces is to add up tensors."""
    found = Layout.of(given_tensors)
    flat = found.pack(given_tensors, CPU)
    pieces = found.by_dtype(flat)
    assert {piece.dtype for piece in pieces} == {x.dtype for x in given_tensors.values()}
    assert len(pieces) == len({piece.dtype for piece in pieces})
    end = 0
    for piece in pieces:
        assert piece.numel() == sum(
            x.numel() for x in given_tensors.values() if x.dtype == piece.dtype
        )
        if piece.numel():
            assert piece.data_ptr() - flat.data_ptr() == end
        end += piece.nbytes
    assert end == flat.nbytes
    for piece in pieces:
        piece.add_(piece)
    for place, tensor in found.unpack(flat).items():
        assert torch.equal(tensor, given_tensors[place] + given_tensors[place])


# The messages of a model


def shapes(found):
    return {part.place: (part.shape, part.dtype) for part in found.parts}


def found_for(model, n_stages, example, by="flops"):
    """The layouts for ``model`` cut into stages."""
    stages = partition(model, n_stages, example, by)
    runners = [StageRunner(stage, j, conform.sgd, None, 0) for j, stage in enumerate(stages)]
    return found_of(runners, (example,))


def found_of(runners, inputs):
    skeletons = [meta_copy(runner.compute) for runner in runners]
    return find_layouts(skeletons, tuple(x.to("meta") for x in inputs))


class Awkward(nn.Module):
    """A residual and whole numbers cross the cut; a norm, and frozen parameters."""

    def __init__(self):
        super().__init__()
        self.near = nn.Embedding(7, 6)
        self.first = nn.Linear(6, 4)
        self.second = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.far = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, ids):
        x = self.first(self.near(ids))
        x = self.frozen(self.second(x)) + x + self.far(ids)
        return self.norm(x)


def test_layouts_of_an_awkward_model():
    float32 = torch.float32
    found = found_for(Awkward(), 2, torch.zeros(5, dtype=torch.long), by=["second"])
    first, last = map(shapes, found.weights)
    assert first == {
        "near.weight": ((7, 6), float32),
        "first.weight": ((4, 6), float32),
        "first.bias": ((4,), float32),
    }
    assert last == {
        "second.weight": ((4, 4), float32),
        "second.bias": ((4,), float32),
        "far.weight": ((7, 4), float32),
        "norm.weight": ((4,), float32),
        "norm.bias": ((4,), float32),
    }
    assert shapes(found.gradients[0]) == first
    assert shapes(found.gradients[1]) == last | {"norm": ((2, 4), float32)}  # its statistics
    crossing = shapes(found.activations[0])
    assert sorted(crossing) == [0, 1]
    assert set(crossing.values()) == {((5,), torch.int64), ((5, 4), float32)}
    (ids,) = (place for place, (_, dtype) in crossing.items() if dtype == torch.int64)
    assert shapes(found.activation_gradients[1]) == {1 - ids: ((5, 4), float32)}
    assert shapes(found.activation_gradients[0]) == {}  # whole numbers come in
    assert found.n_inputs == (1, 2)
    assert shapes(found.activations[1]) == {0: ((5, 4), float32)}


class Unused(nn.Module):
    """Reads the first of four inputs; of the three more that it passes on one is trained."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(3, 3), nn.Linear(5, 5)

    def forward(self, x, *others):
        y = self.used(x)
        return y, x.argmax(1), x.new_zeros(2, 7), y + 1


def test_what_is_not_used_has_no_gradient():
    """A parameter, an input; and an output that nothing leads to. Weights travel as they are."""
    stages = [meta_copy(Unused()) for _ in range(2)]
    found = find_layouts(stages, (torch.empty(2, 3, device="meta"),))
    used = {"used.weight": ((3, 3), torch.float32), "used.bias": ((3,), torch.float32)}
    unused = {"unused.weight": ((5, 5), torch.float32), "unused.bias": ((5,), torch.float32)}
    assert [shapes(x) for x in found.gradients] == [used, used]
    assert [shapes(x) for x in found.weights] == [used | unused] * 2
    passed_on = {
        0: ((2, 3), torch.float32),
        1: ((2,), torch.int64),
        2: ((2, 7), torch.float32),
        3: ((2, 3), torch.float32),
    }
    assert [shapes(x) for x in found.activations] == [passed_on, passed_on]
    assert [shapes(x) for x in found.activation_gradients] == [{}, {0: ((2, 3), torch.float32)}]
    assert found.n_inputs == (1, 4)


def test_a_stage_that_is_frozen():
    """The first sends no gradient; a later one passes that of its input through."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 2))
    example = torch.zeros(2, 3)
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    found = found_for(model, 3, example, by=["1", "2"])
    assert [shapes(x) for x in found.gradients[:2]] == [{}, {}]
    assert [shapes(x) for x in found.weights[:2]] == [{}, {}]
    assert [sorted(shapes(x)) for x in found.activation_gradients] == [[], [0], [0]]
    assert shapes(found.activation_gradients[1]) == {0: ((2, 4), torch.float32)}


def test_a_norm_without_running_statistics():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False))
    (found,) = found_for(model, 1, torch.zeros(2, 3)).gradients
    assert sorted(shapes(found)) == ["0.bias", "0.weight", "1.bias", "1.weight"]


def test_several_inputs_and_a_type_of_its_own():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x, y):
            return self.second(self.first(x) + y)

    example = torch.zeros(5, 3, dtype=torch.float64), torch.zeros(5, 4, dtype=torch.float64)
    stages = partition(Two().double(), 2, example, ["second"])
    runners = [StageRunner(stage, j, conform.sgd, None, 0) for j, stage in enumerate(stages)]
    found = found_of(runners, example)
    assert found.n_inputs == (2, 1)
    assert found.activations[0].n_bytes == found.activation_gradients[1].n_bytes == 5 * 4 * 8
    assert found.gradients == found.weights == tuple(map(weights_layout, stages))


def test_finding_layouts_leaves_no_statistics():
    """The skeletons are used again, for micro-batches of another size."""
    stages = partition(models.residual(), 2, torch.zeros(3, 1, 6, 6, dtype=torch.float64))
    runners = [StageRunner(stage, j, conform.sgd, None, 0) for j, stage in enumerate(stages)]
    skeletons = [meta_copy(runner.compute) for runner in runners]
    small, large = (torch.empty(n, 1, 6, 6, dtype=torch.float64, device="meta") for n in (3, 8))
    first, other = find_layouts(skeletons, (small,)), find_layouts(skeletons, (large,))
    assert find_layouts(skeletons, (small,)) == first
    norms = [m for stage in skeletons for m in stage.modules() if isinstance(m, MicrobatchNorm)]
    assert {norm.statistics for norm in norms} == {None}
    assert (other.gradients, other.weights) == (first.gradients, first.weights)
    assert other.activations[0].n_bytes * 3 == first.activations[0].n_bytes * 8


# Payloads


LAYOUTS = Layouts(
    activations=(layout(((2,), torch.float32), ((3,), torch.int64)), layout()),
    activation_gradients=(layout(), layout(((2,), torch.float32))),
    n_inputs=(1, 2),
    gradients=(Layout.of({"weight": torch.empty(2)}), layout()),
    weights=(Layout.of({"weight": torch.empty(2)}), layout()),
)
VALUES = torch.tensor([1.5, 2.5])
IDS = torch.tensor([7, 8, 9])


def message(buffer, stage):
    return Instruction(0, Action.SEND, stage, 0, 0, 0, buffer, (1,))


def test_payloads():
    i = message(Buffer.ACTIVATION, 0)
    floats, ids = LAYOUTS.unpack(i, LAYOUTS.pack(i, (VALUES, IDS), CPU))
    assert torch.equal(floats, VALUES)
    assert torch.equal(ids, IDS)
    i = message(Buffer.ACTIVATION_GRADIENT, 1)
    gradient, none = LAYOUTS.unpack(i, LAYOUTS.pack(i, (VALUES, None), CPU))
    assert torch.equal(gradient, VALUES)
    assert none is None
    i = message(Buffer.WEIGHTS, 0)
    weights = LAYOUTS.unpack(i, LAYOUTS.pack(i, {"weight": VALUES}, CPU))
    assert isinstance(weights, dict)
    assert torch.equal(weights["weight"], VALUES)
    i = message(Buffer.GRADIENT, 0)
    total = GradientSum()
    total.add({"weight": VALUES.clone()})
    found = LAYOUTS.unpack(i, LAYOUTS.pack(i, total, CPU))
    assert isinstance(found, GradientSum)
    assert torch.equal(found.tensors["weight"], VALUES)


def test_what_is_sent_is_a_copy():
    """The sender goes on to change its tensors while the message is on its way."""
    i, weights = message(Buffer.WEIGHTS, 0), VALUES.clone()
    flat = LAYOUTS.pack(i, {"weight": weights}, CPU)
    weights.zero_()
    assert torch.equal(LAYOUTS.unpack(i, flat)["weight"], VALUES)


# Compressed


def compressed_layout(tensors, dtype):
    return Layout.of(tensors, {name: dtype for name in tensors if name != "whole"})


def test_a_compressed_message_by_hand():
    """What is whole keeps its type and comes first; 1 in bf16 is the upper half of 1 in float32."""
    given_tensors = {
        "small": torch.tensor([1.0, -2.0]),
        "whole": torch.tensor([1.0]),
        "wide": torch.tensor(1.0, dtype=torch.float64),
    }
    found = compressed_layout(given_tensors, torch.bfloat16)
    assert found.parts == (
        Part("whole", (1,), torch.float32, torch.float32),
        Part("small", (2,), torch.float32, torch.bfloat16),
        Part("wide", (), torch.float64, torch.bfloat16),
    )
    assert found.n_bytes == 4 + 2 * 2 + 2
    flat = found.pack(given_tensors, CPU)
    assert flat.tolist() == [*(0, 0, 0x80, 0x3F), *(0x80, 0x3F), *(0, 0xC0), *(0x80, 0x3F)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_was_compressed_is_rounded_and_of_its_own_type_again(dtype):
    torch.manual_seed(0)
    given_tensors = {
        "a": torch.randn(3, 5),
        "wide": torch.randn(4, dtype=torch.float64),
        "none": torch.empty(0, 2),
        "whole": torch.randn(7),
    }
    found = compressed_layout(given_tensors, dtype)
    flat = found.pack(given_tensors, CPU)
    unpacked = found.unpack(flat)
    for name, tensor in given_tensors.items():
        expected = tensor if name == "whole" else tensor.to(dtype).to(tensor.dtype)
        assert unpacked[name].dtype == tensor.dtype
        assert torch.equal(unpacked[name], expected)
        assert torch.equal(tensor, expected) == (name in ("whole", "none"))
    again = found.unpack(found.pack(unpacked, CPU))
    assert all(torch.equal(again[name], x) for name, x in unpacked.items())  # rounded only once
    assert {piece.dtype: piece.numel() for piece in found.by_dtype(flat)} == {
        torch.float32: 7,
        dtype: 3 * 5 + 4,
    }


def sent_as(found):
    return {part.place: part.sent_as for part in found.parts}


def test_what_of_a_model_is_compressed():
    """Weights and their gradients; neither the statistics of norms nor what crosses boundaries."""
    stages = partition(Awkward(), 2, torch.zeros(5, dtype=torch.long), ["second"])
    runners = [StageRunner(stage, j, conform.sgd, None, 0) for j, stage in enumerate(stages)]
    skeletons = [meta_copy(runner.compute) for runner in runners]
    inputs = (torch.zeros(5, dtype=torch.long, device="meta"),)
    plain = find_layouts(skeletons, inputs)
    found = find_layouts(skeletons, inputs, torch.bfloat16)
    assert (found.activations, found.activation_gradients) == (
        plain.activations,
        plain.activation_gradients,
    )
    for j in range(2):
        assert set(sent_as(found.weights[j]).values()) == {torch.bfloat16}
        assert shapes(found.weights[j]) == shapes(plain.weights[j])
        assert found.weights[j].n_bytes * 2 == plain.weights[j].n_bytes
        assert shapes(found.gradients[j]) == shapes(plain.gradients[j])
    assert set(sent_as(found.gradients[0]).values()) == {torch.bfloat16}
    last = sent_as(found.gradients[1])
    assert last.pop("norm") == torch.float32
    assert set(last.values()) == {torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_small_already_is_not_compressed(dtype):
    found = weights_layout(nn.Linear(3, 2).to(torch.float16), dtype)
    assert set(sent_as(found).values()) == {torch.float16}


def test_complex_weights_are_not_compressed():
    found = weights_layout(nn.Linear(3, 2, dtype=torch.complex64), torch.bfloat16)
    assert set(sent_as(found).values()) == {torch.complex64}


# Against real runs


SCHEDULES = [
    catalog.data_parallel(2),
    catalog.data_parallel(3, n_stages=2),
    catalog.data_parallel(2, state="sharded"),
    catalog.cyclic(2, 1),
    catalog.cyclic(3, "freshest"),
    catalog.cyclic(3, 1, state="sharded"),
    catalog.cyclic(3, "freshest", "per_stage"),
    catalog.cyclic(2, 1, "per_stage_and_microbatch"),
    catalog.cyclic(2, 1, "per_stage_and_microbatch", "sharded"),
    catalog.gpipe(3, 3),
    catalog.one_f_one_b(2, 4),
    catalog.interleaved_1f1b(4, 2, 2),
    catalog.zero_bubble(3, 3),
    catalog.v_half(4, 3),
    catalog.pipedream_2bw(2, 3),
]
CASES = {"residual": (models.cut, models.residual, models.make_batches)}
CASES["awkward"] = (models.cut_awkward, models.awkward, models.id_batches)


def tensors_of(payload):
    if isinstance(payload, GradientSum):
        return payload.tensors
    if isinstance(payload, tuple):
        return {k: x for k, x in enumerate(payload) if x is not None}
    return payload


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=models.name_of)
def test_layouts_are_what_a_run_hands_over(monkeypatch, schedule, case):
    """In one process every payload is seen; each must be what its receiver would expect."""
    cut, make, batches = CASES[case]
    handed_over = []
    give = Rank.give

    def spy(self, i):
        payload = give(self, i)
        handed_over.append((i, payload, shapes(Layout.of(tensors_of(payload)))))
        back = layouts.unpack(i, layouts.pack(i, payload, CPU))
        assert type(back) is type(payload)
        if isinstance(payload, tuple):
            assert [x is None for x in back] == [x is None for x in payload]
        for place, tensor in tensors_of(payload).items():
            assert torch.equal(tensors_of(back)[place], tensor)
        return payload

    monkeypatch.setattr(Rank, "give", spy)
    stages = cut(make(), schedule)
    runtime = SingleProcess(stages, schedule, conform.sgd, F.cross_entropy, "scheduled")
    data = batches(schedule.n_microbatches, 2)
    example = data[0][0].chunk(schedule.n_microbatches)[0]
    layouts = found_of(runtime._runners, (example,))
    list(runtime.run(data))
    assert handed_over
    for i, _, sent in handed_over:
        assert sent == shapes(layouts.of(i)), i
    program = schedule.lower(2)
    expected = {
        (i.buffer, i.stage)
        for order in program.ranks
        for i in order
        if i.action.communicates and i.action != Action.RECV
    }
    assert {(i.buffer, i.stage) for i, _, _ in handed_over} == expected


def test_types_of_one_size_lie_side_by_side():
    tensors = {"a": torch.ones(2), "b": torch.ones(2, dtype=torch.int32), "c": 2 * torch.ones(2)}
    layout = Layout.of(tensors)
    pieces = {x.dtype: x.tolist() for x in layout.by_dtype(layout.pack(tensors, CPU))}
    assert pieces == {torch.float32: [1, 1, 2, 2], torch.int32: [1, 1]}
