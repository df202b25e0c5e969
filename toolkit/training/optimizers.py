"""Muon, an optimizer besides those of torch and timm.

It looks at one parameter tensor at a time, so an optimizer for each stage makes the updates of one
for the whole model.
"""

import re
from collections.abc import Callable, Collection, Iterable
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from toolkit.errors import UserError
from toolkit.runtime import by_name

OUTER = ("embed", "head", "fc", r"^conv1\.", r"^conv_proj\.")
"""Patterns of the names of the first and the last layers of the zoo's models."""

# Of the quintic by Keller Jordan's Muon, whose slope at 0 is steep: small singular values grow
# fast, and large ones end between 0.7 and 1.2 instead of at 1.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_AS_ADAMW = 0.2  # usual root mean square of AdamW's updates, given to those of matrices


@by_name
def muon(
    parameters: Iterable[tuple[str, nn.Parameter]],
    adamw: Collection[str] = OUTER,
    betas: Iterable[float] = (0.9, 0.95),
    **options: Any,
) -> Optimizer:
    """:class:`Muon` for the matrices of hidden layers, AdamW for all other parameters.

    Args:
        parameters: names and parameters.
        adamw: regular expressions, found anywhere in a name, of the matrices that AdamW updates:
            those of the first and the last layer.
        betas: betas of AdamW.
        options: options of Muon.
    """
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in parameters:
        # Such as a bias, or a weight of shape [n, 1, 1].
        is_vector = sum(size > 1 for size in parameter.shape) < 2
        is_outer = is_vector or any(re.search(pattern, name) for pattern in adamw)
        groups[not is_outer].append(parameter)
    option_groups = []
    for is_hidden, group in groups.items():
        if group:
            option_groups.append({"params": group, "orthogonal": is_hidden})
    return Muon(option_groups, betas=tuple(betas), **options)


class Muon(AdamW):
    """Muon (Jordan et al., 2024) for groups with ``orthogonal=True``, AdamW for the others.

    A matrix moves along its gradient's running average, whose singular values Newton-Schulz steps
    bring near 1. The update is as large as AdamW's usually are (arXiv 2502.16982), so one rate and
    one weight decay serve all parameters. A convolution's weight is a matrix of its first dimension
    by all others. torch.optim.Muon computes in 16 bits; here it is at least 32, so that runtimes
    that sum gradients in another order agree.

    Args:
        params: groups of parameters.
        momentum: momentum of the running average.
        nesterov: whether to look ahead by one more gradient.
        ns_steps: number of Newton-Schulz steps.
        options: AdamW's: ``lr`` and ``weight_decay`` for all groups, the others for its own.

    Raises:
        UserError: an option is out of its range, or a group for Muon holds a vector.
    """

    def __init__(
        self,
        params: Any,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        **options: Any,
    ) -> None:
        if not 0 <= momentum < 1:
            raise UserError(f"momentum is 0 or more, and below 1: got {momentum}")
        if ns_steps < 1:
            raise UserError(f"ns_steps is 1 or more: got {ns_steps}")
        super().__init__(params, **options)
        self.momentum = momentum
        self.nesterov = nesterov
        self.ns_steps = ns_steps
        for group in self.param_groups:
            group.setdefault("orthogonal", False)
            if group["orthogonal"] and any(
                parameter.dim() < 2 for parameter in group["params"]
            ):
                raise UserError(
                    "Muon is for matrices: put vectors into a group for AdamW"
                )

    def __setstate__(self, state: dict[str, Any]) -> None:
        # AdamW's expects a step count of every parameter.
        Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradient_of_matrix = {}
        for group in self.param_groups:
            if not group["orthogonal"]:
                continue
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(
                        parameter, parameter.grad, group["lr"], group["weight_decay"]
                    )
                    # Without a gradient, AdamW skips the matrix.
                    gradient_of_matrix[parameter] = parameter.grad
                    parameter.grad = None
        super().step()
        for parameter, grad in gradient_of_matrix.items():
            parameter.grad = grad
        return loss

    def _move(self, p: Tensor, grad: Tensor, lr: float, weight_decay: float) -> None:
        """Update the matrix ``p`` along its orthogonalized running average."""
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p)
        # m = momentum * m + (1 - momentum) * g; with Nesterov the direction is momentum * m + (1 -
        # momentum) * g, of the new m.
        momentum_average = state["momentum_buffer"].lerp_(grad, 1 - self.momentum)
        direction = momentum_average
        if self.nesterov:
            direction = grad.lerp(momentum_average, self.momentum)
        update = orthogonalized(direction.flatten(1), self.ns_steps).view_as(p)
        # An orthogonal [r, c] matrix, r < c, has r singular values of 1: a root mean square of
        # sqrt(r / (r * c)) = 1 / sqrt(c). The factor sqrt(c) makes it 1.
        update_scale = _AS_ADAMW * sqrt(max(p.shape[0], prod(p.shape[1:])))
        p.mul_(1 - lr * weight_decay).add_(update, alpha=-lr * update_scale)


def orthogonalized(matrix: Tensor, steps: int = 5) -> Tensor:
    """Return ``matrix`` with singular values from 0.7 to 1.2, except the smallest; zeros stay."""
    a, b, c = _COEFFICIENTS
    x = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    is_tall = x.shape[0] > x.shape[1]
    # The product of the smaller side with itself is the cheaper one.
    if is_tall:
        x = x.mT
    # By the Frobenius norm, which is at least the largest singular value: all are then in [0, 1],
    # where the iteration converges.
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        # Each singular value s becomes a s + b s^3 + c s^5.
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if is_tall else x).to(matrix.dtype)
