"""What crosses a cut between two operations of a traced model, and what forbids that cut."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from toolkit.errors import UserError, first_line
from toolkit.model.analysis import NodeCost, outputs, parameters_of
from toolkit.model.random_draws import seed_layer
from toolkit.model.structure import Inputs
from toolkit.model.trace import shapes_of


@dataclass(frozen=True)
class Boundary:
    """One tensor that travels from a stage to the next."""

    name: str  # of the node in the traced graph
    shape: tuple[int, ...]  # in the example, [b, ...]
    dtype: torch.dtype


class Crossings:
    """Values that cross the cut before each node, and what forbids that cut."""

    def __init__(
        self,
        traced: fx.GraphModule,
        costs: dict[str, NodeCost],
        batched: set[str],
        alike: set[str],
        counts: dict[str, int],
    ) -> None:
        self.traced, self.costs, self.batched, self.counts = traced, costs, batched, counts
        self.repeated = self._repeated()
        self.nodes = [n for n in traced.graph.nodes if n.op not in ("placeholder", "output")]
        self.at: list[list[fx.Node]] = [[] for _ in range(len(self.nodes) + 1)]
        self.obstacle: list[str | None] = [None] * (len(self.nodes) + 1)
        self.spread: set[fx.Node] = set()  # what travels once a sample
        self.spreads = [0] * (len(self.nodes) + 1)  # how many such tensors cross
        position = {node: k for k, node in enumerate(self.nodes)}
        by_name = {node.name: node for node in traced.graph.nodes}
        for node in traced.graph.nodes:
            if node.op == "output" or node in self.repeated:
                continue
            made = position.get(node, -1)
            uses = [position.get(user, len(self.nodes)) for user in node.users]
            crossed = range(made + 1, max(uses, default=-1) + 1)
            for cut in crossed:
                self.at[cut].append(node)
            if not isinstance(costs[node.name].output, torch.Tensor):
                self._forbid(crossed, f"{node} is not a tensor")
            elif node.name in alike:
                self.spread.add(node)
                for cut in crossed:
                    self.spreads[cut] += 1
            elif node.name not in batched:
                self._forbid(crossed, f"{node} has no batch dimension")
            for changed in costs[node.name].changes:
                first = position.get(by_name[changed], -1) + 1
                self._forbid(range(first, made + 1), f"{node} changes {changed} in place")
        shared: dict[int, list[int]] = {}
        for node, k in position.items():
            # A node that only reads a parameter may be repeated; what counts is who uses it.
            users = [position[user] for user in node.users if user in position]
            for parameter in parameters_of(traced, node):
                used = users if node.op == "get_attr" else [k]
                shared.setdefault(id(parameter), []).extend(used)
        names = {id(parameter): name for name, parameter in traced.named_parameters()}
        for key, found in shared.items():
            between = range(min(found, default=0) + 1, max(found, default=0) + 1)
            self._forbid(between, f"the parameter {names[key]} is used on both sides: untie it")

    def _repeated(self) -> set[fx.Node]:
        """Return the nodes that each stage computes for itself, from attributes and sizes."""
        found: set[fx.Node] = set()
        changed = {name for cost in self.costs.values() for name in cost.changes}
        trained: set[fx.Node] = set()
        for node in self.traced.graph.nodes:
            if any(p.requires_grad for p in parameters_of(self.traced, node)):
                trained.add(node)
            if node.op == "get_attr" or self._is_size(node):
                found.add(node)
            elif node.op.startswith("call"):
                cost, sources = self.costs[node.name], node.all_input_nodes
                fixed = not (cost.changes or cost.state or cost.draws or node.name in changed)
                fixed = fixed and trained.isdisjoint([node, *sources])
                if fixed and sources and found.issuperset(sources):
                    found.add(node)
        return found

    def computes(self, node: fx.Node) -> bool:
        """Whether ``node`` has floating-point operations or parameters."""
        sources = (node, *(x for x in node.all_input_nodes if x.op == "get_attr"))
        trained = any(parameters_of(self.traced, source) for source in sources)
        return node not in self.repeated and (trained or self.costs[node.name].flops > 0)

    def _is_size(self, node: fx.Node) -> bool:
        """Whether any tensor with the batch first tells the value of ``node``."""
        device = isinstance(self.costs[node.name].output, torch.device)
        return node.op.startswith("call") and (device or node.name in self.counts)

    def _forbid(self, cuts: Sequence[int], why: str) -> None:
        for cut in cuts:
            self.obstacle[cut] = self.obstacle[cut] or why

    def bytes(self, cut: int) -> int:
        """Return the bytes that cross a cut."""
        n_rows = self.costs[self._inputs[0].name].output.shape[0]
        times = (n_rows if node in self.spread else 1 for node in self.at[cut])
        outputs = (self.costs[node.name].output for node in self.at[cut])
        return sum(n * x.nbytes for n, x in zip(times, outputs, strict=True))

    def boundary(self, cut: int) -> tuple[Boundary, ...]:
        """Return the tensors that cross a cut; before the first node, the inputs."""
        return self._boundary(self.at[cut] if cut else self._inputs)

    def outputs(self) -> tuple[Boundary, ...]:
        """Return the tensors of the result."""
        return self._boundary(_outputs(self.traced))

    @property
    def _inputs(self) -> list[fx.Node]:
        return [node for node in self.traced.graph.nodes if node.op == "placeholder"]

    def _boundary(self, nodes: Sequence[fx.Node]) -> tuple[Boundary, ...]:
        n_rows = self.costs[self._inputs[0].name].output.shape[0]
        return tuple(
            Boundary(node.name, (*(n_rows,) * (node in self.spread), *tensor.shape), tensor.dtype)
            for node in nodes
            if isinstance(tensor := self.costs[node.name].output, torch.Tensor)
        )

    def stage(self, begin: int, end: int) -> fx.GraphModule:
        """Return the nodes from ``begin`` to before ``end`` as a module."""
        graph = fx.Graph()
        received = self.at[begin] if begin else self._inputs
        copies = {node: graph.placeholder(node.name) for node in received}
        first = copies[received[0]]
        for node in received:
            if node in self.spread:
                copies[node] = graph.call_function(operator.getitem, (copies[node], 0))

        def copied(node: fx.Node) -> fx.Node:
            if node not in copies:
                assert node in self.repeated, f"{node} does not cross into this stage"
                if not self._is_size(node):
                    copies[node] = graph.node_copy(node, copied)
                elif node.name in self.counts:
                    multiple = first, self.counts[node.name]
                    copies[node] = graph.call_function(_multiple, multiple)
                else:
                    copies[node] = graph.call_function(getattr, (first, "device"))
            return copies[node]

        own = self.nodes[begin:end]
        for node in own:
            if node not in copies and node not in self.repeated:
                for argument in node.all_input_nodes:
                    copied(argument)
                if self.costs[node.name].draws:
                    graph.call_function(seed_layer, (node.name,))
                copies[node] = graph.node_copy(node, copied)
        ends = self.at[end] if end < len(self.nodes) else _outputs(self.traced)
        graph.output(
            tuple(
                graph.call_function(_spread, (copied(node), first))
                if node in self.spread
                else copied(node)
                for node in ends
            )
        )
        stage = fx.GraphModule(self.traced, graph, class_name="Stage")  # shares the parameters
        draws = any(self.costs[node.name].draws for node in own)
        # Rows of different versions of a spread tensor must not run as one batch.
        mixes = not self.spread.isdisjoint(received) or any(map(self._mixes, own))
        stage.meta |= self.traced.meta | {"draws": draws, "mixes": mixes}
        return stage

    def _mixes(self, node: fx.Node) -> bool:
        """Whether an operation mixes the samples of different micro-batches in one batch.

        A batch norm whose input has the batch first separates micro-batches already.
        """
        if node.op != "call_module":
            return False
        if "modules" in self.traced.meta:
            return True  # nothing is known of a module that was not traced
        module = self.traced.get_submodule(str(node.target))
        if isinstance(module, _BatchNorm):
            return any(x.name not in self.batched for x in node.all_input_nodes)
        return bool(getattr(module, "scale_grad_by_freq", False))


def sizes(
    model: nn.Module, traced: fx.GraphModule, inputs: Inputs, costs: dict[str, NodeCost]
) -> tuple[set[str], set[str], dict[str, int]]:
    """Return what grows with the batch, by running another row on the meta device.

    Returns:
        the nodes whose first dimension grows by one row if the inputs' does; trained tensors of the
        same shape; and the nodes whose value is a multiple of the number of rows, with its factor.
    """
    name, n = type(model).__name__, inputs[0].shape[0]
    more = tuple(t.new_empty((n + 1, *t.shape[1:]), device="meta") for t in inputs)
    try:
        others = outputs(traced, more)
    except Exception as error:  # the model's own code may raise anything
        raise UserError(
            f"{name} runs on {n} rows but not on {n + 1}: the first dimension must be the batch:"
            f" {first_line(error)}"
        ) from error
    sizes = {
        k: [x.shape[0] for x in (cost.output, others[k]) if isinstance(x, torch.Tensor) and x.dim()]
        for k, cost in costs.items()
    }
    for node in _outputs(traced):
        answers, value = sizes[node.name], costs[node.name].output
        if len(answers) < 2 or answers[0] * (n + 1) != answers[1] * n or answers[0] % n:
            shape = shapes_of((value,)) if isinstance(value, torch.Tensor) else type(value).__name__
            raise UserError(
                f"{name} must return tensors with the batch first: got shape {shape} ({node}) for"
                f" {n} samples. Leave others out, and compute a loss outside of the model"
            )
    counts = {
        k: cost.output // n
        for k, cost in costs.items()
        if type(cost.output) is int and cost.output and cost.output % n == 0
        if cost.output * (n + 1) == others[k] * n
    }
    alike = {
        k
        for k, cost in costs.items()
        if isinstance(cost.output, torch.Tensor) and cost.output.requires_grad
        if cost.output.shape == others[k].shape
    }
    return {k for k, pair in sizes.items() if pair == [n, n + 1]}, alike, counts


def _outputs(traced: fx.GraphModule) -> list[fx.Node]:
    """Return the nodes whose values a graph returns."""
    return list(next(iter(reversed(traced.graph.nodes))).args[0])


def _multiple(x: torch.Tensor, factor: int) -> int:
    """Return a multiple of the number of rows of ``x``."""
    return x.shape[0] * factor


def _spread(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Repeat ``x`` for each row of ``like``."""
    return x.expand(like.shape[0], *x.shape)
