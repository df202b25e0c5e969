"""Muon: updates of matrices made orthogonal, as those of hidden layers are to be."""

from collections.abc import Callable
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from toolkit.errors import UserError

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_AS_ADAMW = 0.2  # root of the mean square of AdamW's updates, which those of matrices are given


class Muon(AdamW):
    """Muon (Jordan et al., 2024) for groups of parameters that want it, AdamW for the others.

    A matrix moves along its gradient's running average, all of whose singular values are brought
    near to 1 by steps of Newton and Schulz. The update is as large as AdamW's usually are
    (arXiv 2502.16982), so one rate and one weight decay serve all parameters. More than two
    dimensions, as those of convolutions, are a matrix of the first by all others.

    Its arithmetic is in the parameters' precision, and in 32 bits at least, where Muon is often run
    in 16: runtimes that sum gradients in another order are to agree beyond that.

    Args:
        params: groups; those with ``orthogonal=True`` take Muon.
        momentum: of the running average.
        nesterov: look ahead by one more gradient.
        ns_steps: of Newton and Schulz.
        options: those of AdamW: ``lr`` and ``weight_decay`` for all, the others for its groups.

    Raises:
        UserError: an option out of its range, or a group for Muon with a vector.
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
        self.momentum, self.nesterov, self.ns_steps = momentum, nesterov, ns_steps
        for group in self.param_groups:
            group.setdefault("orthogonal", False)
            if group["orthogonal"] and any(p.dim() < 2 for p in group["params"]):
                raise UserError("Muon is for matrices: put vectors into a group for AdamW")

    def __setstate__(self, state: dict[str, Any]) -> None:
        Optimizer.__setstate__(self, state)  # AdamW's wants a step of every parameter

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update. Parameters without a gradient stay as they are."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        moved = {}
        for group in self.param_groups:
            if group["orthogonal"]:
                for p in group["params"]:
                    if p.grad is not None:
                        self._move(p, p.grad, group["lr"], group["weight_decay"])
                        moved[p], p.grad = p.grad, None  # hidden from AdamW
        super().step()
        for p, grad in moved.items():
            p.grad = grad
        return loss

    def _move(self, p: Tensor, grad: Tensor, lr: float, weight_decay: float) -> None:
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p)
        average = state["momentum_buffer"].lerp_(grad, 1 - self.momentum)
        ahead = grad.lerp(average, self.momentum) if self.nesterov else average
        update = orthogonalized(ahead.flatten(1), self.ns_steps).view_as(p)
        size = _AS_ADAMW * sqrt(max(p.shape[0], prod(p.shape[1:])))
        p.mul_(1 - lr * weight_decay).add_(update, alpha=-lr * size)


def orthogonalized(matrix: Tensor, steps: int = 5) -> Tensor:
    """``matrix`` with its singular values near 1: from 0.7 to 1.2, but for the smallest of them.

    Args:
        matrix: shape ``[rows, columns]``.
        steps: of Newton and Schulz.

    Returns:
        Of the same shape and type. Zeros stay zeros.
    """
    a, b, c = _COEFFICIENTS
    x = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    tall = x.shape[0] > x.shape[1]
    if tall:
        x = x.mT
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrix.dtype)
