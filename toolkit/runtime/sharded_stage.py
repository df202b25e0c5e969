"""A stage that the devices of a rank share (tensor parallelism).

The runtime holds and sends the *local shards*: plain tensors. They become DTensors where the user's
modules and optimizers see them::

    local shard --DTensor--> forward and backward --local--> gradient, sum, message
    local shard --DTensor--> optimizer (states are DTensors, too)
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils._pytree import tree_map_only

from toolkit.errors import UserError
from toolkit.model.node_costs import meta_copy
from toolkit.model.traced_stage import in_training
from toolkit.runtime.process_group.columns import Parallelize, Row
from toolkit.runtime.sharded_draws import seed_shards


class Sharding(NamedTuple):
    """How a tensor lies on a row: where each device has what, and the whole tensor's layout."""

    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    def wrap(self, local: Tensor, mesh: DeviceMesh) -> DTensor:
        """Return the DTensor whose shard here is ``local``; autograd passes through."""
        return DTensor.from_local(
            local, mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )

    def shard(self, whole: Tensor, mesh: DeviceMesh) -> Tensor:
        """Return this device's shard of ``whole``, in memory of its own, without messages."""
        sharded = distribute_tensor(whole.detach(), mesh, self.placements, src_data_rank=None)
        return sharded.to_local().clone(memory_format=torch.contiguous_format)

    def whole(self, local: Tensor, mesh: DeviceMesh) -> Tensor:
        """Return the whole tensor. Every device of the row calls it."""
        return self.wrap(local.detach(), mesh).full_tensor().clone()

    @property
    def is_replicated(self) -> bool:
        """Whether each device has the whole tensor."""
        return all(placement.is_replicate() for placement in self.placements)


def _sharding_of(tensor: Tensor) -> Sharding | None:
    if not isinstance(tensor, DTensor):
        return None
    return Sharding(tuple(tensor.placements), tensor.shape, tuple(tensor.stride()))


@dataclass
class ShardedModule:
    """A stage's modules after ``parallelize``: called with local shards, it returns such.

    Attributes:
        module: the stage, whose trained weights are on the meta device.
        mesh: mesh of its collectives.
        is_last: whether its outputs are the model's, which are whole on every device.
        inputs: sharding of each input; None for a plain tensor.
        outputs: likewise of each output, as the last call has found it.
    """

    module: fx.GraphModule
    mesh: DeviceMesh
    is_last: bool
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
        self, weights: Mapping[str, Tensor], inputs: Sequence[Tensor], *, tie_weights: bool = True
    ) -> tuple[Tensor, ...]:
        """Run the stage on local shards of ``weights`` and ``inputs``."""
        tensors = {}
        for name, weight in weights.items():
            tensors[name] = weight
            if name in self.weights:
                tensors[name] = self.weights[name].wrap(weight, self.mesh)
        received = []
        for index, tensor in enumerate(inputs):
            sharding = self.inputs[index] if self.inputs else None
            received.append(tensor if sharding is None else sharding.wrap(tensor, self.mesh))
        results = torch.func.functional_call(
            self.module, tensors, tuple(received), tie_weights=tie_weights
        )
        self.outputs = [None if self.is_last else _sharding_of(output) for output in results]
        return tuple(self._local(output) for output in results)

    def _local(self, output: Tensor) -> Tensor:
        if not isinstance(output, DTensor):
            return output
        if self.is_last:
            return output.full_tensor()
        return output.to_local()


