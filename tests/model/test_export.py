"""Models that torch.fx cannot trace are exported: the graph computes what the model does."""

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from toolkit.errors import UserError
from toolkit.model import check_independent, partition
from toolkit.model.structure import tensors_of
from toolkit.model.trace import trace
from toolkit.model.traced_stage import draws_at_random, evaluated

ROWS = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Control flow that torch.fx cannot trace, and a body."""

    def __init__(self, body=torch.tanh):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.body = nn.Linear(6, 6), nn.Linear(6, 3), body

    def forward(self, x):
        x = self.first(x)
        if x.dim() == 2 and (x.shape[1] == 6 or x.sum() > 0):
            x = self.body(x)
        return self.last(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.project, self.norm, self.drop = (
            nn.Linear(8, 24),
            nn.LayerNorm(8),
            nn.Dropout(0.1),
        )

    def forward(self, x, mask, angles):
        b, length, width = x.shape
        heads = self.project(self.norm(x) + angles).view(b, length, 3, 2, width // 2)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        if mask.dim() != 4:
            raise ValueError("expected a mask of each query")
        y = F.scaled_dot_product_attention(q, k, v, mask)
        return x + self.drop(y.transpose(1, 2).reshape(b, length, width))


class Decoder(nn.Module):
    """A small language model as Hugging Face writes them: masks, positions, keyword arguments."""

    def __init__(self, n_blocks=3):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.blocks = nn.ModuleList(Block() for _ in range(n_blocks))
        self.register_buffer("rates", torch.arange(1.0, 9.0), persistent=False)

    def forward(self, ids=None, mask=None, keep=False, **others):
        assert not others
        positions = torch.arange(ids.shape[1], device=ids.device)
        with torch.no_grad():
            angles = torch.sin(positions[:, None] * self.rates).to(
                self.embed.weight.dtype
            )
        causal = positions[:, None] >= positions
        seen = causal & mask.bool()[:, None, None, :]
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, seen, angles)
        return {"scores": self.head(x), "kept": x if keep else None, "mean": x.mean(1)}


def text(n=2, length=5):
    generator = torch.Generator().manual_seed(n)
    ids = torch.randint(11, (n, length), generator=generator)
    return {"mask": torch.tensor([[1, 1, 1, 0, 0], [1] * 5] * n)[:n], "ids": ids}


def run(stages, inputs):
    torch.manual_seed(3)
    values = tensors_of(inputs)
    for stage in stages:
        values = stage(*values)
    return stages.results.restore(values)


def assert_computes(model, stages, inputs):
    """The same draws, too."""
    found = run(stages, inputs)
    torch.manual_seed(3)
    expected = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("keep", [False, True])
def test_masks_keyword_arguments_and_dictionaries(keep):
    """The mask and the positions cross no boundary: each stage computes its own."""
    model = Decoder()
    example = text() | {"keep": keep}
    stages = partition(model, 4, example, by=["blocks.0", "blocks.1", "blocks.2"])
    names = [[b.name for b in boundary] for boundary in stages.boundaries]
    assert names[0] == ["ids", "mask"]
    # x, and the mask of each sample.
    assert [len(found) for found in names] == [2, 2, 2, 2]
    for n in (1, 2, 5):
        assert_computes(model, stages, text(n) | {"keep": keep})
    assert {p for stage in stages for p in stage.parameters()} == {*model.parameters()}
    assert stages.output.shape == (2, 5, 11)
    assert [draws_at_random(stage) for stage in stages] == [False, True, True, True]
    check_independent(stages, text(4))


def test_cuts_are_balanced_and_gradients_are_those_of_the_model():
    model = Decoder().double().eval()
    model.blocks.train(False)
    for block in model.blocks:
        block.drop.p = 0.0
    stages = partition(model, 3, text())
    assert min(stages.loads) * 2 >= max(stages.loads)
    run(stages, text(3))["scores"].square().sum().backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    model(**text(3))["scores"].square().sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_another_length_is_refused_in_one_sentence():
    stages = partition(Decoder(), 2, text())
    longer = {"ids": torch.zeros(2, 6, dtype=torch.long), "mask": torch.ones(2, 6)}
    with pytest.raises(
        UserError, match=r"ids: got shape \[2, 6\]; expected \[b, 5\].* Pad"
    ):
        run(stages, longer)


def test_a_graph_fixes_no_device():
    with torch.device("meta"):
        model = Decoder()
    stages = partition(model, 2, {k: x.to("meta") for k, x in text().items()})
    assert run(stages, {k: x.to("meta") for k, x in text().items()})["scores"].is_meta


def region(context):
    def body(x):
        with context():
            return x * 2

    return body


@pytest.mark.parametrize(
    "body",
    [
        region(torch.no_grad),
        region(lambda: torch.autocast("cpu", enabled=False)),
        lambda x: x + torch.normal(0.0, 1.0, (6,)),
        lambda x: x + torch.tensor([0.0, 1, 2, 3, 4, 5]),
        lambda x: F.relu(x, inplace=True),
        nn.Dropout(0.5),
    ],
)
def test_what_a_symbolic_graph_would_lose(body):
    model = Net(body)
    stages = partition(model, 1, ROWS)
    assert_computes(model, stages, ROWS)
    run(stages, ROWS).sum().backward()
    found = model.first.weight.grad
    model.zero_grad()
    torch.manual_seed(3)
    model(ROWS).sum().backward()
    torch.testing.assert_close(found, model.first.weight.grad)  # or both are None


def called_layers(stages):
    return [
        node.target
        for stage in stages
        for node in stage.graph.nodes
        if node.op == "call_module"
    ]


def test_batch_norms_are_layers_again():
    model = Net(nn.Sequential(nn.BatchNorm1d(6), nn.BatchNorm1d(6)))
    model.body[1].eval()
    before = model.body[0].running_mean.clone()
    stages = partition(model, 2, ROWS)
    assert called_layers(stages) == ["first", "body.0", "last"]
    assert evaluated(stages[0]) == {"body.1"}
    assert torch.equal(model.body[0].running_mean, before)
    assert_computes(model, stages, ROWS)
    assert int(model.body[0].num_batches_tracked) == 2


def test_linear_layers_that_compute_something_else_are_not_called():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    hooked = nn.Linear(6, 6)
    hooked.register_forward_hook(lambda module, args, output: output + 1)
    parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
    patched = nn.Linear(6, 6)
    own_forward = patched.forward
    patched.forward = lambda x: 2 * own_forward(x)
    model = Net(nn.Sequential(hooked, Doubled(6, 6), parametrized, patched))
    stages = partition(model, 2, ROWS)
    assert called_layers(stages) == ["first", "last"]
    assert_computes(model, stages, ROWS)


def test_the_weight_of_a_layer_in_another_operation():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x):
            return F.linear(x, self.layer.weight)  # without the bias

    model = Net(Reads())
    stages = partition(model, 2, ROWS)
    assert called_layers(stages) == ["first", "last"]
    assert_computes(model, stages, ROWS)


def test_tied_weights_are_read_by_one_operation():
    model = Decoder()
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    untied = called_layers(partition(model, 1, text()))
    assert {"embed", "head"} <= {*untied}
    model.head.weight = model.embed.weight
    tied = called_layers(partition(model, 1, text()))
    assert {"embed", "head"}.isdisjoint(tied)


def test_devices_with_fewer_heads_take_the_same_operations():
    """Sizes of heads are left to torch, split, grouped and joined."""

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.project = nn.Linear(6, 8, bias=False)

        def forward(self, x):
            b, length, width = x.shape
            if width > 64:  # torch.fx cannot trace it
                return x
            heads = self.project(x).view(b, length, 4, 2).transpose(1, 2)
            grouped = heads[:, :, None].expand(b, 4, 3, length, 2)
            grouped = grouped.reshape(b, 12, length, 2).transpose(1, 2)
            return grouped.reshape(b, length, 24)

    torch.manual_seed(0)
    x = torch.randn(3, 5, 6)
    (stage,) = partition(Heads(), 1, x)
    weight = stage.get_parameter("project.weight")
    (whole,) = stage(x)
    (half,) = functional_call(stage, {"project.weight": weight[:4]}, (x,))
    torch.testing.assert_close(half, whole[..., :12])


@pytest.mark.parametrize(
    ("body", "match"),
    [
        (
            lambda x: F.batch_norm(x, None, None, training=True),
            "batch_norm as a function",
        ),
        (
            lambda x: x if x.sum() > 0 else -x,
            r"control flow.*\(test_export.py line \d+: .*x.sum",
        ),
        (
            lambda x: x * float(x.max()),
            r"test_export.py line \d+: .*x.max.*list of modules",
        ),
    ],
)
def test_refusals_name_the_line(body, match, capfd):
    """Nothing else is printed, such as the graph so far."""
    with pytest.raises(UserError, match=match):
        partition(Net(body), 1, ROWS)
    assert capfd.readouterr() == ("", "")


def test_mixing_is_found_in_exported_graphs():
    class Centred(nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    stages = partition(Net(Centred()), 2, ROWS, check=False)
    match = r"in body \(.*Centred\) \(test_export.py line \d+: .*x - x.mean\(0\)"
    with pytest.raises(UserError, match=match):
        check_independent(stages, ROWS)


def test_a_tuple_of_arguments_may_hold_dictionaries_and_constants():
    class Sum(nn.Module):
        def forward(self, x, more, scale, *, flag=True):
            if not flag or x.shape[1] < 3:
                raise ValueError
            return x * scale + more["a"] - more["b"][0]

    inputs = ROWS, {"b": [ROWS + 2], "a": ROWS + 1}, 3.0
    graph = trace(Sum(), inputs)
    names = [node.target for node in graph.graph.nodes if node.op == "placeholder"]
    assert names == ["x", "more_a", "more_b_0"]
    torch.testing.assert_close(graph(*tensors_of(inputs))[0], ROWS * 3 - 1)


def test_a_weight_that_is_tied_from_end_to_end_travels():
    model = Decoder()
    model.head.weight = model.embed.weight
    stages = partition(model, 3, text())
    assert [sum(not b.batched for b in boundary) for boundary in stages.boundaries] == [
        0,
        1,
        1,
    ]
    assert "embed.weight" in dict(stages[0].named_parameters())
    assert_computes(model, stages, text(3))
    with pytest.raises(
        UserError, match=r"1 to 1 stages: .*weight is used on both sides: untie"
    ):
        partition(nn.Sequential(norm := nn.LayerNorm(6), nn.Tanh(), norm), 2, ROWS)
