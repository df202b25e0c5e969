"""Cut a model into contiguous stages that together compute what the whole model computes.

A cut may fall between two operations if every value that crosses it is a tensor with the batch as
leading dimension. Residuals that skip over a cut travel with it. What follows from buffers and
sizes alone, such as a causal mask, is computed again after the cut. A trained tensor without the
batch, such as a bias of positions or a tied weight, travels once a micro-batch, where stages would
be uneven otherwise; so does a scalar, such as a loss that is summed over the layers.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import accumulate, pairwise
from math import inf
from typing import Any, overload

from torch import fx, nn

from toolkit.errors import UserError, whole
from toolkit.model.balance import balanced, smallest_limit
from toolkit.model.by_hand import chain_modules
from toolkit.model.crossings import Boundary, Crossings
from toolkit.model.cut_sizes import sizes
from toolkit.model.independence import check_partition
from toolkit.model.node_costs import NodeCost, node_costs
from toolkit.model.structure import Inputs, Results, tensors_of
from toolkit.model.tied_weights import share_tied_weights
from toolkit.model.trace import changing, refused, shapes_of, trace
from toolkit.model.traceable import check_traceable

MEASURES = ("flops", "parameters", "activations")
# Defaults of torch's DistributedDataParallel: bucket_cap_mb, and its first bucket.
_BUCKET_BYTES = 25 * 2**20
_FIRST_BUCKET_BYTES = 2**20  # a small one, so that its message can start early


@dataclass(frozen=True)
class Stages(Sequence[fx.GraphModule]):
    """The stages of a model, in forward order.

    Each takes the tensors that cross into it and returns a tuple of those that cross out; the last
    returns those of the model's result. They share parameters, buffers and state_dict keys with
    ``model``.

    Attributes:
        model: the whole model.
        modules: the stages.
        boundaries: ``boundaries[j]`` are the tensors that stage j receives.
        outputs: the tensors of the result.
        results: how the result is made of them.
        loads: cost of each stage in the measure of the cut; 0 for named cuts and lists of modules.
    """

    model: nn.Module
    modules: tuple[fx.GraphModule, ...]
    boundaries: tuple[tuple[Boundary, ...], ...]
    outputs: tuple[Boundary, ...]
    results: Results
    loads: tuple[int, ...]

    @property
    def output(self) -> Boundary:
        """The only tensor of the result, or its first one."""
        return self.outputs[0]

    def activations(self, stage: int) -> frozenset[int]:
        """Return the places of activations among the tensors that ``stage`` receives.

        Others are inputs of the model, integers, and what has no batch, such as a tied weight.
        """
        input_names = {boundary.name for boundary in self.boundaries[0]}
        places = set()
        for place, boundary in enumerate(self.boundaries[stage]):
            is_real = boundary.dtype.is_floating_point
            if is_real and boundary.batched and boundary.name not in input_names:
                places.add(place)
        return frozenset(places)

    def __repr__(self) -> str:
        return f"Stages({type(self.model).__name__}, stages={len(self)}, loads={self.loads})"

    def __len__(self) -> int:
        return len(self.modules)

    @overload
    def __getitem__(self, index: int) -> fx.GraphModule: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[fx.GraphModule, ...]: ...
    def __getitem__(
        self, index: int | slice
    ) -> fx.GraphModule | tuple[fx.GraphModule, ...]:
        return self.modules[index]


def check_stages(stages: object) -> None:
    """Raise UserError if ``stages`` is not a Stages."""
    if not isinstance(stages, Stages):
        raise UserError(
            f"stages must be a Stages: got a {type(stages).__name__}; make one with"
            " toolkit.model.partition(model, n_stages, example)"
        )


def partition(
    model: nn.Module | Sequence[nn.Module],
    n_stages: int,
    example: Any,
    by: str | Sequence[str] = "flops",
    *,
    check: bool = True,
) -> Stages:
    """Cut ``model`` into ``n_stages`` contiguous stages.

    Args:
        model: any module that torch.fx or torch.export can trace, from tensors to tensors. Or a
            list of ``n_stages`` modules, which are not traced: each is called on what the one
            before returns, a tuple as several arguments and a dictionary as keyword arguments.
        n_stages: 1 or more.
        example: arguments for one micro-batch: a tensor ``[b, ...]``; a tuple of arguments; or a
            dictionary of keyword arguments. Each may be a tuple or dictionary of tensors, or a
            constant. Only shapes, types and constants matter.
        by: ``"flops"``, ``"parameters"`` or ``"activations"``: first minimise the
            largest stage; keep the smallest stage at half or more of the best possible; then
            minimise the bytes that cross. Or the names of the modules that begin the second and
            later stages.
        check: whether to run 4 samples with values of its own, apart and together, and refuse a
            model that mixes them. It skips models that cannot run so: on the meta device, with
            whole numbers as inputs on a GPU, or of more than 10 GFLOP a sample on a CPU.

    Raises:
        UserError: the model cannot be traced or cut so, or its stages would train differently.
    """
    if isinstance(model, nn.Module) and not isinstance(model, nn.ModuleList):
        traced = Traced.of(model, example)
    else:
        _tensors_of(example)
        joined, graph = chain_modules(list(model), whole(n_stages, "n_stages"), example)
        traced = Traced.checked(joined, graph, example)
    stages = traced.cut(n_stages, by)
    if check:
        n_samples = len(_tensors_of(example)[0])
        n_flops = sum(cost.flops for cost in traced.crossing.costs.values())
        check_partition(stages, example, n_flops / max(1, n_samples))
    return stages


@dataclass(frozen=True)
class Traced:
    """A traced model, to be cut in several ways.

    Attributes:
        model: the whole model.
        crossing: where it can be cut.
    """

    model: nn.Module
    crossing: Crossings

    @classmethod
    def of(cls, model: nn.Module, example: Any) -> "Traced":
        """Trace ``model``; arguments and errors as of :func:`partition`."""
        _tensors_of(example)
        return cls.checked(model, trace(model, example), example)

    @classmethod
    def checked(
        cls, model: nn.Module, traced: fx.GraphModule, example: Any
    ) -> "Traced":
        """Analyse a traced model; raise UserError if its stages would train differently."""
        inputs = _tensors_of(example)
        check_traceable(model, traced)
        # Before the costs, which belong to the nodes of the changed graph.
        share_tied_weights(model, traced)
        costs = _costs(model, traced, inputs)
        return cls(model, Crossings(traced, costs, sizes(model, traced, inputs, costs)))

    def cut(self, n_stages: int, by: str | Sequence[str] = "flops") -> Stages:
        """Return stages; arguments and errors as of :func:`partition`."""
        n_stages = whole(n_stages, "n_stages")
        crossing = self.crossing
        nodes = crossing.nodes
        traced = crossing.traced
        loads = [0] * len(nodes)
        if "modules" in traced.meta:
            cuts = _named_cuts(n_stages, traced.meta["modules"][1:], crossing)
        elif isinstance(by, str) or not isinstance(by, Sequence):
            if by not in MEASURES:
                raise UserError(
                    f"unknown measure {by!r}: choose {', '.join(MEASURES)}, or a list of module"
                    " names"
                )
            loads = [getattr(crossing.costs[node.name], by) for node in nodes]
            cuts = _balance(loads, n_stages, crossing)
        else:
            cuts = _named_cuts(n_stages, list(by), crossing)
        return self._stages(cuts, loads)

    def cut_in_buckets(self) -> Stages:
        """Return stages whose weights share a bucket of torch's DistributedDataParallel.

        Buckets fill in the order of the backward. One is full when a weight brings it to 25 MiB,
        the first to 1 MiB. Here it is full at the next place where the model can be cut.

        Source: ``compute_bucket_assignment_by_size`` in torch's reducer.
        """
        crossing = self.crossing
        element_bytes = max(
            (p.element_size() for p in self.model.parameters()), default=4
        )
        loads = [crossing.costs[node.name].parameters for node in crossing.nodes]
        may_cut = [obstacle is None for obstacle in crossing.obstacle]
        cuts = bucket_cuts([element_bytes * load for load in loads], may_cut)
        return self._stages(cuts, loads)

    def _stages(self, cuts: Sequence[int], loads: Sequence[int]) -> Stages:
        """Return the stages between ``cuts``; ``loads`` are of each node."""
        crossing = self.crossing
        spans = list(pairwise([0, *cuts, len(crossing.nodes)]))
        return Stages(
            model=self.model,
            modules=tuple(crossing.stage(*span) for span in spans),
            boundaries=tuple(crossing.boundary(begin) for begin, _ in spans),
            outputs=crossing.outputs(),
            results=crossing.results(),
            loads=tuple(sum(loads[begin:end]) for begin, end in spans),
        )


def bucket_cuts(n_bytes: Sequence[float], may_cut: Sequence[bool] = ()) -> list[int]:
    """Return where the buckets of torch's DistributedDataParallel begin, except the first.

    Args:
        n_bytes: of the weights of each part, in the order of the forward.
        may_cut: whether a bucket may begin at a part; everywhere by default.
    """
    cuts: list[int] = []
    limit = _FIRST_BUCKET_BYTES
    bucket_bytes = 0.0
    bytes_before = sum(n_bytes)
    # From the last part on, since gradients become ready in that order.
    for index in reversed(range(1, len(n_bytes))):
        bucket_bytes += n_bytes[index]
        is_full = bucket_bytes >= limit
        # Without weights before this part, the bucket before it would be empty.
        has_weights_before = bytes_before > bucket_bytes
        # From the back, with a first limit of 1 and then 25 MiB::
        #
        #     part    A    | B    C   | D    E
        #     MiB     20   | 10   20  | 3    2       no cut is allowed before E
        if is_full and has_weights_before and (not may_cut or may_cut[index]):
            cuts.append(index)
            bytes_before -= bucket_bytes
            bucket_bytes = 0.0
            limit = _BUCKET_BYTES
    return cuts[::-1]


def _tensors_of(example: Any) -> Inputs:
    """Return the tensors of an example; raise UserError if there are none."""
    inputs = tensors_of(example)
    if not inputs:
        raise UserError(
            f"example must be a tensor, or a tuple or dictionary of some: got {example!r}"
        )
    return inputs


def _costs(
    model: nn.Module, traced: fx.GraphModule, inputs: Inputs
) -> dict[str, NodeCost]:
    """Return the cost of each node; raise UserError if the forward changes inputs or state."""
    name = type(model).__name__
    if not inputs[0].dim() or any(
        tensor.shape[:1] != inputs[0].shape[:1] for tensor in inputs
    ):
        raise UserError(
            f"every input needs the same batch as first dimension: got {shapes_of(inputs)}"
        )
    with refused(model, inputs):
        costs = node_costs(traced, inputs)
    received = {node.name for node in traced.graph.nodes if node.op == "placeholder"}
    for node, cost in costs.items():
        # In-place changes between nodes are fine: they stay within the micro-batch.
        changed_inputs = [
            input_name for input_name in cost.changes if input_name in received
        ]
        if changed_inputs:
            raise UserError(
                f"{name} changes its input {changed_inputs[0]} in place ({node}), but a batch may"
                " be read again: begin with x = x.clone(), or use inplace=False"
            )
        if cost.state:
            raise UserError(f"{name} {changing(cost.state, node)}")
    return costs


def _balance(loads: list[int], n_stages: int, crossing: Crossings) -> list[int]:
    """Return the best allowed cuts; see :func:`balanced`."""
    free_cuts = []
    obstacle_counts: Counter[str] = Counter()
    for cut, obstacle in enumerate(crossing.obstacle[1:-1], 1):
        if obstacle is None:
            free_cuts.append(cut)
        else:
            obstacle_counts[obstacle] += 1
    commonest_obstacle = ""
    for obstacle, _ in obstacle_counts.most_common(1):
        commonest_obstacle = obstacle

    # 1. The first and the last stage have work, if there are other cuts or a weight is tied.
    computing = [
        cut for cut, node in enumerate(crossing.nodes) if crossing.computes(node)
    ]
    # A cut is before its node, so work is on both sides.
    possible_cuts = [
        cut for cut in free_cuts if computing and computing[0] < cut <= computing[-1]
    ]
    if len(possible_cuts) + 1 < n_stages and "both sides" not in commonest_obstacle:
        possible_cuts = free_cuts

    # 2. A tensor without the batch, such as a tied weight, crosses only where this makes the
    # largest stage a quarter smaller: its stages run micro-batches one by one.
    allowed_cuts = [cut for cut in possible_cuts if not crossing.n_unbatched[cut]]
    possible_limit = _limit_of(loads, possible_cuts, n_stages)
    if 4 * possible_limit < 3 * _limit_of(loads, allowed_cuts, n_stages):
        allowed_cuts = possible_cuts
    if not 1 <= n_stages <= len(allowed_cuts) + 1:
        reason = ""
        if commonest_obstacle and 1 < n_stages <= len(loads):
            reason = f"; elsewhere a cut fails, mostly since {commonest_obstacle}"
        raise UserError(
            f"this model can be cut into 1 to {len(allowed_cuts) + 1} stages: got {n_stages}"
            f"{reason}"
        )
    # 3. Balance what lies between allowed cuts, which stays together.
    edges = [0, *allowed_cuts, len(loads)]
    spans = [sum(loads[begin:end]) for begin, end in pairwise(edges)]
    cuts = balanced(spans, [crossing.bytes(cut) for cut in allowed_cuts], n_stages)
    return [edges[cut] for cut in cuts]


def _limit_of(loads: list[int], cuts: list[int], n_stages: int) -> float:
    """Return the load of the largest stage, minimised over these cuts; inf if too few."""
    if not 1 <= n_stages <= len(cuts) + 1:
        return inf
    load_before = [0, *accumulate(loads)]
    return smallest_limit(
        [load_before[cut] for cut in (0, *cuts, len(loads))], n_stages
    )


def _named_cuts(n_stages: int, names: list[str], crossing: Crossings) -> list[int]:
    """Return the cuts before the first node of each named module."""
    if len(names) != n_stages - 1:
        raise UserError(
            f"{n_stages} stages need {n_stages - 1} names of first modules: got {len(names)}"
        )
    cuts = []
    for name in names:
        cut = _first_node(name, crossing)
        obstacle = crossing.obstacle[cut]
        if obstacle is not None or cut == 0:
            raise UserError(
                f"no stage can begin at {name!r}: {obstacle or 'it begins the first'}"
            )
        cuts.append(cut)
    if cuts != sorted(set(cuts)):
        raise UserError(f"{names} must be in the order in which the model runs them")
    return cuts


def _first_node(name: str, crossing: Crossings) -> int:
    """Return the index of the first node of a module; UserError if there is no node."""
    paths: dict[str, None] = {}  # in order, each once
    for index, node in enumerate(crossing.nodes):
        for path in _paths(node):
            # With dots, so that layer.1 does not stand for layer.10.
            if f"{path}.".startswith(f"{name}."):
                return index
            if path:
                paths[path] = None
    suggestion = ""
    for path in get_close_matches(str(name), paths, 1):
        suggestion = f"did you mean {path}? "
    outermost = dict.fromkeys(path.partition(".")[0] for path in paths)
    raise UserError(
        f"torch.fx sees no module {name!r} in this model: {suggestion}choose from"
        f" {', '.join(outermost)} and their submodules"
    )


def _paths(node: fx.Node) -> list[str]:
    """Return the modules that contain a node, and the weight that it reads."""
    paths = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
    return (
        [*paths, str(node.target)] if node.op in ("call_module", "get_attr") else paths
    )
