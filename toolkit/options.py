"""Options of runs: their names, which of them differ, and which change nothing of a training."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

COMPARED = "runs.yaml"
"""In the folder of a comparison: the options of its runs."""

ENDED = "runs.csv"
"""In the folder of a comparison: the epochs of the runs that have ended."""

UNDER_WAY = "under_way"
"""In the folder of a comparison: a folder for each run that has begun and not ended."""

RESUMED_OTHERWISE = "resumed with other options than those of the checkpoint"
"""How a note begins on a run whose options tell only of its last part."""

AROUND = frozenset({"tracking", "resume", "rules", "seeds"})
"""What is around a run: where it is tracked, what it goes on from, the comparison it is of."""

INDIFFERENT = AROUND | {
    *("save", "guard", "guard_factor", "profile", "diagnostics"),
    *("runtime", "device", "threads", "data.num_workers", "data.prefetch_factor"),
    *("cudnn_benchmark", "workers"),
}
"""Options, or groups of them, on which the course of a training does not depend:

- those :data:`AROUND` a run;
- ``save``, ``guard``, ``guard_factor``: when it is kept, and what becomes of one that diverges;
- ``profile``, ``diagnostics``: at what one looks meanwhile;
- ``runtime``, ``device``, ``threads``, ``cudnn_benchmark``, ``data.num_workers``,
  ``data.prefetch_factor``: by what it is computed and read, up to rounding;
- ``workers``: ``microbatches`` has its value.
"""


def flat(options: Mapping[str, Any]) -> dict[str, Any]:
    """``{"a.b": c}`` of ``{"a": {"b": c}}``; a group without options is none."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, Mapping):
            found |= {f"{name}.{last}": inner for last, inner in flat(value).items()}
        else:
            found[str(name)] = value
    return found


def without(options: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The options but for some, or for groups of them, by their names."""
    groups = tuple(f"{name}." for name in names)
    return {name: value for name, value in options.items() if not f"{name}.".startswith(groups)}


def differing(options: Sequence[Mapping[str, Any]]) -> list[str]:
    """The flat options that have two values or more, where they are given."""
    first: dict[str, Any] = {}
    found: set[str] = set()
    for run in options:
        for name, value in run.items():
            if first.setdefault(name, value) != value:
                found.add(name)
    return [name for name in first if name in found]
