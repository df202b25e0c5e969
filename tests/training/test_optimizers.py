"""Optimizers: their first update by hand, and stages like the whole model."""

import copy
import io

import pytest
import torch
from hydra.utils import instantiate
from torch import nn
from torch.nn import functional as F

from tests.cli.test_presets import CONF, composed
from toolkit.cli.help import choices
from toolkit.errors import UserError
from toolkit.model import build, gpt, partition
from toolkit.runtime import SingleProcess
from toolkit.runtime.make_optimizer import takes_names
from toolkit.schedule import catalog
from toolkit.training.optimizers import Muon, orthogonalized

F64 = torch.float64


def chosen(name, *overrides):
    """As the command line makes it."""
    overrides = [f"optimizer.{override}" for override in overrides]
    config = composed("train", f"optimizer={name}", *overrides).optimizer
    return instantiate(config, _partial_=True, _convert_="all")


def one_update(make):
    """The weights before, the gradient, and the weights after."""
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(3, 4, dtype=F64))
    before, w.grad = w.detach().clone(), 100 * torch.randn(3, 4, dtype=F64)
    make([w]).step()
    return before, w.grad, w.detach()


def test_lamb_clips_nothing_by_default():
    for make, limit in ((chosen("lamb"), None), (chosen("lamb", "max_grad_norm=2"), 2)):
        assert make([nn.Parameter(torch.zeros(1))]).defaults["max_grad_norm"] == limit


def groups(make, model):
    """The names that each group of the optimizer has."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    made = make([*model.named_parameters()])
    return [[names[p] for p in group["params"]] for group in made.param_groups]


def test_muon_leaves_the_outer_layers_to_adamw():
    model = gpt(11, 5, layers=1, width=8, heads=2)
    hidden, others = groups(chosen("muon"), model)
    matrices = ["attend", "gather", "widen", "narrow"]
    assert hidden == [f"block_0.{name}.weight" for name in matrices]
    assert {"embed.tokens.weight", "embed.places", "head.weight"} <= {*others}
    chosen_ones = groups(chosen("muon", "adamw=[narrow,head]"), model)[0]
    assert chosen_ones == ["embed.places", "embed.tokens.weight", *hidden[:3]]
    assert groups(chosen("muon"), nn.LayerNorm(3)) == [["weight", "bias"]]


@pytest.mark.parametrize(
    ("name", "outer"),
    [
        ("resnet8", {"conv1.weight", "fc.weight"}),
        ("resnet18", {"conv1.weight", "fc.weight"}),
        ("resnet50", {"conv1.weight", "fc.weight"}),
        (
            "vit_b_16",
            {
                "conv_proj.weight",
                "class_token",
                "encoder.pos_embedding",
                "heads.head.weight",
            },
        ),
    ],
)
def test_muon_knows_the_outer_layers_of_the_zoo(name, outer):
    with torch.device("meta"):
        model = build(name, 10, 32)
    hidden, others = groups(chosen("muon"), model)
    shapes = {name: parameter.dim() for name, parameter in model.named_parameters()}
    assert {name for name in others if shapes[name] > 1} == outer
    assert all(shapes[name] > 1 for name in hidden)


def test_nadam_decays_beside_its_update():
    """Its first update is the sign of the gradient, of a size that Nesterov's momentum gives."""
    w, g, found = one_update(chosen("nadam", "lr=0.1", "weight_decay=0.5", "eps=0"))
    now, then = (0.99 * (1 - 0.5 * 0.96 ** (t * 4e-3)) for t in (1, 2))
    update = (1 + then * (1 - 0.99) / (1 - now * then)) * g.sign()
    torch.testing.assert_close(found, w * (1 - 0.1 * 0.5) - 0.1 * update)


@pytest.mark.parametrize("name", choices([CONF], "optimizer"))
def test_their_states_can_be_read_again(name):
    make, w = chosen(name), nn.Parameter(torch.ones(2, 3))
    optimizer = make([("w", w)] if takes_names(make) else [w])
    w.grad = torch.ones_like(w)
    optimizer.step()
    kept = io.BytesIO()
    torch.save(optimizer.state_dict(), kept)
    kept.seek(0)
    assert torch.load(kept, weights_only=True)["param_groups"]


