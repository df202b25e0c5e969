"""Train one model by one schedule.

python experiments/train.py schedule=cdp_v2 data=digits seed=3
python experiments/train.py -m schedule=dp,cdp_v1,cdp_v2 seed=0,1,2
python experiments/train.py resume=outputs/train/...
torchrun --nproc-per-node 4 experiments/train.py runtime=distributed schedule=cdp_v2
"""

import time
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from toolkit.cli import STOPPED, Ended, entry_point, is_rank_zero
from toolkit.cli.process import restarted
from toolkit.cli.sweeps import mark_failed

if TYPE_CHECKING:
    from toolkit.runtime.meters.measurements import Measurements
    from toolkit.training import Epoch, Step
    from toolkit.training.run_with_checkpoints import Outcome


@entry_point("train", Path(__file__).parents[1] / "conf")
def main(config: DictConfig) -> Ended:
    from toolkit.files import write_json
    from toolkit.results import describe, track
    from toolkit.training import prepare
    from toolkit.training.checkpoint import from_rank_0
    from toolkit.training.profiling import check_profile
    from toolkit.training.run_with_checkpoints import check_saving

    start = time.perf_counter()
    check_profile(config.profile)
    job = prepare(config)
    check_saving(job)
    folder = Path(HydraConfig.get().runtime.output_dir)
    if job.runtime.world is not None:  # whichever rank knows the reason tells it
        job.runtime.world.watch.on_failure = partial(mark_failed, from_rank_0(job.runtime, folder))
    with track(
        config,
        folder,
        device=describe(job.device),
        name=f"{job.schedule.name}, seed {config.seed}",
        group=sweep(),
        resume=bool(config.resume) or restarted(),
        here=is_rank_zero(),
    ) as tracker:
        ended, result = train(config, job, folder, tracker, start)
    if tracker.where:
        print(tracker.where)
    if late := [note for note in tracker.notes if result and note not in result["notes"]]:
        with suppress(OSError):
            write_json(folder / "result.json", result | {"notes": [*result["notes"], *late]})
    return ended


def train(
    config: DictConfig, job: Any, folder: Path, tracker: Any, start: float
) -> tuple[Ended, dict[str, Any]]:
    """Train, and write what came of it to ``folder``; returns how it ended, and the result."""
    from toolkit.files import note_write_errors, write_json
    from toolkit.results.provenance import resume_command
    from toolkit.training import StoppedError, run_with_checkpoints

    with Records(config, job, folder, tracker) as records:
        # Ranks that were started again go on, if there is where from.
        again = None if restarted() else False
        try:
            outcome = run_with_checkpoints(
                job,
                folder,
                resume=True if config.resume else again,
                on_epoch=records.epoch,
                on_step=records.step,
                on_note=records.line,
            )
        except StoppedError as stopped:
            tracker.end(f"stopped by {stopped}", STOPPED)
            track_weights(config, folder, tracker)
            saved = f"; {resume_command(folder)}" if stopped.saved else "; nothing is saved"
            records.line(f"stopped by {stopped}{saved}")
            return Ended(STOPPED), {}
    measured = outcome.job.measurements()
    objective = outcome.epochs[-1].top1
    if not is_rank_zero():
        return Ended(objective=objective), {}
    notes = remarks(outcome)
    ranks = write_tables(outcome, measured, records, notes)
    track_weights(config, folder, tracker)
    result = result_of(config, outcome, ranks, records, notes, time.perf_counter() - start)
    n_notes = len(notes)
    with note_write_errors(notes, folder):
        write_json(folder / "result.json", result)
    whole = len(notes) == n_notes
    tell(config, result, records)
    for note in notes:
        print(f"\nnote: {note}")
    print(f"\nwritten to {folder}" if whole else "\nthe result is not written")
    return Ended(0 if whole else 1, objective), result


