"""Costs of each operation of a model, forward and backward, from meta tensors.

Nothing is computed and no activation is allocated, so a laptop can analyse large models.
"""

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from toolkit.model.precision import HALVES, as_trained, attention_draws
from toolkit.model.trace import in_training


@dataclass(frozen=True)
class Work:
    """Arithmetic and memory traffic of one or more kernels."""

    flops: int  # floating-point operations by torch's counter; grouped convolutions by ours
    bytes: int  # read and written in device memory, each kernel on its own
    in_16_bits: bool = False  # whether any operand has 16 bits


@dataclass(frozen=True)
class NodeCost:
    """Cost of one node of the traced graph.

    Attributes:
        forward: work of its forward.
        backward: work of its backward.
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
    meta_of_tensor: dict[int, Any] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        meta_of_tensor[id(tensor)] = _to_meta(tensor)
    meta_module = in_training(copy.deepcopy(module, meta_of_tensor))
    for norm in meta_module.modules():
        if isinstance(norm, _BatchNorm) and norm.momentum is None:
            norm.momentum = 0.1  # a cumulative mean counts its batches, which meta tensors cannot
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
    recorder = _Recorder(meta_copy(traced), inputs, device or example[0].device, precision)
    recorder.run(*inputs)
    kept_storages = {_storage(tensor) for tensor in recorder.kept}
    return {
        name: replace(
            cost, kept=any(_storage(tensor) in kept_storages for tensor in tensors_in(cost.output))
        )
        for name, cost in recorder.costs.items()
    }


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
            leaves.append(leaf := value.detach().requires_grad_())
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
        self, module: nn.Module, inputs: tuple[Tensor, ...], device: torch.device, precision: str
    ) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.device = device
        self.precision = precision
        self.costs: dict[str, NodeCost] = {}
        self.counted: set[int] = set()
        # Storages are identified by address: keep them alive so that none is reused.
        self.kept: list[Tensor] = [*module.parameters(), *module.buffers(), *inputs]
        self.seen = {_storage(tensor) for tensor in self.kept}
        self.bytes = 0
        norms = [
            name for name, submodule in module.named_modules() if isinstance(submodule, _BatchNorm)
        ]
        self.state = dict(module.named_parameters()) | {
            name: buffer
            for name, buffer in module.named_buffers()
            if name.rpartition(".")[0] not in norms
        }

    def run_node(self, n: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        earlier_versions = {name: tensor._version for name, tensor in self.state.items()}
        changes = self._changes(n, args, kwargs)
        (args, kwargs), leaves = cut_off((args, kwargs), changed=bool(changes))
        earlier_bytes = self.bytes
        saved_tensor_hooks = torch.autograd.graph.saved_tensors_hooks(
            self._keep, lambda tensor: tensor
        )
        with _counting() as forward, saved_tensor_hooks:
            output = self._run(n, args, kwargs)
        parameters = parameters_of(self.module, n)
        with _counting() as backward:
            _backward(output, [*leaves, *parameters])
        new_sizes = {
            id(parameter): parameter.numel()
            for parameter in parameters
            if id(parameter) not in self.counted
        }
        self.counted |= new_sizes.keys()
        self.costs[n.name] = NodeCost(
            forward=forward.work,
            backward=backward.work,
            parameters=sum(new_sizes.values()),
            activations=self.bytes - earlier_bytes,
            changes=changes,
            state=tuple(
                name
                for name, tensor in self.state.items()
                if tensor._version != earlier_versions[name]
            ),
            draws=forward.draws,
            output=output,
        )
        return output

    def _run(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        with as_trained(self.device, self.precision):
            return getattr(self, n.op)(n.target, args, kwargs)

    def _changes(self, n: fx.Node, args: Any, kwargs: Any) -> tuple[str, ...]:
        """Return the nodes whose results ``n`` overwrites, by running it once."""
        schema = getattr(n.target, "_schema", None)
        if not n.op.startswith("call") or (schema and not schema.is_mutable):
            return ()
        earlier_versions = [
            (node, value, value._version)
            for node, value in self.env.items()
            if isinstance(value, Tensor)
        ]
        with torch.no_grad():
            self._run(n, args, kwargs)
        return tuple(
            node.name for node, value, version in earlier_versions if value._version != version
        )

    def _keep(self, tensor: Tensor) -> Tensor:
        if _storage(tensor) not in self.seen:
            self.seen.add(_storage(tensor))
            self.kept.append(tensor)
            self.bytes += tensor.untyped_storage().nbytes()
        return tensor


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of a node's result."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _backward(output: Any, leaves: list[Tensor]) -> None:
    """Run the backward of a node's result to the leaves that need a gradient."""
    outputs = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
    trained_leaves = [leaf for leaf in leaves if leaf.requires_grad]
    if outputs and trained_leaves:
        gradients = [torch.empty_like(tensor) for tensor in outputs]
        torch.autograd.grad(outputs, trained_leaves, gradients, allow_unused=True)


