"""A stage whose modules several devices share: local shards in, local shards out.

Devices hold and send *local shards*: plain tensors. The modules see DTensors, or weights that are
gathered while an op reads them::

    local shard --DTensor or GatheredWeight--> forward and backward --local--> gradient, message
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from toolkit.errors import UserError, first_line
from toolkit.model.gathered_weights import GatheredWeight


class Sharding(NamedTuple):
    """How a tensor lies on a row: where each device has what, and the whole tensor's layout.

    Attributes:
        placements: of the tensor's DTensor.
        shape: of the whole tensor.
        stride: likewise.
        is_gathered: whether modules see a :class:`GatheredWeight` instead of the DTensor.
    """

    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    is_gathered: bool = False

    def wrap(self, local: Tensor, mesh: DeviceMesh) -> DTensor:
        """Return the DTensor whose shard here is ``local``; autograd passes through."""
        return DTensor.from_local(
            local,
            mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=self.stride,
        )

    def weight(self, local: Tensor, mesh: DeviceMesh) -> Tensor:
        """Return what a module sees of a weight whose shard here is ``local``."""
        if self.is_gathered:
            return cast(Tensor, _Gathered.apply(local, self, mesh))
        return self.wrap(local, mesh)

    def shard(self, whole_tensor: Tensor, mesh: DeviceMesh) -> Tensor:
        """Return this device's shard of a tensor, in memory of its own, without messages."""
        # Without a source rank torch takes the tensor of this device, instead of that of rank 0.
        sharded = distribute_tensor(
            whole_tensor.detach(), mesh, self.placements, src_data_rank=None
        )
        # A clone: the shard would otherwise be a view that keeps the whole tensor alive.
        return sharded.to_local().clone(memory_format=torch.contiguous_format)

    def whole(self, local: Tensor, mesh: DeviceMesh) -> Tensor:
        """Return the whole tensor. Every device of the row calls it."""
        return self.wrap(local.detach(), mesh).full_tensor().clone()

    @property
    def is_replicated(self) -> bool:
        """Whether each device has the whole tensor."""
        return all(placement.is_replicate() for placement in self.placements)


class _Gathered(torch.autograd.Function):
    """A local shard as a :class:`GatheredWeight`."""

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, sharding: Sharding, mesh: DeviceMesh
    ) -> Tensor:
        ctx.sharding = sharding
        ctx.mesh = mesh
        return GatheredWeight(sharding.wrap(local.detach(), mesh))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        # Devices computed the same, so each has the whole gradient already.
        return ctx.sharding.shard(gradient, ctx.mesh), None, None


def _sharding_of(tensor: Tensor) -> Sharding | None:
    is_gathered = isinstance(tensor, GatheredWeight)
    if isinstance(tensor, GatheredWeight):
        tensor = tensor.sharded
    if not isinstance(tensor, DTensor):
        return None
    return Sharding(
        tuple(tensor.placements), tensor.shape, tuple(tensor.stride()), is_gathered
    )


@dataclass
class ShardedModule:
    """A stage's modules after ``parallelize``: called with local shards, it returns such.

    Attributes:
        module: the stage, whose trained weights are on the meta device.
        mesh: mesh of its collectives.
        gathers: whether every device returns whole outputs: those of the model.
        inputs: sharding of each input; None for a plain tensor.
        outputs: likewise of each output, as the last call has found it.
    """

    module: fx.GraphModule
    mesh: DeviceMesh
    gathers: bool
    inputs: Sequence[Sharding | None] = ()
    outputs: Sequence[Sharding | None] = ()
    weights: dict[str, Sharding] = field(init=False)

    def __post_init__(self) -> None:
        self.weights = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            sharding = _sharding_of(parameter)
            if sharding is not None:
                self.weights[name] = sharding

    def __call__(
        self,
        weights: Mapping[str, Tensor],
        inputs: Sequence[Tensor],
        *,
        tie_weights: bool = True,
    ) -> tuple[Tensor, ...]:
        """Run the stage on local shards of ``weights`` and ``inputs``."""
        tensors = {}
        for name, weight in weights.items():
            tensors[name] = weight
            if name in self.weights:
                tensors[name] = self.weights[name].weight(weight, self.mesh)
        # A message carries the local shard alone. What it is a shard of is known from the stage
        # before.
        received = []
        for index, tensor in enumerate(inputs):
            sharding = self.inputs[index] if self.inputs else None
            received.append(
                tensor if sharding is None else sharding.wrap(tensor, self.mesh)
            )
        results = torch.func.functional_call(
            self.module, tensors, tuple(received), tie_weights=tie_weights
        )
        # A weight that crosses to the next stage, such as a tied one, crosses whole.
        results = tuple(
            output.clone() if isinstance(output, GatheredWeight) else output
            for output in results
        )
        # The next stage wraps what it receives by these.
        self.outputs = [
            None if self.gathers else _sharding_of(output) for output in results
        ]
        return tuple(self._local(output) for output in results)

    def _local(self, output: Tensor) -> Tensor:
        if not isinstance(output, DTensor):
            return output
        if self.gathers:
            return output.full_tensor()
        return output.to_local()


