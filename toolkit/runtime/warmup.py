"""What a rank computes, done once before any message is under way.

CUDA's libraries and torch.compile load kernels when they are first used, and CUDA then waits for
all that the GPU is doing. A receive that was begun early would be among it, and may wait for a rank
that waits for this one.
"""

from collections.abc import Collection, Sequence

import torch

from toolkit.model.analysis import differentiable
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
    """Run a micro-batch of zeros through stages, forward and backward, and update copies of them.

    Nothing is left of it.

    Args:
        runners: of every stage.
        layouts: of their messages.
        inputs: formed like those of a micro-batch, on any device.
        device: on which they are run.
        computed: the stages that are run.
        updated: those whose weights are there, and are updated.
    """
    passed_on: Values | None = None
    for j, runner in enumerate(runners):
        if j not in computed:
            passed_on = None
            continue
        if j == 0:
            received = tuple(torch.zeros_like(x, device=device) for x in inputs)
        else:
            there = passed_on or _zeros(layouts.activations[j - 1], device).values()
            received = tuple(x.detach().requires_grad_(differentiable(x)) for x in there)
        weights = runner.newest() if j in updated else _zeros(layouts.weights[j], device)
        passed_on = runner.forward(leaves(weights), received, (0,), 0)
        ends = [x for x in passed_on if x.requires_grad]
        torch.autograd.backward(ends, [torch.zeros_like(x) for x in ends])
        runner.take_statistics()
        if j in updated:
            runner.form(updated=True, unused=())


def _zeros(layout: Layout, device: torch.device) -> dict:
    """A message of zeros as it is received, in the order of its places."""
    flat = torch.zeros(layout.n_bytes, dtype=torch.uint8, device=device)
    found = layout.unpack(flat)
    return {place: found[place] for place in sorted(found)}
