"""The first run of a rank's stages, before any message."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from toolkit.model.node_costs import differentiable
from toolkit.runtime.message_layout import Layout, Layouts
from toolkit.runtime.stage import StageRunner, Values, leaves


def warm_up(
    runners: Sequence[StageRunner],
    layouts: Layouts,
    inputs: Values,
    device: torch.device,
    computed: Collection[int],
    updated: Collection[int],
) -> None:
    """Run the ``computed`` stages on zeros, and update copies of weights; no state changes.

    CUDA's libraries and torch.compile load kernels at first use, and CUDA then waits for all that
    the GPU is doing. That may include an early receive from a rank that waits for this one: a
    deadlock. So every kernel is loaded before the first message.

    Args:
        runners: all stages.
        layouts: the messages between them.
        inputs: of a micro-batch, on the meta device.
        device: where the stages compute.
        computed: stages whose ops this rank runs.
        updated: stages that it updates.
    """
    passed_on: Values | None = None
    for stage, runner in enumerate(runners):
        # The next stage that runs here then begins with zeros.
        if stage not in computed:
            passed_on = None
            continue
        if stage == 0:
            stage_inputs = tuple(
                torch.zeros_like(tensor, device=device) for tensor in inputs
            )
        else:
            activations = (
                passed_on or zeros(layouts.activations[stage - 1], device).values()
            )
            stage_inputs = tuple(
                tensor.detach().requires_grad_(differentiable(tensor))
                for tensor in activations
            )
        weights = (
            runner.newest()
            if stage in updated
            else zeros(layouts.weights[stage], device)
        )
        # Leaves, so that gradients come to rest there, and not on the model's parameters.
        passed_on = runner.forward(leaves(weights), stage_inputs, (0,), 0)
        layout = layouts.activations[stage]
        if layout.n_bytes != layout.whole_bytes:
            # Codes have kernels, too. Those of gradients are the same.
            outputs = {place: x.detach() for place, x in enumerate(passed_on)}
            layout.pack(outputs, device)
        roots = [tensor for tensor in passed_on if tensor.requires_grad]
        torch.autograd.backward(roots, [torch.zeros_like(tensor) for tensor in roots])
        # Statistics of zeros must not enter the first step's.
        runner.take_statistics()
        if stage in updated:
            # It updates a copy by gradients of zeros, which loads the optimizer's kernels.
            runner.form(updated=True, unused=())


def zeros(layout: Layout, device: torch.device) -> dict[Any, Tensor]:
    """Return a received message of zeros, in the order of its places."""
    tensors = layout.unpack(
        torch.zeros(layout.n_bytes, dtype=torch.uint8, device=device)
    )
    return {place: tensors[place] for place in sorted(tensors)}
