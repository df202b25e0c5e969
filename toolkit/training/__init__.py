"""Training: image sets, learning rates, the loop, and a run from its configuration."""

from toolkit.training.job import Job, pick_device, prepare
from toolkit.training.keeper import StoppedError
from toolkit.training.kept import Outcome, run_kept
from toolkit.training.loop import DivergedError, Epoch, Evaluation, Step, evaluate, fit

__all__ = [
    "DivergedError",
    "Epoch",
    "Evaluation",
    "Job",
    "Outcome",
    "Step",
    "StoppedError",
    "evaluate",
    "fit",
    "pick_device",
    "prepare",
    "run_kept",
]
