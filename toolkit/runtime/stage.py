"""One stage at work: it computes with any weight version."""

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from types import FunctionType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from toolkit.errors import UserError
from toolkit.model.kernel_work import storage_of
from toolkit.model.random_draws import drawing
from toolkit.model.traced_stage import in_training, one_by_one
from toolkit.runtime.make_optimizer import MakeOptimizer, MakeScheduler
from toolkit.runtime.microbatch_norm import NormGroup, replace_norms, take_statistics
from toolkit.runtime.step_options import PLAIN, StepOptions
from toolkit.runtime.updater import GradientSum, Updater, Weights
from toolkit.schedule import Correction

if TYPE_CHECKING:
    from toolkit.runtime.sharded_stage import ShardedStage

Values = tuple[Tensor, ...]
"""The tensors that cross a boundary."""

# Of a stage: more than it has shapes; torch allows no more in all.
_MOST_COMPILATIONS = 256


class StageRunner(Updater):
    """A stage as one rank runs it: it updates the stage, and computes with any version of it.

    ``seed``, step, layer and micro-batch seed what the stage draws at random (dropout), so that no
    runtime, order, grouping or cut changes the draws.
    """

    def __init__(
        self,
        stage: nn.Module,
        index: int,
        make_optimizer: MakeOptimizer,
        make_scheduler: MakeScheduler | None = None,
        seed: int = 0,
        options: StepOptions = PLAIN,
        sharded: "ShardedStage | None" = None,
    ) -> None:
        super().__init__(stage, make_optimizer, make_scheduler, options, sharded)
        self.index = index
        self.seed = seed
        if options.channels_last:
            for master in self.masters.values():
                master.data = channels_last(master.data)
        self.group = NormGroup(least_fused=options.least_fused(device_of(stage)))
        # A copy of the modules, since norms are replaced, with the tensors of the stage itself.
        tensors = chain(stage.parameters(), stage.buffers())
        stage_tensors = {id(tensor): tensor for tensor in tensors}
        if sharded is None:
            self.compute = in_training(copy.deepcopy(stage, stage_tensors))
        else:
            self.compute = sharded.compute.module
        nodes = cast(fx.GraphModule, stage).graph.nodes
        self.names = [node.name for node in nodes if node.op == "placeholder"]
        self.norms = replace_norms(self.compute, self.group)
        # Statistics of the norms by name, of each forward since they were last taken.
        self._statistics: list[dict[str, Tensor]] = []
        self.one_by_one = one_by_one(self.compute)
        # By output, the input that it is.
        self.passes_on: dict[int, int] = cast(Any, stage).meta.get("passes_on", {})
        self.buffers = list(self.compute.buffers())
        frozen = [p for p in self.compute.parameters() if not p.requires_grad]
        # What it reads besides weights and inputs.
        self.constants = [*self.buffers, *frozen]
        # To look for tied weights in each call takes a tenth of a small model's time.
        n_names = len(list(self.compute.named_parameters(remove_duplicate=False)))
        has_tied = len(list(self.compute.parameters())) < n_names
        call: Callable[..., Any] = partial(torch.func.functional_call, self.compute)
        if sharded is not None:
            call = sharded.compute
        self._call: Callable[..., Values] = partial(call, tie_weights=has_tied)
        if options.compile != "none":
            self._call = compiled(self._call, options.compile)

    @property
    def splits(self) -> bool:
        """Whether the halves of a backward are half the work each.

        torch computes all gradients of a compiled stage or none; a checkpointed stage would repeat
        its forward in each half.
        """
        return self.options.compile == "none" and not self.options.checkpoints(
            self.index
        )

    def replica(self) -> "StageRunner":
        """Return a copy with parameters and optimizer state of its own."""
        stage = copy.deepcopy(self.stage)
        twin = StageRunner(
            stage,
            self.index,
            self.make_optimizer,
            self.make_scheduler,
            self.seed,
            self.options,
        )
        twin.load(self.state())
        return twin

    def forward(
        self, weights: Weights, inputs: Values, microbatches: Sequence[int], step: int
    ) -> Values:
        """Run ``microbatches`` as one batch, ``inputs`` ``[len(microbatches) * b, ...]`` each.

        Args:
            weights: the trained weights by name, as leaves.
            inputs: ``[len(microbatches) * b, ...]`` each.
            microbatches: numbers of the micro-batches, in the order of their samples.
            step: training step, which seeds random draws.
        """
        if len(inputs) != len(self.names):
            raise UserError(
                f"inputs: got {len(inputs)} tensors; expected {len(self.names)},"
                f" {' and '.join(self.names)}, as in the example of partition"
            )
        if self.options.channels_last and self.index == 0:
            inputs = tuple(channels_last(tensor) for tensor in inputs)
        run = partial(self._run, weights, microbatches=microbatches, step=step)
        if not self.options.checkpoints(self.index):
            return run(*inputs)
        return checkpoint(
            run,
            *inputs,
            use_reentrant=False,
            preserve_rng_state=False,  # draws have a seed of their own
            context_fn=lambda: (nullcontext(), self.group),
        )

    def _run(
        self, weights: Weights, *inputs: Tensor, microbatches: Sequence[int], step: int
    ) -> Values:
        with self.options.autocast(inputs[0].device):
            if self.one_by_one:
                return self._run_one_by_one(weights, inputs, microbatches, step)
            n_microbatches = len(microbatches)
            # Norms read it, within the call.
            self.group.size = n_microbatches
            outputs = []
            results = self._call(weights, inputs)
            self._add_statistics()
            for output in results:
                # Of what has no batch, such as a tied weight, the stage returns one row, and the
                # next stage takes one per micro-batch. All else has a row or more per micro-batch.
                if output.shape[0] == 1 < n_microbatches:
                    outputs.append(output.expand(n_microbatches, *output.shape[1:]))
                else:
                    outputs.append(output)
            return tuple(outputs)

    def _run_one_by_one(
        self, weights: Weights, inputs: Values, microbatches: Sequence[int], step: int
    ) -> Values:
        self.group.size = 1
        n_microbatches = len(microbatches)
        # No chunk of one part: the gradient of a chunk is copied.
        chunks: Iterable[Values] = [inputs]
        if n_microbatches > 1:
            chunks = zip(
                *(tensor.chunk(n_microbatches) for tensor in inputs), strict=True
            )
        outputs = []
        for microbatch, chunk in zip(microbatches, chunks, strict=True):
            with drawing(chunk, self.seed, step, microbatch):
                outputs.append(self._call(weights, chunk))
            self._add_statistics()
        if n_microbatches == 1:
            return outputs[0]
        merged_outputs = []
        for index, of_microbatches in enumerate(zip(*outputs, strict=True)):
            if index in self.passes_on:
                # An input that is passed on is whole already: a copy of a tied weight is large.
                merged_outputs.append(inputs[self.passes_on[index]])
            else:
                merged_outputs.append(torch.cat(of_microbatches))
        return tuple(merged_outputs)

    @torch.no_grad()
    def predict(
        self,
        previous: Weights,
        stale: Weights,
        version: int,
        step: int,
        correction: Correction,
    ) -> Weights:
        """Predict the weights of ``step`` from ``stale``, of ``version``, and the previous version.

        See :class:`toolkit.schedule.Correction`.

        Args:
            previous: weights of ``version - 1``.
            stale: weights of ``version``.
            version: number of the newest weights that the step can read.
            step: the step whose weights are predicted.
            correction: the kind of prediction, and its strength.
        """
        if correction.kind == "extrapolate":
            ahead = 1.0 + correction.c * (step - version)
            return {
                name: torch.lerp(previous[name], weight, ahead)
                for name, weight in stale.items()
            }
        predicted = {}
        # Update t makes version t + 1. Between `previous` and `stale` lies update version - 1;
        # still to come until `step` are the updates version to step - 1::
        #
        #     previous --last_rate--> stale --next_rates--> weights of `step`
        #     version - 1             version               (predicted)
        #
        # Each is taken to go as far as the last one, in the same direction, in proportion to its
        # rate.
        last_rates, *next_rates = [
            self.rates(update) for update in range(version - 1, step)
        ]
        for name, weight in stale.items():
            last_rate, decay = last_rates[name]
            # At a rate of 0, as at the start of a warm-up, the last update says nothing.
            ahead = 0.0
            if last_rate:
                ahead = (
                    correction.c
                    * sum(rates[name][0] for rates in next_rates)
                    / last_rate
                )
            predicted[name] = torch.lerp(previous[name], weight, 1.0 + ahead)
            if ahead and decay:
                # The last update's decay must not be extrapolated with its gradient's step.
                predicted[name].add_(previous[name], alpha=ahead * last_rate * decay)
        return predicted

    def _add_statistics(self) -> None:
        """Add the norms' statistics of the last forward, outside of what is compiled."""
        statistics = take_statistics(self.norms)
        # A checkpointed forward runs again in the backward, and has been counted.
        if not self.group.again:
            self._statistics.append(statistics)

    def take_statistics(self) -> dict[str, Tensor]:
        """Take the norms' statistics summed over the forwards since the last call, by name."""
        total = GradientSum()
        for statistics in self.statistics_of_forwards():
            total.add(statistics)
        return total.tensors

    def statistics_of_forwards(self) -> list[dict[str, Tensor]]:
        """Take the norms' statistics of each forward since the last call, by name."""
        statistics = self._statistics
        self._statistics = []
        return statistics


