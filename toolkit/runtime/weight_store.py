"""Which weights a rank holds between programs, and how the newest come together."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.model import Stages
from toolkit.runtime.message_layout import Layout
from toolkit.runtime.message_transfer import Messages, Transfer
from toolkit.runtime.process_group.join import World
from toolkit.runtime.stage import StageRunner
from toolkit.runtime.state import load_model, loaded
from toolkit.runtime.updater import Weights
from toolkit.schedule import Action, Buffer, Instruction, Schedule


class WeightStore:
    """The weights of one rank.

    A rank keeps, in ``versions[stage]``, the versions that are still read of the stages that it
    has ``updated``. It receives what it reads first of the others as a program begins, and the rest
    by the program. With ``loads`` a state is loaded next, and ranks agree on no first weights.
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
        self.world, self.stages, self.schedule, self.runners = world, stages, schedule, runners
        program, everything = schedule.lower(1), range(len(runners))
        of_rank = [program.updated(rank) for rank in range(schedule.n_ranks)]
        self._updaters = [{r for r, own in enumerate(of_rank) if j in own} for j in everything]
        self._layouts = [Layout.of(self._state(j)) for j in everything]
        self._averaged = [Layout.of(runner.averaged()) for runner in runners]
        # All ranks start with the weights of rank 0, unless a state is loaded next.
        for j, layout in enumerate(() if loads else self._layouts):
            received = self._broadcast(layout, 0, self._state(j))
            for name, tensor in self._state(j).items():
                tensor.copy_(received[name])
        self.updated = sorted(of_rank[world.rank])
        self.versions = {j: {0: runners[j].newest()} for j in self.updated}
        for j in self.updated:
            runners[j].begin_average()
        self.forget()

    def forget(self) -> None:
        """Free the memory of stages that this rank does not update."""
        for j, runner in enumerate(self.runners):
            if j not in self.versions:
                for master in runner.masters.values():
                    master.data = torch.empty(0, dtype=master.dtype, device=master.device)

    def share(self, messages: Messages, step: int) -> dict[tuple, Weights]:
        """Return the weights by (stage, version) held as a program begins at ``step``.

        Every rank calls it.
        """
        self.forget()
        rank = self.world.rank
        held: dict[tuple, Weights] = {
            (j, v): weights for j, own in self.versions.items() for v, weights in own.items()
        }
        sent, coming = [], []
        for j, owner in enumerate(self.schedule.owners):
            lacking = sorted(set(self.schedule.first_holders(j)) - self._updaters[j])
            for version in self.schedule.versions(j, step):
                what = (j, None, None, version, Buffer.WEIGHTS)
                # Do not wait yet: two owners that wait for each other would deadlock, and a sender
                # waits for each receive.
                for receiver in lacking if rank == owner else ():
                    send = Instruction(0, Action.SEND, *what, (receiver,))
                    sent.append((send, messages.send(send, held[j, version])))
                if rank in lacking:
                    receive = Instruction(0, Action.RECV, *what, (owner,))
                    coming.append((receive, messages.receive(receive)))
        for receive, transfer in coming:
            self._await(receive, step, transfer)
            held[receive.stage, receive.version] = cast(
                Weights, messages.received(receive, transfer)
            )
        for send, transfer in sent:
            self._await(send, step, transfer)
        return held

    def _await(self, i: Instruction, step: int, transfer: Transfer) -> None:
        with self.world.watch.waiting(i, i.peers, step):
            transfer.wait()

    def collect(self) -> None:
        """Bring the newest weights and running statistics to every rank's stages."""
        for j, runner in enumerate(self.runners):
            if len(self._updaters[j]) == self.world.size:
                continue
            tensors = self._state(j) if j in self.versions else {}
            received = self._broadcast(self._layouts[j], self.schedule.owners[j], tensors)
            if j not in self.versions:
                for name, master in runner.masters.items():
                    master.data = received[name]
                for name, buffer in runner.stage.named_buffers():
                    buffer.copy_(received[name])

    def allocate(self) -> None:
        """Make memory for the weights of stages that this rank does not update."""
        for j, runner in enumerate(self.runners):
            shapes = {part.place: part.shape for part in self._layouts[j].parts}
            for name, master in runner.masters.items() if j not in self.versions else ():
                master.data = torch.empty(shapes[name], dtype=master.dtype, device=master.device)

    def averages(self) -> Weights:
        """Return the averages of all stages' weights, from their owners."""
        found: Weights = {}
        for j, runner in enumerate(self.runners):
            if runner.options.ema is not None:
                owner = self.schedule.owners[j]
                found |= self._broadcast(self._averaged[j], owner, runner.averages)
        return found

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over the updated stages of ``state``, and what is frozen of the others."""
        self.forget()
        load_model(state, self.stages, self.runners, self.updated)
        for j in self.updated:
            self.versions[j] = loaded(state, j, self.runners[j])

    def _state(self, j: int) -> dict[str, Tensor]:
        """The newest weights of a stage, its frozen weights, and its buffers."""
        stage = self.runners[j].stage
        return {name: p.data for name, p in stage.named_parameters()} | dict(stage.named_buffers())

    def _broadcast(self, layout: Layout, root: int, tensors: Mapping) -> dict:
        """Return ``tensors`` of ``root`` on every rank, each in memory of its own.

        Users may save them, and torch.save refuses one memory that is read as several types.
        """
        device = self.world.message_device
        if self.world.rank == root:
            flat = layout.pack(tensors, device)
        else:
            flat = torch.empty(layout.n_bytes, dtype=torch.uint8, device=device)
        with self.world.watch.waiting(f"weights of rank {root}", [root]):
            dist.broadcast(flat, root, group=self.world.group)
        received = layout.unpack(flat.to(self.world.device))
        return {name: tensor.clone() for name, tensor in received.items()}
