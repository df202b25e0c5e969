"""The newest weights of a stage, and what updates them."""

import copy
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map_only

from toolkit.errors import UserError
from toolkit.runtime.ema import MovingAverage
from toolkit.runtime.microbatch_norm import advance_running_statistics
from toolkit.runtime.step_options import PLAIN, StepOptions

Weights = dict[str, Tensor]
"""One version of a stage's trainable parameters, by name. Never changed in place once shared."""

MakeOptimizer = Callable[[list[Any]], Optimizer]
"""Makes the optimizer of a stage from the list of its parameters or, :func:`by_name`, of pairs."""
MakeScheduler = Callable[[Optimizer], LRScheduler]

Maker = TypeVar("Maker", bound=Callable[..., Optimizer])


def by_name(make: Maker) -> Maker:
    """Mark ``make`` as one that makes an optimizer from pairs of a name and a parameter.

    So it can put them into groups::

        @by_name
        def optimizer(parameters):
            decayed = [p for name, p in parameters if "norm" not in name]
            others = [p for name, p in parameters if "norm" in name]
            return AdamW([{"params": decayed}, {"params": others, "weight_decay": 0}])

    Names are those of the whole model.
    """
    vars(make)["takes_names"] = True
    return make


def takes_names(make: Callable[..., Optimizer]) -> bool:
    """Whether ``make``, or what it is a partial of, is marked :func:`by_name`."""
    while isinstance(make, partial):
        make = make.func
    return getattr(make, "takes_names", False)


