"""torch's FSDP2: ZeRO-3, or ZeRO-2."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only

from toolkit.errors import UserError
from toolkit.runtime.baselines.baseline import ReleasedParameters
from toolkit.runtime.baselines.ddp import Synchronous, WholeModel, check_weights_stay
from toolkit.runtime.microbatches import StepResult
from toolkit.runtime.stage import Values
from toolkit.runtime.state import join_states
from toolkit.runtime.updater import Updater


@dataclass(eq=False, repr=False, kw_only=True)
class FSDP(Synchronous):
    """Data parallelism with sharded state, by torch's fully_shard of each stage.

    While it trains, the model's own parameters are empty; :meth:`module` fills them.

    Args:
        stages, optimizer, loss, lr_scheduler, seed, world: as in ``Distributed``.
        schedule: ``catalog.data_parallel(n)``, its state sharded or not.
        options: only precision and memory format may be set. FSDP cuts only contiguous weights, so
            ``channels_last`` is for images alone.
        reshard: give back a stage's weights after its forward (ZeRO-3), or keep them until its
            backward (ZeRO-2).
        cpu_offload: keep each rank's share in the CPU's memory, and update it there.

    Raises:
        UserError: the schedule is not data parallelism, or cannot be run on this device.
    """

    runtime = "fsdp"
    states = ("replicated", "sharded")
    _all_save = True

    reshard: bool = True
    cpu_offload: bool = False

    def _wrap(self, model: WholeModel) -> nn.Module:
        device = self.world.device
        self._check_no_gloo_on_gpus()
        if self.reshard:
            check_weights_stay(self.stages, self.runtime, "set reshard=False")
        if self.cpu_offload and device.type == "cpu":
            raise UserError(
                "cpu_offload=True keeps weights off the GPU: got device=cpu"
            )
        self._model_parameters = [
            dict(stage.named_parameters()) for stage in model.stages
        ]
        self._released = ReleasedParameters(self.stages.model.parameters())
        group = self.world.group
        if group is None:
            group = dist.group.WORLD
        assert group is not None
        mesh = DeviceMesh.from_group(group, device.type)
        policy = CPUOffloadPolicy() if self.cpu_offload else OffloadPolicy()
        # Inner modules first, as torch asks: the outer one takes the parameters that no inner one
        # has, here none, and begins and ends the passes.
        for module in (*model.stages, model):
            reshard = self.reshard and module is not model
            fully_shard(
                module, mesh=mesh, reshard_after_forward=reshard, offload_policy=policy
            )
        return model

    def _in_forward(self) -> AbstractContextManager[None]:
        return self.world.watch.waiting("the weights of all ranks", self._everyone)

    @torch.no_grad()
    def module(self) -> nn.Module:
        """Return the whole model, from the shares of all ranks. Every rank calls it."""
        self._released.restore()
        for stage, parameters in zip(
            self._chain.stages, self._model_parameters, strict=True
        ):
            assert isinstance(stage, FSDPModule)
            with self.world.watch.waiting("the shares of all ranks", self._everyone):
                stage.unshard()
            # A stage at a time, so that only one is whole twice.
            for name, parameter in stage.named_parameters():
                parameters[name].copy_(parameter)
            stage.reshard()
        return super().module()

    def _local_state(self) -> dict[str, Any]:
        state = super()._local_state()
        # The model's own frozen parameters are empty; the wrapped stages have the shares.
        for stage in self._chain.stages:
            for name, parameter in stage.named_parameters():
                if not parameter.requires_grad:
                    state["fixed"][name] = parameter.data
        return state

    def state_dict(self) -> dict[str, Any]:
        """Return :meth:`Runtime.state_dict`; the ranks gather their shares."""
        with self.world.watch.waiting("the shares of all ranks", self._everyone):
            return join_states([tree_map_only(Tensor, _whole, self.local_state())])

    @torch.no_grad()
    def _load(self, state: Mapping[str, Any]) -> None:
        for stage in self._chain.stages:
            for name, parameter in stage.named_parameters():
                parameter.data.copy_(_share(state["model"][name], parameter))
            for name, buffer in stage.named_buffers():
                buffer.copy_(state["model"][name])
        for updater, stage_state in zip(self._updaters, state["stages"], strict=True):
            optimizer_state = _optimizer_share(stage_state["optimizer"], updater)
            updater.load(stage_state | {"optimizer": optimizer_state})

    def _train(self, step: int, inputs: Values, targets: Tensor) -> StepResult:
        self._released.release()
        return super()._train(step, inputs, targets)


def _whole(tensor: Tensor) -> Tensor:
    """Return a copy of ``tensor`` with the shares of all ranks."""
    if not isinstance(tensor, DTensor):
        return tensor.clone()
    # An offloaded share is in the CPU's memory, which NCCL does not reach.
    share = cast(DTensor, tensor.to(tensor.device_mesh.device_type))
    return share.full_tensor().to("cpu", copy=True)


def _share(tensor: Tensor, parameter: Tensor) -> DTensor:
    """Return ``tensor`` spread over the ranks like ``parameter``."""
    sharded = cast(DTensor, parameter.data)
    # Every rank has the whole tensor, so each cuts out its share, and none has to send.
    return distribute_tensor(
        tensor, sharded.device_mesh, sharded.placements, src_data_rank=None
    )


def _optimizer_share(
    state: dict[str, Any] | None, updater: Updater
) -> dict[str, Any] | None:
    """Return an optimizer's state, each tensor spread like its parameter."""
    if state is None or updater.optimizer is None:
        return None
    parameters: list[Tensor] = []
    for group in updater.optimizer.param_groups:
        parameters += group["params"]
    shares: dict[int, dict[str, Any]] = {}
    for index, values in state["state"].items():
        parameter = parameters[index]
        shares[index] = dict(values)
        for key, value in values.items():
            # Step counts are scalars or of another shape, and whole on every rank.
            if (
                isinstance(value, Tensor)
                and value.dim()
                and value.shape == parameter.shape
            ):
                shares[index][key] = _share(value, parameter)
    return state | {"state": shares}
