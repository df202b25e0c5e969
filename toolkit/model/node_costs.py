"""Costs of each operation of a model, forward and backward, from meta tensors.

Nothing is computed and no activation is allocated, so a laptop can analyse large models.
"""

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map

from toolkit.model.kernel_work import Work, counting_work, storage_of, tensors_in
from toolkit.model.precision import as_trained
from toolkit.model.traced_stage import in_training


@dataclass(frozen=True)
class NodeCost:
    """Cost of one node of the traced graph.

    Attributes:
        forward: work of its forward.
        backward: work of its backward.
        weight_backward: the part of it that makes gradients of parameters.
        parameters: elements of parameters that no earlier node uses.
        activations: bytes that it is first to save for the backward; no parameters, model inputs.
        changes: nodes whose results, or views of them, it overwrites in place.
        state: buffers and parameters that it changes, without batch norms' running statistics.
        draws: whether it draws at random.
        output: its result on the meta device.
        kept: whether any node saves its result's memory for the backward.
    """

    forward: Work
    backward: Work
    weight_backward: Work
    parameters: int
    activations: int
    changes: tuple[str, ...]
    state: tuple[str, ...]
    draws: bool
    output: Any
    kept: bool = False

    @property
    def flops(self) -> int:
        """Floating-point operations of the forward."""
        return self.forward.flops


def meta_copy(module: nn.Module) -> nn.Module:
    """Return ``module`` on the meta device in training mode, without copying tensors."""
    # deepcopy takes these in place of the tensors, so no memory is allocated on the device.
    meta_of_tensor: dict[int, Any] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        meta_of_tensor[id(tensor)] = _to_meta(tensor)
    meta_module = in_training(copy.deepcopy(module, meta_of_tensor))
    for norm in meta_module.modules():
        if isinstance(norm, _BatchNorm) and norm.momentum is None:
            # A cumulative mean counts its batches, which meta tensors cannot.
            norm.momentum = 0.1
    return meta_module


def node_costs(
    traced: fx.GraphModule,
    example: tuple[Tensor, ...],
    device: torch.device | None = None,
    precision: str = "fp32",
) -> dict[str, NodeCost]:
    """Return the cost of each node of ``traced`` by node name.

    Args:
        traced: a traced module.
        example: inputs ``[b, ...]``; only shapes and types matter.
        device: device whose attention and autocast apply; None: the example's. Meta: a GPU.
        precision: one of :data:`toolkit.model.precision.PRECISIONS`.
    """
    inputs = tuple(_to_meta(tensor) for tensor in example)
    recorder = _Recorder(
        meta_copy(traced), inputs, device or example[0].device, precision
    )
    recorder.run(*inputs)
    # Only now: a later node may save what an earlier one has computed.
    saved_storages = {storage_of(tensor) for tensor in recorder.saved_tensors}
    costs = {}
    for name, cost in recorder.costs.items():
        is_saved = any(
            storage_of(tensor) in saved_storages for tensor in tensors_in(cost.output)
        )
        costs[name] = replace(cost, kept=is_saved)
    return costs


@torch.no_grad()
def outputs(traced: fx.GraphModule, example: tuple[Tensor, ...]) -> dict[str, Any]:
    """Return the result of each node of ``traced`` on the meta device, by node name."""
    interpreter = fx.Interpreter(meta_copy(traced), garbage_collect_values=False)
    interpreter.run(*(_to_meta(tensor) for tensor in example))
    return {node.name: value for node, value in interpreter.env.items()}


