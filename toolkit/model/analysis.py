"""What each operation of a model costs, read off one forward on meta tensors.

Nothing is computed and no activation is allocated, so a large batch of a large model is analysed
on a laptop.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils.flop_counter import FlopCounterMode


@dataclass(frozen=True)
class NodeCost:
    """One node of the traced graph.

    Attributes:
        flops: floating-point operations of its forward, by torch's own counter.
        parameters: elements of the parameters that it is the first to use.
        activations: bytes that its forward keeps for the backward and no earlier node kept;
            neither parameters nor the model's inputs.
        output: its result on the meta device (a tensor of the right shape and type).
    """

    flops: int
    parameters: int
    activations: int
    output: Any


def meta_copy(module: nn.Module) -> nn.Module:
    """The same module on the meta device, in training mode, without copying its tensors."""
    memo: dict[int, Any] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        memo[id(tensor)] = _to_meta(tensor)
    return copy.deepcopy(module, memo).train()


def node_costs(traced: fx.GraphModule, example: tuple[torch.Tensor, ...]) -> dict[str, NodeCost]:
    """The cost of each node of ``traced`` for inputs like ``example``, by node name."""
    inputs = tuple(_to_meta(tensor) for tensor in example)
    recorder = _Recorder(meta_copy(traced), inputs)
    with recorder.flop_counter, torch.autograd.graph.saved_tensors_hooks(recorder.keep, _unpack):
        recorder.run(*inputs)
    return recorder.costs


def _to_meta(tensor: torch.Tensor) -> torch.Tensor:
    meta = torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)
    return nn.Parameter(meta, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta


def _unpack(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Recorder(fx.Interpreter):
    def __init__(self, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        assert isinstance(module, fx.GraphModule)
        super().__init__(module, garbage_collect_values=False)
        self.flop_counter = FlopCounterMode(display=False)
        self.costs: dict[str, NodeCost] = {}
        self.counted: set[str] = set()
        # Storages are told apart by address: what is kept must stay alive meanwhile.
        self.kept: list[torch.Tensor] = [*module.parameters(), *module.buffers(), *inputs]
        self.seen = {_storage(tensor) for tensor in self.kept}
        self.bytes = 0

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        if _storage(tensor) not in self.seen:
            self.seen.add(_storage(tensor))
            self.kept.append(tensor)
            self.bytes += tensor.untyped_storage().nbytes()
        return tensor

    def run_node(self, n: fx.Node) -> Any:
        flops, kept = self.flop_counter.get_total_flops(), self.bytes
        output = super().run_node(n)
        self.costs[n.name] = NodeCost(
            flops=self.flop_counter.get_total_flops() - flops,
            parameters=self._new_parameters(n),
            activations=self.bytes - kept,
            output=output,
        )
        return output

    def _new_parameters(self, n: fx.Node) -> int:
        new = {k: p for k, p in parameters_of(self.module, n) if k not in self.counted}
        self.counted |= new.keys()
        return sum(parameter.numel() for parameter in new.values())


def parameters_of(module: nn.Module, n: fx.Node) -> list[tuple[str, nn.Parameter]]:
    """The parameters that a node reads itself, by their names in ``module``."""
    if n.op == "call_module":
        leaf = module.get_submodule(str(n.target))
        return [(f"{n.target}.{name}", parameter) for name, parameter in leaf.named_parameters()]
    if n.op == "get_attr":
        owner, _, name = str(n.target).rpartition(".")
        value = getattr(module.get_submodule(owner), name)
        if isinstance(value, nn.Parameter):
            return [(str(n.target), value)]
    return []
