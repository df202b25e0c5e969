"""The state of a training run, the same for every runtime that follows the update rule."""

from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.runtime.stage import StageWorker
from toolkit.schedule import Schedule

_KEYS = {"steps_done", "model", "versions", "stages"}


def check_state(
    state: Mapping[str, Any], schedule: Schedule, workers: Sequence[StageWorker]
) -> None:
    """Refuse a state from which ``schedule`` cannot go on.

    Raises:
        ValueError: it is of other stages, or lacks weights that the schedule reads.
    """
    if missing := sorted(_KEYS - state.keys()):
        raise ValueError(f"this is not the state of a runtime: it lacks {missing}")
    names = [set(worker.masters) for worker in workers]
    theirs = [set(next(iter(versions.values()))) for versions in state["versions"]]
    if names != theirs:
        raise ValueError(
            f"the state is of {len(theirs)} stages cut otherwise than these {len(names)}:"
            " partition the model as it was when the state was taken"
        )
    steps_done = state["steps_done"]
    for j, versions in enumerate(state["versions"]):
        needed = set(range(schedule.oldest_version(j, steps_done), steps_done + 1))
        if lacking := sorted(needed - versions.keys()):
            raise ValueError(
                f"the schedule reads version {lacking[0]} of stage {j} at step {steps_done},"
                " and the state was taken under one with smaller delays: go on with that one"
            )
