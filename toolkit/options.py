"""Options of runs: their dotted names, which of them differ, and which change no result."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

COMPARED = "runs.yaml"
"""File in a comparison's folder with the options of its runs."""

ENDED = "runs.csv"
"""File in a comparison's folder with the epochs of the runs that have ended."""

UNDER_WAY = "under_way"
"""Folder in a comparison's folder with a folder for each run that has begun and not ended."""

RESUMED_OTHERWISE = "resumed with other options than those of the checkpoint"
"""Start of the note on a run whose options are only those of its last part."""

AROUND = frozenset({"tracking", "resume", "rules", "seeds"})
"""Options around a run: its tracking, the run that it resumes, its comparison."""

INDIFFERENT = AROUND | {
    *("save", "guard", "guard_factor"),  # checkpoints, and what happens after a divergence
    *("profile", "diagnostics"),  # measurements
    # How it is computed and read, which changes results by rounding at most.
    *("runtime", "device", "threads", "data.num_workers", "data.prefetch_factor"),
    "cudnn_benchmark",
    "workers",  # microbatches has its value
}
"""Options, or groups of them, that do not change the course of a training."""


def flat(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``{"a.b": c}`` for ``{"a": {"b": c}}``; a group without options is left out."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, Mapping):
            found |= {f"{name}.{last}": inner for last, inner in flat(value).items()}
        else:
            found[str(name)] = value
    return found


def without(options: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return flat ``options`` without ``names``, which may be options or groups."""
    groups = tuple(f"{name}." for name in names)
    return {name: value for name, value in options.items() if not f"{name}.".startswith(groups)}


def differing(options: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the flat options that have two values or more among the runs that have them."""
    first: dict[str, Any] = {}
    found: set[str] = set()
    for run in options:
        for name, value in run.items():
            if first.setdefault(name, value) != value:
                found.add(name)
    return [name for name in first if name in found]
