"""What a run records of its options, and how they differ from those of a checkpoint."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from toolkit.files import digest_of
from toolkit.options import INDIFFERENT, compared, differing
from toolkit.training.training_run import TrainingRun

FREE = INDIFFERENT | {"epochs"}
"""Options that may change when a run is resumed: it may continue for longer than was planned."""
_MAX_NAMED = 4  # options that differ


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

    A free runtime may be another one, but its lossy messages and local steps may not change.
    """
    earlier_values = compared(before, free)
    new_values = compared(now, free)
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
