"""Training: image sets, learning rates, the loop, and a run from its configuration."""

from toolkit.training.job import Job, pick_device, prepare
from toolkit.training.loop import Epoch, Evaluation, Step, evaluate, fit

__all__ = ["Epoch", "Evaluation", "Job", "Step", "evaluate", "fit", "pick_device", "prepare"]
