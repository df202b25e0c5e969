"""Order "scheduled": every rank's program, slot by slot, in one process.

Messages are handed over in memory, so the activations alive are those of the schedule, and any
placement runs without starting processes.
"""

import copy
from collections.abc import Iterator, Sequence

from toolkit.runtime.microbatches import BatchReader, MicrobatchQueue, StepResult
from toolkit.runtime.rank import Payload, Rank
from toolkit.runtime.stage import StageRunner
from toolkit.runtime.step_options import Loss
from toolkit.runtime.updater import GradientSum, Weights
from toolkit.schedule import Action, Instruction, Program, Schedule
from toolkit.schedule.replay import replay

_WINDOW = 64  # training steps lowered at once


class Scheduled:
    """Interprets the programs of a schedule, as lowered."""

    def __init__(self, runners: Sequence[StageRunner], schedule: Schedule, loss: Loss) -> None:
        self.runners = dict(enumerate(runners))
        self.schedule, self.loss = schedule, loss
        self.updaters = {(schedule.owners[j], j): runner for j, runner in enumerate(runners)}

    def run(
        self, source: BatchReader, versions: list[dict[int, Weights]], step: int
    ) -> Iterator[StepResult]:
        """Train from ``step`` on; ``versions[stage]`` follows the newest weights.

        Steps overlap, so a result can precede its step's last update.
        """
        assert source.n_steps is not None  # known, since steps overlap
        everything = range(self.schedule.n_microbatches)
        feed = MicrobatchQueue(source, step, lambda _: everything)
        end = step + source.n_steps
        for begin in range(step, end, _WINDOW):
            program = self.schedule.lower(min(_WINDOW, end - begin), begin)
            yield from self.execute(program, versions, feed)

    def execute(
        self, program: Program, versions: list[dict[int, Weights]], feed: MicrobatchQueue
    ) -> Iterator[StepResult]:
        """Carry out ``program``."""
        ranks = self._ranks(program, versions, feed)
        message: Payload = ()
        for rank, i in replay(program.ranks):
            here, root = ranks[rank], i.peers[0] if i.peers else rank
            # A replay has each receive right after its send, so one message is under way.
            if i.action == Action.SEND:
                message = here.give(i)
            elif i.action == Action.RECV:
                here.take(i, message)
                message = ()
            elif i.action in (Action.ALL_REDUCE, Action.REDUCE):
                if rank == root:
                    _reduce(ranks, i)
            elif i.action == Action.BROADCAST:
                if rank != root:
                    here.take(i, ranks[root].give(i))
            else:
                here.execute(i)
            if i.action != Action.FORWARD or i.step is None:
                continue
            if feed.n_finished(i.step) == self.schedule.n_microbatches:
                yield feed.result(i.step)

    def _ranks(
        self, program: Program, versions: list[dict[int, Weights]], feed: MicrobatchQueue
    ) -> list[Rank]:
        """Every rank, with the weights that it holds before the program."""
        ranks = []
        for rank in range(len(program.ranks)):
            updated = program.updated(rank)
            # Replicas are made now, while all of a stage's updaters have the same weights.
            for j in updated:
                if (rank, j) not in self.updaters:
                    self.updaters[rank, j] = self.runners[j].replica()
            updaters = {j: self.updaters[rank, j] for j in updated}
            owned = {j: versions[j] for j in updated if self.schedule.owners[j] == rank}
            ranks.append(Rank(program, self.runners, updaters, owned, self.loss, feed))
        for j, known in enumerate(versions):
            for rank in self.schedule.first_holders(j):
                ranks[rank].weights |= {(j, version): known[version] for version in known}
        return ranks


def _reduce(ranks: Sequence[Rank], i: Instruction) -> None:
    """Sum what the peers of ``i`` have, in their order: the sum has the same bits in each run."""
    root, *others = i.peers
    total = GradientSum()
    for peer in i.peers:
        part = ranks[peer].give(i)
        assert isinstance(part, GradientSum)
        total.add(part.tensors)
    if i.action == Action.ALL_REDUCE:
        for peer in others:  # a copy each: optimizers may change gradients in place
            ranks[peer].take(i, copy.deepcopy(total))
    ranks[root].take(i, total)
