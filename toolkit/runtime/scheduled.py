"""Order "scheduled": every rank's program, slot by slot, in one process.

Messages are handed over in memory, so the activations alive are those of the schedule, and any
placement runs without starting processes.
"""

import copy
from collections.abc import Iterator, Sequence

from toolkit.runtime.grouped import Loss
from toolkit.runtime.microbatches import BatchReader, MicrobatchQueue, StepResult
from toolkit.runtime.rank import Payload, Rank
from toolkit.runtime.stage import StageRunner
from toolkit.runtime.updater import GradientSum, Weights
from toolkit.schedule import Action, Instruction, Program, Schedule
from toolkit.schedule.replay import replay

_WINDOW = 64  # training steps lowered at once


class Scheduled:
    """Interprets the programs of a schedule, which lowering has made."""

    def __init__(self, runners: Sequence[StageRunner], schedule: Schedule, loss: Loss) -> None:
        self.runners = dict(enumerate(runners))
        self.schedule = schedule
        self.loss = loss
        self.updaters = {(schedule.owners[j], j): runner for j, runner in enumerate(runners)}

    def run(
        self,
        source: BatchReader,
        versions: list[dict[int, Weights]],
        step: int,
        n_steps: int | None,
    ) -> Iterator[StepResult]:
        """Train from ``step`` on; ``versions[stage]`` follows the newest weights.

        Steps overlap, so a result can precede its step's last update.
        """
        assert n_steps is not None, "it looks ahead"
        everything = range(self.schedule.n_microbatches)
        feed = MicrobatchQueue(source, step, lambda _: everything)
        end = step + n_steps
        for begin in range(step, end, _WINDOW):
            program = self.schedule.lower(min(_WINDOW, end - begin), begin)
            yield from self.execute(program, versions, feed)

    def execute(
        self, program: Program, versions: list[dict[int, Weights]], feed: MicrobatchQueue
    ) -> Iterator[StepResult]:
        """Carry out ``program``."""
        run = _Run(self._ranks(program, versions, feed))
        for rank, i in replay(program.ranks):
            run.execute(rank, i)
            if i.action != Action.FORWARD or i.step is None:
                continue
            if feed.n_finished(i.step) == self.schedule.n_microbatches:
                yield feed.result(i.step)

    def _ranks(
        self, program: Program, versions: list[dict[int, Weights]], feed: MicrobatchQueue
    ) -> list[Rank]:
        """Every rank, with the weights that it holds before the program."""
        owners = self.schedule.owners
        ranks = []
        for rank in range(len(program.ranks)):
            updated = program.updated(rank)
            # All of them now, while they still agree on the weights.
            updaters = {j: self._updater(rank, j) for j in updated}
            owned = {j: versions[j] for j in updated if owners[j] == rank}
            ranks.append(Rank(program, self.runners, updaters, owned, self.loss, feed))
        for j, known in enumerate(versions):
            for rank in self.schedule.first_holders(j):
                ranks[rank].weights |= {(j, version): known[version] for version in known}
        return ranks

    def _updater(self, rank: int, stage: int) -> StageRunner:
        """The runner with which ``rank`` updates ``stage``: the stage's own, or a replica."""
        if (rank, stage) not in self.updaters:
            self.updaters[rank, stage] = self.runners[stage].replica()
        return self.updaters[rank, stage]


class _Run:
    """One program being executed."""

    def __init__(self, ranks: list[Rank]) -> None:
        self.ranks = ranks
        self.message: Payload = ()

    def execute(self, rank: int, i: Instruction) -> None:
        here = self.ranks[rank]
        if i.action == Action.SEND:
            self.message = here.give(i)
        elif i.action == Action.RECV:
            here.take(i, self.message)
        elif i.action in (Action.ALL_REDUCE, Action.REDUCE):
            self._reduce(rank, i)
        elif i.action == Action.BROADCAST:
            if rank != i.peers[0]:
                here.take(i, self.ranks[i.peers[0]].give(i))
        else:
            here.execute(i)

    def _reduce(self, rank: int, i: Instruction) -> None:
        if rank != i.peers[0]:
            return
        total = self.ranks[rank].give(i)
        assert isinstance(total, GradientSum)
        # In the order of the peers, so that the sum has the same bits in each run.
        for peer in i.peers[1:]:
            part = self.ranks[peer].give(i)
            assert isinstance(part, GradientSum)
            total.add(part.tensors)
        if i.action == Action.ALL_REDUCE:
            for peer in i.peers[1:]:  # a copy each: optimizers may change gradients in place
                self.ranks[peer].take(i, copy.deepcopy(total))
        self.ranks[rank].take(i, total)
