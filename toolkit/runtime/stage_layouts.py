"""Finds the layouts of all messages, by a run of the stages without memory or values."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from toolkit.errors import UserError, first_line
from toolkit.model.node_costs import differentiable
from toolkit.runtime.message_layout import Layout, Layouts
from toolkit.runtime.microbatch_norm import MicrobatchNorm, take_statistics
from toolkit.runtime.stage import Values

if TYPE_CHECKING:
    from toolkit.runtime.sharded_stage import ShardedStage

_CPU = torch.device("cpu")


class _Forward(NamedTuple):
    """A stage's forward.

    Attributes:
        tensors: the stage's parameters and buffers by name; those that it trains need gradients.
        inputs: what it has received.
        outputs: what it passes on.
    """

    tensors: dict[str, Tensor]
    inputs: Values
    outputs: Values

    def weights(self) -> dict[str, Tensor]:
        """Return the trained weights, by name."""
        return {name: x for name, x in self.tensors.items() if x.requires_grad}


class _Backward(NamedTuple):
    """A stage's backward: gradients, None where there is none, and what its norms noted.

    Attributes:
        inputs: gradients of the stage's inputs.
        weights: gradients of its trained weights, by name.
        statistics: those of its norms in the forward, by name.
    """

    inputs: list[Tensor | None]
    weights: dict[str, Tensor | None]
    statistics: dict[str, Tensor]


def find_layouts(
    skeletons: Sequence[nn.Module],
    inputs: Values,
    wire: torch.dtype | None = None,
    device: torch.device = _CPU,
    sharded: Sequence["ShardedStage"] = (),
) -> Layouts:
    """Find the layouts of all messages, by a run of the stages without memory or values.

    Args:
        skeletons: the stages, on the meta device.
        inputs: of a micro-batch, on the meta device.
        wire: as in :meth:`Layout.of`.
        device: where the stages compute; autocast chooses types by it.
        sharded: the stages on a row of devices, if ranks have several. Each stage learns how its
            inputs lie; ``skeletons`` are their skeletons' modules.
    """
    local_tensors = _local_tensors(skeletons, bool(sharded))
    with FakeTensorMode():
        # 1. Forwards, one stage after another: a stage's outputs are the next one's inputs.
        forwards: list[_Forward] = []
        stage_inputs = tuple(_fake(tensor, device) for tensor in inputs)
        for index, stage in enumerate(skeletons):
            tensors = {
                name: _fake(tensor, device).requires_grad_(tensor.requires_grad)
                for name, tensor in local_tensors[index].items()
            }
            if sharded:
                outputs = _sharded_forward(sharded, index, tensors, stage_inputs)
            else:
                outputs = torch.func.functional_call(stage, tensors, stage_inputs)
            forwards.append(_Forward(tensors, stage_inputs, outputs))
            stage_inputs = _next_inputs(outputs)

        # 2. Backwards: they find which tensors get a gradient, and its type.
        backwards: list[_Backward] = []
        output_gradients: Sequence[Tensor | None] = [
            torch.empty_like(tensor) for tensor in stage_inputs
        ]
        for stage, forward in zip(reversed(skeletons), reversed(forwards), strict=True):
            backward = _run_backward(stage, forward, output_gradients)
            output_gradients = backward.inputs
            backwards.append(backward)
        backwards.reverse()

    # 3. Each tensor's place in the messages.
    return Layouts(
        activations=tuple(Layout.of(dict(enumerate(f.outputs))) for f in forwards),
        activation_gradients=tuple(
            Layout.of(dict(enumerate(b.inputs))) for b in backwards
        ),
        n_inputs=tuple(len(f.inputs) for f in forwards),
        gradients=tuple(
            # Statistics of norms travel with the gradients, but are not rounded with them.
            Layout.of(b.weights | b.statistics, wire, exact=b.statistics)
            for b in backwards
        ),
        weights=tuple(Layout.of(f.weights(), wire) for f in forwards),
    )


def _run_backward(
    stage: nn.Module, forward: _Forward, output_gradients: Sequence[Tensor | None]
) -> _Backward:
    """Run a stage's backward, from the gradients of its outputs."""
    weights = forward.weights()
    gradients = _gradients(
        forward.outputs, output_gradients, [*forward.inputs, *weights.values()]
    )
    n_inputs = len(forward.inputs)
    weight_gradients = dict(zip(weights, gradients[n_inputs:], strict=True))
    # Taken, not only read: the skeletons run again for other shapes, and then must have none.
    statistics = _statistics_of(stage)
    return _Backward(gradients[:n_inputs], weight_gradients, statistics)


def _sharded_forward(
    stages: Sequence["ShardedStage"],
    index: int,
    tensors: dict[str, Tensor],
    inputs: Values,
) -> Values:
    """Run a stage on a row of devices; the next one learns how its inputs lie."""
    # Only here: to import torch's DTensors takes a second.
    from toolkit.runtime.sharded_stage import pass_shardings_on

    try:
        with _quiet_fakes():
            outputs: Values = stages[index].skeleton(tensors, inputs)
    except UserError:
        raise
    except (
        Exception
    ) as error:  # the plan is the user's, and torch checks it by what fails
        raise UserError(
            f"parallelize: got a plan with which stage {index} cannot run:"
            f" {first_line(error).rstrip('.')}. Its modules have to fit together, such as q, k and"
            " v of an attention, and sizes that devices share to be multiples of the width"
        ) from error
    pass_shardings_on(stages, index)
    return outputs


@contextmanager
def _quiet_fakes() -> Iterator[None]:
    """Discard torch's tracebacks of operations that fail on fake tensors: the error says it."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _next_inputs(outputs: Values) -> Values:
    """Return what the next stage receives: leaves, since each stage has a graph of its own."""
    return tuple(
        torch.empty_like(tensor).requires_grad_(differentiable(tensor))
        for tensor in outputs
    )


def _local_tensors(
    skeletons: Sequence[nn.Module], are_sharded: bool
) -> list[dict[str, Tensor]]:
    """Return the parameters and buffers of each stage, or this device's part of them."""
    if are_sharded:
        # Only here: to import torch's DTensors takes a second.
        from toolkit.runtime.sharded_stage import local_tensors_of

        return [local_tensors_of(stage) for stage in skeletons]
    return [
        dict(chain(stage.named_parameters(), stage.named_buffers()))
        for stage in skeletons
    ]


def _statistics_of(stage: nn.Module) -> dict[str, Tensor]:
    """Return what the norms of ``stage`` noted in its forward."""
    norms = {}
    for name, module in stage.named_modules():
        if isinstance(module, MicrobatchNorm):
            norms[name] = module
    return take_statistics(norms)


def _fake(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def _gradients(
    outputs: Values, output_gradients: Sequence[Tensor | None], leaves: list[Tensor]
) -> list[Tensor | None]:
    """Return the gradients of ``leaves``; None for a leaf that gets no gradient."""
    roots = []
    root_gradients = []
    for output, gradient in zip(outputs, output_gradients, strict=True):
        if output.requires_grad and gradient is not None:
            roots.append(output)
            root_gradients.append(gradient)
    sources = [leaf for leaf in leaves if leaf.requires_grad]
    if not roots or not sources:
        return [None] * len(leaves)
    gradients = iter(
        torch.autograd.grad(roots, sources, root_gradients, allow_unused=True)
    )
    return [next(gradients) if leaf.requires_grad else None for leaf in leaves]
