"""Ranks whose loaders end after different numbers of passes."""

import pickle
import time

import torch.distributed as dist

from toolkit.runtime.process_group.world import World
from toolkit.runtime.step_optimizer import Settings

_POLL = 0.01  # seconds


class UnevenInputs:
    """What the ranks let each other know of the training steps that they begin.

    A rank whose loader has ended takes part in the steps of the others with gradients of zero. It
    asks before each step whether any rank begins it. Every rank makes one at the same time.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        # A connection of its own: other threads use the world's.
        self._store = dist.PrefixStore(
            f"uneven/{world.next_name()}", world.store.clone()
        )

    def begin(self, step: int, settings: Settings) -> None:
        """Show that this rank begins ``step`` with inputs of its own, and what its loop has set."""
        self._store.set(f"begun/{self._world.rank}", pickle.dumps((step, settings)))  # type: ignore[arg-type]

    def end(self) -> None:
        """Show that this rank begins no further step with inputs of its own."""
        self._store.set(f"ended/{self._world.rank}", "")

    def settings_of(self, step: int) -> Settings | None:
        """Wait until a rank begins ``step``, or all have ended before.

        Returns:
            What the loop of that rank has set for the step; None if all have ended.
        """
        other_ranks = [
            rank for rank in range(self._world.size) if rank != self._world.rank
        ]
        # It asks again and again: a wait of the store would end after the store's timeout, and a
        # loop may take longer between two steps, as for a test.
        with self._world.watch.waiting("the other ranks' inputs", other_ranks):
            while True:
                # Ends first: a rank shows its last step before it shows its end.
                ended = [self._store.check([f"ended/{rank}"]) for rank in other_ranks]
                for key in [f"begun/{rank}" for rank in other_ranks]:
                    if self._store.check([key]):
                        begun_step, settings = pickle.loads(self._store.get(key))
                        if begun_step >= step:
                            return settings
                if all(ended):
                    return None
                time.sleep(_POLL)
