"""One stage at work: it computes with any weight version."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from types import FunctionType

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from toolkit.model.trace import in_training, one_by_one
from toolkit.runtime.microbatch_norm import Again, Group, replace_norms
from toolkit.runtime.step_options import PLAIN, StepOptions
from toolkit.runtime.updater import MakeOptimizer, MakeScheduler, Updater, Weights

Values = tuple[Tensor, ...]
"""The tensors that cross a boundary."""

_MOST_COMPILATIONS = 256  # of a stage: more than it has shapes; torch allows no more in all


class StageRunner(Updater):
    """A stage as one rank runs it: what updates it, and computes with any version of it.

    Args:
        stage: the stage; its parameters are the newest weights and are updated in place.
        index: which stage it is.
        seed: with step, stage and micro-batch it seeds what the stage draws at random (dropout),
            so that no runtime, order or grouping changes the draws.
        options: how it computes and updates.
    """

    def __init__(
        self,
        stage: nn.Module,
        index: int,
        make_optimizer: MakeOptimizer,
        make_scheduler: MakeScheduler | None,
        seed: int,
        options: StepOptions = PLAIN,
    ) -> None:
        super().__init__(stage, make_optimizer, make_scheduler, options)
        self.index = index
        self.seed = seed
        if options.channels_last:
            for master in self.masters.values():
                master.data = channels_last(master.data)
        self.group = Group()
        tensors = chain(stage.parameters(), stage.buffers())
        self.compute = in_training(copy.deepcopy(stage, {id(tensor): tensor for tensor in tensors}))
        self.norms = replace_norms(self.compute, self.group)
        self.one_by_one = one_by_one(self.compute)
        self._call: Callable[[Weights, Values], Values] = partial(
            torch.func.functional_call, self.compute
        )
        if options.compile != "none":
            self._call = compiled(self._call, options.compile)

    @property
    def splits(self) -> bool:
        """Whether the halves of a backward are half the work each.

        Of a compiled stage torch computes all gradients or none, and one that computes its forward
        again would do so for each half.
        """
        return self.options.compile == "none" and not self.options.checkpoints(self.index)

    def replica(self) -> "StageRunner":
        """A copy with parameters and optimizer state of its own."""
        stage = copy.deepcopy(self.stage)
        twin = StageRunner(stage, self.index, *self.makers, self.seed, self.options)
        twin.load(self.state())
        return twin

    def forward(
        self, weights: Weights, inputs: Values, microbatches: Sequence[int], step: int
    ) -> Values:
        """Run micro-batches that read the same weights as one batch."""
        if self.options.channels_last and self.index == 0:
            inputs = tuple(channels_last(tensor) for tensor in inputs)
        run = partial(self._run, weights, microbatches=microbatches, step=step)
        if not self.options.checkpoints(self.index):
            return run(*inputs)
        outputs: Values = checkpoint(
            run,
            *inputs,
            use_reentrant=False,
            preserve_rng_state=False,  # what is drawn is seeded by its place
            context_fn=lambda: (nullcontext(), Again(self.group)),
        )
        return outputs

    def _run(
        self, weights: Weights, *inputs: Tensor, microbatches: Sequence[int], step: int
    ) -> Values:
        with self.options.autocast(inputs[0].device):
            return self._compute(weights, inputs, microbatches, step)

    def _compute(
        self, weights: Weights, inputs: Values, microbatches: Sequence[int], step: int
    ) -> Values:
        if not self.one_by_one:
            self.group.size = len(microbatches)
            return self._call(weights, inputs)
        self.group.size = 1
        n = len(microbatches)
        parts = zip(*(tensor.chunk(n) for tensor in inputs), strict=True) if n > 1 else [inputs]
        outputs = []
        for microbatch, part in zip(microbatches, parts, strict=True):
            with drawing(part, self.seed, step, self.index, microbatch):
                outputs.append(self._call(weights, part))
        if n == 1:
            return outputs[0]
        return tuple(torch.cat(tensors) for tensors in zip(*outputs, strict=True))

    def take_statistics(self) -> dict[str, Tensor]:
        """What the norms have summed since this was last called, by the norm's name."""
        taken = {name: norm.take_statistics() for name, norm in self.norms.items()}
        return {name: statistics for name, statistics in taken.items() if statistics is not None}


def compiled(call: Callable[..., Values], mode: str) -> Callable[..., Values]:
    """``call`` by torch.compile, with machine code for the shapes that it meets.

    torch counts the compilations of a code object, and gives up after a few: what it has not met by
    then it leaves as it is. So each stage has its own, the same code as another object; and more of
    them, for all numbers of micro-batches that it may run as one batch.
    """

    def run(weights: Weights, inputs: Values) -> Values:
        return call(weights, inputs)

    own = FunctionType(run.__code__.replace(), run.__globals__, closure=run.__closure__)
    found: Callable[..., Values] = torch.compile(own, mode=mode, dynamic=False)
    more = torch._dynamo.config.patch(recompile_limit=_MOST_COMPILATIONS)

    def compiling(weights: Weights, inputs: Values) -> Values:
        with more:
            return found(weights, inputs)

    return compiling


def channels_last(tensor: Tensor) -> Tensor:
    """The same values; images and the weights of convolutions in that memory format."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


@torch.no_grad()
def predicted(before: Weights, late: Weights, delay: int) -> Weights:
    """What ``late`` weights will be ``delay`` updates on, if each is as the one since ``before``.

    theta_v + delay (theta_v - theta_{v-1}): the prediction of SpecTrain (arXiv 1809.02839), since
    an update by momentum is nearly the one before it.
    """
    return {name: torch.lerp(before[name], x, 1.0 + delay) for name, x in late.items()}


def leaves(weights: Weights) -> Weights:
    """The same memory as leaves of a new graph, to gather gradients apart from the parameters."""
    return {name: tensor.detach().requires_grad_() for name, tensor in weights.items()}


def take_gradients(weights: Weights) -> dict[str, Tensor]:
    """Take what a backward has left on ``leaves``, each in memory of its own.

    Where several weights are added up, autograd may leave them views of one gradient.
    """
    found: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, leaf in weights.items():
        gradient = take_gradient(leaf)
        if gradient is not None:
            if gradient.layout == torch.strided:
                storage = gradient.untyped_storage()._cdata
                gradient = gradient.clone() if storage in storages else gradient
                storages.add(storage)
            found[name] = gradient
    return found


def take_gradient(leaf: Tensor) -> Tensor | None:
    """What a backward has left on ``leaf``, which forgets it: memory is another's to give back."""
    gradient, leaf.grad = leaf.grad, None
    return gradient


@contextmanager
def drawing(inputs: Values, seed: int, step: int, stage: int, microbatch: int) -> Iterator[None]:
    """Draw at random what belongs to a stage on a micro-batch; the generators are kept."""
    gpus = {tensor.device for tensor in inputs if tensor.is_cuda}
    generators = [torch.default_generator, *(torch.cuda.default_generators[d.index] for d in gpus)]
    with torch.random.fork_rng(gpus):
        for generator in generators:  # torch.manual_seed would change those of other GPUs, too
            generator.manual_seed(hash((seed, step, stage, microbatch)))
        yield
