"""Find what crosses a cut between two operations of a traced model, and what forbids the cut."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from toolkit.errors import UserError, first_line
from toolkit.model.analysis import NodeCost, outputs, parameters_of
from toolkit.model.random_draws import seed_layer
from toolkit.model.structure import Inputs, Results
from toolkit.model.tied_weights import weight_is_shared
from toolkit.model.trace import shapes_of


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


@dataclass(frozen=True)
class CutSizes:
    """Values of a graph that grow with the batch, by the names of nodes.

    Attributes:
        batched: tensors whose first dimension has a row a sample.
        unbatched: tensors without the batch that can travel: trained ones, and scalars.
        counts: whole numbers that are a multiple of the number of samples, with its factor.
    """

    batched: set[str]
    unbatched: set[str]
    counts: dict[str, int]


class Crossings:
    """Values that cross the cut before each node, and what forbids that cut.

    A value without the batch, such as a tied weight or a loss that the model computes, crosses as a
    tensor ``[1, ...]``: one row a micro-batch.
    """

    def __init__(
        self, traced: fx.GraphModule, costs: dict[str, NodeCost], found_sizes: CutSizes
    ) -> None:
        self.traced = traced
        self.costs = costs
        self.batched = found_sizes.batched
        self.counts = found_sizes.counts
        self.repeated = self._repeated()
        self.of_batch = self._of_batch()
        self.nodes = [
            node for node in traced.graph.nodes if node.op not in ("placeholder", "output")
        ]
        self.at: list[list[fx.Node]] = [[] for _ in range(len(self.nodes) + 1)]
        self.obstacle: list[str | None] = [None] * (len(self.nodes) + 1)
        results = _outputs(traced)
        self.unbatched = {
            node
            for node in traced.graph.nodes
            if node.name in found_sizes.unbatched
            if node not in self.repeated or node in results
        }
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
                self._forbid(range(produced_at + 1, min(uses) + 1), f"{node} is used next")
            for changed_name in self.costs[node.name].changes:
                first_cut = position.get(by_name[changed_name], -1) + 1
                self._forbid(
                    range(first_cut, produced_at + 1), f"{node} changes {changed_name} in place"
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
        names = {id(parameter): name for name, parameter in self.traced.named_parameters()}
        for key, nodes in readers.items():
            if len(nodes) == 1 and nodes[0] not in self.repeated:
                continue
            using_nodes = []
            for node in nodes:
                # A node that only reads a parameter may be repeated; what counts is who uses it.
                users = [user for user in node.users if user in position]
                using_nodes += users if node.op == "get_attr" else [node]
            use_positions = [position[node] for node in using_nodes]
            cuts_between = range(
                min(use_positions, default=0) + 1, max(use_positions, default=0) + 1
            )
            self._forbid(
                cuts_between, f"the parameter {names[key]} is used on both sides: untie it"
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
        changed_names = {name for cost in self.costs.values() for name in cost.changes}
        trained_nodes: set[fx.Node] = set()
        for node in self.traced.graph.nodes:
            if any(parameter.requires_grad for parameter in parameters_of(self.traced, node)):
                trained_nodes.add(node)
            if weight_is_shared(self.traced, node):
                continue
            if node.op == "get_attr" or self._is_size(node):
                repeated_nodes.add(node)
            elif node.op.startswith("call"):
                cost, sources = self.costs[node.name], node.all_input_nodes
                is_fixed = not (
                    cost.changes or cost.state or cost.draws or node.name in changed_names
                )
                is_fixed = is_fixed and trained_nodes.isdisjoint([node, *sources])
                if is_fixed and sources and repeated_nodes.issuperset(sources):
                    repeated_nodes.add(node)
        return repeated_nodes

    def computes(self, node: fx.Node) -> bool:
        """Return whether ``node`` has floating-point operations or parameters."""
        sources = (node, *(source for source in node.all_input_nodes if source.op == "get_attr"))
        has_parameters = any(parameters_of(self.traced, source) for source in sources)
        return node not in self.repeated and (has_parameters or self.costs[node.name].flops > 0)

    def _is_size(self, node: fx.Node) -> bool:
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
        return self._boundary(_outputs(self.traced))

    def results(self) -> Results:
        """Return how the result is made of its tensors."""
        scalars = [
            index for index, node in enumerate(_outputs(self.traced)) if node in self.unbatched
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
            shape = tuple(tensor.shape) if batched else (1, *tensor.shape)
            boundary.append(Boundary(node.name, shape, tensor.dtype, batched))
        return tuple(boundary)

    def stage(self, begin: int, end: int) -> fx.GraphModule:
        """Return the nodes from ``begin`` to before ``end`` as a module."""
        graph = fx.Graph()
        received = self.at[begin] if begin else self._inputs
        placeholders = {node: graph.placeholder(node.name) for node in received}
        batched_placeholder = placeholders[
            received[0]
        ]  # it has the batch, since tensors without one come last
        copies = {node: copy for node, copy in placeholders.items() if node not in self.unbatched}

        def copied(node: fx.Node) -> fx.Node:
            if node in copies:
                return copies[node]
            if node in placeholders:
                copies[node] = graph.call_function(torch.squeeze, (placeholders[node], 0))
                return copies[node]
            assert node in self.repeated, f"{node} does not cross into this stage"
            if not self._is_size(node):
                copies[node] = graph.node_copy(node, copied)
            elif node.name in self.counts:
                multiple = batched_placeholder, self.counts[node.name]
                copies[node] = graph.call_function(_multiple, multiple)
            else:
                copies[node] = graph.call_function(getattr, (batched_placeholder, "device"))
            return copies[node]

        stage_nodes = self.nodes[begin:end]
        for node in stage_nodes:
            if node not in copies and node not in self.repeated:
                for argument in node.all_input_nodes:
                    copied(argument)
                if self.costs[node.name].draws:
                    graph.call_function(seed_layer, (node.name,))
                copies[node] = graph.node_copy(node, copied)
        sent_nodes = self.at[end] if end < len(self.nodes) else _outputs(self.traced)
        sent_unbatched = [
            node for node in sent_nodes if node in self.unbatched and node not in placeholders
        ]
        outputs = []
        for node in sent_nodes:
            if node in sent_unbatched:
                outputs.append(graph.call_function(torch.unsqueeze, (copied(node), 0)))
            elif node in placeholders:
                outputs.append(placeholders[node])
            else:
                outputs.append(copied(node))
        graph.output(tuple(outputs))
        stage = fx.GraphModule(self.traced, graph, class_name="Stage")  # shares the parameters
        # Such a stage runs micro-batches one by one: a scalar is one of a micro-batch, and rows of
        # different versions of a weight must not run as one batch.
        uses_unbatched = any(node in self.unbatched and node in copies for node in received)
        makes_scalar = any(node in self.of_batch for node in sent_unbatched)
        unbatched = uses_unbatched or makes_scalar
        stage.meta |= self.traced.meta | {
            "draws": any(self.costs[node.name].draws for node in stage_nodes),
            "mixes": unbatched or any(map(self._mixes, stage_nodes)),
            "unbatched": unbatched,
            "passes_on": {
                index: received.index(node)
                for index, node in enumerate(sent_nodes)
                if node in placeholders
            },
            "sends_weights": [str(node.target) for node in sent_unbatched if node.op == "get_attr"],
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
            return any(source.name not in self.batched for source in node.all_input_nodes)
        return bool(getattr(module, "scale_grad_by_freq", False))


def sizes(
    model: nn.Module, traced: fx.GraphModule, inputs: Inputs, costs: dict[str, NodeCost]
) -> CutSizes:
    """Find what grows with the batch, by a run with one more row on the meta device.

    Raises:
        UserError: the model cannot run another row, or returns a tensor without the batch that is
            no scalar.
    """
    name, n_samples = type(model).__name__, inputs[0].shape[0]
    longer_inputs = tuple(
        tensor.new_empty((n_samples + 1, *tensor.shape[1:]), device="meta") for tensor in inputs
    )
    try:
        longer_outputs = outputs(traced, longer_inputs)
    except Exception as error:  # the model's own code may raise anything
        raise UserError(
            f"{name} runs on {n_samples} rows but not on {n_samples + 1}: the first dimension must"
            f" be the batch: {first_line(error)}"
        ) from error
    batched, unbatched, counts = set(), set(), {}
    rows: dict[str, tuple[int, int]] = {}  # of each tensor, in the two runs
    for node_name, cost in costs.items():
        value, longer_value = cost.output, longer_outputs[node_name]
        if isinstance(value, torch.Tensor) and isinstance(longer_value, torch.Tensor):
            if value.dim() and longer_value.dim():
                rows[node_name] = value.shape[0], longer_value.shape[0]
            if rows.get(node_name) == (n_samples, n_samples + 1):
                batched.add(node_name)
            is_scalar = value.dim() == 0 and value.is_floating_point()
            if value.shape == longer_value.shape and (value.requires_grad or is_scalar):
                unbatched.add(node_name)
        elif (
            type(value) is int
            and value
            and value % n_samples == 0
            and value * (n_samples + 1) == longer_value * n_samples
        ):
            counts[node_name] = value // n_samples
    for node in _outputs(traced):
        value = costs[node.name].output
        if isinstance(value, torch.Tensor) and value.dim() == 0 and node.name in unbatched:
            continue
        n_rows, n_rows_of_longer = rows.get(node.name, (0, 0))
        if (
            not n_rows
            or n_rows * (n_samples + 1) != n_rows_of_longer * n_samples
            or n_rows % n_samples
        ):
            shape = shapes_of((value,)) if isinstance(value, torch.Tensor) else type(value).__name__
            raise UserError(
                f"{name} must return tensors with the batch first, or a floating-point scalar such"
                f" as a loss: got shape {shape} ({node}) for {n_samples} samples. Leave it out,"
                " return it once a sample, or compute it in the loss"
            )
    return CutSizes(batched, unbatched, counts)


def _outputs(traced: fx.GraphModule) -> list[fx.Node]:
    """Return the nodes whose values a graph returns."""
    return list(next(iter(reversed(traced.graph.nodes))).args[0])


def _multiple(x: torch.Tensor, factor: int) -> int:
    """Return a multiple of the number of rows of ``x``."""
    return x.shape[0] * factor
