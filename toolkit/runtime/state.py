"""The state of a training run, the same for every runtime that follows the update rule."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_only

from toolkit.errors import UserError
from toolkit.model import Stages
from toolkit.runtime.updater import Updater, Weights
from toolkit.schedule import Schedule

_KEYS = {"steps_done", "model", "versions", "stages"}


def local_state_of(
    steps_done: int,
    stages: Stages,
    updaters: Sequence[Updater],
    versions: Mapping[int, Mapping[int, Weights]],
    own: Collection[int],
    *,
    is_rank_zero: bool,
) -> dict[str, Any]:
    """Return what one rank alone adds to the state of a run; see :func:`join_states`.

    It adds the updaters' states and the ``versions`` of its ``own`` stages; rank zero
    also adds what belongs to no stage.
    """
    trained = {name for updater in updaters for name in updater.masters}
    home = {name: index for index, stage in enumerate(stages) for name in stage.state_dict()}
    other_names = names_of_tied(stages, trained)
    fixed = {
        name: tensor
        for name, tensor in stages.model.state_dict().items()
        if name not in trained and name not in other_names
        if (home[name] in own if name in home else is_rank_zero)
    }
    for stage in own:
        # The model's own tensor is empty on ranks without the stage.
        newest = versions[stage][steps_done]
        fixed |= {
            other_name: newest[name] for other_name, name in other_names.items() if name in newest
        }
    return {
        "steps_done": steps_done,
        "fixed": fixed,
        "versions": {stage: dict(versions[stage]) for stage in own},
        "stages": {stage: updaters[stage].state() for stage in own},
    }


def names_of_tied(stages: Stages, trained: Collection[str]) -> dict[str, str]:
    """Return the further names of tied weights in the model; each with its name in ``trained``."""
    names: defaultdict[int, list[str]] = defaultdict(list)
    for name, parameter in stages.model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    trained_names: dict[str, str] = {}
    for names_of_weight in names.values():  # of one weight
        masters = [name for name in names_of_weight if name in trained]
        if masters:
            trained_names |= {name: masters[0] for name in names_of_weight if name not in trained}
    return trained_names


def part_of_stages(
    part: Mapping[str, Any], stages: Stages, read: Mapping[int, Collection[int]]
) -> dict[str, Any]:
    """Return what of ``part`` belongs to the stages of ``read``, and their versions, on the CPU."""
    names = {name for stage in read for name in stages[stage].state_dict()}
    state_of_read = {
        "fixed": {name: tensor for name, tensor in part["fixed"].items() if name in names},
        "versions": {
            stage: {
                version: weights
                for version, weights in part["versions"][stage].items()
                if version in versions
            }
            for stage, versions in read.items()
        },
        "stages": {stage: part["stages"][stage] for stage in read},
    }
    return tree_map_only(Tensor, Tensor.cpu, state_of_read)


def join_states(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state of a run, from the parts of all ranks.

    Returns:
        ``steps_done``; ``model``, the state_dict of the whole; ``versions[stage][version]``, the
        weights that are still read; ``stages``, the state of each one's updater.
    """
    state = reduce(merged, parts)
    steps_done, model = state["steps_done"], state["fixed"]
    versions, stages = (
        [state[key][stage] for stage in sorted(state[key])] for key in ("versions", "stages")
    )
    for stage_versions in versions:
        model = model | stage_versions[steps_done]
    return {"steps_done": steps_done, "model": model, "versions": versions, "stages": stages}


def merged(first: Mapping[Any, Any], second: Mapping[Any, Any]) -> dict[Any, Any]:
    """Merge nested dicts; where both have a value, take that of ``second``."""
    union = dict(first)
    for key, value in second.items():
        both_mappings = isinstance(value, dict) and isinstance(union.get(key), dict)
        union[key] = merged(union[key], value) if both_mappings else value
    return union


def loaded(state: Mapping[str, Any], j: int, updater: Updater) -> dict[int, Weights]:
    """Return the versions of stage ``j``: the newest is that of ``updater``, others are copies."""
    versions = {}
    for version, weights in state["versions"][j].items():
        if version != state["steps_done"]:
            devices = {name: updater.masters[name].device for name in weights}
            versions[version] = {
                name: tensor.to(devices[name], copy=True) for name, tensor in weights.items()
            }
    return versions | {state["steps_done"]: updater.newest()}


def load_model(
    state: Mapping[str, Any], stages: Stages, updaters: Sequence[Updater], own: Collection[int]
) -> None:
    """Copy the model's tensors from ``state``, except trained weights of stages not ``own``."""
    skipped_names = {
        name
        for stage, updater in enumerate(updaters)
        if stage not in own
        for name in updater.masters
    }
    # A tied weight is loaded once, by the name that its stage has for it.
    skipped_names |= {
        *names_of_tied(stages, {name for updater in updaters for name in updater.masters})
    }
    for name, tensor in stages.model.state_dict().items():
        if name not in skipped_names:
            tensor.copy_(state["model"][name])