class GradientSum:
    """Gradients of a stage's weights and statistics of its norms, summed over micro-batches.

    It takes the tensors that it is given as its own.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def add(self, tensors: dict[str, Tensor]) -> None:
        both = [name for name in tensors if name in self.tensors]
        if both:
            mine, theirs = ([of[name] for name in both] for of in (self.tensors, tensors))
            torch._foreach_add_(mine, theirs)
        self.tensors = tensors | self.tensors


class GradientNorm(NamedTuple):
    """That of a gradient, squared, shape ``[]``; and whether an update can be made by it."""

    squared: Tensor
    finite: bool


class Updater:
    """The trained parameters of a stage, their optimizer and its learning-rate schedule.

    Args:
        stage: the stage; its parameters are the newest weights and are updated in place.
        options: how it updates.

    Raises:
        UserError: an optimizer or a schedule whose step needs more than gradients.

    Attributes:
        masters: the trained parameters, by name.
        optimizer: none where all is frozen.
        average: of its weights, where the options wants one.
        n_skipped: updates left out because their gradient was not finite.
        unused: weights that have had no gradient in any update.
    """

    def __init__(
        self,
        stage: nn.Module,
        make_optimizer: MakeOptimizer,
        make_scheduler: MakeScheduler | None,
        options: StepOptions = PLAIN,
    ) -> None:
        self.stage = stage
        self.options = options
        self.makers = (make_optimizer, make_scheduler)
        self.masters = {k: p for k, p in stage.named_parameters() if p.requires_grad}
        self.average = None if options.ema is None else MovingAverage(options.ema)
        self.n_skipped = 0
        self.unused = [*self.masters]
        self.optimizer, self.scheduler = self._made(self.masters)

    def _made(
        self, masters: Mapping[str, nn.Parameter]
    ) -> tuple[Optimizer | None, LRScheduler | None]:
        """An optimizer of ``masters``, and the schedule of its learning rate if there is one."""
        if not masters:
            return None, None
        make_optimizer, make_scheduler = self.makers
        given = masters.items() if takes_names(make_optimizer) else masters.values()
        optimizer = make_optimizer([*given])
        _check_step(optimizer, "optimizer", "such as torch.optim.SGD or AdamW")
        if make_scheduler is None:
            return optimizer, None
        scheduler = make_scheduler(optimizer)
        _check_step(scheduler, "lr_scheduler", "that goes by steps, such as LambdaLR")
        return optimizer, scheduler

    def state(self) -> dict[str, Any]:
        """Return what the next updates depend on, except weights and gradients."""
        return {
            "optimizer": self.optimizer.state_dict() if self.optimizer else None,
            "lr_scheduler": self.scheduler.state_dict() if self.scheduler else None,
            "average": self.average.state_dict() if self.average else None,
            "n_skipped": self.n_skipped,
            "unused": self.unused,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over a copy of the :meth:`state` of the same stage elsewhere."""
        for name, part in {"optimizer": self.optimizer, "lr_scheduler": self.scheduler}.items():
            if part is not None and state[name] is not None:
                part.load_state_dict(copy.deepcopy(state[name]))
        if self.average is not None and state["average"] is not None:
            devices = {master.device for master in self.masters.values()}
            place = partial(torch.Tensor.to, device=next(iter(devices), None), copy=True)
            self.average.load_state_dict(tree_map_only(Tensor, place, state["average"]))
        self.n_skipped, self.unused = state["n_skipped"], [*state["unused"]]

    def form(self, *, updated: bool, unused: Collection[str]) -> dict[str, Any]:
        """A state formed as that which :meth:`state` gives, whatever its values.

        Args:
            updated: after an update, rather than before the first.
            unused: weights that have had no gradient until then.
        """
        twin = copy.copy(self)
        masters = {k: nn.Parameter(torch.zeros_like(p)) for k, p in self.masters.items()}
        twin.optimizer, twin.scheduler = self._made(masters)
        if updated and twin.optimizer:
            for name in masters.keys() - unused:
                masters[name].grad = torch.zeros_like(masters[name])
            twin.optimizer.step()
        return twin.state()

    def newest(self) -> Weights:
        """The newest version. It shares memory with the parameters until the next update."""
        return {name: master.data for name, master in self.masters.items()}

    def squared_norm(self, total: GradientSum) -> Tensor:
        """Of the gradient in ``total``, which has some; shape ``[]``."""
        found = [total.tensors[name] for name in self.masters if name in total.tensors]
        return torch.stack(torch._foreach_norm(found)).square().sum() / self.options.scale**2

    def update(
        self,
        total: GradientSum,
        n_microbatches: int,
        *,
        keep_old: bool,
        norm: GradientNorm | None = None,
    ) -> None:
        """One optimizer step on the newest weights; then the learning rate of the next.

        Args:
            total: the sum over all micro-batches of the gradients of (scale * loss /
                n_microbatches), of the options's scale, and of the norms' statistics.
            n_microbatches: how many there are.
            keep_old: whether someone still reads the version before. If so the new one gets
                memory of its own.
            norm: by which the gradient is clipped, or left out; its own unless given.
        """
        self.begin_average()
        # The optimizer works in place. Micro-batches between forward and backward still use the old
        # version, so it must keep its memory.
        if keep_old:
            self._renew()
        for name, master in self.masters.items():
            master.grad = total.tensors.get(name)
        if self.optimizer is not None and not self._prepare_gradient(total, norm):
            self.n_skipped += 1
            self.optimizer.zero_grad(set_to_none=True)  # what has no gradient stays as it is
        self.apply()
        if names := [name for name in total.tensors if name not in self.masters]:
            norms = [cast(_BatchNorm, self.stage.get_submodule(name)) for name in names]
            summed = [total.tensors[name] for name in names]
            advance_running_statistics(norms, torch._foreach_div(summed, n_microbatches))
        if self.average is not None:
            self.average.update(self.averaged())

    def begin_average(self) -> None:
        """Have the average, if there is one, start with what is there before the first update."""
        if self.average is not None:
            self.average.begin(self.averaged())

    def averaged(self) -> Weights:
        """What an average follows: the newest weights, and running statistics of batch norms."""
        running = {
            name: tensor
            for name, tensor in self.stage.named_buffers()
            if name.rpartition(".")[2] in ("running_mean", "running_var")
        }
        return self.newest() | running

    @torch.no_grad()
    def _renew(self) -> None:
        """Give the weights memory of their own, and leave to others what they had."""
        old = [*self.newest().values()]
        new = [torch.empty_like(tensor) for tensor in old]
        if new:
            torch._foreach_copy_(new, old)
        for master, tensor in zip(self.masters.values(), new, strict=True):
            master.data = tensor

    def apply(self) -> None:
        """One optimizer step with the gradients that the parameters have."""
        self.unused = [name for name in self.unused if self.masters[name].grad is None]
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        if self.scheduler is not None:
            self.scheduler.step()

    @torch.no_grad()
    def _prepare_gradient(self, total: GradientSum, norm: GradientNorm | None) -> bool:
        """Take the loss's scale out of the gradient, and clip it; False if it is not finite."""
        grads = [master.grad for master in self.masters.values() if master.grad is not None]
        (norm,) = norms([self], [total]) if norm is None else (norm,)
        if norm is None or not grads:
            return True
        if not norm.finite:
            return False
        factor = torch.full_like(norm.squared, 1 / self.options.scale)
        if self.options.clip is not None:
            factor *= (self.options.clip / (norm.squared.sqrt() + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(grads, factor)
        return True


def norms(updaters: Sequence[Updater], totals: Sequence[GradientSum]) -> list[GradientNorm | None]:
    """Those of the gradients in ``totals``, one for each of ``updaters``, which share a options.

    Of the whole model where that is clipped as one. None where there is no gradient, or nobody asks
    for its norm. They are found on the device before any is looked at, which waits for it.
    """
    options = updaters[0].options
    squares = {
        k: updater.squared_norm(total)
        for k, (updater, total) in enumerate(zip(updaters, totals, strict=True))
        if options.needs_norm and total.tensors.keys() & updater.masters.keys()
    }
    if options.clip is not None and options.clip_by == "model" and squares:
        squares = dict.fromkeys(squares, torch.stack([*squares.values()]).sum())
    finite = [True] * len(squares)
    if options.scale != 1 and squares:
        finite = torch.stack([*squares.values()]).isfinite().tolist()
    found = {k: GradientNorm(squares[k], sound) for k, sound in zip(squares, finite, strict=True)}
    return [found.get(k) for k in range(len(updaters))]


def join_averages(updaters: Iterable[Updater]) -> Weights:
    """The averages that ``updaters`` keep, by the names of what they are of."""
    kept = (updater.average.weights for updater in updaters if updater.average is not None)
    return {name: tensor for weights in kept for name, tensor in weights.items()}


def _check_step(made: Optimizer | LRScheduler, name: str, way_out: str) -> None:
    """Raise UserError if ``step`` needs an argument, as LBFGS needs a closure."""
    if not callable(getattr(made, "step", None)):
        kind = made if made is None else f"a {type(made).__name__}"
        raise UserError(
            f"{name}: the function has returned {kind}, so have it return one {way_out}"
        )
    try:
        inspect.signature(made.step).bind()
    except TypeError as error:
        raise UserError(
            f"{name}: {type(made).__name__} cannot step by itself, its step is {error}, and an"
            f" update knows gradients alone: choose one {way_out}"
        ) from error
