"""Ranks agree, while they train, to end a program early: so a pipeline drains only on demand."""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from sys import maxsize

import torch
import torch.distributed as dist

from toolkit.runtime.process_group.join import World
from toolkit.schedule import Program

Wants = Callable[[list[float]], bool]
"""Whether a rank wants to end, from the moments (s) at which it ended the program's steps."""


NEVER = maxsize, lambda moments: False
"""Arguments of an :class:`EarlyEnd` that does not come."""


@dataclass
class EarlyEnd:
    """The points at which ``program`` may end, and the ranks' votes on them.

    It may end before a step that is a multiple of ``every``. The ranks vote while the steps before
    still run, so none waits: no rank has begun the step, or a message for it, when it knows.

    Attributes:
        before: the step at which the program ends, or may end next; its end, if not before.
    """

    program: Program
    world: World
    every: int
    wants: Wants
    before: int = field(init=False)

    def __post_init__(self) -> None:
        self._moments: list[float] = []
        self._wanted = torch.zeros(1)  # a sum of votes
        # Ops of so many steps can be under way on a rank when it ends a step.
        self._lead = self.program.schedule.timing.steps_under_way
        self.before = self._next(self.program.first_step + self._lead + 2)

    @property
    def limit(self) -> float:
        """The last step that may begin."""
        return self.before - 1 if self.before < self.program.steps.stop else inf

    def ended(self, done: int, moment: float) -> bool:
        """Note that this rank has ended ``done`` steps; return whether all end at ``before``."""
        self._moments.append(moment)
        if self.before >= self.program.steps.stop:
            return False
        if done == self.before - self._lead - 1:
            self._wanted[0] = self.wants(self._moments)
            group = self.world.object_group
            self._vote = dist.all_reduce(self._wanted, group=group, async_op=True)
        elif done == self.before - self._lead:
            with self.world.watch.waiting("a vote of all ranks", range(self.world.size)):
                self._vote.wait()
            if self._wanted[0] > 0:
                return True
            self.before = self._next(self.before + 2)
        return False

    def _next(self, step: int) -> int:
        return min(-(-step // self.every) * self.every, self.program.steps.stop)
