"""Stages compute what the whole computes, and the cuts are the best that are allowed."""

import copy
from collections import OrderedDict
from functools import partial
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from tests.schedule.strategies import quick
from tests.thorough import more
from toolkit.errors import UserError
from toolkit.model import MEASURES, build, partition
from toolkit.model.balance import balanced
from toolkit.model.traced_stage import one_by_one


def pass_through(stages, *values):
    """Forward and backward as the stages of a pipeline do: autograd ends at each boundary."""
    inputs, outputs = [], []
    for j, stage in enumerate(stages):
        if j:
            values = [v.detach().requires_grad_(v.is_floating_point()) for v in values]
        inputs.append(values)
        values = stage(*values)
        outputs.append(values)
    (result,) = values
    result.square().sum().backward()
    for sent, received in reversed([*zip(outputs, inputs[1:], strict=False)]):
        if used := [
            (s, r.grad) for s, r in zip(sent, received, strict=True) if s.requires_grad
        ]:
            torch.autograd.backward(*zip(*used, strict=True))
    return result.detach()


def gradients(model):
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def assert_equal_to_whole(model, stages, *inputs):
    """Outputs, gradients and names."""
    whole = model(*inputs)
    whole.square().sum().backward()
    expected = gradients(model)
    torch.testing.assert_close(
        pass_through(stages, *inputs), whole.detach(), rtol=1e-10, atol=0
    )
    torch.testing.assert_close(gradients(model), expected, rtol=1e-10, atol=1e-12)
    assert_same_names(model, stages)


def assert_same_names(model, stages):
    """A tied weight has the first of its names, in one stage."""
    names = [name for stage in stages for name in stage.state_dict()]
    once = [name for name, _ in [*model.named_parameters(), *model.named_buffers()]]
    assert sorted(names) == sorted(once)


# The zoo


@pytest.mark.parametrize(
    ("name", "n_stages"),
    more([("resnet18", 3)], [("resnet18", 2), ("resnet50", 8), ("vit_b_16", 5)]),
)
def test_stages_of_the_zoo_compute_what_the_whole_computes(name, n_stages):
    torch.manual_seed(0)
    model = build(name, 10, image_size=32).double()
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    stages = partition(model, n_stages, x)
    assert len(stages) == len(stages.boundaries) == len(stages.loads) == n_stages
    assert_equal_to_whole(model, stages, x)


def test_a_large_micro_batch_is_counted_without_computing():
    with torch.device("meta"):
        model = build("vit_b_16")
    stages = partition(model, 8, torch.empty(32, 3, 224, 224, device="meta"))
    # 12 blocks: 2 * (4 d^2 + 8 d^2) flops a token for the layers, 4 tokens d for attention
    tokens, d = 197, 768
    block = 2 * 12 * d * d * tokens + 4 * tokens * tokens * d
    embedding, head = 2 * 196 * 768 * d, 2 * d * 1000
    assert sum(stages.loads) == 32 * (12 * block + embedding + head)


# Optimality: no other cuts are better, found by trying each


def spans(loads, cuts):
    return [sum(loads[a:b]) for a, b in pairwise([0, *cuts, len(loads)])]


def judged(loads, across, cuts):
    """Bytes, then how uneven the stages are."""
    return sum(across[cut - 1] for cut in cuts), sum(
        load**2 for load in spans(loads, cuts)
    )


@given(
    loads=st.lists(
        st.sampled_from([0, 1, 2, 3, 7, 2**53 + 1, 2**64]), min_size=1, max_size=8
    ),
    ties=st.booleans(),
    data=st.data(),
)
@quick
def test_no_cuts_are_better(loads, ties, data):
    n_stages = data.draw(st.integers(1, len(loads)))
    n = len(loads) - 1
    across = data.draw(
        st.lists(st.integers(1, 2 if ties else 99), min_size=n, max_size=n)
    )
    every = [*combinations(range(1, len(loads)), n_stages - 1)]
    limit = min(max(spans(loads, cuts)) for cuts in every)
    within = [cuts for cuts in every if max(spans(loads, cuts)) == limit]
    least = max(min(spans(loads, cuts)) for cuts in within)
    rest = [cuts for cuts in within if 2 * min(spans(loads, cuts)) >= least]
    cuts = tuple(balanced(loads, across, n_stages))
    assert cuts in rest
    assert judged(loads, across, cuts) == min(
        judged(loads, across, others) for others in rest
    )


