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
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm.auto import tqdm

from toolkit.errors import UserError, first_line

Batch = tuple[Tensor, Tensor]
Vector = tuple[Tensor, ...]
LanczosStep = tuple[Vector, float, float]
"""A vector of the basis, its diagonal entry, and the next off-diagonal one."""

_MAX_PRODUCTS = 100


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
        tolerance: relative error at which it ends; it ends after 100 products in any case.
        seconds: time after which no product begins.
        shares: also find the eigenvector's shares, which takes as many products again.
        seed: of the start and of dropout.

    Raises:
        UserError: no parameter trains, an operation of the model has no second derivative, or the
            Hessian is not finite.
    """
    parameters = _trained_parameters(model)
    if not batches:
        raise UserError("batches are empty: give at least one (inputs, targets)")
    generator = torch.Generator().manual_seed(seed)
    # On the CPU, so that every device starts from the same vector.
    start = tuple(
        torch.randn(weights.shape, generator=generator).to(weights)
        for weights in parameters.values()
    )

    def product(vector: Vector) -> Vector:
        return _product(model, loss, batches, parameters, vector, seed)

    estimate = _top_eigenvalue(
        _lanczos(product, start), tolerance, time.monotonic() + seconds
    )
    n_products = len(estimate.coefficients)
    if not shares:
        return Curvature(estimate.value, estimate.error, n_products, {})

    # The eigenvector is the sum of the basis vectors, each times its coefficient.
    # The basis is too large to keep, so that the same products are computed a second time.
    with _progress(_lanczos(product, start), n_products) as products:
        squares = _squared_norms(products, estimate.coefficients, parameters)
    total = sum(squares.values())
    parameter_shares = {name: square / total for name, square in squares.items()}
    return Curvature(estimate.value, estimate.error, 2 * n_products, parameter_shares)


def _trained_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that train, by name; raise UserError if there are none."""
    parameters = {
        name: weights.detach()
        for name, weights in model.named_parameters()
        if weights.requires_grad
    }
    if not parameters:
        raise UserError(
            f"{type(model).__name__} has no parameter to train: set requires_grad"
        )
    return parameters


def _progress(steps: Iterator[LanczosStep], n_products: int) -> "tqdm[LanczosStep]":
    """Show the progress of ``steps``, one for each Hessian-vector product, if they take long."""
    name = "curvature of the stages"
    return tqdm(steps, name, n_products, unit=" products", leave=False, delay=3)


class _Estimate(NamedTuple):
    """An estimate of the top eigenvalue.

    Attributes:
        value: of the eigenvalue.
        error: bound on the distance to the nearest eigenvalue.
        coefficients: of the eigenvector in Lanczos' basis.
    """

    value: float
    error: float
    coefficients: list[float]


def _top_eigenvalue(
    products: Iterable[LanczosStep], tolerance: float, end: float
) -> _Estimate:
    """Take products until the top eigenvalue is known, or until ``end`` by time.monotonic."""
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    progress_bar = tqdm(products, "curvature", unit=" products", leave=False, delay=3)
    for _, alpha, beta in progress_bar:
        diagonal.append(alpha)
        off_diagonal.append(beta)
        # Ascending, so that the last one is the top eigenvalue. Rounding lets the basis lose its
        # orthogonality; that only repeats eigenvalues which have converged, and changes none.
        values, vectors = torch.linalg.eigh(_tridiagonal(diagonal, off_diagonal))
        value = float(values[-1])
        # The residual norm of Lanczos' estimate: |beta| times the last entry of its eigenvector.
        error = abs(beta * float(vectors[-1, -1]))
        n_products = len(diagonal)
        # The first estimates can be those of a vector without a part in the top eigenvector.
        converged = n_products > 2 and error <= tolerance * abs(value)
        if (
            converged
            # beta is 0 if the basis spans all that H makes of the start: the estimate is then
            # exact, and there is no next vector.
            or beta == 0
            or n_products >= _MAX_PRODUCTS
            or time.monotonic() >= end
        ):
            break
    progress_bar.close()
    return _Estimate(value, error, vectors[:, -1].tolist())


def _squared_norms(
    products: Iterable[LanczosStep],
    coefficients: Sequence[float],
    parameters: Mapping[str, Tensor],
) -> dict[str, float]:
    """Return the squared norm of each parameter's part of a vector, by its basis coefficients."""
    eigenvector = [torch.zeros_like(weights) for weights in parameters.values()]
    # The coefficients are first, so that zip ends before it takes one product too many.
    for coefficient, (basis_vector, _, _) in zip(coefficients, products, strict=False):
        for accumulated, component in zip(eigenvector, basis_vector, strict=True):
            accumulated.add_(component, alpha=coefficient)
    return {
        name: float(component.square().sum())
        for name, component in zip(parameters, eigenvector, strict=True)
    }