class ShardedStage:
    """One stage on a row: its modules for computing and for finding shapes, and its shards.

    Args:
        stage: the stage, with whole weights. They become local shards here.
        row: the devices.
        parallelize: shards the modules.
        is_last: whether it is the last stage.

    Attributes:
        compute: computes with messages.
        skeleton: finds shapes without messages, on meta or fake tensors.
        shardings: of each trained weight, by name.

    Raises:
        UserError: ``parallelize`` does what cannot be done here.
    """

    def __init__(
        self, stage: fx.GraphModule, row: Row, parallelize: Parallelize, *, is_last: bool
    ) -> None:
        self.row = row
        self.compute = ShardedModule(
            _parallelized(_with_meta_weights(stage), row.compute, parallelize, row),
            row.compute,
            is_last,
        )
        skeleton = cast(fx.GraphModule, meta_copy(stage))
        skeleton = _parallelized(skeleton, row.trace, parallelize, row)
        self.skeleton = ShardedModule(skeleton, row.trace, is_last)
        self.shardings: dict[str, Sharding] = {}
        self._has_alike_gradients = False  # of weights that every device has whole
        self._shard(stage)

    def _shard(self, stage: fx.GraphModule) -> None:
        names_of: dict[int, list[str]] = {}
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            names_of.setdefault(id(parameter), []).append(name)
        for names in names_of.values():
            tied = [name for name in names if name in self.compute.weights]
            if tied and len(names) > 1:
                raise UserError(
                    f"parallelize: got the tied weights {' and '.join(names)}; expected weights of"
                    " one name in a stage. Leave them out of the plan"
                )
        for name, parameter in stage.named_parameters():
            sharding = self.compute.weights.get(name)
            if not parameter.requires_grad:
                frozen = parameter
                if sharding is not None:
                    local = sharding.shard(parameter.data, self.row.compute)
                    frozen = nn.Parameter(sharding.wrap(local, self.row.compute), False)
                _set_parameter(self.compute.module, name, frozen)
                continue
            if sharding is None:
                replicated = (Replicate(),)
                sharding = Sharding(replicated, parameter.shape, tuple(parameter.stride()))
            else:
                parameter.data = sharding.shard(parameter.data, self.row.compute)
            self.shardings[name] = sharding

    # What the optimizer sees.

    def handles(self, masters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Return the parameters of an optimizer: DTensors, whose shards are those of ``masters``.

        All are DTensors, since torch's optimizers refuse a mixture.
        """
        handles = {}
        for name, master in masters.items():
            wrapped = self.shardings[name].wrap(master.data, self.row.update)
            handles[name] = nn.Parameter(wrapped)
        return handles

    def give_to_optimizer(
        self, masters: Mapping[str, nn.Parameter], handles: Mapping[str, nn.Parameter]
    ) -> None:
        """Let ``handles`` have the memory and the gradients of ``masters``, which lose these."""
        if not self._has_alike_gradients:
            self._check_alike(masters)
        for name, master in masters.items():
            handle = cast(DTensor, handles[name])
            # As torch's own FSDP does: assigning .data of a DTensor leaves its shard as it was.
            handle._local_tensor = master.data
            handle.grad = None
            if master.grad is not None:
                handle.grad = self.shardings[name].wrap(master.grad, self.row.update)
            master.grad = None

    def _check_alike(self, masters: Mapping[str, nn.Parameter]) -> None:
        """Raise UserError if devices have different gradients of a weight that they all have whole.

        A plan that leaves out a weight which meets shards of activations would train each copy by
        a part of its gradient. The first gradients show that.
        """
        gradients = {}
        for name, master in masters.items():
            if name not in self.compute.weights and master.grad is not None:
                gradients[name] = master.grad
        if not gradients:
            return
        norms = torch.stack(torch._foreach_norm([*gradients.values()])).double()
        extremes = torch.stack([norms, -norms])
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self.row.update.get_group())
        largest, smallest = extremes[0], -extremes[1]
        # Copies of one computation differ by rounding, a gradient near zero by all of itself.
        differs = largest - smallest > 1e-3 * largest + 1e-6 * largest.max()
        if differs.any():
            names = [*gradients]
            name = names[int(differs.nonzero()[0])]
            raise UserError(
                f"parallelize: got different gradients of {name} on the devices of a rank; expected"
                " the same, since the plan leaves it whole. It meets shards of activations: add"
                " its module to the plan, such as SequenceParallel()"
            )
        self._has_alike_gradients = True

    def squared_norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Return the squared norm of the whole stage's gradient; each weight counts once.

        Args:
            gradients: local shards, by name; those that are replicated are the same on the row.
        """
        is_first_device = self.row.device_index == 0
        counted = []
        for name, gradient in gradients.items():
            if is_first_device or not self.shardings[name].is_replicated:
                counted.append(gradient)
        squared = next(iter(gradients.values())).new_zeros(())
        if counted:
            squared = torch.stack(torch._foreach_norm(counted)).square().sum()
        dist.all_reduce(squared, group=self.row.update.get_group())
        return squared

    # Whole tensors.

    def whole(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return whole weights from local shards. Every device of the row calls it."""
        return {
            name: self.shardings[name].whole(tensor, self.row.compute)
            if name in self.shardings
            else tensor
            for name, tensor in weights.items()
        }

    def forms(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return ``weights`` on the meta device with the shapes of the whole tensors."""
        forms = {}
        for name, tensor in weights.items():
            shape = tensor.shape
            if name in self.shardings:
                shape = self.shardings[name].shape
            forms[name] = torch.empty(shape, dtype=tensor.dtype, device="meta")
        return forms

    def local(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return local shards of whole ``weights``."""
        local = {}
        for name, tensor in weights.items():
            local[name] = tensor
            if name in self.shardings:
                on_device = tensor.to(self.row.compute.device_type)
                local[name] = self.shardings[name].shard(on_device, self.row.compute)
        return local

    def whole_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return an updater's state with whole tensors. Every device of the row calls it."""
        whole = {**state}
        if state["average"] is not None:
            average = state["average"]
            whole["average"] = {**average, "weights": self.whole(average["weights"])}
        return cast(dict[str, Any], tree_map_only(DTensor, DTensor.full_tensor, whole))

    def local_state(self, state: Mapping[str, Any], form: Mapping[str, Any]) -> dict[str, Any]:
        """Return an updater's state with DTensors where its ``form`` has them.

        Args:
            state: with whole tensors.
            form: a state of the same form, of this row.
        """
        local = {**state}
        if state["average"] is not None:
            average = state["average"]
            local["average"] = {**average, "weights": self.local(average["weights"])}
        if state["optimizer"] is not None:
            optimizer = {**state["optimizer"]}
            entries = {}
            for index, values in optimizer["state"].items():
                form_of_values = form["optimizer"]["state"][index]
                entries[index] = {
                    key: _like(value, form_of_values[key]) for key, value in values.items()
                }
            optimizer["state"] = entries
            local["optimizer"] = optimizer
        return local


def local_tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name, of a DTensor this device's shard."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        tensors[name] = tensor
        if isinstance(tensor, DTensor):
            tensors[name] = tensor.to_local().detach().requires_grad_(tensor.requires_grad)
    return tensors


def pass_shardings_on(stages: Sequence[ShardedStage], index: int) -> None:
    """Let the stage after ``index`` take its inputs as the skeleton of ``index`` has given them."""
    for follower in stages[index + 1 : index + 2]:
        follower.skeleton.inputs = stages[index].skeleton.outputs
        follower.compute.inputs = stages[index].skeleton.outputs


def _like(value: Any, form: Any) -> Any:
    """Return ``value`` as a DTensor that lies as ``form`` does; as it is if ``form`` is none."""
    if not isinstance(form, DTensor):
        return value
    mesh = form.device_mesh
    sharding = Sharding(tuple(form.placements), form.shape, tuple(form.stride()))
    return sharding.wrap(sharding.shard(value.to(mesh.device_type), mesh), mesh)


def _with_meta_weights(stage: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of ``stage`` that shares its buffers; its weights are on the meta device."""
    tensors: dict[int, Any] = {id(buffer): buffer for buffer in stage.buffers()}
    for parameter in stage.parameters():
        meta = torch.empty_like(parameter, device="meta")
        tensors[id(parameter)] = nn.Parameter(meta, parameter.requires_grad)
    return in_training(copy.deepcopy(stage, tensors))


def _parallelized(
    stage: fx.GraphModule, mesh: DeviceMesh, parallelize: Parallelize, row: Row
) -> fx.GraphModule:
    """Return ``stage``, a copy of its own, after ``parallelize``."""
    trained = {name for name, p in stage.named_parameters() if p.requires_grad}
    result = parallelize(stage, mesh)
    if isinstance(result, fx.GraphModule):
        stage = result
    # torch's SequenceParallel makes new parameters that all need a gradient.
    for name, parameter in stage.named_parameters():
        parameter.requires_grad_(name in trained)
    for name, module in stage.named_modules():
        if type(module).__name__.startswith("FSDP"):
            raise UserError(
                f"parallelize: got fully_shard of {name or 'the stage'}; expected tensor"
                " parallelism, such as parallelize_module. To share states use state=sharded"
            )
    for name, buffer in stage.named_buffers():
        if isinstance(buffer, DTensor):
            raise UserError(
                f"parallelize: got the buffer {name} as a DTensor; expected parameters only. Leave"
                " its module out of the plan"
            )
    seed_shards(stage, row)
    return stage


def _set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, attribute = name.rpartition(".")
    module.get_submodule(owner).register_parameter(attribute, parameter)
