"""The newest weights of a stage, and what updates them."""

import copy
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from toolkit.runtime.checked_optimizer import make_checked
from toolkit.runtime.ema import WeightAverage
from toolkit.runtime.future_rates import FutureRates
from toolkit.runtime.gradient_norms import GradientNorm, gradient_norms
from toolkit.runtime.losses import COUNT, SUM_SCALE, nonzero
from toolkit.runtime.make_optimizer import MakeOptimizer, MakeScheduler
from toolkit.runtime.microbatch_norm import advance_running_statistics
from toolkit.runtime.step_options import PLAIN, StepOptions

if TYPE_CHECKING:
    from toolkit.runtime.sharded_stage import ShardedStage

Weights = dict[str, Tensor]
"""One version of a stage's trainable parameters, by name. Never changed in place once shared."""


class GradientSum:
    """Gradients of a stage's weights and statistics of its norms, summed over micro-batches.

    If the loss is counted, so are the counts, under the name ``COUNT``. It adds in place to the
    first tensors that it is given, so these must not be used elsewhere.
    """

    def __init__(self, tensors: dict[str, Tensor] | None = None) -> None:
        self.tensors = tensors or {}

    def add(self, tensors: dict[str, Tensor]) -> None:
        """Add ``tensors``, by name."""
        add_to_sums([self], [tensors])

    @torch.no_grad()
    def divide_by_count(self, weights: Collection[str]) -> None:
        """Divide the gradients of ``weights`` by the count of the loss, if any, and drop it."""
        count = self.tensors.pop(COUNT, None)
        gradients = [self.tensors[name] for name in weights if name in self.tensors]
        if count is not None and gradients:
            # The backward of a sum began at SUM_SCALE times it; see :meth:`LossValue.root_factor`.
            torch._foreach_div_(gradients, nonzero(count) * SUM_SCALE)


def add_to_sums(
    totals: Sequence[GradientSum], terms: Sequence[dict[str, Tensor]]
) -> None:
    """Add one term to each of several sums, in one operation.

    Args:
        totals: the sums, such as one per stage.
        terms: tensors by name to add to each.
    """
    sums: list[Tensor] = []
    addends: list[Tensor] = []
    for total, term in zip(totals, terms, strict=True):
        # What a sum has no term of yet is taken over as it is, without an addition.
        for name in term.keys() & total.tensors.keys():
            sums.append(total.tensors[name])
            addends.append(term[name])
        # Of a name that both have, the tensor on the right stays: that of the sum, to which the
        # addition below adds in place.
        total.tensors = term | total.tensors
    if sums:
        torch._foreach_add_(sums, addends)