def form_of(stages: Stages) -> dict[str, Tensor]:
    """Return the model's state_dict on the meta device, where it takes no memory."""
    return {
        name: torch.empty_like(tensor, device="meta")
        for name, tensor in stages.model.state_dict().items()
    }


def check_state(
    state: Mapping[str, Any],
    schedule: Schedule,
    updaters: Sequence[Updater],
    model: Mapping[str, Tensor],
    own: Collection[int],
) -> None:
    """Raise UserError if ``schedule`` cannot continue from ``state``.

    The state is of other stages, lacks weights that the schedule reads, or differs in form from
    that of these ``updaters`` and of ``model``, a state_dict. Only ``own`` stages are compared.
    """
    if missing := sorted(_KEYS - state.keys()):
        raise UserError(f"this is not the state of a runtime: it lacks {missing}")
    if not _well_formed(**state):
        raise UserError("this is not the state of a runtime: it is malformed")
    steps_done = state["steps_done"]
    names = [set(updater.masters) for updater in updaters]
    state_names = [set(next(iter(versions.values()))) for versions in state["versions"]]
    if set().union(*names) != set().union(*state_names):
        raise UserError("the state is of another model: give the one with which it was taken")
    if names != state_names:
        raise UserError(
            f"the state is of {len(state_names)} stages cut otherwise than these {len(names)}:"
            " partition the model as it was when the state was taken"
        )
    for stage, versions in enumerate(state["versions"]):
        if lacking := sorted({*schedule.versions(stage, steps_done)} - versions.keys()):
            raise UserError(
                f"the schedule reads version {lacking[0]} of stage {stage} at step {steps_done},"
                " which the state lacks: continue with the schedule (delays, correction) that"
                " saved it"
            )
    forms = {"model": state["model"]} | {stage: _of_stage(state, stage) for stage in own}
    expected_forms = {"model": model} | {
        stage: _expected(state, stage, updaters[stage]) for stage in own
    }
    if fault := difference(forms, expected_forms, "state"):
        raise UserError(
            f"the state is not of this run: {fault}; give the model, optimizer and options with"
            " which it was taken"
        )


def _well_formed(steps_done: Any, versions: Any, stages: Any, **other_entries: Any) -> bool:
    """Whether a state has, for each stage, a mapping and weights by the number of the version."""
    return (
        type(steps_done) is int
        and all(isinstance(entries, list | tuple) for entries in (versions, stages))
        and len(versions) == len(stages)
        and all(isinstance(entry, dict) for entry in (*versions, *stages))
        and all(versions)
        and all(
            type(version) is int and isinstance(weights, dict)
            for stage_versions in versions
            for version, weights in stage_versions.items()
        )
    )


def _of_stage(state: Mapping[str, Any], stage: int) -> dict[str, Any]:
    return {"versions": state["versions"][stage], "stage": state["stages"][stage]}


def _expected(state: Mapping[str, Any], stage: int, updater: Updater) -> dict[str, Any]:
    """Return a template of :func:`_of_stage`: its values have the kinds that the state needs."""
    stage_state, versions = state["stages"][stage], state["versions"][stage]
    unused, n_skipped, average = (
        stage_state.get(key) for key in ("unused", "n_skipped", "average")
    )
    unused_is_valid = isinstance(unused, list) and all(name in updater.masters for name in unused)
    updated = isinstance(n_skipped, int) and state["steps_done"] > n_skipped
    form = updater.form(updated=updated, unused=unused if unused_is_valid else ())
    form["unused"] = unused if unused_is_valid else None
    if updater.options.ema is None:
        form["average"] = average  # this run keeps no average, so any will do
    elif state["steps_done"] > 0 or (isinstance(average, dict) and average.get("weights")):
        form["average"] = {"weights": updater.averaged(), "n_updates": 0}
    return {"versions": dict.fromkeys(versions, updater.newest()), "stage": form}


def difference(found: Any, expected: Any, where: str) -> str | None:
    """Return the first place where ``found`` has another form than ``expected``, or None.

    Mappings need the same keys, sequences the same length, tensors the same shape and dtype, other
    values the same type; an int may stand for a float. ``where`` names ``found`` in the answer.
    """
    found_kinds, expected_kinds = _kinds(found), _kinds(expected)
    for place in [*expected_kinds, *found_kinds]:
        kind, expected_kind = (
            found_kinds.get(place, "missing"),
            expected_kinds.get(place, "unknown"),
        )
        if kind != expected_kind and (kind, expected_kind) != ("of type int", "of type float"):
            return f"{where}{place} is {kind}, not {expected_kind}"
    return None


def _kinds(tree: Any) -> dict[str, str]:
    """Return the kind of each value in nested mappings and sequences, by its place."""
    leaves, _ = tree_flatten_with_path(tree, is_leaf=_is_empty)
    return {keystr(path): _kind(value) for path, value in leaves}


def _is_empty(node: Any) -> bool:
    return isinstance(node, dict | list | tuple) and not node


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return "None" if value is None else f"of type {type(value).__name__}"
