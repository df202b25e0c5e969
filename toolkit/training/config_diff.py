"""Options that differ between a saved run and the one that resumes it."""

from collections.abc import Collection, Mapping
from typing import Any

from toolkit.options import INDIFFERENT, differing, flat, without

_MOST_SHOWN = 4
_STEPS = 4  # of an epoch, at which learning rates are compared
FREE = INDIFFERENT | {"epochs"}  # a run may continue for longer than was planned


def changed_options(before: object, now: Mapping[str, Any], free: Collection[str] = FREE) -> str:
    """Describe differing options that change the trajectory; empty if no option does.

    An option that one side lacks is None there.

    Args:
        before: recorded options; anything but a mapping is unknown, and nothing is reported.
        now: options of the run.
        free: options, or groups of them, that may differ.
    """
    if not isinstance(before, Mapping):
        return ""
    old, new = (without(flat(options), free) for options in (before, now))
    known = dict.fromkeys(sorted(old.keys() | new.keys()))
    names = differing([known | old, known | new])
    shown = [f"{name}={new.get(name)} (was {old.get(name)})" for name in names[:_MOST_SHOWN]]
    more = [f"and {len(names) - _MOST_SHOWN} more"] if len(names) > _MOST_SHOWN else []
    return ", ".join([*shown, *more])


def rate_follows_epochs(before: object, epochs: int, lr: Any) -> bool:
    """Whether a change in the number of epochs changes the learning rates of earlier ones.

    It does for half a cosine over all of them, and does not for steps every so many epochs.

    Args:
        before: recorded options of the saved run.
        epochs: epochs of the run that resumes it.
        lr: learning-rate factor of :mod:`toolkit.training.lr`.
    """
    planned = before.get("epochs") if isinstance(before, Mapping) else None
    if not isinstance(planned, int) or planned == epochs:
        return False
    steps = range(_STEPS * min(planned, epochs))
    both = [[lr.factor(k, _STEPS, n, 1) for k in steps] for n in (planned, epochs)]
    return both[0] != both[1]
