"""The start of a program, at which ranks that nothing else holds back wait for their turn.

Nothing but its first forward makes a rank wait for its place in the schedule; after that
dependencies keep the order. The turn comes by word of the rank that starts first, so no clock is
needed: it gives it when it reaches the tick at which the other one starts.
"""

from datetime import timedelta

from toolkit.runtime.process_group.group import World
from toolkit.schedule import Action, Instruction, Program


class StartOffset:
    """One rank's part in the start of ``program``."""

    def __init__(self, program: Program, world: World) -> None:
        self.world, self._name = world, world.next_name()
        ticks = program.first_forwards()
        self._leader = min(ticks, key=lambda rank: (ticks[rank], rank), default=world.rank)
        later = [(tick, rank) for rank, tick in ticks.items() if tick > ticks[self._leader]]
        self._waiting = sorted(later) if world.rank == self._leader else []
        self._my_turn = next((tick for tick, rank in later if rank == world.rank), None)

    def before(self, i: Instruction) -> None:
        """Give the others their turn, or wait for one's own, as ``i`` is about to begin."""
        while self._waiting and i.tick >= self._waiting[0][0]:
            _, rank = self._waiting.pop(0)
            # GPU ops are queued: end them first, or the other rank starts before this tick.
            self.world.finish_computing()
            self.world.store.set(self._key(rank), "")
        if self._my_turn is not None and i.action == Action.FORWARD:
            self._my_turn = None
            watch = self.world.watch
            with watch.waiting("its turn to start", [self._leader]):
                patience = timedelta(seconds=2 * watch.timeout)
                self.world.store.wait([self._key(self.world.rank)], patience)
            self.world.store.delete_key(self._key(self.world.rank))

    def finish(self) -> None:
        """Give the turns that are left: the leader has come to its end."""
        for _, rank in self._waiting:
            self.world.store.set(self._key(rank), "")

    def _key(self, rank: int) -> str:
        return f"turn/{self._name}/{rank}"
