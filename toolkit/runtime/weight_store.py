"""The weights that a rank holds between programs, and their transfer between ranks."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.model import Stages
from toolkit.runtime.message_layout import Layout
from toolkit.runtime.message_transfer import Messages, Transfer
from toolkit.runtime.process_group.world import World
from toolkit.runtime.stage import StageRunner
from toolkit.runtime.state import load_model, loaded, merged, state_of_stages
from toolkit.runtime.updater import Weights
from toolkit.schedule import Action, Buffer, Instruction, Schedule


class WeightStore:
    """The weights of one rank.

    Weights of stages that it does not update come from other ranks: the versions that are read
    first as a program begins (:meth:`share`), later ones by messages of the program.

    Args:
        world: the ranks.
        stages: the model, partitioned.
        schedule: the schedule of the next programs.
        runners: of each stage.
        loads: whether a state is loaded next, so that the ranks need not agree on first weights.

    Attributes:
        updated: stages that this rank updates.
        versions: ``[stage][version]``, the weights of those stages that are still read.
    """

    def __init__(
        self,
        world: World,
        stages: Stages,
        schedule: Schedule,
        runners: Sequence[StageRunner],
        *,
        loads: bool = False,
    ) -> None:
        self.world = world
        self.stages = stages
        self.schedule = schedule
        self.runners = runners
        self._updaters = _updaters(schedule)
        all_stages = range(len(runners))
        # Of every stage, since a rank also receives the weights of stages that it only computes
        # with.
        self._layouts = [Layout.of(self._state(stage)) for stage in all_stages]
        self._averaged = [Layout.of(runner.averaged()) for runner in runners]
        # All ranks start with the weights of rank 0, unless a state is loaded next.
        if not loads:
            for stage, layout in enumerate(self._layouts):
                received = self._broadcast(layout, 0, self._state(stage))
                for name, tensor in self._state(stage).items():
                    tensor.copy_(received[name])
        self.updated = [
            stage for stage in all_stages if world.rank in self._updaters[stage]
        ]
        self.versions = {stage: {0: runners[stage].newest()} for stage in self.updated}
        for stage in self.updated:
            runners[stage].begin_average()
        # Only now: the layouts and the first broadcast need the weights of every stage.
        self.forget()

    def forget(self) -> None:
        """Free the memory of stages that this rank does not update."""
        for stage, runner in enumerate(self.runners):
            if stage not in self.versions:
                runner.release()

    def share(self, messages: Messages, step: int) -> dict[tuple, Weights]:
        """Return the weights with which a program begins at ``step``, by (stage, version).

        Every rank calls it. Ranks that lack a version pass it on from one to the next, so the owner
        sends it only once.

        Args:
            messages: carry the weights.
            step: first training step of the program.
        """
        self.forget()
        rank = self.world.rank
        first_weights: dict[tuple, Weights] = {}
        for stage, versions in self.versions.items():
            for version, weights in versions.items():
                first_weights[stage, version] = weights
        sends = []
        for stage, owner in enumerate(self.schedule.owners):
            # A rank that updates the stage has these versions already.
            chain = handed_on(
                owner, {*self.schedule.first_holders(stage)} - self._updaters[stage]
            )
            # With owner 1, and ranks 2 and 0 that lack the version::
            #
            #     rank 1 --send--> rank 2 --send--> rank 0
            #
            # Each rank sends it once, so no link carries more than one copy.
            if rank not in chain:
                continue
            chain_index = chain.index(rank)
            for version in self.schedule.versions(stage, step):
                # All ranks wait in the order of stages and versions: so none deadlocks.
                if chain_index > 0:
                    source = chain[chain_index - 1]
                    receive = _weights_message(Action.RECV, stage, version, source)
                    incoming = messages.receive(receive)
                    self._await(receive, step, incoming)
                    received = messages.received(receive, incoming)
                    first_weights[stage, version] = cast(Weights, received)
                if chain_index + 1 < len(chain):
                    target = chain[chain_index + 1]
                    send = _weights_message(Action.SEND, stage, version, target)
                    outgoing = messages.send(send, first_weights[stage, version])
                    # Begin now and wait at the end: the next rank of the chain waits for it.
                    outgoing.begin()
                    sends.append((send, outgoing))
        for send, transfer in sends:
            self._await(send, step, transfer)
        return first_weights

    def _await(self, i: Instruction, step: int, transfer: Transfer) -> None:
        with self.world.watch.waiting(i, i.peers, step):
            transfer.wait()

    def collect(self) -> None:
        """Bring the newest weights and running statistics to every rank's stages."""
        for stage, runner in enumerate(self.runners):
            if len(self._updaters[stage]) == self.world.size:
                continue  # every rank has updated it
            tensors: dict[str, Tensor] = {}
            if stage in self.versions:
                tensors = self._state(stage)
            received = self._broadcast(
                self._layouts[stage], self.schedule.owners[stage], tensors
            )
            if stage not in self.versions:
                for name, master in runner.masters.items():
                    master.data = received[name]
                for name, buffer in runner.stage.named_buffers():
                    buffer.copy_(received[name])

    def newest(self, j: int) -> dict[str, Tensor]:
        """Return the newest weights, frozen weights and buffers of a stage that is updated here."""
        # Not from the parameters: an evaluation may have put averages there.
        version = max(self.versions[j])
        return self._state(j) | self.versions[j][version]

    def take(self, j: int, tensors: Mapping[str, Tensor]) -> None:
        """Put weights and buffers of a stage into the model."""
        runner = self.runners[j]
        # Weights of other ranks' stages are empty, so they are replaced; buffers have memory.
        for name, master in runner.masters.items():
            master.data = tensors[name].to(self.world.device)
        for name, buffer in runner.stage.named_buffers():
            buffer.copy_(tensors[name])

    def allocate(self) -> None:
        """Make memory for the weights of stages that this rank does not update."""
        for stage, runner in enumerate(self.runners):
            if stage not in self.versions:
                shapes = {
                    tensor.place: tensor.shape
                    for tensor in self._layouts[stage].tensors
                }
                for name, master in runner.masters.items():
                    master.data = master.data.new_empty(shapes[name])

    def averages(self) -> Weights:
        """Return the averages of all stages' weights, from their owners."""
        averages: Weights = {}
        for stage, runner in enumerate(self.runners):
            if runner.options.ema is not None:
                owner = self.schedule.owners[stage]
                averages |= self._broadcast(
                    self._averaged[stage], owner, runner.averages
                )
        return averages

    def handed_over(
        self, schedule_plan: Schedule, local_state: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the state from which this rank can go over to the next schedule of a plan.

        A rank that will update a stage gets that stage's state, unless it updates it now. Every
        rank calls it.

        Args:
            schedule_plan: schedules of the same ranks.
            local_state: that of the stages that this rank updates; see :func:`local_state_of`.
        """
        state = local_state
        step = local_state["steps_done"]
        next_updaters = _updaters(schedule_plan.at(step))
        stages_of: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        # Stages with the same chain of ranks travel together, so each chain is one relay.
        for stage, owner in enumerate(self.schedule.owners):
            chain = handed_on(owner, next_updaters[stage] - self._updaters[stage])
            stages_of[chain].append(stage)
        for chain, stages in stages_of.items():
            if self.world.rank in chain:
                sent_state = None
                if self.world.rank == chain[0]:
                    versions_read = {
                        stage: schedule_plan.versions(stage, step) for stage in stages
                    }
                    sent_state = state_of_stages(
                        local_state, self.stages, versions_read
                    )
                state = merged(state, self.world.relay(sent_state, chain))
        # The newest weights of the stages in this state. Those of others may be empty: load() skips
        # them.
        model = self.stages.model.state_dict() | state["fixed"]
        for versions in state["versions"].values():
            model |= versions[step]
        return {**state, "model": model}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over the updated stages of ``state``, and what is frozen of the others."""
        self.forget()
        load_model(state, self.stages, self.runners, self.updated)
        for stage in self.updated:
            self.versions[stage] = loaded(state, stage, self.runners[stage])

    def _state(self, j: int) -> dict[str, Tensor]:
        """Return the newest weights of a stage, its frozen weights, and its buffers."""
        stage = self.runners[j].stage
        weights = {name: parameter.data for name, parameter in stage.named_parameters()}
        return weights | dict(stage.named_buffers())

    def _broadcast(self, layout: Layout, root: int, tensors: Mapping) -> dict:
        """Return ``tensors`` of ``root`` on every rank, each in memory of its own.

        Users may save them, and torch.save refuses one memory that is read as several types.
        """
        device = self.world.message_device
        if self.world.rank == root:
            # All tensors in one message: each broadcast costs a round through the ranks.
            flat = layout.pack(tensors, device)
        else:
            flat = torch.empty(layout.n_bytes, dtype=torch.uint8, device=device)
        with self.world.watch.waiting(f"weights of rank {root}", [root]):
            dist.broadcast(flat, self.world.process(root), group=self.world.group)
        received = layout.unpack(flat.to(self.world.device))
        return {name: tensor.clone() for name, tensor in received.items()}


def _weights_message(
    action: Action, stage: int, version: int, peer: int
) -> Instruction:
    """Return the instruction that sends weights to ``peer``, or receives them from it."""
    return Instruction(
        0, action, stage, version=version, buffer=Buffer.WEIGHTS, peers=(peer,)
    )


def _updaters(schedule: Schedule) -> list[set[int]]:
    """Return the ranks that update each stage."""
    # One step shows it: the ranks that update a stage are the same in all steps of a schedule.
    program = schedule.lower(1)
    updaters: list[set[int]] = [set() for _ in range(schedule.n_stages)]
    for rank in range(schedule.n_ranks):
        for stage in program.updated(rank):
            updaters[stage].add(rank)
    return updaters


def handed_on(owner: int, lacking: Collection[int]) -> tuple[int, ...]:
    """Return the chain of ranks from the ``owner`` of weights through those ``lacking`` them."""
    # Source and receivers of owner 2 among ranks 0 to 4, all lacking: 2 -> 3 -> 4 -> 0 -> 1.
    # Upwards from the owner, then round from rank 0.
    receivers = sorted(lacking, key=lambda rank: (rank < owner, rank))
    if not receivers:
        return ()
    return (owner, *receivers)