def device_of(stage: nn.Module) -> torch.device:
    """Return the device of the first parameter or buffer of ``stage``, or the CPU."""
    first = next(chain(stage.parameters(), stage.buffers()), None)
    if first is None:
        return torch.device("cpu")
    return first.device


def compiled(call: Callable[..., Values], mode: str) -> Callable[..., Values]:
    """Return ``call`` compiled by torch.compile, for every shape that it meets."""

    def run(weights: Weights, inputs: Values) -> Values:
        return call(weights, inputs)

    # torch counts the compilations of a code object, and stops compiling after a few. So each stage
    # gets a copy of the code object, and a limit above all numbers of micro-batches in one batch.
    run_copy = FunctionType(
        run.__code__.replace(), run.__globals__, closure=run.__closure__
    )
    compiled_run: Callable[..., Values] = torch.compile(
        run_copy, mode=mode, dynamic=False
    )
    return torch._dynamo.config.patch(recompile_limit=_MOST_COMPILATIONS)(compiled_run)


def channels_last(tensor: Tensor) -> Tensor:
    """Return the same values, with four-dimensional tensors in the format channels_last."""
    if tensor.dim() != 4:
        return tensor
    return tensor.contiguous(memory_format=torch.channels_last)


@torch.no_grad()
def compensated(
    gradients: Weights, stale: Weights, newest: Weights, strength: Tensor | float
) -> Weights:
    """Add strength * g * g * (newest - stale) to gradients g of ``stale``; see ``Correction``.

    Args:
        gradients: gradients g by the name of the weight.
        stale: the weights that the gradients belong to.
        newest: the weights that they will update.
        strength: factor of the correction, divided by that on the loss.
    """
    return {
        name: gradient + strength * gradient * gradient * (newest[name] - stale[name])
        for name, gradient in gradients.items()
    }


def leaves(weights: Weights) -> Weights:
    """Return leaves of a new graph in the same memory, with gradients of their own."""
    return {name: tensor.detach().requires_grad_() for name, tensor in weights.items()}


def take_gradients(weights: Weights) -> dict[str, Tensor]:
    """Take what a backward has left on ``leaves``, each in memory of its own."""
    gradients: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, leaf in weights.items():
        gradient = take_gradient(leaf)
        if gradient is None:
            continue
        gradients[name] = gradient
        if gradient.layout == torch.strided:
            # Where several weights are added up, autograd may leave views of one gradient.
            storage = storage_of(gradient)
            if storage in storages:
                gradients[name] = gradient.clone()
            storages.add(storage)
    return gradients


def take_gradient(leaf: Tensor) -> Tensor | None:
    """Take what a backward has left on ``leaf``; the caller alone then holds its memory."""
    gradient = leaf.grad
    leaf.grad = None
    return gradient
