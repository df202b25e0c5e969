"""The names under which W&B has what training logs; reports show it by them."""

from pathlib import Path

STEP = "step"
TRAIN_LOSS = "train/loss"
LEARNING_RATE, SPEED = "train/lr", "train/samples_per_second"
GRID, TIMELINE = "schedule/grid", "measured/timeline"  # images
ACTIVATIONS, TRAFFIC = "schedule/activations_by_slot", "schedule/traffic_by_slot"  # tables
MEASURED_MEMORY, MEASURED_MESSAGES = "measured/memory", "measured/messages"
MEASURED_RANKS = "measured/ranks"


def of_epoch(metric: str) -> str:
    """A metric of the test, or of the training, after each epoch."""
    return f"epoch/{metric}"


def final(metric: str) -> str:
    """The same after the last one."""
    return f"final/{metric}"


def of_delay(name: str, stage: int | str) -> str:
    """What delay does to a stage's gradients; the stage may be a pattern."""
    return f"delay/{name}_stage_{stage}"


def group_of(folder: Path) -> str:
    """The group in which the runs of a comparison in ``folder`` stand together."""
    folder = folder.resolve()
    swept = (folder.parent / "sweep.json").exists()
    return "/".join(folder.parts[-2:] if swept else folder.parts[-1:])
