"""Muon's updates beside torch's in 16 bits, and AdamW's beside them."""

import copy

import pytest
import torch
from torch import nn

from toolkit.errors import UserError
from toolkit.training.muon import Muon, orthogonalized

F64 = torch.float64
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
    torch.testing.assert_close(turned, torch.diag(turned.diagonal()), atol=1e-12, rtol=0)
    assert (turned.diagonal() > 0).all()


def test_zeros_stay_zeros():
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
    filters, matrix = (nn.Parameter(drawn(4, 18).view(s)) for s in ((4, 2, 3, 3), (4, 18)))
    for p in (filters, matrix):
        p.grad = 2 * p.detach()
        Muon([{"params": [p], "orthogonal": True}], **OPTIONS).step()
    torch.testing.assert_close(filters.flatten(1), matrix, rtol=0, atol=0)


def test_other_groups_are_adamws():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).double()
    twin = copy.deepcopy(model)
    hidden, others = [model[0].weight], [model[0].bias, *model[1].parameters()]
    optimizer = Muon([{"params": hidden, "orthogonal": True}, {"params": others}], **OPTIONS)
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
    Muon([{"params": [still, moving], "orthogonal": True}], **OPTIONS).step()
    assert torch.equal(still, drawn(3, 3))
    assert not torch.equal(moving, drawn(3, 3))
    assert torch.equal(moving.grad, torch.ones_like(moving))


def test_a_closure_tells_the_loss():
    p = nn.Parameter(drawn(3, 3))

    def loss():
        total = p.square().sum()
        total.backward()
        return total

    expected = drawn(3, 3).square().sum()
    assert Muon([{"params": [p], "orthogonal": True}], **OPTIONS).step(loss) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": 1.0}, "momentum is 0 or more, and below 1: got 1.0"),
        ({"ns_steps": 0}, "ns_steps is 1 or more: got 0"),
        ({"lr": -1.0}, "Invalid learning rate"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        Muon([nn.Parameter(drawn(2, 2))], **options)


def test_vectors_are_refused():
    with pytest.raises(UserError):
        Muon([{"params": [nn.Parameter(drawn(2))], "orthogonal": True}])