def _lanczos(
    product: Callable[[Vector], Vector], start: Vector
) -> Iterator[LanczosStep]:
    """Yield each vector of Lanczos' basis, its diagonal entry, and the next off-diagonal one."""
    scale = _dot(start, start) ** 0.5
    basis_vector = tuple(new / scale for new in start)
    # Only two vectors of the basis are kept, whatever the number of products.
    previous_vector = tuple(map(torch.zeros_like, start))
    beta = 0.0
    while True:
        new_vector = product(basis_vector)
        alpha = _dot(basis_vector, new_vector)
        new_vector = tuple(
            new - alpha * current - beta * previous
            for new, current, previous in zip(
                new_vector, basis_vector, previous_vector, strict=True
            )
        )
        # Lanczos' three-term recurrence, with H the Hessian and v the basis:
        #
        #     beta_k v_{k+1} = H v_k - alpha_k v_k - beta_{k-1} v_{k-1}
        beta = _dot(new_vector, new_vector) ** 0.5
        yield basis_vector, alpha, beta
        previous_vector = basis_vector
        basis_vector = tuple(new / beta for new in new_vector)


def _product(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    batches: Iterable[Batch],
    parameters: Mapping[str, Tensor],
    vector: Vector,
    seed: int,
) -> Vector:
    """Return the Hessian of the mean loss over ``batches``, times ``vector``."""
    total = [torch.zeros_like(tensor) for tensor in vector]
    devices = sorted(
        {tensor.device.index or 0 for tensor in vector if tensor.device.type == "cuda"}
    )
    n_batches = 0
    # Fused attention has no second derivative; the plain one has.
    with (
        torch.random.fork_rng(devices),
        sdpa_kernel(SDPBackend.MATH),
        torch.enable_grad(),
    ):
        # Every product draws the same dropout, or the Hessian would differ between products.
        torch.manual_seed(seed)
        for batch in batches:
            n_batches += 1
            try:
                products = _product_of_batch(model, loss, batch, parameters, vector)
            except RuntimeError as error:
                raise UserError(
                    f"the curvature of {type(model).__name__} cannot be measured:"
                    f" {first_line(error)}"
                ) from error
            for tensor, product in zip(total, products, strict=True):
                tensor.add_(product)
    mean_product = tuple(tensor / n_batches for tensor in total)
    if not all(bool(tensor.isfinite().all()) for tensor in mean_product):
        raise UserError(
            f"the Hessian of {type(model).__name__} is not finite: check its weights and inputs"
        )
    return mean_product


def _product_of_batch(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    batch: Batch,
    parameters: Mapping[str, Tensor],
    vector: Vector,
) -> Vector:
    """Return the Hessian of a batch's loss, times ``vector``: the loss is differentiated twice."""
    inputs, targets = batch
    # Views can require gradients without changing the model's tensors.
    weights = {
        name: weight.detach().requires_grad_() for name, weight in parameters.items()
    }
    # Training mode updates batch norm's buffers: copies keep the model's own unchanged.
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    outputs = torch.func.functional_call(model, weights | buffers, (inputs,))
    weight_tensors = tuple(weights.values())
    gradients = grad(
        loss(outputs, targets),
        weight_tensors,
        create_graph=True,
        materialize_grads=True,
    )
    # The slope of the loss along the vector, g^T v; its gradient is the Hessian times the vector:
    #
    #     H v = d(g^T v) / d weights, for a vector v that does not depend on the weights
    slopes = [
        (gradient * tensor).sum()
        for gradient, tensor in zip(gradients, vector, strict=True)
    ]
    directional_slope = sum(slopes[1:], start=slopes[0])
    if not directional_slope.requires_grad:
        # The loss is linear in the weights: its Hessian is 0.
        return tuple(map(torch.zeros_like, vector))
    return grad(directional_slope, weight_tensors, materialize_grads=True)


def _dot(a: Vector, b: Vector) -> float:
    return sum(
        float((first.double() * second.double()).sum())
        for first, second in zip(a, b, strict=True)
    )


def _tridiagonal(
    diagonal: Sequence[float], off_diagonal_values: Sequence[float]
) -> Tensor:
    diagonal_entries = torch.tensor(diagonal, dtype=torch.float64)
    off_diagonal = torch.tensor(off_diagonal_values[:-1], dtype=torch.float64)
    return diagonal_entries.diag() + off_diagonal.diag(1) + off_diagonal.diag(-1)
