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
        known = [(edge, gradient) for edge, gradient in pairs if gradient is not None]
        if known and self.weights:
            edges, gradients = zip(*known, strict=True)
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
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    if not wanted or not outputs:
        return (None,) * len(inputs), [BackwardSegment(outputs, weights, gradients)]
    second_half = _find_segments(outputs, wanted, weights)
    # Weights that join at several places, or lie on an output off the path, get their gradients at
    # once: a second half that began at one joint would run on through the others.
    later = {id(weight) for segment in second_half for weight in segment.weights}
    at_once = [weight for weight in weights if id(weight) not in later]
    edges = [edge for segment in second_half for edge in segment.edges]
    asked: list[Tensor | GradientEdge] = [*wanted, *at_once, *edges]
    found = iter(
        torch.autograd.grad(
            outputs,
            asked,  # type: ignore[arg-type]  # of both kinds
            gradients,
            retain_graph=True,  # for the second half
            allow_unused=True,
        )
    )
    of_inputs = tuple(next(found) if tensor.requires_grad else None for tensor in inputs)
    for weight in at_once:
        gradient = next(found)
        weight.grad = None if gradient is None else gradient.clone()
    for segment in second_half:
        segment.gradients = list(islice(found, len(segment.edges)))
    return of_inputs, second_half


def _find_segments(
    outputs: Sequence[GradientEdge], inputs: Sequence[Tensor], weights: Sequence[Tensor]
) -> list[BackwardSegment]:
    """From each joint to the weights that join only there; without gradients yet."""
    ends = {get_gradient_edge(tensor).node for tensor in inputs}
    leaves = {get_gradient_edge(tensor).node: tensor for tensor in weights}
    entered: defaultdict[Node, set[int]] = defaultdict(set)
    for edge in outputs:
        entered[edge.node].add(edge.output_nr)
    joining: dict[Node, set[Node]] = {}  # weights that join at each node on the path to the inputs
    beyond: dict[Node, set[Node]] = {}  # weights beyond each of the other nodes
    for node in _leaves_first(outputs):
        followers = [(n, number) for n, number in node.next_functions if n is not None]
        for follower, number in followers:
            entered[follower].add(number)
        reached = set().union(*(beyond[n] for n, _ in followers if n in beyond))
        if node in ends or any(n in joining for n, _ in followers):
            joining[node] = reached
        else:
            beyond[node] = reached | (leaves.keys() & {node})
    times = Counter(chain(*joining.values()))
    off_path = set().union(*(beyond.get(edge.node, ()) for edge in outputs))
    segments = []
    for node, reached in joining.items():
        if once := [n for n in reached if times[n] == 1 and n not in off_path]:
            edges = [GradientEdge(node, number) for number in sorted(entered[node])]
            segments.append(BackwardSegment(edges, [leaves[n] for n in once]))
    return segments


def _leaves_first(outputs: Sequence[GradientEdge]) -> Iterator[Node]:
    """Every node of the graph after those that follow it."""
    seen: set[Node] = set()
    left = [(edge.node, False) for edge in outputs]
    while left:
        node, done = left.pop()
        if done:
            yield node
        elif node not in seen:
            seen.add(node)
            left.append((node, True))
            left += [(n, False) for n, _ in node.next_functions if n is not None]