@given(
    widths=st.lists(st.integers(1, 9), min_size=3, max_size=9),
    n_stages=st.integers(1, 8),
    by=st.sampled_from(MEASURES),
)
@settings(max_examples=more(15, 30), deadline=None)
def test_cuts_balance_the_layers_of_a_chain(widths, n_stages, by):
    layers = [nn.Linear(m, n) for m, n in pairwise(widths)]
    n_stages = min(n_stages, len(layers))
    example = torch.empty(3, widths[0])
    loads = partition(nn.Sequential(*layers), len(layers), example, by).loads
    found = partition(nn.Sequential(*layers), n_stages, example, by)
    cuts = balanced(loads, [3 * 4 * width for width in widths[1:-1]], n_stages)
    edges = [0, *cuts, len(loads)]
    assert [*found.loads] == spans(loads, cuts)
    assert [b.shape[1] for (b,) in found.boundaries] == [
        widths[edge] for edge in edges[:-1]
    ]


class Chain(nn.Module):
    """Linear layers, some of which a residual jumps over."""

    def __init__(self, skips, width=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(len(skips)))
        self.skips = skips

    def forward(self, x):
        past = [x]
        for layer, back in zip(self.layers, self.skips, strict=True):
            past.append(layer(past[-1]) + past[max(0, len(past) - 1 - back)])
        return past[-1]


@given(
    skips=st.lists(st.integers(0, 6), min_size=2, max_size=7),
    n_stages=st.integers(1, 5),
)
@settings(max_examples=more(25, 40), deadline=None)
def test_random_residuals_travel(skips, n_stages):
    torch.manual_seed(0)
    model, x = Chain(skips).double(), torch.randn(3, 4, dtype=torch.float64)
    assert_equal_to_whole(model, partition(model, min(n_stages, 2 * len(skips)), x), x)


# What crosses a cut


def test_boundaries_tell_names_shapes_and_types():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))
    stages = partition(model, 3, torch.empty(5, 1, 4, 4))
    assert [(b.shape, b.dtype) for (b,) in stages.boundaries] == [
        ((5, 1, 4, 4), torch.float32),
        ((5, 2, 2, 2), torch.float32),
        ((5, 8), torch.float32),
    ]
    assert stages[-1] is stages.modules[2]
    assert stages[:2] == stages.modules[:2]
    assert stages.model is model


class Sizes(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.position = nn.Parameter(torch.randn(1, 5, 4))
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def forward(self, x):
        n, length, width = x.shape
        x = (
            torch.cat([self.token.expand(n, -1, -1), x], dim=1)
            + self.position[:, : length + 1]
        )
        x = self.layers(x).reshape(n, (length + 1) * width)
        return x.view(x.size(0), -1).sum(1, keepdim=True)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layer = nn.Embedding(5, 4), nn.Linear(4, 4)

    def forward(self, x, which):
        return self.layer(torch.tanh(x)) * self.embed(which)


class InPlace(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.relu = nn.ReLU(inplace=True)
        self.change = change

    def forward(self, x):
        for layer in self.layers:
            x = self.change(self, layer(x))
        return x


def after_view(_, x):
    x.view(-1).mul_(2)
    return x


CHANGES = {
    "module": lambda model, x: model.relu(x),
    "position": lambda _, x: F.relu(x, True),
    "method": lambda _, x: x.mul_(2),
    "view": after_view,
    "flatten": lambda model, x: model.relu(x.flatten(1)),
}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.decode.weight = self.encode.weight
        self.inside = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.head = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))

    def forward(self, x):
        return self.head(self.decode(self.inside(self.encode(x))))


