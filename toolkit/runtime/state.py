"""The state of a training run, the same for every runtime that follows the update rule."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from toolkit.runtime.form import difference
from toolkit.runtime.stage import StageWorker
from toolkit.schedule import Schedule

_KEYS = {"steps_done", "model", "versions", "stages"}


def check_state(
    state: Mapping[str, Any], schedule: Schedule, workers: Sequence[StageWorker], model: nn.Module
) -> None:
    """Refuse a state from which ``schedule`` cannot go on.

    Raises:
        ValueError: it is of other stages, lacks weights that the schedule reads, or is formed
            otherwise than the state of these ``workers`` and of the whole ``model``.
    """
    if missing := sorted(_KEYS - state.keys()):
        raise ValueError(f"this is not the state of a runtime: it lacks {missing}")
    for fault in _faults_outside(state):
        raise ValueError(f"this is not the state of a runtime: {fault}")
    names = [set(worker.masters) for worker in workers]
    theirs = [set(next(iter(versions.values()))) for versions in state["versions"]]
    if names != theirs:
        same = set().union(*names) == set().union(*theirs)
        raise ValueError(
            f"the state is of {len(theirs)} stages cut otherwise than these {len(names)}: partition"
            " the model as it was when the state was taken"
            if same
            else "the state is of another model: give the one with which it was taken"
        )
    steps_done = state["steps_done"]
    for j, versions in enumerate(state["versions"]):
        needed = set(range(schedule.oldest_version(j, steps_done), steps_done + 1))
        if lacking := sorted(needed - versions.keys()):
            raise ValueError(
                f"the schedule reads version {lacking[0]} of stage {j} at step {steps_done},"
                " and the state was taken under one with smaller delays: go on with that one"
            )
    for fault in _faults_inside(state, workers, model):
        raise ValueError(
            f"the state is not of this run: {fault}; give the model, optimizer and options with"
            " which it was taken"
        )


def _faults_outside(state: Mapping[str, Any]) -> Iterator[str]:
    if fault := difference(state["steps_done"], 0, "steps_done"):
        yield fault
    for name in ("versions", "stages"):
        parts = state[name]
        if not isinstance(parts, list | tuple) or not all(isinstance(p, dict) for p in parts):
            yield f"{name} is not a list of mappings"
    for versions in state["versions"]:
        if not versions or not all(
            type(version) is int and isinstance(weights, dict)
            for version, weights in versions.items()
        ):
            yield "versions are not weights by their number"
    if len(state["stages"]) != len(state["versions"]):
        yield f"it is of {len(state['stages'])} stages and of {len(state['versions'])}"


def _faults_inside(
    state: Mapping[str, Any], workers: Sequence[StageWorker], model: nn.Module
) -> Iterator[str]:
    if fault := difference(state["model"], model.state_dict(), "model"):
        yield fault
    for j, worker in enumerate(workers):
        for version, weights in state["versions"][j].items():
            if fault := difference(weights, worker.newest(), f"versions[{j}].{version}"):
                yield fault
        if fault := _fault_of_stage(
            state["stages"][j], state["steps_done"], worker, f"stages[{j}]"
        ):
            yield fault


def _fault_of_stage(
    found: Mapping[str, Any], steps_done: int, worker: StageWorker, where: str
) -> str | None:
    unused, n_skipped = found.get("unused"), found.get("n_skipped")
    if not isinstance(unused, list) or not all(name in worker.masters for name in unused):
        return f"{where}.unused does not name weights of the stage"
    updated = isinstance(n_skipped, int) and steps_done > n_skipped
    expected = worker.form(updated=updated, unused=unused)
    expected["unused"] = unused
    if expected["average"] is None:
        expected["average"] = found.get("average")  # nobody asks for it any longer
    elif isinstance(average := found.get("average"), dict) and average.get("weights"):
        expected["average"] = {"weights": worker.newest(), "n_updates": 0}
    elif steps_done > 0:
        return f"{where}.average has no weights"
    return difference(found, expected, where)
