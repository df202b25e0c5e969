"""When each rank starts a program: at its place in the schedule, without a common clock."""

from datetime import timedelta

from toolkit.runtime.process_group.world import World
from toolkit.schedule import Action, Instruction, Program


class StartOffset:
    """The start of ``program`` on one rank, which waits for its place in the schedule.

    Only its first forward makes a rank wait; after that dependencies keep the order. The rank that
    starts first is the leader. It gives each other rank its turn when it reaches the tick at which
    that rank starts, so no clock is needed.

    Args:
        program: the program of all ranks.
        world: the ranks. Their store carries the turns.
    """

    def __init__(self, program: Program, world: World) -> None:
        self.world = world
        self._name = world.next_name()
        first_ticks = program.first_forwards()
        # First forwards of three ranks, by tick; the leader, rank 0, gives the turns::
        #
        #     tick      0  1  2  3  4
        #     rank 0    F     !     !       "!": it reaches the tick of another rank's start
        #     rank 1          F
        #     rank 2                F
        self._leader = min(
            first_ticks, key=lambda rank: (first_ticks[rank], rank), default=world.rank
        )
        self._waiting: list[tuple[int, int]] = []  # ticks and ranks, on the leader only
        self._waits_for_turn = False
        for rank, tick in first_ticks.items():
            if tick == first_ticks[self._leader]:
                continue
            if world.rank == self._leader:
                self._waiting.append((tick, rank))
            if world.rank == rank:
                self._waits_for_turn = True
        # By tick, so that the leader looks at the first only.
        self._waiting.sort()

    def before(self, i: Instruction) -> None:
        """Give the others their turn, or wait for this rank's, as ``i`` is about to begin."""
        while self._waiting and i.tick >= self._waiting[0][0]:
            _, rank = self._waiting.pop(0)
            # GPU ops are queued: end them first, or the other rank starts before this tick.
            self.world.finish_computing()
            self.world.store.set(self._key(rank), "")
        if self._waits_for_turn and i.action == Action.FORWARD:
            self._waits_for_turn = False
            watch = self.world.watch
            with watch.waiting("its turn to start", [self._leader]):
                # The watch reports a dead leader after `timeout`; the store only has to wait longer
                # than that.
                patience = timedelta(seconds=2 * watch.timeout)
                self.world.store.wait([self._key(self.world.rank)], patience)
            # Or each program of a long training would leave a key in the store.
            self.world.store.delete_key(self._key(self.world.rank))

    def finish(self) -> None:
        """Give the turns that are left, at the end of the leader's program."""
        for _, rank in self._waiting:
            self.world.store.set(self._key(rank), "")

    def _key(self, rank: int) -> str:
        return f"turn/{self._name}/{rank}"
