"""A model's stages on the devices of a rank: one program, first weights, and whole states."""

import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from toolkit.errors import UserError
from toolkit.model import Stages
from toolkit.model.generators import kept_generators
from toolkit.model.sharded_module import Sharding
from toolkit.runtime.losses import CheckedLoss
from toolkit.runtime.message_layout import Layout
from toolkit.runtime.process_group.columns import Column, Parallelize, Row
from toolkit.runtime.sharded_loss import ShardedLoss
from toolkit.runtime.sharded_stage import ShardedStage
from toolkit.runtime.step_options import StepOptions
from toolkit.runtime.updater import Updater, Weights
from toolkit.schedule import Schedule


class DeviceRow:
    """All stages on the row of this process.

    The stages' weights become local shards here, after all have those of the first process.

    Args:
        column: this device of every rank.
        stages: the model, partitioned, with whole weights.
        parallelize: shards a stage.

    Attributes:
        stages: each stage on the row.
        model: the whole model, apart from ``stages.model``, whose weights are local shards. Its
            trained weights are empty until :meth:`fill`.
    """

    def __init__(
        self, column: Column, stages: Stages, parallelize: Parallelize
    ) -> None:
        self.column = column
        self.row = column.row
        if column.rank == 0:
            self._start_alike(stages)
        self.model = _without_weights(stages)
        last = len(stages) - 1
        self.stages = [
            ShardedStage(stage, self.row, parallelize, is_last=index == last)
            for index, stage in enumerate(stages)
        ]

        if not any(stage.compute.weights for stage in self.stages):
            names = [name for name, _ in stages.model.named_parameters()]
            raise UserError(
                "parallelize: got stages without a sharded weight; expected some. Modules of a"
                f" stage have their names in the whole model, such as those of {names[:2]}"
            )

    def loss(self, loss: CheckedLoss) -> CheckedLoss:
        """Return ``loss`` of what the last stage returns: local scores, if devices share them."""
        last_stage = self.stages[-1].skeleton
        if last_stage.gathers:
            return loss
        return ShardedLoss(loss, last_stage, self.row.compute)

    def check_outputs(self, inputs: Sequence[Tensor], local_outputs: Layout) -> None:
        """Raise UserError unless the loss gets what the whole model returns.

        A plan that leaves a shard of the scores on each device would train by a part of the loss.

        Args:
            inputs: of a micro-batch, on the meta device.
            local_outputs: of the last stage on a device.
        """
        if not self.stages[-1].skeleton.gathers:
            return  # its loss takes shards
        values = tuple(inputs)
        with kept_generators(values):
            for stage in self.stages:
                values = stage.whole_stage(*values)
        for tensor in local_outputs.tensors:
            whole_shape = tuple(values[cast(int, tensor.place)].shape)
            if tensor.shape != whole_shape:
                raise UserError(
                    f"parallelize: got outputs {[*tensor.shape]} of the last stage on each device,"
                    f" expected {[*whole_shape]} as of the whole model. Give their module"
                    " output_layouts=Replicate(), or see toolkit.model.loss_parallel"
                )

    def shardings(self) -> list[Sequence[Sharding | None]]:
        """Return how the inputs of each stage lie."""
        return [stage.compute.inputs for stage in self.stages]

    def use_shardings(self, shardings: Sequence[Sequence[Sharding | None]]) -> None:
        """Let the inputs of each stage lie as :meth:`shardings` has returned."""
        for stage, inputs in zip(self.stages, shardings, strict=True):
            stage.compute.inputs = inputs

    def _start_alike(self, stages: Stages) -> None:
        """Give the first row the weights of its first device; columns pass them on."""
        source = self.column.process(0) - self.row.device_index
        tensors = [*stages.model.parameters(), *stages.model.buffers()]
        with self.column.within_op("first weights", None):
            for tensor in tensors:
                # Through the CPU: the row's group for whole tensors is one of gloo.
                received = tensor.detach().cpu().contiguous()
                dist.broadcast(received, source, group=self.row.group)
                tensor.data.copy_(received)

    @torch.no_grad()
    def fill(self, updaters: Sequence[Updater]) -> nn.Module:
        """Return the whole model with the weights of ``updaters``. Every process calls it."""
        parameters = dict(self.model.named_parameters())
        with self.column.within_op("whole weights", None):
            for stage, updater in zip(self.stages, updaters, strict=True):
                for name, weight in stage.whole(updater.newest()).items():
                    parameters[name].data = weight
        return self.model

    @torch.no_grad()
    def show(self, updaters: Sequence[Updater]) -> None:
        """Replace the local shards in the parameters of ``updaters`` by whole weights.

        Every device of the row calls it, and the caller puts shards back before the next update.
        """
        with self.column.within_op("whole weights", None):
            for stage, updater in zip(self.stages, updaters, strict=True):
                for name, weight in stage.whole(updater.newest()).items():
                    updater.masters[name].data = weight

    def whole_averages(self, averages: Mapping[str, Tensor]) -> Weights:
        """Return whole averages from local shards. Every process calls it."""
        whole_averages = dict(averages)
        with self.column.within_op("averages", None):
            for stage in self.stages:
                names = [name for name in averages if name in stage.shardings]
                whole_averages |= stage.whole({name: averages[name] for name in names})
        return whole_averages

    def whole_state(self, local_state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a rank's :meth:`Runtime.local_state` with whole tensors, on the CPU.

        Every device of the row calls it.
        """
        state = {**local_state, "versions": {}, "stages": {}, "fixed": {}}
        with self.column.within_op("states of stages", None):
            for index, versions in local_state["versions"].items():
                stage = self.stages[index]
                state["versions"][index] = {
                    version: stage.whole(weights)
                    for version, weights in versions.items()
                }
                state["stages"][index] = stage.whole_state(local_state["stages"][index])
        state["fixed"] = local_state["fixed"]
        return tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), state)

    def local_state(
        self,
        state: Mapping[str, Any],
        updaters: Sequence[Updater],
        updated: Sequence[int],
    ) -> dict[str, Any]:
        """Return the state of a run with local shards of the ``updated`` stages."""
        # Copies of what is changed below: the state stays the caller's.
        local = dict(state)
        local["model"] = dict(state["model"])
        local["versions"] = list(state["versions"])
        local["stages"] = list(state["stages"])
        for index in updated:
            stage = self.stages[index]
            names = [name for name in stage.shardings if name in state["model"]]
            local["model"] |= stage.local(
                {name: state["model"][name] for name in names}
            )
            local["versions"][index] = {
                version: stage.local(weights)
                for version, weights in state["versions"][index].items()
            }
            of_stage = state["stages"][index]
            has_steps = bool(of_stage["optimizer"] and of_stage["optimizer"]["state"])
            form = updaters[index].form(updated=has_steps, unused=of_stage["unused"])
            local["stages"][index] = stage.local_state(of_stage, form)
        return local


@dataclass(frozen=True, eq=False)
class TravellingShard:
    """A device's shard of a DTensor, as it goes to the same device of another rank.

    Attributes:
        local: the shard, on the CPU.
        sharding: how the DTensor lies on the rank's devices.
    """

    local: Tensor
    sharding: Sharding


def shards_of(state: Any) -> Any:
    """Return ``state`` with a :class:`TravellingShard` in place of each DTensor."""

    def shard_of(tensor: DTensor) -> TravellingShard:
        sharding = Sharding(
            tuple(tensor.placements), tensor.shape, tuple(tensor.stride())
        )
        return TravellingShard(tensor.to_local().detach().cpu(), sharding)

    return tree_map_only(DTensor, shard_of, state)


def dtensors_of(state: Any, row: Row) -> Any:
    """Return ``state`` with DTensors on ``row`` in place of each :class:`TravellingShard`."""
    mesh = row.compute

    def dtensor_of(shard: TravellingShard) -> DTensor:
        return shard.sharding.wrap(shard.local.to(mesh.device_type), mesh)

    return tree_map_only(TravellingShard, dtensor_of, state)


def check_rows(
    column: Column, schedule: Schedule, seed: int, options: StepOptions, stages: Stages
) -> None:
    """Raise UserError on every process if devices of a rank disagree about what they carry out.

    Otherwise one would wait within an op for a collective of another op.
    """
    descriptions = {
        "schedule": repr(schedule.lower(2).ranks),
        "seed": repr(seed),
        "options": repr(options),
        "model": repr([[*stage.state_dict()] for stage in stages]),
    }
    digests = {}
    for name, text in descriptions.items():
        digests[name] = hashlib.sha256(text.encode()).hexdigest()
    width = column.row.width
    digests_of_process = column.everyone.gather(digests, "programs of devices")
    for process, process_digests in enumerate(digests_of_process):
        first_digests = digests_of_process[process - process % width]
        differing = [
            name for name in digests if process_digests[name] != first_digests[name]
        ]
        if differing:
            raise UserError(
                f"rank {process // width}, device {process % width}: got another {differing[0]}"
                " than device 0; expected the same on each device of a rank. Make Distributed with"
                " the same arguments on every process"
            )


def _without_weights(stages: Stages) -> nn.Module:
    """Return a copy of the model with empty trained weights, which shares all other tensors."""
    model = stages.model
    # deepcopy takes what it finds here, by id, in place of a copy.
    tensors: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        tensors[id(tensor)] = tensor
    # A parameter in no stage, which no loss depends on, stays as it is.
    for stage in stages:
        for parameter in stage.parameters():
            if parameter.requires_grad:
                tensors[id(parameter)] = nn.Parameter(parameter.data.new_empty(0))
    return copy.deepcopy(model, tensors)