@pytest.mark.parametrize("name", ["lars", "lamb", "nadam", "muon"])
def test_stages_are_updated_like_the_whole_model(name):
    make = chosen(name, "lr=0.05", "weight_decay=0.01")
    found = []
    for n_stages in (1, 3):
        torch.manual_seed(0)
        layers = [
            nn.Linear(4, 8),
            nn.Tanh(),
            nn.Linear(8, 8),
            nn.Tanh(),
            nn.Linear(8, 3),
        ]
        model = nn.Sequential(*layers).double()
        stages = partition(model, n_stages, torch.empty(2, 4, dtype=F64))
        schedule = catalog.data_parallel(2, n_stages=n_stages)
        runtime = SingleProcess(stages, schedule, make, F.cross_entropy)
        generator = torch.Generator().manual_seed(1)
        for _ in range(4):
            x = torch.randn(4, 4, dtype=F64, generator=generator)
            runtime.step(x, torch.randint(3, (4,), generator=generator))
        found.append(runtime.module().state_dict())
    whole, cut = found
    for key in whole:
        torch.testing.assert_close(cut[key], whole[key], rtol=1e-10, atol=1e-12)


# Muon

OPTIONS = {"lr": 0.02, "weight_decay": 0.1}


def drawn(*shape, dtype=F64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(8, 32), (32, 8)])
def test_singular_values_come_near_1(shape, dtype):
    found = orthogonalized(100 * drawn(*shape).to(dtype))
    assert found.dtype == dtype
    values = torch.linalg.svdvals(found.to(F64))
    assert 0.65 < values.min() <= values.max() < 1.25


def test_singular_vectors_stay():
    matrix = drawn(4, 6)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    turned = u.mT @ orthogonalized(matrix) @ v.mT
    torch.testing.assert_close(
        turned, torch.diag(turned.diagonal()), atol=1e-12, rtol=0
    )
    assert (turned.diagonal() > 0).all()
    assert not orthogonalized(torch.zeros(3, 4)).any()


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(16, 48), (48, 16)])
def test_matrices_go_where_torchs_muon_takes_them(shape, nesterov):
    start = drawn(*shape, dtype=torch.float32)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    options = OPTIONS | {"momentum": 0.9, "nesterov": nesterov, "ns_steps": 4}
    optimizers = (
        Muon([{"params": [ours], "orthogonal": True}], **options),
        torch.optim.Muon([theirs], adjust_lr_fn="match_rms_adamw", **options),
    )
    for k in range(5):
        gradient = drawn(5, *shape, dtype=torch.float32)[k]
        for p, optimizer in zip((ours, theirs), optimizers, strict=True):
            p.grad = gradient.clone()
            optimizer.step()
    moved = (theirs - start).norm()
    assert (ours - theirs).norm() < 0.02 * moved  # theirs computes in bfloat16


def test_a_filter_is_a_matrix_of_its_outputs():
    filters, matrix = (
        nn.Parameter(drawn(4, 18).view(s)) for s in ((4, 2, 3, 3), (4, 18))
    )
    for p in (filters, matrix):
        p.grad = 2 * p.detach()
        Muon([{"params": [p], "orthogonal": True}], **OPTIONS).step()
    torch.testing.assert_close(filters.flatten(1), matrix, rtol=0, atol=0)


def test_other_groups_are_adamws():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).double()
    twin = copy.deepcopy(model)
    hidden, others = [model[0].weight], [model[0].bias, *model[1].parameters()]
    optimizer = Muon(
        [{"params": hidden, "orthogonal": True}, {"params": others}], **OPTIONS
    )
    adamw = torch.optim.AdamW(twin.parameters(), **OPTIONS)
    for _ in range(3):
        for module, chosen in ((model, optimizer), (twin, adamw)):
            chosen.zero_grad()
            module(drawn(5, 4)).square().sum().backward()
            chosen.step()
        with torch.no_grad():  # what follows from Muon's own weights is not compared
            twin[0].weight.copy_(model[0].weight)
    for ours, theirs in zip(others, [twin[0].bias, *twin[1].parameters()], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)


def test_without_a_gradient_nothing_moves():
    still, moving = (nn.Parameter(drawn(3, 3)) for _ in range(2))
    moving.grad = torch.ones_like(moving)
    optimizer = Muon([{"params": [still, moving], "orthogonal": True}], **OPTIONS)
    assert optimizer.step(lambda: torch.tensor(3.0)) == 3
    assert torch.equal(still, drawn(3, 3))
    assert not torch.equal(moving, drawn(3, 3))
    assert torch.equal(moving.grad, torch.ones_like(moving))


@pytest.mark.parametrize(("option", "value"), [("momentum", 1.0), ("ns_steps", 0)])
def test_refuses(option, value):
    with pytest.raises(UserError, match=f"{option}.* {value}"):
        Muon([nn.Parameter(drawn(2, 2))], **{option: value})
    with pytest.raises(UserError, match="vectors"):
        Muon([{"params": [nn.Parameter(drawn(2))], "orthogonal": True}])