class Updater:
    """The trained parameters of a stage, their optimizer and its learning-rate schedule.

    The stage's parameters are the newest weights and are updated in place.

    Attributes:
        is_rounded: whether passes read, in place of these weights, what compressed messages say of
            them.
    """

    is_rounded = False

    def __init__(
        self,
        stage: nn.Module,
        make_optimizer: MakeOptimizer,
        make_scheduler: MakeScheduler | None = None,
        options: StepOptions = PLAIN,
        sharded: "ShardedStage | None" = None,
    ) -> None:
        self.stage = stage
        self.sharded = sharded
        self.options = options
        self.make_optimizer = make_optimizer
        self.make_scheduler = make_scheduler
        self.masters = {
            name: parameter
            for name, parameter in stage.named_parameters()
            if parameter.requires_grad
        }
        self._average: WeightAverage | None = None
        if options.ema is not None:
            self._average = WeightAverage(options.ema)
        self.n_skipped = 0  # updates whose gradient was not finite
        self.unused = [*self.masters]  # weights that had no gradient in any update
        self._future_rates: FutureRates | None = None
        # Held while the optimizer exchanges weights in place: evaluations of several threads would
        # otherwise take the weights that another one has put there.
        self._exchanging_weights = threading.Lock()
        # Memory of versions that nothing reads any more, for later versions: a step allocates none.
        self._spare: list[Weights] = []
        # The optimizer has the masters, or DTensors whose local shards are the masters.
        self._optimized = self._optimized_of(self.masters)
        optimizer, scheduler = self._make(self._optimized)
        self.optimizer = optimizer
        self.scheduler = scheduler

    def _optimized_of(
        self, masters: dict[str, nn.Parameter]
    ) -> dict[str, nn.Parameter]:
        if self.sharded is None:
            return masters
        return self.sharded.handles(masters)

    def _make(
        self, optimized: Mapping[str, nn.Parameter]
    ) -> tuple[Optimizer | None, LRScheduler | None]:
        return make_checked(optimized, self.make_optimizer, self.make_scheduler)

    def state(self) -> dict[str, Any]:
        """Return what the next updates depend on, except weights and gradients."""
        state: dict[str, Any] = {
            "optimizer": None,
            "lr_scheduler": None,
            "average": None,
            "n_skipped": self.n_skipped,
            "unused": self.unused,
        }
        if self.optimizer is not None:
            state["optimizer"] = self.optimizer.state_dict()
        if self.scheduler is not None:
            state["lr_scheduler"] = self.scheduler.state_dict()
        if self._average is not None:
            state["average"] = self._average.state()
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over a copy of the :meth:`state` of the same stage elsewhere."""
        for name, component in (
            ("optimizer", self.optimizer),
            ("lr_scheduler", self.scheduler),
        ):
            if component is not None and state[name] is not None:
                # A copy: torch's optimizers may keep the tensors that they load.
                component.load_state_dict(copy.deepcopy(state[name]))
        if self._average is not None and state["average"] is not None:
            device = next((master.device for master in self.masters.values()), None)
            self._average.load(state["average"], device)
        self.n_skipped = state["n_skipped"]
        self.unused = [*state["unused"]]

    def form(self, *, updated: bool, unused: Collection[str]) -> dict[str, Any]:
        """Return a state with the keys, shapes and types of :meth:`state`, and other values.

        ``updated``: as after an update in which all but the ``unused`` weights had a gradient.
        """
        # The optimizer itself shows which state it makes: another one makes a step with zeros.
        twin = copy.copy(self)
        optimized = self._optimized_of(self._zeros())
        optimizer, scheduler = self._make(optimized)
        twin.optimizer = optimizer
        twin.scheduler = scheduler
        if updated and twin.optimizer:
            for name in optimized.keys() - unused:
                optimized[name].grad = torch.zeros_like(optimized[name])
            twin.optimizer.step()
        return twin.state()

    def rates(self, update: int) -> dict[str, tuple[float, float]]:
        """Return the learning rate and the decoupled weight decay of each weight at an update."""
        if self._future_rates is None:
            optimized = self._optimized_of(self._zeros())
            optimizer, scheduler = self._make(optimized)
            assert optimizer is not None  # since a weight is predicted
            self._future_rates = FutureRates(optimized, optimizer, scheduler)
        return self._future_rates.at(update)

    def _zeros(self) -> dict[str, nn.Parameter]:
        """Return parameters of the same names and shapes, with memory of their own."""
        return {
            name: nn.Parameter(torch.zeros_like(parameter))
            for name, parameter in self.masters.items()
        }

    def newest(self) -> Weights:
        """Return the newest version. It shares memory with the parameters until the next update."""
        return {name: master.data for name, master in self.masters.items()}

    def update(
        self,
        total: GradientSum,
        n_microbatches: int,
        *,
        keep_old: bool,
        norm: GradientNorm | None = None,
    ) -> None:
        """Make one optimizer step on the newest weights; then set the next learning rate.

        ``total`` sums over all micro-batches the gradients of (options.scale * loss /
        n_microbatches), and norms' statistics; see :meth:`LossValue.root` for losses with a count.
        ``keep_old``: the version before is still read.
        """
        # 1. Turn the sum into the gradient of the step's mean loss.
        total.divide_by_count(self.masters)
        # 2. Before the weights change: the average begins with those before the first update.
        self.begin_average()
        # 3. The optimizer works in place. Micro-batches between forward and backward still use the
        # old version, so it must keep its memory.
        if keep_old:
            renew([self])
        # 4. Update; an infinite gradient, as float16 may give, leaves the weights as they are.
        for name, master in self.masters.items():
            master.grad = total.tensors.get(name)
        if self.optimizer is not None:
            # With the norm of the whole model, the caller has computed it for all stages together.
            norm = norm or gradient_norms([self], [total])[0]
            if norm is not None and not norm.is_finite:
                # The learning-rate schedule still advances, since it counts training steps.
                self.n_skipped += 1
                for master in self.masters.values():
                    master.grad = None  # weights without gradient stay
            elif norm is not None:
                self._scale_gradient(norm)
        self.apply()
        # 5. Norms' running statistics and the average follow.
        advance_statistics([self], [total], n_microbatches)
        if self._average is not None:
            self._average.update(self.averaged())

    def release(self) -> None:
        """Free the weights' memory."""
        for master in self.masters.values():
            # The parameter itself stays: optimizer, model and names refer to it.
            master.data = master.data.new_empty(0)
        if self.sharded is not None:
            self.sharded.give_to_optimizer(self.masters, self._optimized)

    @property
    def averages(self) -> Weights:
        """The moving average, with ``options.ema``; empty without, and before the first update."""
        if self._average is None:
            return {}
        return self._average.weights

    def whole_forms(self, weights: Weights) -> Weights:
        """Return tensors of the names, types and whole shapes of ``weights`` of this stage."""
        if self.sharded is None:
            return weights
        return self.sharded.forms(weights)

    def optimizer_averages(self, newest: Weights) -> Weights:
        """Return the weights with which the optimizer would evaluate; by default none.

        Optimizers such as schedule-free's exchange the weights in place by ``eval()``. They do so
        here on copies, since others read the versions.
        """
        optimizer = self.optimizer
        if optimizer is None or not callable(getattr(optimizer, "eval", None)):
            return {}
        with self._exchanging_weights:
            # The optimizer's eval() and train() change in place whatever memory the masters have::
            #
            #     newest --copy--> masters --eval()--> averages
            #     averages --copy--> masters --train()--> dropped
            #
            # The weights that are trained get back their own memory, untouched.
            trained = {name: master.data for name, master in self.masters.items()}
            for name, master in self.masters.items():
                master.data = newest[name].clone()
            optimizer.eval()  # type: ignore[attr-defined]
            averages = {name: master.data for name, master in self.masters.items()}
            for name, master in self.masters.items():
                master.data = averages[name].clone()
            optimizer.train()  # type: ignore[attr-defined]
            for name, master in self.masters.items():
                master.data = trained[name]
        return averages

    def begin_average(self) -> None:
        """Start the average, if any, with the weights before the first update."""
        if self._average is not None:
            self._average.begin(self.averaged())

    def averaged(self) -> Weights:
        """Return what averages follow: the newest weights, and batch norms' running statistics."""
        averaged = self.newest()
        for name, buffer in self.stage.named_buffers():
            if name.rpartition(".")[2] in ("running_mean", "running_var"):
                averaged[name] = buffer
        return averaged

    def renew(self) -> list[tuple[Tensor, Tensor]]:
        """Give the newest weights memory of their own; readers of the old version keep theirs.

        Returns:
            pairs of a new tensor and the old one, which the caller has to copy to it.
        """
        old = self.newest()
        if self._spare:
            new = self._spare.pop()
        else:
            new = {name: torch.empty_like(tensor) for name, tensor in old.items()}
        for name, master in self.masters.items():
            master.data = new[name]
        return [(new[name], old[name]) for name in old]

    def recycle(self, weights: Weights) -> None:
        """Let a later version take the memory of ``weights``, which nothing reads any more.

        Versions then return to the same addresses, which a captured step reads.
        """
        # The newest version has the memory of the masters. As a spare it would be overwritten by
        # the next update, while ops still read it.
        in_use = {master.data_ptr() for master in self.masters.values()}
        if weights and not any(
            tensor.data_ptr() in in_use for tensor in weights.values()
        ):
            self._spare.append(weights)

    def apply(self) -> None:
        """Make one optimizer step with the gradients that the parameters have."""
        # An optimizer makes the state of a weight in its first update with a gradient. A state that
        # is loaded is checked against this; see :meth:`form`.
        self.unused = [name for name in self.unused if self.masters[name].grad is None]
        if self.optimizer is not None:
            if self.sharded is not None:
                self.sharded.give_to_optimizer(self.masters, self._optimized)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        if self.scheduler is not None:
            # After the step, so the rate of step t applies to the update of step t.
            self.scheduler.step()

    @torch.no_grad()
    def _scale_gradient(self, norm: GradientNorm) -> None:
        """Divide the gradient by the loss's scale, and clip it."""
        gradients = [
            master.grad for master in self.masters.values() if master.grad is not None
        ]
        # The norm is that of the gradient without the scale, so the limit applies to it as it is.
        # On a GPU nothing is read here: the factor stays on the device.
        factor = torch.full_like(norm.squared, 1 / self.options.scale)
        if self.options.clip is not None:
            # The small number as in torch.nn.utils.clip_grad_norm_: equal weights to the bit.
            factor *= (self.options.clip / (norm.squared.sqrt() + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, factor)


@torch.no_grad()
def renew(updaters: Sequence[Updater]) -> None:
    """Give the newest weights of several stages memory of their own, in one operation."""
    pairs: list[tuple[Tensor, Tensor]] = []
    for updater in updaters:
        pairs += updater.renew()
    if pairs:
        torch._foreach_copy_([new for new, _ in pairs], [old for _, old in pairs])


def advance_statistics(
    updaters: Sequence[Updater], totals: Sequence[GradientSum], n_microbatches: int
) -> None:
    """Take the norms' statistics out of ``totals``, and advance the running ones by their means.

    Args:
        updaters: those of all stages.
        totals: for each stage, its sum; statistics of a norm are ``[2, channels]``, by its name.
        n_microbatches: number of micro-batches in the sums.
    """
    norms: list[_BatchNorm] = []
    summed: list[Tensor] = []
    for updater, total in zip(updaters, totals, strict=True):
        # Gradients have the names of weights; all other names but the count's are those of norms.
        for name in total.tensors.keys() - updater.masters.keys() - {COUNT}:
            norms.append(cast(_BatchNorm, updater.stage.get_submodule(name)))
            summed.append(total.tensors.pop(name))
    if norms:
        advance_running_statistics(norms, torch._foreach_div(summed, n_microbatches))