def parallelized(
    stage: fx.GraphModule,
    mesh: DeviceMesh,
    parallelize: Callable[[nn.Module, DeviceMesh], Any],
) -> fx.GraphModule:
    """Return ``stage`` after ``parallelize``, which may change it in place.

    Raises:
        UserError: ``parallelize`` does what cannot be done here.
    """
    # Noted before the plan runs, which may replace parameters.
    trained = {name for name, p in stage.named_parameters() if p.requires_grad}
    try:
        result = parallelize(stage, mesh)
    except NotImplementedError as error:  # of torch's styles
        raise UserError(
            f"parallelize: {first_line(error)} The traced stage calls functions in place of"
            f" {_uncalled_modules(stage)}: their weights are tied, or their layers are of another"
            " kind. Leave them out of the plan, or take shard_parameters of"
            " toolkit.model.gathered_weights"
        ) from error
    if isinstance(result, fx.GraphModule):
        stage = result
    # torch's SequenceParallel makes new parameters that all need a gradient.
    for name, parameter in stage.named_parameters():
        parameter.requires_grad_(name in trained)
    for name, module in stage.named_modules():
        if type(module).__name__.startswith("FSDP"):
            raise UserError(
                f"parallelize: got torch's fully_shard of {name or 'the stage'}, which computes"
                " with its own weights, never with late ones; expected shard_parameters of"
                " toolkit.model.gathered_weights, which divides weights, gradients and optimizer"
                " states alike"
            )
    for name, buffer in stage.named_buffers():
        if isinstance(buffer, DTensor):
            raise UserError(
                f"parallelize: got the buffer {name} as a DTensor; expected parameters only. Leave"
                " its module out of the plan"
            )
    _check_hooks_run(stage)
    return stage


def _uncalled_modules(stage: fx.GraphModule) -> str:
    """Return the names of some modules whose weights the stage reads without calling them."""
    names = []
    for name, module in stage.named_modules():
        # torch.fx makes such a module to hold what a graph reads by a dotted name.
        if type(module) is nn.Module and module._parameters:
            names.append(name)
    return ", ".join(names[:3]) or "some modules"


def _check_hooks_run(stage: fx.GraphModule) -> None:
    """Raise UserError if the plan has a module that the stage does not call.

    torch's styles move tensors in hooks of a module. A graph calls functions in place of a module
    that contains others. Of those that torch.export has traced it calls linear layers, embeddings
    and batch norms alone.
    """
    called = {
        str(node.target) for node in stage.graph.nodes if node.op == "call_module"
    }
    running = {id(stage)}
    for target in called:
        running |= {id(module) for module in stage.get_submodule(target).modules()}
    for name, module in stage.named_modules():
        has_hooks = module._forward_pre_hooks or module._forward_hooks
        if has_hooks and id(module) not in running:
            raise UserError(
                f"parallelize: got a plan for {name}, which the traced stage does not call;"
                f" expected modules that it calls, such as {sorted(called)[:2]}. torch.fx calls"
                " torch's own layers; torch.export, as for models of transformers, linear layers,"
                " embeddings and batch norms. shard_parameters of toolkit.model.gathered_weights"
                " takes any model"
            )
