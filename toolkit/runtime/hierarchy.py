"""All-reduces in two tiers: within each machine first, then between machines.

A sum crosses between machines once a machine, not once a rank. Sums that are handed on from rank to
rank do so by themselves, where a machine's ranks are consecutive.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby

import torch.distributed as dist
from torch import Tensor

Group = tuple[str, tuple[int, ...]]
"""What a process group is for, and its ranks, ascending."""

ALL, GATHER, BETWEEN, SPREAD = "all", "gather", "between", "spread"

Works = list[dist.Work | None]
Phase = Callable[[], Works]
GroupOf = Callable[[Group], dist.ProcessGroup | None]


def groups(ranks: Sequence[int], per_machine: int) -> list[Group]:
    """The groups of an all-reduce of ``ranks``, ascending, of which ``per_machine`` are together.

    What goes within a machine has a group a direction: a machine may already gather the next sum
    while another rank of it still waits for the one before.
    """
    machines = _machines(ranks, per_machine)
    if len(machines) == 1:
        return [(ALL, tuple(ranks))]
    within = [machine for machine in machines if len(machine) > 1]
    leaders = tuple(machine[0] for machine in machines)
    return [(step, machine) for step in (GATHER, SPREAD) for machine in within] + [
        (BETWEEN, leaders)
    ]


def all_reduce(
    pieces: Sequence[Tensor], ranks: Sequence[int], rank: int, per_machine: int, group_of: GroupOf
) -> list[Phase]:
    """The phases by which ``rank`` takes part; each begins when the one before has ended."""
    machines = _machines(ranks, per_machine)
    if len(machines) == 1:
        group = group_of((ALL, tuple(ranks)))
        return [partial(_each, dist.all_reduce, pieces, group=group)]
    mine = next(machine for machine in machines if rank in machine)
    leader = mine[0]
    phases: list[Phase] = []
    if len(mine) > 1:
        group = group_of((GATHER, mine))
        phases.append(partial(_each, dist.reduce, pieces, dst=leader, group=group))
    if rank == leader:
        group = group_of((BETWEEN, tuple(machine[0] for machine in machines)))
        phases.append(partial(_each, dist.all_reduce, pieces, group=group))
    if len(mine) > 1:
        group = group_of((SPREAD, mine))
        phases.append(partial(_each, dist.broadcast, pieces, src=leader, group=group))
    return phases


def _each(do: Callable[..., dist.Work | None], pieces: Sequence[Tensor], **where: object) -> Works:
    return [do(piece, async_op=True, **where) for piece in pieces]


def _machines(ranks: Sequence[int], per_machine: int) -> list[tuple[int, ...]]:
    if per_machine == 0:
        return [tuple(ranks)]
    return [tuple(found) for _, found in groupby(ranks, key=lambda rank: rank // per_machine)]
