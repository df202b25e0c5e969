"""Which weights a rank holds between programs, and how the newest come together."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.model import Stages
from toolkit.runtime.message_layout import Layout
from toolkit.runtime.message_transfer import Messages, Transfer
from toolkit.runtime.process_group.join import World
from toolkit.runtime.stage import StageRunner
from toolkit.runtime.state import load_model, loaded, merged, part_of_stages
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
        self._updaters, everything = _updaters(schedule), range(len(runners))
        self._layouts = [Layout.of(self._state(j)) for j in everything]
        self._averaged = [Layout.of(runner.averaged()) for runner in runners]
        # All ranks start with the weights of rank 0, unless a state is loaded next.
        for j, layout in enumerate(() if loads else self._layouts):
            received = self._broadcast(layout, 0, self._state(j))
            for name, tensor in self._state(j).items():
                tensor.copy_(received[name])
        self.updated = [j for j in everything if world.rank in self._updaters[j]]
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

        Every rank calls it. Ranks that lack a version hand it on from one to the next, so that the
        owner sends it once.
        """
        self.forget()
        rank = self.world.rank
        held: dict[tuple, Weights] = {
            (j, v): weights for j, own in self.versions.items() for v, weights in own.items()
        }
        sent = []
        for j, owner in enumerate(self.schedule.owners):
            chain = handed_on(owner, {*self.schedule.first_holders(j)} - self._updaters[j])
            if rank not in chain:
                continue
            place = chain.index(rank)
            for version in self.schedule.versions(j, step):
                what = (j, None, None, version, Buffer.WEIGHTS)
                # All ranks wait in the order of stages and versions: so none deadlocks.
                if place > 0:
                    receive = Instruction(0, Action.RECV, *what, (chain[place - 1],))
                    self._await(receive, step, coming := messages.receive(receive))
                    held[j, version] = cast(Weights, messages.received(receive, coming))
                if place + 1 < len(chain):
                    send = Instruction(0, Action.SEND, *what, (chain[place + 1],))
                    sent.append((send, messages.send(send, held[j, version])))
                    sent[-1][1].begin()
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

    def newest(self, j: int) -> dict[str, Tensor]:
        """Return the newest weights, frozen weights and buffers of a stage that is updated here."""
        # Not from the parameters: an evaluation may have put averages there.
        version = max(self.versions[j])
        return self._state(j) | self.versions[j][version]

    def take(self, j: int, tensors: Mapping[str, Tensor]) -> None:
        """Put weights and buffers of a stage into the model."""
        runner = self.runners[j]
        for name, master in runner.masters.items():
            master.data = tensors[name].to(self.world.device)
        for name, buffer in runner.stage.named_buffers():
            buffer.copy_(tensors[name])

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

    def handed_over(self, course: Schedule, part: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state from which this rank can go over to the next schedule of ``course``.

        A rank that will update a stage gets that stage's state, unless it updates it now. Every
        rank calls it.

        Args:
            course: schedules of the same ranks.
            part: the state of the stages that this rank updates, as of :func:`part_of`.
        """
        found, step = part, part["steps_done"]
        after, stages_of = _updaters(course.at(step)), defaultdict(list)
        for j, owner in enumerate(self.schedule.owners):
            stages_of[handed_on(owner, after[j] - self._updaters[j])].append(j)
        for chain, stages in stages_of.items():
            if self.world.rank in chain:
                own = None
                if self.world.rank == chain[0]:
                    read = {j: course.versions(j, step) for j in stages}
                    own = part_of_stages(part, self.stages, read)
                found = merged(found, self.world.relay(own, chain))
        newest = {k: x for known in found["versions"].values() for k, x in known[step].items()}
        model = self.stages.model.state_dict() | found["fixed"] | newest
        return {**found, "model": model}

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


def _updaters(schedule: Schedule) -> list[set[int]]:
    """The ranks that update each stage."""
    program, ranks = schedule.lower(1), range(schedule.n_ranks)
    updated = [program.updated(rank) for rank in ranks]
    return [{r for r in ranks if j in updated[r]} for j in range(schedule.n_stages)]


def handed_on(owner: int, lacking: Collection[int]) -> tuple[int, ...]:
    """The ranks by which the ``owner`` of weights reaches those ``lacking`` them, in turn."""
    later = sorted(lacking, key=lambda rank: (rank < owner, rank))
    return (owner, *later) if later else ()