def cut_off(values: Any, *, changed: bool) -> tuple[Any, list[Tensor]]:
    """Detach a tree of tensors from their graph, and return the new leaves too.

    ``changed``: whether an in-place change may follow, which autograd forbids on leaves.
    """
    leaves: list[Tensor] = []
    # By id: a tensor that occurs twice stays one, which self-attention checks.
    leaf_of_tensor: dict[int, Tensor] = {}

    def begin(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.requires_grad:
            return value
        if id(value) not in leaf_of_tensor:
            leaf = value.detach().requires_grad_()
            leaves.append(leaf)
            leaf_of_tensor[id(value)] = leaf.clone() if changed else leaf
        return leaf_of_tensor[id(value)]

    return tree_map(begin, values), leaves


def parameters_of(module: nn.Module, n: fx.Node) -> list[nn.Parameter]:
    """Return the parameters of ``module`` that a node reads directly."""
    if n.op == "call_module":
        return [*module.get_submodule(str(n.target)).parameters()]
    if n.op == "get_attr":
        owner, _, name = str(n.target).rpartition(".")
        value = getattr(module.get_submodule(owner), name)
        return [value] if isinstance(value, nn.Parameter) else []
    return []


class _Recorder(fx.Interpreter):
    """Run each node alone, forward and backward, on inputs detached from earlier nodes."""

    def __init__(
        self,
        module: nn.Module,
        inputs: tuple[Tensor, ...],
        device: torch.device,
        precision: str,
    ) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.device = device
        self.precision = precision
        self.costs: dict[str, NodeCost] = {}
        self.counted_parameters: set[int] = set()
        # Storages are identified by address: keep them alive so that none is reused.
        self.saved_tensors: list[Tensor] = [
            *module.parameters(),
            *module.buffers(),
            *inputs,
        ]
        self.seen_storages = {storage_of(tensor) for tensor in self.saved_tensors}
        self.parameter_storages = {
            storage_of(parameter) for parameter in module.parameters()
        }
        self.saved_bytes = 0
        self.state: dict[str, Tensor] = dict(module.named_parameters())
        for name, buffer in module.named_buffers():
            owner = module.get_submodule(name.rpartition(".")[0])
            if not isinstance(owner, _BatchNorm):
                self.state[name] = buffer

    def run_node(self, n: fx.Node) -> Any:
        # 1. Cut the arguments off from the nodes before, so that the backward is that of this node.
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        earlier_versions = {
            name: tensor._version for name, tensor in self.state.items()
        }
        changes = self._changes(n, args, kwargs)
        (args, kwargs), leaves = cut_off((args, kwargs), changed=bool(changes))
        earlier_bytes = self.saved_bytes
        # 2. The forward, with what autograd saves of it.
        hooks = torch.autograd.graph.saved_tensors_hooks(
            self._save, lambda tensor: tensor
        )
        with counting_work() as forward, hooks:
            output = self._run(n, args, kwargs)
        # 3. The backward, to what the node reads: arguments, and parameters of its own module.
        parameters = parameters_of(self.module, n)
        # A traced weight comes as an input: its leaf shares the parameter's memory.
        weights = [
            leaf for leaf in leaves if storage_of(leaf) in self.parameter_storages
        ]
        # The backward runs twice: for the weights alone, and for everything.
        with counting_work() as weight_backward:
            _backward(output, [*weights, *parameters], retain_graph=True)
        with counting_work() as backward:
            _backward(output, [*leaves, *parameters])
        # 4. A parameter counts at its first node, and what has changed in place by its version.
        n_new_parameters = 0
        for parameter in parameters:
            if id(parameter) not in self.counted_parameters:
                self.counted_parameters.add(id(parameter))
                n_new_parameters += parameter.numel()
        changed_state = [
            name
            for name, tensor in self.state.items()
            if tensor._version != earlier_versions[name]
        ]
        self.costs[n.name] = NodeCost(
            forward=forward.work,
            backward=backward.work,
            weight_backward=weight_backward.work,
            parameters=n_new_parameters,
            activations=self.saved_bytes - earlier_bytes,
            changes=changes,
            state=tuple(changed_state),
            draws=forward.draws,
            output=output,
        )
        return output

    def _run(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        with as_trained(self.device, self.precision):
            return getattr(self, n.op)(n.target, args, kwargs)

    def _changes(self, n: fx.Node, args: Any, kwargs: Any) -> tuple[str, ...]:
        """Return the nodes whose results ``n`` overwrites, by running it once."""
        # Of torch's own operations the schema says whether they write; of layers and functions
        # nothing.
        schema = getattr(n.target, "_schema", None)
        if not n.op.startswith("call") or (schema and not schema.is_mutable):
            return ()
        earlier_versions = [
            (node, value, value._version)
            for node, value in self.env.items()
            if isinstance(value, Tensor)
        ]
        # Without a graph, so that running the node twice saves nothing twice.
        with torch.no_grad():
            self._run(n, args, kwargs)
        return tuple(
            node.name
            for node, value, version in earlier_versions
            if value._version != version
        )

    def _save(self, tensor: Tensor) -> Tensor:
        if storage_of(tensor) not in self.seen_storages:
            self.seen_storages.add(storage_of(tensor))
            self.saved_tensors.append(tensor)
            self.saved_bytes += tensor.untyped_storage().nbytes()
        return tensor


def _backward(output: Any, leaves: list[Tensor], *, retain_graph: bool = False) -> None:
    """Run the backward of a node's result to the leaves that need a gradient."""
    outputs = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
    trained_leaves = [leaf for leaf in leaves if leaf.requires_grad]
    if outputs and trained_leaves:
        gradients = [torch.empty_like(tensor) for tensor in outputs]
        torch.autograd.grad(
            outputs,
            trained_leaves,
            gradients,
            retain_graph=retain_graph,
            allow_unused=True,
        )


def _to_meta(tensor: Tensor) -> Tensor:
    """Return a meta tensor of the same kind, without values."""
    meta = torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)
    return (
        nn.Parameter(meta, tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else meta
    )


def differentiable(tensor: Tensor) -> bool:
    """Return whether autograd can differentiate such a tensor."""
    return tensor.is_floating_point() or tensor.is_complex()
