"""Curvatures against full Hessians, and models that are left as they were."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from toolkit.errors import UserError
from toolkit.model.gpt import gpt
from toolkit.plan.curvature import largest_curvature


def network(norm=True):
    torch.manual_seed(0)
    layers = [nn.Linear(4, 5), *[nn.BatchNorm1d(5)] * norm, nn.Tanh(), nn.Linear(5, 3)]
    return nn.Sequential(*layers).double()


def batches(n=1, size=12):
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(size, 4, generator=generator, dtype=torch.float64),
            torch.randint(3, (size,), generator=generator),
        )
        for _ in range(n)
    ]


def hessian(model, loss, given):
    named = {
        name: p.detach() for name, p in model.named_parameters() if p.requires_grad
    }
    sizes = [p.numel() for p in named.values()]

    def value(flat):
        parts = flat.split(sizes)
        weights = {
            k: x.view_as(p) for (k, p), x in zip(named.items(), parts, strict=True)
        }
        losses = [
            loss(torch.func.functional_call(model, weights, (x,)), y) for x, y in given
        ]
        return torch.stack(losses).mean()

    return torch.autograd.functional.hessian(
        value, torch.cat([p.flatten() for p in named.values()])
    )


@pytest.mark.parametrize("n", [1, 3])
def test_is_the_top_eigenvalue_and_vector(n):
    model, given = network(), batches(n)
    found = largest_curvature(
        model, F.cross_entropy, given, tolerance=1e-8, shares=True
    )
    values, vectors = torch.linalg.eigh(
        hessian(copy.deepcopy(model), F.cross_entropy, given)
    )
    assert found.value == pytest.approx(float(values[-1]), rel=1e-9)
    assert found.error <= 1e-8 * found.value
    parts = vectors[:, -1].split([p.numel() for p in model.parameters()])
    expected = {k: float(v.square().sum()) for (k, _), v in zip(model.named_parameters(), parts,
                strict=True)}  # fmt: skip
    assert found.shares == pytest.approx(expected, abs=1e-5)


def test_finds_the_largest_though_a_negative_one_is_larger():
    class Saddle(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(3))

        def forward(self, x):
            return (self.w.square() * torch.tensor([2.0, 1.0, -50.0])).sum() * x

    found = largest_curvature(
        Saddle(), lambda out, _: out.mean(), [(torch.ones(1),) * 2]
    )
    assert found.value == pytest.approx(4, rel=1e-4)


def test_leaves_the_model_and_the_random_state_as_they_were():
    model = nn.Sequential(network(), nn.Dropout(0.5))
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    first, again = (
        largest_curvature(model, F.cross_entropy, batches()) for _ in range(2)
    )
    assert first == again  # the same dropout in each product
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_frozen_parameters_do_not_count():
    model, given = network(norm=False), batches()
    whole = largest_curvature(model, F.cross_entropy, given, tolerance=1e-6)
    model[0].requires_grad_(False)
    part = largest_curvature(model, F.cross_entropy, given, tolerance=1e-6, shares=True)
    top = torch.linalg.eigvalsh(hessian(model, F.cross_entropy, given))[-1]
    assert part.value == pytest.approx(float(top), rel=1e-6)
    assert part.value < whole.value
    assert part.shares.keys() == {"2.weight", "2.bias"}


def test_gradients_near_it_diverge_beyond_two_over_it():
    """Plain descent on least squares: stable below 2 / curvature, not above."""
    torch.manual_seed(0)
    x, y = torch.randn(20, 6).double(), torch.randn(20, 1).double()
    model = nn.Linear(6, 1).double()
    curvature = largest_curvature(model, F.mse_loss, [(x, y)], tolerance=1e-6).value
    for factor, grows in ((1.98, False), (2.02, True)):
        trained = copy.deepcopy(model)
        losses = []
        for _ in range(2000):
            trained.zero_grad()
            loss = F.mse_loss(trained(x), y)
            loss.backward()
            losses.append(float(loss.detach()))
            with torch.no_grad():
                for p in trained.parameters():
                    p -= factor / curvature * p.grad
        assert (losses[-1] > 10 * losses[0]) is grows


def test_attention_in_single_precision():
    """Attention's fast kernels have no second derivative; the product takes another."""
    torch.manual_seed(0)
    model = gpt(7, 4, layers=1, width=8, heads=2)
    ids = torch.randint(7, (3, 4))

    def loss(out, y):
        return F.cross_entropy(out.flatten(0, 1), y.flatten())

    found = largest_curvature(model, loss, [(ids, ids)], tolerance=1e-3)
    exact = largest_curvature(
        copy.deepcopy(model).double(), loss, [(ids, ids)], tolerance=1e-6
    )
    assert found.value == pytest.approx(exact.value, rel=2e-3)


def test_ends_in_time_and_is_then_a_lower_bound():
    found = largest_curvature(network(), F.cross_entropy, batches(), seconds=0)
    assert found.products == 1
    assert found.value <= largest_curvature(network(), F.cross_entropy, batches()).value


def test_a_linear_loss_is_flat():
    found = largest_curvature(
        nn.Linear(2, 1), lambda out, _: out.mean(), [(torch.ones(3, 2),) * 2]
    )
    assert (found.value, found.products) == (0, 1)


def test_refuses_what_has_no_curvature():
    model, given = network(), batches()
    with pytest.raises(UserError, match="no parameter to train: set requires_grad"):
        largest_curvature(model.requires_grad_(False), F.cross_entropy, given)
    model.requires_grad_()
    with pytest.raises(UserError, match="batches are empty"):
        largest_curvature(model, F.cross_entropy, [])
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nan
    with pytest.raises(UserError, match="Hessian of Sequential is not finite"):
        largest_curvature(model, F.cross_entropy, given)


def test_refuses_an_operation_without_a_second_derivative():
    def ctc(out, y):
        return F.ctc_loss(out.log_softmax(-1), y, torch.tensor([3]), torch.tensor([2]))

    given = [(torch.ones(3, 1, 2), torch.tensor([[1, 2]]))]
    with pytest.raises(
        UserError, match="curvature of Linear cannot be measured: derivative"
    ):
        largest_curvature(nn.Linear(2, 4), ctc, given)
