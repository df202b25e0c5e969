"""What a run records of its options, and how they differ from those of a checkpoint."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from toolkit.files import digest_of
from toolkit.options import INDIFFERENT, differing, flat, without
from toolkit.training.training_run import TrainingRun

FREE = INDIFFERENT | {"epochs"}
"""Options that may change when a run is resumed: it may continue for longer than was planned."""
_MAX_NAMED = 4  # options that differ
_COMPRESSIONS = ("compression", "boundary_compression")
_COMPRESSION_SETTINGS = (
    "low_rank",
    "compression_start",
    "warm_start",
    "error_feedback",
)
_LOCAL_STEPS = ("period", "start", "outer_lr", "outer_momentum")


def options_to_save(run: TrainingRun) -> Mapping[str, Any]:
    """Return the options of ``run``, and a digest of the rank orders that it reads from a file."""
    file = (run.recorded_options.get("schedule") or {}).get("file")
    digest = None
    if file:
        digest = digest_of(Path(file))[:12]
    return {**run.recorded_options, "orders": digest}


def changed_options(
    before: Mapping[str, Any], now: Mapping[str, Any], free: Collection[str] = FREE
) -> str:
    """Describe the options that differ, except ``free`` ones; a missing option counts as None.

    A runtime that is free may be any other with the same results: what its messages lose and its
    ranks do on their own is compared all the same.
    """
    earlier_values = _compared(before, free)
    new_values = _compared(now, free)
    option_names = dict.fromkeys(sorted(earlier_values.keys() | new_values.keys()))
    names = differing([option_names | earlier_values, option_names | new_values])
    changes = []
    for name in names[:_MAX_NAMED]:
        changes.append(
            f"{name}={new_values.get(name)} (was {earlier_values.get(name)})"
        )
    if len(names) > _MAX_NAMED:
        changes.append(f"and {len(names) - _MAX_NAMED} more")
    return ", ".join(changes)


def _compared(options: Mapping[str, Any], free: Collection[str]) -> dict[str, Any]:
    """Return the options that matter where ``free`` ones do not, by dotted names."""
    values = without(flat(options), free)
    if "runtime" in free:
        trajectory_options = _trajectory_options(options.get("runtime") or {})
        values |= flat({"runtime": trajectory_options})
    return values


def _trajectory_options(runtime: Mapping[str, Any]) -> dict[str, Any]:
    """Return those options of a runtime on which the trained weights depend."""
    # A runtime without compression may lack the option.
    values = {name: runtime.get(name) or "none" for name in _COMPRESSIONS}
    names = [*_LOCAL_STEPS]
    if values["compression"] != "none":
        names += _COMPRESSION_SETTINGS
    return values | {name: runtime[name] for name in names if name in runtime}
