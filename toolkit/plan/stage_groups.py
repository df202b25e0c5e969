"""Neighbouring stages of a rank that a search moves as one.

A merged problem has a stage for each group. Its orders are shorter, so that a search tries more of
them; :meth:`StageGroups.split` turns them into orders of all stages.
"""

from collections.abc import Sequence
from itertools import groupby

from toolkit.plan.list_schedule import list_schedule
from toolkit.plan.order_problem import OrderProblem, RankOrder


class StageGroups:
    """A problem, and the one whose stages are its groups.

    Attributes:
        problem: the problem of all stages.
        groups: stages that follow one another on a rank, about half of its ops at most.
        merged: the problem whose stages are the groups; ``problem`` itself if each has one stage.
    """

    def __init__(self, problem: OrderProblem) -> None:
        self.problem = problem
        self.groups = _groups(problem)
        self.merged = problem
        if len(self.groups) < problem.n_stages:
            self.merged = _merged(problem, self.groups)

    def list_orders(self, keys: Sequence[float]) -> list[RankOrder]:
        """List the orders of the merged problem from the keys of a block of all stages.

        Forwards take the key of a group's first stage, backwards that of its last.

        Args:
            keys: as of :func:`list_schedule`, for the chains of all stages.
        """
        interval, patience, *chain_keys = keys
        group_keys: list[float] = []
        for group in self.groups:
            group_keys += [chain_keys[chain] for chain in _entries(self.problem, group)]
        return list_schedule(self.merged, [interval, patience, *group_keys])

    def split(self, orders: Sequence[RankOrder]) -> list[RankOrder]:
        """Return the orders of all stages that do what ``orders`` of the merged problem do."""
        n_kinds = self.problem.n_kinds
        split_orders = []
        for order in orders:
            chains = []
            for group_chain in order:
                group, kind = divmod(group_chain, n_kinds)
                stages = self.groups[group]
                if kind > 0:
                    stages = stages[::-1]
                chains += [self.problem.chains(stage)[kind] for stage in stages]
            split_orders.append(chains)
        return split_orders


def _groups(problem: OrderProblem) -> tuple[tuple[int, ...], ...]:
    stage_seconds = []
    for stage in range(problem.n_stages):
        stage_seconds.append(
            sum(problem.seconds[chain] for chain in problem.chains(stage))
        )
    groups: dict[tuple[int, int], list[int]] = {}
    # A run is a row of stages on one rank. Only within one are stages merged: a message ends a
    # group.
    runs = groupby(range(problem.n_stages), key=problem.placement.__getitem__)
    for run, (_, stages_of_run) in enumerate(runs):
        stages = [*stages_of_run]
        run_seconds = sum(stage_seconds[stage] for stage in stages)
        # Two groups for as much time as a rank has on average.
        n_groups = max(1, round(2 * problem.n_ranks * run_seconds / sum(stage_seconds)))
        end = 0.0
        for stage in stages:
            # A stage belongs to the group in which its middle falls.
            end += stage_seconds[stage]
            group = int((end - stage_seconds[stage] / 2) / run_seconds * n_groups)
            groups.setdefault((run, group), []).append(stage)
    return tuple(map(tuple, groups.values()))


def _entries(problem: OrderProblem, group: Sequence[int]) -> list[int]:
    """Return the chain in which each kind of op enters a group: backwards enter its last stage."""
    backwards = problem.chains(group[-1])[1:]
    return [problem.chains(group[0])[0], *backwards]


def _merged(problem: OrderProblem, groups: Sequence[Sequence[int]]) -> OrderProblem:
    n_kinds = problem.n_kinds
    group_of_stage: dict[int, int] = {}
    kept_bytes = []
    update_seconds = []
    for group, stages in enumerate(groups):
        group_of_stage |= dict.fromkeys(stages, group)
        kept_bytes.append(sum(problem.kept_bytes[stage] for stage in stages))
        update_seconds.append(max(problem.update_seconds[stage] for stage in stages))

    seconds: list[float] = []
    needs: list[tuple[tuple[int, float], ...]] = []
    workspace_bytes: list[float] = []
    waiting_bytes: list[float] = []
    for stages in groups:
        for kind, entry in enumerate(_entries(problem, stages)):
            # Ops of the same kind follow one another: a group's forward is all forwards of its
            # stages.
            chains = [problem.chains(stage)[kind] for stage in stages]
            # A group's op needs what its first op needs of other stages, and its own ops before.
            op_needs = []
            if kind > 0:
                op_needs.append((len(needs) - 1, 0.0))
            for needed_chain, lag in problem.needs[entry]:
                needed_stage, needed_kind = divmod(needed_chain, n_kinds)
                if needed_stage != entry // n_kinds:
                    op_needs.append(
                        (group_of_stage[needed_stage] * n_kinds + needed_kind, lag)
                    )
            needs.append(tuple(op_needs))
            seconds.append(sum(problem.seconds[chain] for chain in chains))
            workspace_bytes.append(
                max(problem.workspace_bytes[chain] for chain in chains)
            )
            waiting_bytes.append(problem.waiting_bytes[entry])
    return OrderProblem(
        placement=tuple(problem.placement[stages[0]] for stages in groups),
        n_microbatches=problem.n_microbatches,
        kinds=problem.kinds,
        seconds=tuple(seconds),
        needs=tuple(needs),
        kept_bytes=tuple(kept_bytes),
        workspace_bytes=tuple(workspace_bytes),
        waiting_bytes=tuple(waiting_bytes),
        room=problem.room,
        update_seconds=tuple(update_seconds),
    )
