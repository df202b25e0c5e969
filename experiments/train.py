"""Train one model by one schedule.

cyclic-dp train schedule=cdp_v2 data=digits seed=3
cyclic-dp train -m schedule=dp,cdp_v1,cdp_v2 seed=0,1,2
cyclic-dp train resume=outputs/train/...
torchrun --nproc-per-node 4 -m toolkit train runtime=distributed schedule=cdp_v2
"""

import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from toolkit.cli import (
    EXIT_STOPPED,
    Ended,
    build_run,
    entry_point,
    is_rank_zero,
    output_folder,
)
from toolkit.cli.resume import trust_option
from toolkit.cli.sweeps import mark_failed
from toolkit.format import (
    delay_table,
    duration,
    rank_cells,
    run_cells,
    table,
)
from toolkit.terminal import show, show_activity, show_import
from toolkit.torchrun import restarted

if TYPE_CHECKING:
    from toolkit.results.run_recorder import RunRecorder
    from toolkit.training import TrainingRun


@entry_point("train")
def main(config: DictConfig) -> Ended:
    show_import()
    from toolkit.plan.rate_check import check_rate
    from toolkit.results import Progress
    from toolkit.results.run_recorder import RunRecorder
    from toolkit.training import StoppedError
    from toolkit.training.checkpoint import from_rank_0
    from toolkit.training.profiling import check_profile
    from toolkit.training.run_with_checkpoints import rollback_schedule

    start = time.perf_counter()
    check_profile(config.profile)
    run = build_run(config, on_activity=show_activity)
    rollback_schedule(run)
    folder, hydra = output_folder(), HydraConfig.get()
    if run.runtime.world is not None:  # whichever rank knows the reason writes it
        run.runtime.world.watch.on_failure = partial(
            mark_failed, from_rank_0(run.runtime, folder)
        )
    resumed = bool(config.resume) or restarted()
    if config.stability and not resumed and is_rank_zero():
        warning = check_rate(run, on_activity=show_activity)
        if warning:
            show(f"warning: {warning}", file=sys.stderr)

    group = Path(hydra.sweep.dir).name if hydra.mode == RunMode.MULTIRUN else None
    stop_text = ""
    with RunRecorder(run, folder, resume=resumed, group=group) as recorder:
        with Progress(run.options.epochs, visible=is_rank_zero()) as progress:

            def print_line(text: str) -> None:
                if is_rank_zero():
                    progress.line(text)

            try:
                # Ranks that torchrun restarted resume if they can.
                resume = True if config.resume else None if restarted() else False
                with recorder.training(
                    progress, resume=resume, on_note=print_line
                ) as train:
                    outcome = train()
            except StoppedError as stopped:
                recorder.upload_weights()
                saved = "nothing is saved: start it again"
                if stopped.saved:
                    saved = f"it continues by:\n  {continuing_command(folder)}"
                stop_text = f"stopped by {stopped}; {saved}"
        if stop_text:
            if is_rank_zero():
                show(stop_text, file=sys.stderr)
            return Ended(EXIT_STOPPED)
        # Every rank takes part in the measurements. Hydra's sweepers maximize the objective.
        measured, objective = outcome.run.measurements(), outcome.epochs[-1].top1
        if not is_rank_zero():
            return Ended(objective=objective)
        result = recorder.conclude(outcome, measured, start)
        show_result(outcome.run, result, recorder)

    show_places(recorder, folder)
    return Ended(1 if recorder.unwritten or outcome.weights_lost else 0, objective)


def continuing_command(folder: Path) -> str:
    """Return the command that continues a run that has been stopped."""
    from toolkit.results.provenance import resume_command

    return resume_command(folder) + trust_option(folder, "train")


def show_result(
    run: "TrainingRun", result: dict[str, Any], recorder: "RunRecorder"
) -> None:
    """Print the result of a run and its notes."""
    from toolkit.training.profiling import WARM_UP

    metrics = {
        name: value for name, value in result["metrics"].items() if name != "epoch"
    }
    n_epochs = result["metrics"]["epoch"] + 1
    cells = {
        "schedule": result["schedule"],
        "seed": run.options.seed,
        "epochs": n_epochs,
    }
    show(table([cells | run_cells(metrics)]))
    if "peak_weights" in result["ranks"][0]:
        show(
            f"\nmeasured in the first {run.recorded_options['runtime']['record']} training steps:\n"
        )
        show(table([rank_cells(row) for row in result["ranks"]]))
        show(f"\n{step_seconds_in_words(result['step_seconds'])}")
    if result["delays"]:
        show(
            "\nwhat the delay does to the gradients, mean over the steps looked into:\n"
        )
        show(delay_table(result["delays"]))
    if recorder.profile.written:
        show(
            f"\nprofile: {recorder.profile.path} (for ui.perfetto.dev or chrome://tracing)"
        )
    elif run.recorded_options["profile"]:
        show(
            f"\nno profile: it begins after {WARM_UP} training steps, and the run has no more"
        )
    for note in result["notes"]:
        show(f"\nnote: {note}")


def step_seconds_in_words(seconds: dict[str, float]) -> str:
    """Return how long a measured training step took, and what is predicted, in words."""
    text = f"a step took {' '.join(duration(seconds['measured']))}"
    if "predicted" in seconds:
        text += f"; predicted {' '.join(duration(seconds['predicted']))}"
    return text


def show_places(recorder: "RunRecorder", folder: Path) -> None:
    """Print where the result is, or that it could not be written."""
    for note in recorder.unwritten:
        show(f"\nnote: {note}")
    show(
        "\nthe result is not written"
        if recorder.unwritten
        else f"\nwritten to {folder}"
    )
    if recorder.tracker.where:
        show(recorder.tracker.where)


if __name__ == "__main__":
    main()
