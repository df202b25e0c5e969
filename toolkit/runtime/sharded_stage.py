"""A stage that the devices of a rank share, by tensor parallelism or by shards of its weights.

The runtime holds and sends the *local shards*: see :mod:`toolkit.model.sharded_module`. They become
DTensors where the user's optimizers see them, whose states are DTensors, too.
"""

import copy
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_map_only

from toolkit.errors import UserError
from toolkit.model.gathered_weights import GatheredWeight, local_of
from toolkit.model.loss_parallel import is_loss_parallel
from toolkit.model.node_costs import meta_copy
from toolkit.model.sharded_module import ShardedModule, Sharding, parallelized
from toolkit.model.traced_stage import in_training
from toolkit.runtime.microbatch_norm import NormGroup, replace_norms
from toolkit.runtime.process_group.columns import Parallelize, Row
from toolkit.runtime.sharded_draws import seed_shards


class ShardedStage:
    """One stage on a row: its modules for computing and for finding shapes, and its shards.

    Args:
        stage: the stage, with whole weights. They become local shards here.
        row: the devices.
        parallelize: shards the modules.
        is_last: whether it is the last stage, whose outputs are whole on every device unless the
            plan is a :class:`toolkit.model.loss_parallel.LossParallel`.

    Attributes:
        compute: computes with messages.
        skeleton: finds shapes without messages, on meta or fake tensors.
        whole_stage: the stage before the plan, on the meta device.
        shardings: of each trained weight, by name.

    Raises:
        UserError: ``parallelize`` does what cannot be done here.
    """

    def __init__(
        self,
        stage: fx.GraphModule,
        row: Row,
        parallelize: Parallelize,
        *,
        is_last: bool,
    ) -> None:
        self.row = row
        self.whole_stage = meta_copy(stage)
        gathers = is_last and not is_loss_parallel(parallelize)
        self.compute = ShardedModule(
            _parallelized(_with_meta_weights(stage), row.compute, parallelize, row),
            row.compute,
            gathers,
        )
        skeleton = in_training(cast(fx.GraphModule, meta_copy(stage)))
        skeleton = _parallelized(skeleton, row.trace, parallelize, row)
        # As in the modules that compute: messages of gradients have the statistics of norms, too.
        replace_norms(skeleton, NormGroup())
        self.skeleton = ShardedModule(skeleton, row.trace, gathers)
        self.shardings: dict[str, Sharding] = {}
        self._has_alike_gradients = False  # of weights that every device has whole
        self._shard(stage)

    def _shard(self, stage: fx.GraphModule) -> None:
        names_of: dict[int, list[str]] = {}
        # Two names of one weight would become two shards, which updates would then pull apart.
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
                    frozen = nn.Parameter(
                        sharding.weight(local, self.row.compute), False
                    )
                _set_parameter(self.compute.module, name, frozen)
                continue
            if sharding is None:
                replicated = (Replicate(),)
                # A weight that the plan leaves out is whole on every device.
                sharding = Sharding(
                    replicated, parameter.shape, tuple(parameter.stride())
                )
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
        # One all-reduce finds both: the smallest norm is minus the largest of the negative ones.
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
                " its module to the plan, such as SequenceParallel(), or the layers that belong"
                " together, such as q, k and v"
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
        # A device that counts none still adds its zero: all take part in the sum.
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
            # What has no sharding, such as a running statistic, is the same on all devices.
            local[name] = tensor
            if name in self.shardings:
                on_device = tensor.to(self.row.compute.device_type)
                local[name] = self.shardings[name].shard(on_device, self.row.compute)
        return local

    def whole_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return an updater's state with whole tensors. Every device of the row calls it."""
        whole_state = {**state}
        if state["average"] is not None:
            average = state["average"]
            whole_state["average"] = {
                **average,
                "weights": self.whole(average["weights"]),
            }
        return cast(
            dict[str, Any], tree_map_only(DTensor, DTensor.full_tensor, whole_state)
        )

    def local_state(
        self, state: Mapping[str, Any], form: Mapping[str, Any]
    ) -> dict[str, Any]:
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
                # The form shows which of a parameter's values are DTensors: a step count is a plain
                # number.
                entries[index] = {
                    key: _like(value, form_of_values[key])
                    for key, value in values.items()
                }
            optimizer["state"] = entries
            local["optimizer"] = optimizer
        return local


def local_tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name; of those that devices share this device's shard."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        tensors[name] = tensor
        if isinstance(tensor, DTensor | GatheredWeight):
            local = local_of(tensor)
            tensors[name] = local.detach().requires_grad_(tensor.requires_grad)
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
    stage = parallelized(stage, mesh, parallelize)
    seed_shards(stage, row)
    return stage


def _set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, attribute = name.rpartition(".")
    module.get_submodule(owner).register_parameter(attribute, parameter)
