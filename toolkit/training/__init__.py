"""Training: sets of samples, optimizers, learning rates, the loop, and resumable runs."""

from toolkit.training.devices import pick_device
from toolkit.training.evaluation import Evaluation, evaluate
from toolkit.training.loop import DivergedError, Epoch, Step
from toolkit.training.run_with_checkpoints import (
    Listeners,
    Outcome,
    run_with_checkpoints,
)
from toolkit.training.stop_signals import StoppedError
from toolkit.training.training_run import TrainingRun, prepare

__all__ = [
    "DivergedError",
    "Epoch",
    "Evaluation",
    "Listeners",
    "Outcome",
    "Step",
    "StoppedError",
    "TrainingRun",
    "evaluate",
    "pick_device",
    "prepare",
    "run_with_checkpoints",
]
