"""Largest curvature of a training loss: the top eigenvalue of its Hessian.

Lanczos' iteration takes one Hessian-vector product H v a step, from torch's double backward. It
finds the best estimate in the Krylov space of power iteration, and so needs fewer products; the
largest eigenvalue is found even where a negative one is larger in magnitude. Three vectors as
large as the model are kept. Estimates are at most the true value, up to rounding.

Source: Ghorbani et al., "An Investigation into Neural Net Optimization via Hessian Eigenvalue
Density", arXiv 1901.10159.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm.auto import tqdm

from toolkit.errors import UserError, first_line

Batch = tuple[Tensor, Tensor]
Vector = tuple[Tensor, ...]


@dataclass(frozen=True)
class Curvature:
    """The largest eigenvalue of a loss's Hessian.

    Attributes:
        value: the estimate; below 0 if the loss curves down in all directions.
        error: bound on the distance to the nearest eigenvalue.
        products: Hessian-vector products that it took.
        shares: by parameter, its share of the eigenvector's squared norm; empty unless asked for.
    """

    value: float
    error: float
    products: int
    shares: Mapping[str, float]


def largest_curvature(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    batches: Sequence[Batch],
    *,
    tolerance: float = 0.01,
    most: int = 100,
    seconds: float = inf,
    shares: bool = False,
    seed: int = 0,
) -> Curvature:
    """Measure the largest curvature of the mean loss over ``batches``.

    The model computes in training mode, as it is, and is left as it was. Each product draws the
    same dropout.

    Args:
        model: the model; its parameters that require gradients count.
        loss: mean loss ``[]`` of outputs and targets.
        batches: ``(inputs, targets)`` on the model's device, of equal size; one graph at a time is
            in memory.
        tolerance: relative error at which it ends.
        most: Hessian-vector products after which it ends.
        seconds: time after which no product begins.
        shares: also find the eigenvector's shares, which takes as many products again.
        seed: of the start and of dropout.

    Raises:
        UserError: no parameter trains, an operation of the model has no second derivative, or the
            Hessian is not finite.
    """
    named = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    if not named:
        raise UserError(f"{type(model).__name__} has no parameter to train: set requires_grad")
    if not batches:
        raise UserError("batches are empty: give at least one (inputs, targets)")

    def products() -> Iterator[tuple[Vector, float, float]]:
        return _lanczos(lambda v: _product(model, loss, batches, named, v, seed), start)

    generator = torch.Generator().manual_seed(seed)
    start = tuple(torch.randn(p.shape, generator=generator).to(p) for p in named.values())
    end, diagonal, off = time.monotonic() + seconds, list[float](), list[float]()
    shown = tqdm(products(), "curvature", unit=" products", leave=False, delay=3)
    for _, alpha, beta in shown:
        diagonal.append(alpha)
        off.append(beta)
        values, vectors = torch.linalg.eigh(_tridiagonal(diagonal, off))
        value, error = float(values[-1]), abs(beta * float(vectors[-1, -1]))
        n = len(diagonal)
        # A first estimate can be that of a vector without a part in the top eigenvector.
        converged = n > 2 and error <= tolerance * abs(value)
        if converged or beta == 0 or n >= most or time.monotonic() >= end:
            break
    shown.close()
    found: dict[str, float] = {}
    if shares:
        top = [torch.zeros_like(p) for p in named.values()]
        for weight, (v, _, _) in zip(vectors[:, -1].tolist(), products(), strict=False):
            for total, x in zip(top, v, strict=True):
                total.add_(x, alpha=weight)
        norms = {name: float(x.square().sum()) for name, x in zip(named, top, strict=True)}
        found = {name: norm / sum(norms.values()) for name, norm in norms.items()}
    return Curvature(value, error, n * (2 if shares else 1), found)


def _lanczos(
    product: Callable[[Vector], Vector], start: Vector
) -> Iterator[tuple[Vector, float, float]]:
    """Yield each vector of Lanczos' basis, its diagonal entry, and the next off-diagonal one."""
    scale, beta = _dot(start, start) ** 0.5, 0.0
    v, before = tuple(x / scale for x in start), tuple(map(torch.zeros_like, start))
    while True:
        w = product(v)
        alpha = _dot(v, w)
        w = tuple(x - alpha * y - beta * z for x, y, z in zip(w, v, before, strict=True))
        beta = _dot(w, w) ** 0.5
        yield v, alpha, beta
        v, before = tuple(x / beta for x in w), v


def _product(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    batches: Iterable[Batch],
    named: Mapping[str, Tensor],
    vector: Vector,
    seed: int,
) -> Vector:
    """The Hessian of the mean loss over ``batches``, times ``vector``."""
    total = [torch.zeros_like(x) for x in vector]
    devices = sorted({x.device.index or 0 for x in vector if x.device.type == "cuda"})
    n = 0
    with torch.random.fork_rng(devices), sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
        torch.manual_seed(seed)
        for inputs, targets in batches:
            weights = {name: p.requires_grad_() for name, p in _copies(named)}
            buffers = {name: b.clone() for name, b in model.named_buffers()}
            n += 1
            try:
                out = torch.func.functional_call(model, weights | buffers, (inputs,))
                value = loss(out, targets)
                wanted = tuple(weights.values())
                grads = grad(value, wanted, create_graph=True, materialize_grads=True)
                slope = sum((g * x).sum() for g, x in zip(grads, vector, strict=True))
                if not (isinstance(slope, Tensor) and slope.requires_grad):
                    continue  # the loss is linear
                more = grad(slope, wanted, materialize_grads=True)
            except RuntimeError as error:
                raise UserError(
                    f"the curvature of {type(model).__name__} cannot be measured:"
                    f" {first_line(error)}"
                ) from error
            for x, y in zip(total, more, strict=True):
                x.add_(y)
    found = tuple(x / n for x in total)
    if not all(bool(x.isfinite().all()) for x in found):
        raise UserError(
            f"the Hessian of {type(model).__name__} is not finite: check its weights and inputs"
        )
    return found


def _copies(named: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Views of the tensors that can require gradients without changing the model's."""
    return ((name, p.detach()) for name, p in named.items())


def _dot(a: Vector, b: Vector) -> float:
    return sum(float((x.double() * y.double()).sum()) for x, y in zip(a, b, strict=True))


def _tridiagonal(diagonal: Sequence[float], off: Sequence[float]) -> Tensor:
    entries, beside = (torch.tensor(x, dtype=torch.float64) for x in (diagonal, off[:-1]))
    return entries.diag() + beside.diag(1) + beside.diag(-1)