class Records:
    """What a run shows, tracks and writes while it trains; a context.

    Args:
        config: of the run.
        job: about to be trained.
        folder: of the run, where its tables go.
        tracker: of the run.
    """

    def __init__(self, config: DictConfig, job: Any, folder: Path, tracker: Any) -> None:
        from toolkit.results import Curves, Ledger, Progress, track_schedule
        from toolkit.training.profiling import Profile

        track_schedule(tracker, job.schedule)
        kept = {"resume": bool(config.resume) or restarted(), "here": is_rank_zero()}
        self.folder, self.tracker = folder, tracker
        self.measure = job.samples.form.metric
        self.curves = Curves(tracker, config.tracking.every)
        self.epochs = Ledger(folder / "epochs.csv", ["epoch"], **kept)
        self.delays = Ledger(folder / "delays.csv", ["step", "stage"], **kept)
        self.profile = Profile(config.profile, folder / "profile.json", here=is_rank_zero())
        self._progress = Progress(config.epochs, shown=is_rank_zero())
        self._progress.run(f"{job.schedule.name}, seed {config.seed}")
        self._open = ExitStack()

    def __enter__(self) -> "Records":
        self._open.enter_context(self._progress)
        self._open.enter_context(self.profile)
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    def epoch(self, epoch: "Epoch") -> None:
        """An epoch is done."""
        self._progress.note(f"test {epoch.told(self.measure)}")
        self.curves.epoch(epoch)
        self.epochs.put([as_row(epoch)])

    def step(self, step: "Step") -> None:
        """A training step is done."""
        self._progress.trained(step)
        self.curves.trained(step)
        self.delays.put([asdict(delay) for delay in step.result.delays])
        self.profile.step()

    def line(self, text: str) -> None:
        """Something to tell while it goes on."""
        if is_rank_zero():
            self._progress.line(text)


def remarks(outcome: "Outcome") -> list[str]:
    """What is to be said of a run that has ended."""
    notes = list(outcome.notes)
    if outcome.resumed_at:
        rest = "seconds are of the steps since"
        if outcome.resumed_at == outcome.job.runtime.steps_done:
            rest = "there was nothing left to train"
        notes.append(f"resumed at step {outcome.resumed_at}: {rest}")
    if damaged := damaged_in(outcome):
        notes.append(f"{len(damaged)} damaged images, each replaced by another of its class")
    return notes


def damaged_in(outcome: "Outcome") -> list[Any]:
    """The images that could not be read."""
    return [*getattr(outcome.job.samples, "damaged", ())]


def write_tables(
    outcome: "Outcome", measured: "Measurements | None", records: Records, notes: list[str]
) -> list[dict[str, Any]]:
    """Tables and figures of the whole run; what cannot be written is note_write_errors.

    Returns:
        what was measured, a row a rank.
    """
    from toolkit.files import note_write_errors, write_csv

    folder, looks = records.folder, records.delays.rows()
    with note_write_errors(notes, folder):
        write_csv(folder / "epochs.csv", [as_row(epoch) for epoch in outcome.epochs])
    if looks:
        with note_write_errors(notes, folder):
            write_csv(folder / "delays.csv", looks)
    ranks: list[dict[str, Any]] = []
    if measured:
        timelines, ranks = beside_predicted(measured, outcome.job, notes)
        with note_write_errors(notes, folder):
            write_measured(timelines, ranks, folder, records.tracker)
    return ranks


def result_of(
    config: DictConfig,
    outcome: "Outcome",
    ranks: list[dict[str, Any]],
    records: Records,
    notes: list[str],
    seconds: float,
) -> dict[str, Any]:
    """What ``result.json`` holds; its last metrics and notes are tracked, too."""
    from toolkit.results import delay_means, describe, provenance, training_log
    from toolkit.results.record import SCHEMA

    job, tracker, final = outcome.job, records.tracker, as_row(outcome.epochs[-1])
    tracker.summary({training_log.final(name): value for name, value in final.items()})
    tracker.summary({"notes": "\n".join(notes), "seconds": seconds})
    return {
        "schema": SCHEMA,
        "schedule": job.schedule.name,
        "metrics": final,
        "judged_by": records.measure.name,
        "notes": [*notes, *tracker.notes],
        "damaged": damaged_in(outcome),
        "delays": delay_means(records.delays.rows(), ["stage"]),
        "ranks": ranks or [{"rank": rank} for rank in range(job.n_ranks)],
        "provenance": provenance(config, describe(job.device), seconds),
    }


