"""The state of a training run, the same for every runtime that follows the update rule."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_only

from toolkit.errors import UserError, shortened
from toolkit.model import Stages
from toolkit.runtime.updater import Updater, Weights
from toolkit.schedule import Schedule

_KEYS = {"steps_done", "model", "versions", "stages"}


def local_state_of(
    steps_done: int,
    stages: Stages,
    updaters: Sequence[Updater],
    versions: Mapping[int, Mapping[int, Weights]],
    saved_stages: Collection[int],
    *,
    is_rank_zero: bool,
) -> dict[str, Any]:
    """Return what one rank alone adds to the state of a run; see :func:`join_states`.

    It adds the updaters' states and the ``versions`` of ``saved_stages``, and what the model has
    besides trained weights: of these stages, and on rank zero what belongs to no stage.

    Args:
        steps_done: number of training steps so far.
        stages: the model, partitioned.
        updaters: those of all stages.
        versions: by stage and number, the weight versions that later steps read, and the newest.
        saved_stages: stages whose state this rank adds.
        is_rank_zero: whether this is the first rank.
    """
    trained: set[str] = set().union(*(updater.masters for updater in updaters))
    other_names = names_of_tied(stages, trained)
    stage_of_name: dict[str, int] = {}
    for index, stage in enumerate(stages):
        stage_of_name |= dict.fromkeys(stage.state_dict(), index)
    # "Fixed" is what no optimizer updates: buffers and frozen weights.
    fixed = {}
    for name, tensor in stages.model.state_dict().items():
        if name in trained or name in other_names:
            continue
        if name in stage_of_name:
            is_saved_here = stage_of_name[name] in saved_stages
        else:
            is_saved_here = is_rank_zero
        if is_saved_here:
            fixed[name] = tensor
    for index in saved_stages:
        # The model's own tensor is empty on ranks without the stage.
        newest = versions[index][steps_done]
        if updaters[index].is_rounded:
            # The model has the updater's own weights, and not those that ranks compute with.
            newest = updaters[index].newest()
            # In :func:`join_states` these win over the versions, which only fill gaps.
            fixed |= newest
        for other_name, name in other_names.items():
            if name in newest:
                fixed[other_name] = newest[name]
    return {
        "steps_done": steps_done,
        "fixed": fixed,
        "versions": {index: dict(versions[index]) for index in saved_stages},
        "stages": {index: updaters[index].state() for index in saved_stages},
    }


def names_of_tied(stages: Stages, trained: Collection[str]) -> dict[str, str]:
    """Return the further names of tied weights in the model; each with its name in ``trained``."""
    names_of_weights: defaultdict[int, list[str]] = defaultdict(list)
    for name, parameter in stages.model.named_parameters(remove_duplicate=False):
        names_of_weights[id(parameter)].append(name)
    trained_names: dict[str, str] = {}
    for names in names_of_weights.values():
        masters = [name for name in names if name in trained]
        if masters:
            trained_names |= {name: masters[0] for name in names if name not in trained}
    return trained_names


def state_of_stages(
    local_state: Mapping[str, Any],
    stages: Stages,
    versions_read: Mapping[int, Collection[int]],
) -> dict[str, Any]:
    """Return what of ``local_state`` belongs to some stages, on the CPU.

    Args:
        local_state: as :func:`local_state_of` returns it.
        stages: the model, partitioned.
        versions_read: the versions to return, by stage.
    """
    names: set[str] = set()
    versions: dict[int, dict[int, Weights]] = {}
    for stage, read in versions_read.items():
        names |= stages[stage].state_dict().keys()
        stage_versions = local_state["versions"][stage]
        versions[stage] = {
            v: weights for v, weights in stage_versions.items() if v in read
        }
    fixed = {
        name: tensor for name, tensor in local_state["fixed"].items() if name in names
    }
    updater_states = {stage: local_state["stages"][stage] for stage in versions_read}
    state = {"fixed": fixed, "versions": versions, "stages": updater_states}
    return tree_map_only(Tensor, Tensor.cpu, state)


def join_states(local_states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state of a run, from those of all ranks.

    Returns:
        ``steps_done``; ``model``, the state_dict of the whole; ``versions[stage][version]``, the
        weights that are still read; ``stages``, the state of each one's updater; and ``ranks``,
        what single ranks have, by rank, where any does.
    """
    # Ranks add disjoint parts; replicas of a stage add equal ones.
    state = reduce(merged, local_states)
    steps_done = state["steps_done"]
    versions = [state["versions"][stage] for stage in sorted(state["versions"])]
    stages = [state["stages"][stage] for stage in sorted(state["stages"])]
    model = dict(state["fixed"])
    for stage_versions in versions:
        for name, tensor in stage_versions[steps_done].items():
            # Of a rounded stage the newest version is not what the model has.
            model.setdefault(name, tensor)
    joined = {
        "steps_done": steps_done,
        "model": model,
        "versions": versions,
        "stages": stages,
    }
    if "ranks" in state:
        joined["ranks"] = state["ranks"]
    return joined


