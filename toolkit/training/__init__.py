"""Training: image sets, learning rates, the loop, and a run from its configuration."""

from typing import TYPE_CHECKING, Any

from toolkit.training.job import Job, pick_device, prepare
from toolkit.training.keeper import StoppedError
from toolkit.training.kept import Outcome, run_kept
from toolkit.training.loop import Epoch, Evaluation, Step, evaluate, fit

if TYPE_CHECKING:
    from toolkit.pilot import pilot

__all__ = [
    "Epoch",
    "Evaluation",
    "Job",
    "Outcome",
    "Step",
    "StoppedError",
    "evaluate",
    "fit",
    "pick_device",
    "pilot",
    "prepare",
    "run_kept",
]


def __getattr__(name: str) -> Any:
    """The pilot loads when it is first used."""
    if name == "pilot":
        from toolkit.pilot import pilot

        return pilot
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