def tell(config: DictConfig, result: dict[str, Any], records: Records) -> None:
    """Print what came of a run."""
    from toolkit.format import rank_cells, table
    from toolkit.training.profiling import WARM_UP

    print(table([{"schedule": result["schedule"], "seed": config.seed} | result["metrics"]]))
    if "peak_weights" in result["ranks"][0]:
        print(f"\nmeasured in the first {config.runtime.record} training steps:\n")
        print(table([rank_cells(row) for row in result["ranks"]]))
    if result["delays"]:
        print("\nwhat the delay does to the gradients, mean over the steps looked into:\n")
        print(table(result["delays"]))
    if records.profile.written:
        print(f"\nprofile: {records.profile.path} (for ui.perfetto.dev or chrome://tracing)")
    elif config.profile:
        print(f"\nno profile: it begins after {WARM_UP} training steps, and the run has no more")


def sweep() -> str | None:
    """The name of the sweep's folder, if this is a run of one."""
    hydra = HydraConfig.get()
    return Path(hydra.sweep.dir).name if hydra.mode == RunMode.MULTIRUN else None


def track_weights(config: DictConfig, folder: Path, tracker: Any) -> None:
    """Upload what was saved, if that is asked for."""
    if config.tracking.checkpoints:
        saved = folder / "checkpoints"
        paths = [*sorted(saved.glob("step_*.ckpt"))[-1:], saved / "best.ckpt", folder / "model.pt"]
        tracker.files("weights", [path for path in paths if path.exists()])


def as_row(epoch: Any) -> dict[str, Any]:
    """An epoch's metrics, without those that there are none of."""
    return {name: value for name, value in asdict(epoch).items() if value is not None}


def beside_predicted(
    measured: "Measurements", job: Any, notes: list[str]
) -> tuple[list[Any], list[dict[str, Any]]]:
    """The timelines, measured and predicted, and a row a rank; a note if nothing is predicted."""
    from toolkit.cost.timeline import ACTIVATIONS, WEIGHTS
    from toolkit.errors import first_line
    from toolkit.training.prediction import beside_prediction

    rows: list[dict[str, Any]] = [*measured.by_rank()]
    try:
        timeline, predicted = beside_prediction(measured, job.config, job.samples.form)
    except (ValueError, RuntimeError) as error:  # what can run cannot always be analysed
        notes.append(f"nothing is predicted beside what was measured: {first_line(error)}")
        return [measured.timeline()], rows
    for rank, row in enumerate(rows):
        if job.config.checkpoint == "none":  # else they live within ops, where none are measured
            row["predicted_activations"] = predicted.peak_memory(rank, ACTIVATIONS)
        row["predicted_weights"] = predicted.peak_memory(rank, WEIGHTS)
    return [timeline, predicted], rows


def write_measured(
    lines: list[Any], ranks: list[dict[str, Any]], folder: Path, tracker: Any
) -> None:
    """Tables, a figure and a trace of the steps that were measured.

    Args:
        lines: the timeline that was measured, and what was predicted beside it.
    """
    from toolkit.figures import save, timelines
    from toolkit.files import write_csv
    from toolkit.results import track_measured

    figure, timeline = timelines(lines), lines[0]
    write_csv(folder / "ranks.csv", ranks)
    save(figure, folder / "timeline")
    timeline.to_chrome_trace(folder / "trace.json")
    timeline.to_frame().to_csv(folder / "spans.csv", index=False)
    track_measured(tracker, timeline, figure, ranks)


if __name__ == "__main__":
    main()