def merged(first: Mapping[Any, Any], second: Mapping[Any, Any]) -> dict[Any, Any]:
    """Merge nested dicts; where both have a value, take that of ``second``."""
    union = dict(first)
    for key, value in second.items():
        if isinstance(value, dict) and isinstance(union.get(key), dict):
            union[key] = merged(union[key], value)
        else:
            union[key] = value
    return union


def loaded(state: Mapping[str, Any], j: int, updater: Updater) -> dict[int, Weights]:
    """Return the versions of stage ``j``: the newest is that of ``updater``, others are copies.

    Of a rounded stage the newest is a copy, too.
    """
    newest = {state["steps_done"]: updater.newest()}
    if updater.is_rounded:
        newest = {}
    versions: dict[int, Weights] = {}
    for version, weights in state["versions"][j].items():
        if version not in newest:
            versions[version] = {}
            for name, tensor in weights.items():
                # A copy, also on the same device: the state stays the caller's.
                versions[version][name] = tensor.to(
                    updater.masters[name].device, copy=True
                )
    return versions | newest


def load_model(
    state: Mapping[str, Any],
    stages: Stages,
    updaters: Sequence[Updater],
    updated_stages: Collection[int],
) -> None:
    """Copy the model's tensors from ``state``; trained weights only of ``updated_stages``."""
    trained: set[str] = set()
    skipped_names: set[str] = set()
    for stage, updater in enumerate(updaters):
        trained |= updater.masters.keys()
        if stage not in updated_stages:
            skipped_names |= updater.masters.keys()
    # A tied weight is loaded once, by the name that its stage has for it.
    skipped_names |= names_of_tied(stages, trained).keys()
    for name, tensor in stages.model.state_dict().items():
        if name not in skipped_names:
            # In place: stages and optimizer share these very tensors.
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
    updated_stages: Collection[int],
) -> None:
    """Raise UserError if ``schedule`` cannot continue from ``state``.

    The state is of other stages, lacks weights that the schedule reads, or differs in form from
    that of these ``updaters`` and of ``model``, a state_dict. Of the stages only ``updated_stages``
    are compared in form.
    """
    # 1. It is a state at all.
    missing = sorted(_KEYS - state.keys())
    if missing:
        raise UserError(f"this is not the state of a runtime: it lacks {missing}")
    if not _well_formed(**state):
        raise UserError("this is not the state of a runtime: it is malformed")

    # 2. It is of this model, cut into the same stages.
    _check_cut(state, updaters)

    # 3. It has the late weights that the schedule reads.
    steps_done = state["steps_done"]
    for stage, versions in enumerate(state["versions"]):
        lacking = sorted({*schedule.versions(stage, steps_done)} - versions.keys())
        if lacking:
            raise UserError(
                f"the schedule reads version {lacking[0]} of stage {stage} at step {steps_done},"
                " which the state lacks: continue with the schedule (delays, correction) that"
                " saved it"
            )

    # 4. Weights that had no gradient are some of the stage's.
    for stage in updated_stages:
        _check_unused(state["stages"][stage].get("unused"), stage, updaters[stage])

    # 5. Shapes and types are those of this run.
    forms: dict[Any, Any] = {"model": state["model"]}
    expected_forms: dict[Any, Any] = {"model": model}
    for stage in updated_stages:
        forms[stage] = {
            "versions": state["versions"][stage],
            "stage": state["stages"][stage],
        }
        expected_forms[stage] = _expected(state, stage, updaters[stage])
    fault = difference(forms, expected_forms, "state")
    if fault:
        raise UserError(
            f"the state is not of this run: {fault}; give the model, optimizer and options with"
            " which it was taken"
        )


