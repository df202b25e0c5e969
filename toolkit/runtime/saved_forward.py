"""What a forward leaves on its rank for the backward."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.autograd.graph import GradientEdge

from toolkit.runtime.split_backward import BackwardSegment
from toolkit.runtime.stage import Values, take_gradients
from toolkit.runtime.updater import Weights

Gradients = tuple[Tensor | None, ...]


@dataclass
class SavedForward:
    """What a forward leaves for its backward.

    Attributes:
        weights: leaves, which gather the gradients.
        inputs: likewise.
        outputs: places in the graph, instead of tensors: the memory of these may be freed.
        statistics: of the norms, for the sum of gradients.
        gradients: of the outputs; that of the loss is known at once.
        count: of the loss, if it has one.
        second_half: left by the first half of a split backward.
    """

    weights: Weights
    inputs: Values
    outputs: Sequence[GradientEdge | None]
    statistics: Weights
    gradients: Gradients = ()
    count: Tensor | None = None
    second_half: Sequence[BackwardSegment] = ()

    def take_roots(self) -> tuple[list[GradientEdge], list[Tensor]]:
        """Take where the backward begins, and the gradients there."""
        edges = []
        gradients = []
        for edge, gradient in zip(self.outputs, self.gradients, strict=True):
            if edge is not None and gradient is not None:
                edges.append(edge)
                gradients.append(gradient)
        self.gradients = ()
        return edges, gradients

    def take_weight_gradients(self) -> Weights:
        """Take what a backward has left on the weights; free the rest, with the graph."""
        gradients = take_gradients(self.weights)
        self.weights = {}
        self.inputs = ()
        self.outputs = ()
        self.second_half = ()
        return gradients
