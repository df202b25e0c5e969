"""Find what crosses a cut between two operations of a traced model, and what forbids the cut."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx
from torch.nn.modules.batchnorm import _BatchNorm

from toolkit.model.cut_sizes import CutSizes, result_nodes
from toolkit.model.node_costs import NodeCost, parameters_of
from toolkit.model.random_draws import seed_layer
from toolkit.model.structure import Results
from toolkit.model.tied_weights import weight_is_shared


@dataclass(frozen=True)
class Boundary:
    """One tensor that travels from a stage to the next.

    Attributes:
        name: that of its node in the traced graph.
        shape: in the example. ``[b, ...]``; or ``[1, ...]`` without the batch.
        dtype: its type.
        batched: whether it has the batch. If not, it travels once a micro-batch.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    batched: bool = True


class Crossings:
    """Values that cross the cut before each node, and what forbids that cut.

    A value without the batch, such as a tied weight or a loss that the model computes, crosses as a
    tensor ``[1, ...]``: one row per micro-batch.
    """

    def __init__(
        self, traced: fx.GraphModule, costs: dict[str, NodeCost], cut_sizes: CutSizes
    ) -> None:
        self.traced = traced
        self.costs = costs
        self.batched = cut_sizes.batched
        self.counts = cut_sizes.counts
        self.repeated = self._repeated()
        self.of_batch = self._of_batch()
        self.nodes = [
            node
            for node in traced.graph.nodes
            if node.op not in ("placeholder", "output")
        ]
        # Cut k is before node k; `at[k]` are the values that cross it, `obstacle[k]` forbids it::
        #
        #     x = a(input)     y = b(x)     z = c(x, y)
        #     cut 0            1            2            3
        #     at  [input]      [x]          [x, y]       [z]
        self.at: list[list[fx.Node]] = [[] for _ in range(len(self.nodes) + 1)]
        self.obstacle: list[str | None] = [None] * (len(self.nodes) + 1)
        results = result_nodes(traced)
        self.unbatched = set()
        for node in traced.graph.nodes:
            travels = node not in self.repeated or node in results
            if node.name in cut_sizes.unbatched and travels:
                self.unbatched.add(node)
        self.n_unbatched = [0] * (len(self.nodes) + 1)  # how many such tensors cross
        index_of_node = {node: index for index, node in enumerate(self.nodes)}
        self._find_crossing(index_of_node)
        self._forbid_separate_uses(index_of_node)

    def _find_crossing(self, position: dict[fx.Node, int]) -> None:
        """Find what crosses each cut, and the cuts that it forbids."""
        by_name = {node.name: node for node in self.traced.graph.nodes}
        for node in self.traced.graph.nodes:
            if node.op == "output" or node in self.repeated:
                continue
            # The inputs are there before node 0; the result is used after the last one.
            produced_at = position.get(node, -1)
            uses = [position.get(user, len(self.nodes)) for user in node.users]
            crossed = range(produced_at + 1, max(uses, default=-1) + 1)
            for cut in crossed:
                self.at[cut].append(node)
            if not isinstance(self.costs[node.name].output, torch.Tensor):
                self._forbid(crossed, f"{node} is not a tensor")
            elif node in self.unbatched:
                for cut in crossed:
                    self.n_unbatched[cut] += 1
            elif node.name not in self.batched:
                self._forbid(crossed, f"{node} has no batch dimension")
            if weight_is_shared(self.traced, node):
                # The stage that owns a weight is one that computes with it.
                self._forbid(
                    range(produced_at + 1, min(uses) + 1), f"{node} is used next"
                )
            # A message carries a copy: a change after the cut would not reach views from before it.
            for changed_name in self.costs[node.name].changes:
                first_cut = position.get(by_name[changed_name], -1) + 1
                self._forbid(
                    range(first_cut, produced_at + 1),
                    f"{node} changes {changed_name} in place",
                )
        for cut, crossing in enumerate(self.at):
            # A stage takes the number of samples and the device from the first one.
            crossing.sort(key=lambda node: node in self.unbatched)
            if all(node in self.unbatched for node in crossing):
                self._forbid([cut], "no tensor with the batch crosses there")

    def _forbid_separate_uses(self, position: dict[fx.Node, int]) -> None:
        """Forbid cuts between nodes that read the same parameter.

        All uses of a tied weight read it by one node, unless it cannot travel.
        """
        readers: dict[int, list[fx.Node]] = {}
        for node in position:
            for parameter in parameters_of(self.traced, node):
                readers.setdefault(id(parameter), []).append(node)
        names = {
            id(parameter): name for name, parameter in self.traced.named_parameters()
        }
        for key, nodes in readers.items():
            if len(nodes) == 1 and nodes[0] not in self.repeated:
                continue
            using_nodes = []
            for node in nodes:
                # A node that only reads a parameter may be repeated; what counts is who uses it.
                if node.op == "get_attr":
                    using_nodes += [user for user in node.users if user in position]
                else:
                    using_nodes.append(node)
            use_positions = [position[node] for node in using_nodes]
            cuts_between = range(
                min(use_positions, default=0) + 1, max(use_positions, default=0) + 1
            )
            self._forbid(
                cuts_between,
                f"the parameter {names[key]} is used on both sides: untie it",
            )

    def _of_batch(self) -> set[fx.Node]:
        """Return the nodes whose values depend on the inputs, not on their sizes alone."""
        dependent: set[fx.Node] = set()
        for node in self.traced.graph.nodes:
            from_inputs = not dependent.isdisjoint(node.all_input_nodes)
            if node.op == "placeholder" or (from_inputs and node not in self.repeated):
                dependent.add(node)
        return dependent

    def _repeated(self) -> set[fx.Node]:
        """Return the nodes that each stage computes for itself, from attributes and sizes."""
        repeated_nodes: set[fx.Node] = set()
        changed_names: set[str] = set()
        for cost in self.costs.values():
            changed_names.update(cost.changes)
        trained_nodes: set[fx.Node] = set()
        for node in self.traced.graph.nodes:
            if any(
                parameter.requires_grad
                for parameter in parameters_of(self.traced, node)
            ):
                trained_nodes.add(node)
            if weight_is_shared(self.traced, node):
                continue
            if node.op == "get_attr" or self.is_size(node):
                repeated_nodes.add(node)
            elif node.op.startswith("call"):
                cost = self.costs[node.name]
                sources = node.all_input_nodes
                # What runs again in each stage must have no effect, give the same each time, and
                # need no gradient: each stage would have a part of it only.
                has_effects = cost.changes or cost.state or cost.draws
                is_fixed = not (has_effects or node.name in changed_names)
                is_fixed = is_fixed and trained_nodes.isdisjoint([node, *sources])
                if is_fixed and sources and repeated_nodes.issuperset(sources):
                    repeated_nodes.add(node)
        return repeated_nodes

    def computes(self, node: fx.Node) -> bool:
        """Return whether ``node`` has floating-point operations or parameters."""
        if node in self.repeated:
            return False
        sources = [source for source in node.all_input_nodes if source.op == "get_attr"]
        has_parameters = any(
            parameters_of(self.traced, source) for source in (node, *sources)
        )
        return has_parameters or self.costs[node.name].flops > 0

    def is_size(self, node: fx.Node) -> bool:
        """Return whether the value of ``node`` follows from any tensor with the batch first."""
        is_device = isinstance(self.costs[node.name].output, torch.device)
        return node.op.startswith("call") and (is_device or node.name in self.counts)

    def _forbid(self, cuts: Sequence[int], why: str) -> None:
        """Forbid ``cuts``; the first reason of each counts."""
        for cut in cuts:
            self.obstacle[cut] = self.obstacle[cut] or why

    def bytes(self, cut: int) -> int:
        """Return the bytes that cross a cut."""
        return sum(self.costs[node.name].output.nbytes for node in self.at[cut])

    def boundary(self, cut: int) -> tuple[Boundary, ...]:
        """Return the tensors that cross a cut; before the first node, the inputs."""
        return self._boundary(self.at[cut] if cut else self._inputs)

    def outputs(self) -> tuple[Boundary, ...]:
        """Return the tensors of the result."""
        return self._boundary(result_nodes(self.traced))

    def results(self) -> Results:
        """Return how the result is made of its tensors."""
        scalars = [
            index
            for index, node in enumerate(result_nodes(self.traced))
            if node in self.unbatched
        ]
        results: Results = self.traced.meta["results"]
        return replace(results, scalars=frozenset(scalars))

    @property
    def _inputs(self) -> list[fx.Node]:
        return [node for node in self.traced.graph.nodes if node.op == "placeholder"]

    def _boundary(self, nodes: Sequence[fx.Node]) -> tuple[Boundary, ...]:
        boundary = []
        for node in nodes:
            tensor = self.costs[node.name].output
            if not isinstance(tensor, torch.Tensor):
                continue
            batched = node not in self.unbatched
            shape = tuple(tensor.shape)
            if not batched:
                shape = (1, *shape)
            boundary.append(Boundary(node.name, shape, tensor.dtype, batched))
        return tuple(boundary)

    def stage(self, begin: int, end: int) -> fx.GraphModule:
        """Return the nodes from ``begin`` to before ``end`` as a module."""
        # 1. Copy the nodes, with what arrives as inputs and what crosses the end as outputs.
        received = self.at[begin] if begin else self._inputs
        sent = self.at[end] if end < len(self.nodes) else result_nodes(self.traced)
        stage_nodes = self.nodes[begin:end]
        copies = _StageCopies(self, received)
        for node in stage_nodes:
            if node not in copies.of and node not in self.repeated:
                copies.add(node)
        copies.add_output(sent)
        # Shares parameters.
        stage = fx.GraphModule(self.traced, copies.graph, class_name="Stage")

        # 2. Must it run micro-batches one by one? A scalar is one of a micro-batch, and rows of
        # different versions of a weight must not run as one batch.
        sent_unbatched = copies.made_unbatched(sent)
        uses_unbatched = any(
            node in self.unbatched and node in copies.of for node in received
        )
        makes_scalar = any(node in self.of_batch for node in sent_unbatched)
        unbatched = uses_unbatched or makes_scalar

        # 3. What is returned as it came, such as a residual: input index by output index.
        passes_on = {}
        for index, node in enumerate(sent):
            if node in received:
                passes_on[index] = received.index(node)
        stage.meta |= self.traced.meta | {
            "draws": any(self.costs[node.name].draws for node in stage_nodes),
            "mixes": unbatched or any(map(self._mixes, stage_nodes)),
            "unbatched": unbatched,
            "passes_on": passes_on,
            "sends_weights": [
                str(node.target) for node in sent_unbatched if node.op == "get_attr"
            ],
        }
        return stage

    def _mixes(self, node: fx.Node) -> bool:
        """Return whether an operation mixes the samples of micro-batches that run as one batch.

        A batch norm whose input has the batch first separates micro-batches already.
        """
        if node.op != "call_module":
            return False
        if "modules" in self.traced.meta:
            return True  # nothing is known of a module that was not traced
        module = self.traced.get_submodule(str(node.target))
        if isinstance(module, _BatchNorm):
            return any(
                source.name not in self.batched for source in node.all_input_nodes
            )
        # Such an embedding divides a token's gradient by how often the token is in the batch.
        return bool(getattr(module, "scale_grad_by_freq", False))


