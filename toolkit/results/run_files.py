"""Names of the files of runs and comparisons, and what can be resumed in a folder."""

from pathlib import Path

STATUS = "status.json"
"""State of a run, and why it failed."""

CONTINUED_FILE = "options.json"
"""Options of an experiment that continues when it is started in the same folder again."""

# In the folder of a comparison:
OPTIONS_FILE = "runs.yaml"  # the options of its runs
EPOCHS_FILE = "runs.csv"  # the epochs of the runs that have ended
DELAYS_FILE = "delays.csv"
NOTES_FILE = "notes.csv"
UNDER_WAY_FOLDER = "under_way"  # a folder for each run that has begun and not ended
TUNING_FOLDER = "tuning"  # the comparison of learning rates


def has_checkpoint(run: Path) -> bool:
    """Return whether a run's folder has a checkpoint to resume from."""
    return any(run.glob("checkpoints/step_*.ckpt"))


def resumable_in(folder: Path) -> str:
    """Return what can be resumed in ``folder``, as text: checkpoints or runs; empty if nothing."""
    if has_checkpoint(folder):
        return "the checkpoints of a run"
    # A comparison that tunes its rates may have been stopped while its trials ran.
    for comparison_folder in (folder, folder / TUNING_FOLDER):
        runs_under_way = (comparison_folder / UNDER_WAY_FOLDER).glob("*")
        has_ended_runs = (comparison_folder / EPOCHS_FILE).is_file()
        if has_ended_runs or any(map(has_checkpoint, runs_under_way)):
            return "the runs of a comparison"
    return ""