@contextmanager
def _counting() -> Iterator["_Traffic"]:
    """Count the work of the operations inside the context."""
    with FlopCounterMode(display=False, custom_mapping=_FLOPS) as flops, _Traffic() as traffic:
        yield traffic
    traffic.flops = flops.get_total_flops()


def _convolution_backward(*args: Any, **keywords: Any) -> int:
    """Return the operations of a convolution's backward: one forward for each gradient it computes.

    torch's formula ignores groups, and counts a depthwise convolution as a dense one.
    """
    # aten.convolution_backward(grad, x, weight, bias, stride, padding, dilation, transposed, ...)
    # These are called with shapes in place of tensors.
    gradient_shape, input_shape, weight_shape, *_, transposed, _, _, output_mask = args[:11]
    positions = input_shape[2:] if transposed else gradient_shape[2:]
    forward_flops = 2 * input_shape[0] * prod(positions) * prod(weight_shape)
    return forward_flops * sum(output_mask[:2])


_FLOPS = {torch.ops.aten.convolution_backward: _convolution_backward}


class _Traffic(TorchDispatchMode):
    """Count bytes that kernels read and write, and detect random draws; views are free."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.bytes = 0
        self.in_16_bits = self.draws = False

    @property
    def work(self) -> Work:
        return Work(self.flops, self.bytes, self.in_16_bits)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func.is_view or func in _ALLOCATIONS:
            return output
        attention_dropout = attention_draws(func, args)
        is_seeded = torch.Tag.nondeterministic_seeded in func.tags
        self.draws |= is_seeded if attention_dropout is None else attention_dropout
        operands = tensors_in((args, kwargs, output))
        self.bytes += sum(operand.nbytes for operand in operands)
        self.in_16_bits |= any(operand.dtype in HALVES for operand in operands)
        return output


_ALLOCATIONS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.detach.default,
}


def _to_meta(tensor: Tensor) -> Tensor:
    """Return a meta tensor of the same kind, without values."""
    meta = torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)
    return nn.Parameter(meta, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta


def _storage(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, which identifies it while it lives."""
    return tensor.untyped_storage()._cdata


def differentiable(tensor: Tensor) -> bool:
    """Return whether autograd can differentiate such a tensor."""
    return tensor.is_floating_point() or tensor.is_complex()


class MemoryMeter(Protocol):
    """Bytes in use on a device."""

    @property
    def bytes(self) -> int:
        """Bytes in use now."""

    @property
    def most(self) -> int:
        """Peak since the last restart."""

    def restart(self) -> None:
        """Set the peak to the bytes in use now."""


class Live(TorchDispatchMode):
    """Count the bytes of living tensors made inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.most = 0  # now; and the peak since the last restart
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        argument_storages = [
            tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))
        ]
        for tensor in tensors_in(output):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._sizes and storage._cdata not in argument_storages:
                self._sizes[storage._cdata] = storage.nbytes()
                self.bytes += storage.nbytes()
                weakref.finalize(storage, self._forget, storage._cdata)
        self.most = max(self.most, self.bytes)
        return output

    def restart(self) -> None:
        """Set the peak to the bytes in use now."""
        self.most = self.bytes

    def _forget(self, storage: int) -> None:
        self.bytes -= self._sizes.pop(storage)


def working_bytes(
    stage: fx.GraphModule, inputs: tuple[Tensor, ...], device: torch.device, precision: str
) -> tuple[int, int]:
    """Return the peak bytes of a stage's forward and backward besides what is kept between them.

    Temporary results and gradients count. Arguments are as in :func:`node_costs`.
    """
    meta_stage = meta_copy(stage)

    def forward() -> tuple[Tensor, ...]:
        # An interpreter keeps the outputs alive: it must end with this call.
        outputs: tuple[Tensor, ...] = fx.Interpreter(meta_stage).run(*inputs)
        return outputs

    with Live() as live:
        return peaks_beside_kept(forward, live, as_trained(device, precision))


def peaks_beside_kept(
    forward: Callable[[], tuple[Tensor, ...]],
    memory: MemoryMeter,
    precision: AbstractContextManager[object],
) -> tuple[int, int]:
    """Return the peak bytes of a forward and of its backward, besides what is kept between them.

    Args:
        forward: returns the outputs of a stage, and keeps no reference to them.
        memory: meter of the device.
        precision: context of the forward.
    """
    memory.restart()
    with precision:
        outputs = forward()
    forward_peak = memory.most
    differentiable_outputs = [output for output in outputs if output.requires_grad]
    edges = [get_gradient_edge(output) for output in differentiable_outputs]
    specs = [(output.shape, output.dtype, output.device) for output in differentiable_outputs]
    del outputs, differentiable_outputs  # each reference would keep the outputs alive
    kept_bytes = memory.bytes
    memory.restart()
    gradients = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in specs]
    torch.autograd.backward(edges, gradients)
    return forward_peak - kept_bytes, memory.most - kept_bytes
