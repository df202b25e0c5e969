"""A backward in two halves: gradients of a stage's inputs first, those of its weights later.

The first half goes from the outputs to the inputs, and keeps the gradients at the joints: the
nodes where weights join that path. The second half runs from the joints to the weights alone, so
nothing is computed twice (as in Zero Bubble, arXiv 2401.10241).
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


@dataclass
class BackwardSegment:
    """A part of a backward: from ``edges``, with their ``gradients``, to some ``weights``."""

    edges: Sequence[GradientEdge]
    weights: Sequence[Tensor]
    gradients: Sequence[Tensor | None] = ()

    def run(self) -> None:
        """Leave the gradients on the weights; autograd frees what it saved for them."""
        pairs = zip(self.edges, self.gradients, strict=True)
        roots = [(edge, gradient) for edge, gradient in pairs if gradient is not None]
        if roots and self.weights:
            edges = [edge for edge, _ in roots]
            gradients = [gradient for _, gradient in roots]
            # Not torch.autograd.grad, which may return one tensor for two weights.
            torch.autograd.backward(edges, gradients, inputs=self.weights)


def first_half(
    outputs: Sequence[GradientEdge],
    gradients: Sequence[Tensor],
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
) -> tuple[tuple[Tensor | None, ...], list[BackwardSegment]]:
    """Return the gradient of each input, or None, and the segments of the second half.

    The backward begins at ``outputs``, with their ``gradients``; ``inputs`` and ``weights`` are
    leaves.
    """
    inputs_with_gradient = [tensor for tensor in inputs if tensor.requires_grad]
    if not inputs_with_gradient or not outputs:
        # A first stage, whose inputs are data: the first half has nothing to do.
        return (None,) * len(inputs), [BackwardSegment(outputs, weights, gradients)]
    second_half = _find_segments(outputs, inputs_with_gradient, weights)
    # Weights that join at several places, or lie on an output off the path, get their gradients at
    # once: a second half that began at one joint would run on through the others.
    second_half_ids: set[int] = set()
    edges: list[GradientEdge] = []
    for segment in second_half:
        second_half_ids.update(map(id, segment.weights))
        edges += segment.edges
    weights_at_once = [
        weight for weight in weights if id(weight) not in second_half_ids
    ]
    sources: list[Tensor | GradientEdge] = [
        *inputs_with_gradient,
        *weights_at_once,
        *edges,
    ]
    computed = iter(
        torch.autograd.grad(
            outputs,
            sources,  # type: ignore[arg-type]  # of both kinds
            gradients,
            retain_graph=True,  # for the second half
            allow_unused=True,
        )
    )
    input_gradients = tuple(
        next(computed) if tensor.requires_grad else None for tensor in inputs
    )
    for weight in weights_at_once:
        gradient = next(computed)
        weight.grad = None
        if gradient is not None:
            # A copy, since torch.autograd.grad may return one tensor for two weights.
            weight.grad = gradient.clone()
    for segment in second_half:
        segment.gradients = list(islice(computed, len(segment.edges)))
    return input_gradients, second_half


def _find_segments(
    outputs: Sequence[GradientEdge], inputs: Sequence[Tensor], weights: Sequence[Tensor]
) -> list[BackwardSegment]:
    """Return a segment for each joint, with the weights that join only there.

    ::

        output o--o--o--o input      the path; its nodes are keys of ``joining``
                  |  |
                  w  o--w            beyond it: the weights that join at a node of the path
    """
    ends = {get_gradient_edge(tensor).node for tensor in inputs}
    leaves = {get_gradient_edge(tensor).node: tensor for tensor in weights}
    # By node, the numbers of its outputs at which the backward enters it.
    entered: defaultdict[Node, set[int]] = defaultdict(set)
    for edge in outputs:
        entered[edge.node].add(edge.output_nr)
    # Weights that join at each node on the path to the inputs.
    joining: dict[Node, set[Node]] = {}
    beyond: dict[Node, set[Node]] = {}  # weights beyond each of the other nodes
    for node in _leaves_first(outputs):
        weights_beyond: set[Node] = set()
        is_on_path = node in ends
        for follower, number in node.next_functions:
            if follower is None:
                continue
            entered[follower].add(number)
            weights_beyond |= beyond.get(follower, set())
            is_on_path = is_on_path or follower in joining
        if is_on_path:
            joining[node] = weights_beyond
        else:
            beyond[node] = weights_beyond | (leaves.keys() & {node})
    # A weight that the stage uses at two places has two joints.
    n_joints = Counter(chain(*joining.values()))
    off_path = set().union(*(beyond.get(edge.node, ()) for edge in outputs))
    segments = []
    for node, weights_beyond in joining.items():
        segment_weights = [
            leaves[n] for n in weights_beyond if n_joints[n] == 1 and n not in off_path
        ]
        if segment_weights:
            edges = [GradientEdge(node, number) for number in sorted(entered[node])]
            segments.append(BackwardSegment(edges, segment_weights))
    return segments


def _leaves_first(outputs: Sequence[GradientEdge]) -> Iterator[Node]:
    """Yield every node of the graph after those that follow it."""
    visited: set[Node] = set()
    stack = [(edge.node, False) for edge in outputs]
    # Without recursion, for deep graphs. A node comes back, expanded, after all that follow it.
    while stack:
        node, is_expanded = stack.pop()
        if is_expanded:
            yield node
        elif node not in visited:
            visited.add(node)
            stack.append((node, True))
            for follower, _ in node.next_functions:
                if follower is not None:
                    stack.append((follower, False))