class _StageCopies:
    """The graph of a stage: copies of nodes of the whole model's graph.

    Args:
        crossings: what crosses the cuts of the model.
        received: nodes whose values the stage receives, those with the batch first.

    Attributes:
        graph: the graph of the stage.
        placeholders: the inputs of the graph, by node of the model.
        of: copies that compute, by node of the model.
    """

    def __init__(self, crossings: Crossings, received: Sequence[fx.Node]) -> None:
        self.crossings = crossings
        self.graph = fx.Graph()
        self.placeholders = {
            node: self.graph.placeholder(node.name) for node in received
        }
        # It has the batch, since tensors without one come last.
        self.batched_placeholder = self.placeholders[received[0]]
        self.of: dict[fx.Node, fx.Node] = {}
        for node, placeholder in self.placeholders.items():
            if node not in crossings.unbatched:
                self.of[node] = placeholder

    def add(self, node: fx.Node) -> None:
        """Add a node after what it reads; if it draws random numbers, seed them before."""
        for argument in node.all_input_nodes:
            self.copy(argument)
        if self.crossings.costs[node.name].draws:
            self.graph.call_function(seed_layer, (node.name,))
        self.of[node] = self.graph.node_copy(node, self.copy)

    def copy(self, node: fx.Node) -> fx.Node:
        """Return the copy of what a node of the stage reads, which is made if there is none."""
        if node not in self.of:
            self.of[node] = self._new_copy(node)
        return self.of[node]

    def _new_copy(self, node: fx.Node) -> fx.Node:
        if node in self.placeholders:  # without the batch: it has travelled as [1, ...]
            return self.graph.call_function(torch.squeeze, (self.placeholders[node], 0))
        crossings = self.crossings
        assert node in crossings.repeated, f"{node} does not cross into this stage"
        if not crossings.is_size(node):
            return self.graph.node_copy(node, self.copy)
        if node.name in crossings.counts:
            multiple = (self.batched_placeholder, crossings.counts[node.name])
            return self.graph.call_function(_multiple, multiple)
        return self.graph.call_function(getattr, (self.batched_placeholder, "device"))

    def made_unbatched(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        """Return those of ``nodes`` without the batch whose values the stage does not receive."""
        made_nodes = []
        for node in nodes:
            if node in self.crossings.unbatched and node not in self.placeholders:
                made_nodes.append(node)
        return made_nodes

    def add_output(self, sent: Sequence[fx.Node]) -> None:
        """Return the values of ``sent`` from the graph, as they travel to the next stage."""
        made_unbatched = self.made_unbatched(sent)
        outputs = []
        for node in sent:
            if node in made_unbatched:
                outputs.append(
                    self.graph.call_function(torch.unsqueeze, (self.copy(node), 0))
                )
            elif node in self.placeholders:
                outputs.append(self.placeholders[node])
            else:
                outputs.append(self.copy(node))
        self.graph.output(tuple(outputs))


def _multiple(x: torch.Tensor, factor: int) -> int:
    """Return a multiple of the number of rows of ``x``."""
    return x.shape[0] * factor
