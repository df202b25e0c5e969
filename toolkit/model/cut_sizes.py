"""Find which values of a traced model grow with the batch, so that they can cross a cut."""

from dataclasses import dataclass

import torch
from torch import fx, nn

from toolkit.errors import UserError, first_line
from toolkit.model.node_costs import NodeCost, outputs
from toolkit.model.structure import Inputs
from toolkit.model.trace import shapes_of


@dataclass(frozen=True)
class CutSizes:
    """Values of a graph that grow with the batch, by the names of nodes.

    Attributes:
        batched: tensors whose first dimension has a row per sample.
        unbatched: tensors without the batch that can travel: trained ones, and scalars.
        counts: whole numbers that are a multiple of the number of samples, with its factor.
    """

    batched: set[str]
    unbatched: set[str]
    counts: dict[str, int]


def sizes(
    model: nn.Module, traced: fx.GraphModule, inputs: Inputs, costs: dict[str, NodeCost]
) -> CutSizes:
    """Find what grows with the batch, by a run with one more row on the meta device.

    Raises:
        UserError: the model cannot run another row, or returns a tensor without the batch that is
            no scalar.
    """
    name = type(model).__name__
    n_samples = inputs[0].shape[0]
    # What has one more row in this run grows with the batch::
    #
    #     run      [b, ...]      a mask [s, s]
    #     longer   [b+1, ...]    a mask [s, s]
    longer_inputs = tuple(
        tensor.new_empty((n_samples + 1, *tensor.shape[1:]), device="meta")
        for tensor in inputs
    )
    try:
        longer_outputs = outputs(traced, longer_inputs)
    except Exception as error:  # the model's own code may raise anything
        raise UserError(
            f"{name} runs on {n_samples} rows but not on {n_samples + 1}: the first dimension must"
            f" be the batch: {first_line(error)}"
        ) from error
    batched: set[str] = set()
    unbatched: set[str] = set()
    counts: dict[str, int] = {}
    rows: dict[str, tuple[int, int]] = {}  # of each tensor, in the two runs
    for node_name, cost in costs.items():
        value = cost.output
        longer_value = longer_outputs[node_name]
        if isinstance(value, torch.Tensor) and isinstance(longer_value, torch.Tensor):
            if value.dim() and longer_value.dim():
                rows[node_name] = value.shape[0], longer_value.shape[0]
            if rows.get(node_name) == (n_samples, n_samples + 1):
                batched.add(node_name)
            is_scalar = value.dim() == 0 and value.is_floating_point()
            if value.shape == longer_value.shape and (value.requires_grad or is_scalar):
                unbatched.add(node_name)
        # Such as the first size of a reshape: x.shape[0] * 8 for 8 heads.
        elif type(value) is int and value and _grows(value, longer_value, n_samples):
            counts[node_name] = value // n_samples
    for node in result_nodes(traced):
        value = costs[node.name].output
        is_tensor = isinstance(value, torch.Tensor)
        if is_tensor and value.dim() == 0 and node.name in unbatched:
            continue
        n_rows, n_longer_rows = rows.get(node.name, (0, 0))
        if not n_rows or not _grows(n_rows, n_longer_rows, n_samples):
            shape = shapes_of((value,)) if is_tensor else type(value).__name__
            raise UserError(
                f"{name} must return tensors with the batch first, or a floating-point scalar such"
                f" as a loss: got shape {shape} ({node}) for {n_samples} samples. Leave it out,"
                " return it once a sample, or compute it in the loss"
            )
    return CutSizes(batched, unbatched, counts)


def _grows(size: int, longer_size: int, n_samples: int) -> bool:
    """Whether a size is a multiple of the samples, and of one more in the longer run."""
    return size % n_samples == 0 and size * (n_samples + 1) == longer_size * n_samples


def result_nodes(traced: fx.GraphModule) -> list[fx.Node]:
    """Return the nodes whose values a graph returns."""
    return list(next(iter(reversed(traced.graph.nodes))).args[0])