def _well_formed(
    steps_done: Any, versions: Any, stages: Any, **other_entries: Any
) -> bool:
    """Whether a state has, for each stage, a mapping and weights by the number of the version."""
    if not (
        type(steps_done) is int
        and isinstance(versions, list | tuple)
        and isinstance(stages, list | tuple)
        and len(versions) == len(stages)
        and all(isinstance(entry, dict) for entry in (*versions, *stages))
        and all(versions)
    ):
        return False
    for stage_versions in versions:
        for version, weights in stage_versions.items():
            if type(version) is not int or not isinstance(weights, dict):
                return False
    return True


def _check_cut(state: Mapping[str, Any], updaters: Sequence[Updater]) -> None:
    """Raise UserError unless the state's stages have the same weights as ``updaters``."""
    names = [set(updater.masters) for updater in updaters]
    # All versions of a stage have the same weights, so one of them says their names.
    state_names = [set(next(iter(versions.values()))) for versions in state["versions"]]
    if set().union(*names) != set().union(*state_names):
        raise UserError(
            "the state is of another model: give the one with which it was taken"
        )
    if names != state_names:
        raise UserError(
            f"the state is of {len(state_names)} stages cut otherwise than these {len(names)}:"
            " partition the model as it was when the state was taken"
        )


def _check_unused(unused: Any, stage: int, updater: Updater) -> None:
    """Raise UserError unless ``unused`` is a list of names of the stage's weights."""
    if isinstance(unused, list):
        names = [
            name for name in unused if isinstance(name, str) and name in updater.masters
        ]
        if len(names) == len(unused):
            return
    raise UserError(
        f"the state is not of this run: state['stages'][{stage}]['unused'] is"
        f" {shortened(repr(unused))}; expected a list of names of the stage's weights, as"
        " state_dict() returns it"
    )


def _expected(state: Mapping[str, Any], stage: int, updater: Updater) -> dict[str, Any]:
    """Return a template of a stage's state: its values have the kinds that the state needs."""
    stage_state = state["stages"][stage]
    n_skipped = stage_state.get("n_skipped")
    average = stage_state.get("average")
    # An optimizer makes its state in the first update that is not skipped.
    updated = isinstance(n_skipped, int) and state["steps_done"] > n_skipped
    form = updater.form(updated=updated, unused=stage_state["unused"])
    form["unused"] = stage_state["unused"]
    if updater.options.ema is None:
        form["average"] = average  # this run keeps no average, so any will do
    elif state["steps_done"] > 0 or (
        isinstance(average, dict) and average.get("weights")
    ):
        form["average"] = {
            "weights": updater.whole_forms(updater.averaged()),
            "n_updates": 0,
        }
    versions = dict.fromkeys(
        state["versions"][stage], updater.whole_forms(updater.newest())
    )
    return {"versions": versions, "stage": form}


def difference(tree: Any, expected: Any, name: str) -> str | None:
    """Return the first place where ``tree`` has another form than ``expected``, or None.

    Mappings need the same keys, sequences the same length, tensors the same shape and dtype, other
    values the same type; an int may stand for a float. ``name`` is that of ``tree`` in the answer.
    """
    kinds = _kinds(tree)
    expected_kinds = _kinds(expected)
    for place in [*expected_kinds, *kinds]:
        kind = kinds.get(place, "missing")
        expected_kind = expected_kinds.get(place, "unknown")
        if kind != expected_kind and (kind, expected_kind) != (
            "of type int",
            "of type float",
        ):
            return f"{name}{place} is {kind}, not {expected_kind}"
    return None


def _kinds(tree: Any) -> dict[str, str]:
    """Return the kind of each value in nested mappings and sequences, by its place."""
    # Empty containers count as values: torch's pytree has no leaf for them, so {} would equal [].
    leaves, _ = tree_flatten_with_path(tree, is_leaf=_is_empty)
    return {keystr(path): _kind(value) for path, value in leaves}


def _is_empty(node: Any) -> bool:
    return isinstance(node, dict | list | tuple) and not node


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if value is None:
        return "None"
    return f"of type {type(value).__name__}"