class Biased(nn.Module):
    """Each layer adds the same function of a weight, which has no batch."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        bias = torch.sin(self.bias)
        for layer in self.layers:
            x = torch.tanh(layer(x) + bias)
        return x


ROWS = torch.randn(3, 4, dtype=torch.float64)
TOKENS = torch.randn(7, 4, 4, dtype=torch.float64)
WHICH = torch.tensor([0, 4, 1])


@pytest.mark.parametrize(
    ("make", "inputs", "n_stages"),
    [
        *(pytest.param(Sizes, (TOKENS[:b],), n, id=f"size arithmetic of {b}, {n}")
          for b in (3, 7) for n in (2, 3)),
        pytest.param(TwoInputs, (ROWS, WHICH), 2, id="two inputs"),
        *(pytest.param(partial(InPlace, change), (ROWS,), 3, id=f"in place: {name}")
          for name, change in CHANGES.items()),
        *(pytest.param(Tied, (ROWS,), n, id=f"tied {n}") for n in (2, 3, 5)),
        *(pytest.param(Biased, (ROWS,), n, id=f"one bias {n}") for n in (2, 4)),
    ],
)  # fmt: skip
def test_stages_equal_the_whole(make, inputs, n_stages):
    """On batches of another size than the example, too."""
    torch.manual_seed(0)
    model = make().double()
    stages = partition(model, n_stages, tuple(x[:3] for x in inputs))
    assert [b.dtype for b in stages.boundaries[0]] == [x.dtype for x in inputs]
    assert_equal_to_whole(model, stages, *inputs)


class Hooked(Tied):
    """A function cannot replace the call of a layer with a hook."""

    def __init__(self):
        super().__init__()
        self.decode.register_forward_hook(lambda *_: None)


OBSTACLES = [
    (Hooked, "parameter"),
    *((partial(InPlace, c), "in place") for c in CHANGES.values()),
]


@pytest.mark.parametrize(("make", "why"), OBSTACLES)
def test_no_cut_separates_a_change_or_a_parameter(make, why):
    with pytest.raises(UserError, match=rf"1 to 3 .*got 4.*{why}"):
        partition(make(), 4, ROWS.float())


def test_a_layer_that_is_called_again_is_one_of_the_first_stage():
    again = nn.Sequential(layer := nn.Linear(4, 4), nn.Tanh(), layer, nn.Linear(4, 4))
    names = [
        sorted(dict(stage.named_parameters()))
        for stage in partition(again, 2, ROWS.float())
    ]
    assert names == [["0.bias", "0.weight"], ["3.bias", "3.weight"]]
    first, second, third = partition(again, 3, ROWS.float())
    assert sorted(dict(first.named_parameters())) == ["0.bias", "0.weight"]
    assert not [*second.parameters()]
    assert sorted(dict(third.named_parameters())) == ["3.bias", "3.weight"]


def test_a_stage_begins_where_a_tied_weight_is_used_again():
    stages = partition(Tied(), 3, ROWS.float(), ["inside", "decode"])
    assert [[*dict(stage.named_parameters())] for stage in stages] == [
        ["encode.weight", "encode.bias"],
        ["inside.0.weight", "inside.0.bias", "inside.1.weight", "inside.1.bias"],
        ["head.0.weight", "head.0.bias", "head.1.weight", "head.1.bias"],
    ]
    crossing = [
        [b.name for b in boundary if not b.batched] for boundary in stages.boundaries
    ]
    assert crossing == [[], ["encode_weight"], ["encode_weight"]]


def test_a_trained_tensor_without_batch_travels_where_stages_would_be_uneven():
    stages = partition(Biased(), 4, ROWS.float())
    assert len({*stages.loads}) == 1
    assert [b.shape for b in stages.boundaries[2]] == [(3, 4), (1, 4)]
    # Rows of different versions must not run as one batch.
    assert [one_by_one(stage) for stage in stages] == [False, True, True, True]


# Named cuts


def test_named_cuts():
    model = build("resnet18", 10, 32)
    stages = partition(
        model, 4, torch.empty(2, 3, 32, 32), ["layer2", "layer3.1", "fc"]
    )
    first = [next(iter(stage.state_dict())) for stage in stages]
    assert first == [
        "conv1.weight",
        "layer2.0.conv1.weight",
        "layer3.1.conv1.weight",
        "fc.weight",
    ]
    assert stages.loads == (0, 0, 0, 0)
    assert_same_names(model, stages)


# Refusals


class Branching(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class Fixed(nn.Module):
    def forward(self, x):
        return x.view(2, 4) * 2


class Several(nn.Module):
    def forward(self, x):
        return x + 1, x.mean(0)


LAYERS = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
HEAD = nn.Sequential(OrderedDict(first=nn.Linear(4, 4), last=nn.Linear(4, 4)))
NESTED = nn.Sequential(OrderedDict(body=nn.Linear(4, 4), head=HEAD))


@pytest.mark.parametrize(
    ("model", "n_stages", "by", "value"),
    [
        (LAYERS, 3, "flops", "1 to 2 .*got 3"),
        (LAYERS, 0, "flops", "1 to 2 .*got 0"),
        (LAYERS, "2", "flops", "n_stages.*'2'"),
        (LAYERS, 2.0, "flops", r"n_stages.*2\.0"),
        (LAYERS, True, ["2"], "n_stages.*True"),
        (LAYERS, 2, "flop", "'flop': .*flops, parameters, activations"),
        (LAYERS, 2, 3, "3"),
        (LAYERS, 2, ["0", "2"], "2"),
        (LAYERS, 2, ["3"], "'3'.* 0, 1, 2 "),
        (NESTED, 2, ["head.frist"], r"'head.frist'.* head\.first.* body, head "),
        (LAYERS, 2, ["0"], "'0'"),
        (LAYERS, 2, ["1"], "'1': _1 .* _0"),
        (LAYERS, 3, ["2", "2"], r"\['2', '2'\]"),
        (Branching(), 1, "flops", "Branching: .*torch.fx.wrap"),
        (Several(), 1, "flops", r"Several must return .* \[4\] \(mean\) for 2"),
        (nn.Linear(5, 4), 1, "flops", r"Linear .*\[2, 4\]:"),
        (Fixed(), 1, "flops", "Fixed .*2 .*3"),
    ],
)
def test_rejects(model, n_stages, by, value):
    with pytest.raises(UserError, match=value):
        partition(model, n_stages, torch.empty(2, 4), by)


def test_the_model_keeps_its_tensors():
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2)
    )
    before = copy.deepcopy(model.state_dict())
    stages = partition(model, 2, torch.randn(3, 1, 4, 4))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    shared = {id(p) for stage in stages for p in stage.parameters()}
    assert shared == {id(p) for p in model.parameters()}


def test_a_sequence_before_the_batch_does_not_cross():
    """Though it is as long as the batch is large."""

    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 2)

        def forward(self, x):
            x = self.first(x.transpose(0, 1))
            return self.last(x.transpose(0, 1).mean(1))

    stages = partition(Turned(), 2, torch.zeros(4, 4, 6))
    others = partition(Turned(), 2, torch.zeros(5, 4, 6))
    names = [
        [value.name for value in found.boundaries[1]] for found in (stages, others)
    ]
    assert names[0] == names[1]
    for length in (4, 5):  # of the batch, where the sequence has 4
        with pytest.raises(UserError, match="transpose"):
            partition(Turned(), 2, torch.zeros(length, 4, 6), ["first"])


class Around(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body, self.head = body, nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.body(x))


@pytest.mark.parametrize(
    ("body", "example", "named"),
    [
        (nn.InstanceNorm1d(6, track_running_stats=True), torch.zeros(4, 6, 6),
         r"body\.running_mean.*\(body\)"),
        (nn.utils.spectral_norm(nn.Linear(6, 6)), torch.zeros(4, 6), r"body\.weight_u.*\(body\)"),
        (nn.Embedding(9, 6, max_norm=1.0), torch.zeros(2, 5, dtype=torch.long), r"body\.weight"),
        (lambda x: x.sub_(0.5).mul_(2), torch.zeros(4, 6), r"\(sub_\)"),
        (lambda x: F.relu(x.flatten(1), inplace=True), torch.zeros(4, 6), r"\(relu\)"),
    ],
    ids=["buffer", "weight_u", "norms of an embedding", "batch", "view of the batch"],
)  # fmt: skip
def test_rejects_a_forward_that_changes_what_others_read(body, example, named):
    with pytest.raises(UserError, match=named):
        partition(Around(body), 1, example)


def test_rejects_inputs_of_several_batch_sizes():
    with pytest.raises(UserError, match=r"\[4, 6\], \[3, 6\]"):
        partition(nn.Bilinear(6, 6, 2), 1, (torch.zeros(4, 6), torch.zeros(3, 6)))
