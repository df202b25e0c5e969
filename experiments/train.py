"""Train one model by one schedule.

python experiments/train.py schedule=cdp_v2 data=digits seed=3
python experiments/train.py -m schedule=dp,cdp_v1,cdp_v2 seed=0,1,2
python experiments/train.py resume=outputs/train/...
torchrun --nproc-per-node 4 experiments/train.py runtime=distributed schedule=cdp_v2
"""

import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from toolkit.cli import STOPPED, Ended, build_run, entry_point, is_rank_zero, output_folder
from toolkit.cli.sweeps import mark_failed
from toolkit.errors import UserError, first_line
from toolkit.files import note_write_errors, write_csv, write_json
from toolkit.format import rank_cells, table
from toolkit.torchrun import restarted

if TYPE_CHECKING:
    from toolkit.results import Tracker
    from toolkit.runtime import SwitchDecision, Switching
    from toolkit.runtime.meters.measurements import Measurements
    from toolkit.training import Epoch, Outcome, Step, TrainingRun


@entry_point("train")
def main(config: DictConfig) -> Ended:
    from toolkit.plan.rate_check import check_rate
    from toolkit.results import describe, track
    from toolkit.results.provenance import resume_command
    from toolkit.training import StoppedError, run_with_checkpoints
    from toolkit.training.checkpoint import from_rank_0
    from toolkit.training.profiling import check_profile
    from toolkit.training.run_with_checkpoints import rollback_schedule

    start = time.perf_counter()
    check_profile(config.profile)
    run = build_run(config)
    rollback_schedule(run)
    folder, hydra = output_folder(), HydraConfig.get()
    if run.runtime.world is not None:  # whichever rank knows the reason writes it
        run.runtime.world.watch.on_failure = partial(mark_failed, from_rank_0(run.runtime, folder))
    resumed = bool(config.resume) or restarted()
    if config.stability and not resumed and is_rank_zero() and (unstable := check_rate(run)):
        print(f"warning: {unstable}", file=sys.stderr)
    with track(
        run.record,
        folder,
        device=describe(run.device),
        name=f"{run.schedule.name}, seed {config.seed}",
        group=Path(hydra.sweep.dir).name if hydra.mode == RunMode.MULTIRUN else None,
        resume=resumed,
    ) as tracker:
        with Records(run, folder, tracker, resumed) as records:
            try:
                outcome = run_with_checkpoints(
                    run,
                    folder,
                    # Ranks that torchrun restarted resume if they can.
                    resume=True if config.resume else None if restarted() else False,
                    on_epoch=records.epoch,
                    on_step=records.step,
                    on_note=records.line,
                )
            except StoppedError as stopped:
                tracker.end(f"stopped by {stopped}", STOPPED)
                records.track_weights()
                saved = f"; {resume_command(folder)}" if stopped.saved else "; nothing is saved"
                records.line(f"stopped by {stopped}{saved}")
                return Ended(STOPPED)
        measured, objective = outcome.run.measurements(), outcome.epochs[-1].top1
        if not is_rank_zero():
            return Ended(objective=objective)
        written, result = conclude(outcome, measured, records, start)
    if tracker.where:
        print(tracker.where)
    if late := [note for note in tracker.notes if note not in result["notes"]]:
        with suppress(OSError):
            write_json(folder / "result.json", result | {"notes": [*result["notes"], *late]})
    return Ended(0 if written and not outcome.weights_lost else 1, objective)


def conclude(
    outcome: "Outcome", measured: "Measurements | None", records: "Records", start: float
) -> tuple[bool, dict[str, Any]]:
    """Write, track and print the results of a run; return whether they are written, and them."""
    from toolkit.results import delay_means, describe, provenance
    from toolkit.results.record import SCHEMA

    run, folder, tracker = outcome.run, records.folder, records.tracker
    notes, damaged = list(outcome.notes), [*getattr(run.samples, "damaged", ())]
    if outcome.resumed_at:
        ended = outcome.resumed_at == run.runtime.steps_done
        rest = "there was nothing left to train" if ended else "seconds are of the steps since"
        notes.append(f"resumed at step {outcome.resumed_at}: {rest}")
    if damaged:
        notes.append(f"{len(damaged)} damaged images, each replaced by another of its class")
    epochs, delays = [as_row(epoch) for epoch in outcome.epochs], records.delays.rows()
    ranks: list[dict[str, Any]] = [{"rank": rank} for rank in range(run.runtime.n_ranks)]
    with note_write_errors(notes, folder):
        write_csv(folder / "epochs.csv", epochs)
        if delays:
            write_csv(folder / "delays.csv", delays)
    if measured:
        ranks = conclude_measured(measured, run, notes, folder, tracker)
    if run.switching is not None:
        notes += conclude_switching(run.switching, folder, tracker)
    records.track_weights()
    seconds = time.perf_counter() - start
    tracker.summary({f"final/{name}": value for name, value in epochs[-1].items()})
    tracker.summary({"notes": "\n".join(notes), "seconds": seconds})
    result = {
        "schema": SCHEMA,
        "schedule": run.schedule.name,
        "metrics": epochs[-1],
        "judged_by": run.samples.form.metric.name,
        "notes": [*notes, *tracker.notes],
        "damaged": damaged,
        "delays": delay_means(delays, ["stage"]),
        "ranks": ranks,
        "provenance": provenance(run.record, describe(run.device), seconds),
    }
    unwritten: list[str] = []
    with note_write_errors(unwritten, folder):
        write_json(folder / "result.json", result)
    show(run, result, records)
    for note in [*notes, *unwritten]:
        print(f"\nnote: {note}")
    print("\nthe result is not written" if unwritten else f"\nwritten to {folder}")
    return not unwritten, result


class Records(ExitStack):
    """What a run shows, tracks and writes while it trains; a resumed one continues its tables."""

    def __init__(self, run: "TrainingRun", folder: Path, tracker: "Tracker", resumed: bool) -> None:
        from toolkit.results import Ledger, Progress, track_schedule
        from toolkit.training.profiling import Profile

        super().__init__()
        tracking, here = run.record["tracking"], is_rank_zero()
        track_schedule(tracker, run.schedule)
        self.folder, self.tracker, self.uploads = folder, tracker, tracking["checkpoints"]
        self.measure = run.samples.form.metric
        self.epochs = Ledger(folder / "epochs.csv", ["epoch"], resume=resumed, here=here)
        self.delays = Ledger(folder / "delays.csv", ["step", "stage"], resume=resumed, here=here)
        self.progress = Progress(run.options.epochs, shown=here)
        self.progress.run(f"{run.schedule.name}, seed {run.options.seed}")
        self.enter_context(self.progress)
        self.run = run
        if run.switching is not None:
            run.switching.on_decision = self.switch_decision
        profile = Profile(run.record["profile"], folder / "profile.json", here=here)
        self.profile = self.enter_context(profile)

    def epoch(self, epoch: "Epoch") -> None:
        self.progress.note(f"test {epoch.text(self.measure)}")
        self.tracker.epoch(epoch)
        self.epochs.put([as_row(epoch)])

    def step(self, step: "Step") -> None:
        self.progress.trained(step)
        self.tracker.step(step)
        self.delays.put([asdict(delay) for delay in step.result.delays])
        self.profile.step()

    def switch_decision(self, decision: "SwitchDecision") -> None:
        values: dict[str, float] = {"switch/seconds": decision.seconds}
        values |= {f"switch/predicted/{name}": t for name, t in decision.predicted.items()}
        if self.run.switching is not None:
            chosen = self.run.switching.candidates[decision.schedule]
            values["switch/staleness"] = chosen.mean_staleness
        self.tracker.log(values, decision.step)
        if decision.reason:
            self.line(f"step {decision.step}: {decision.schedule} from here on ({decision.reason})")

    def line(self, text: str) -> None:
        """Print a line above the progress bar."""
        if is_rank_zero():
            self.progress.line(text)

    def track_weights(self) -> None:
        """Upload the latest weights, if tracking.checkpoints says so."""
        if self.uploads:
            saved = self.folder / "checkpoints"
            latest = sorted(saved.glob("step_*.ckpt"))[-1:]
            paths = [*latest, saved / "best.ckpt", self.folder / "model.pt"]
            self.tracker.files("weights", [path for path in paths if path.exists()])


def show(run: "TrainingRun", result: dict[str, Any], records: Records) -> None:
    """Print the results of a run."""
    from toolkit.training.profiling import WARM_UP

    metrics = {k: v for k, v in result["metrics"].items() if k != "epoch"}
    about = {"schedule": result["schedule"], "seed": run.options.seed}
    print(table([about | {"epochs": result["metrics"]["epoch"] + 1} | metrics]))
    if "peak_weights" in result["ranks"][0]:
        print(f"\nmeasured in the first {run.record['runtime']['record']} training steps:\n")
        print(table([rank_cells(row) for row in result["ranks"]]))
    if result["delays"]:
        print("\nwhat the delay does to the gradients, mean over the steps looked into:\n")
        print(table(result["delays"]))
    if records.profile.written:
        print(f"\nprofile: {records.profile.path} (for ui.perfetto.dev or chrome://tracing)")
    elif run.record["profile"]:
        print(f"\nno profile: it begins after {WARM_UP} training steps, and the run has no more")


def as_row(epoch: Any) -> dict[str, Any]:
    """An epoch's metrics, without those that are None."""
    return {name: value for name, value in asdict(epoch).items() if value is not None}


def conclude_switching(switching: "Switching", folder: Path, tracker: "Tracker") -> list[str]:
    """Write and track what the run decided; return how to repeat it."""
    from toolkit.figures import save
    from toolkit.figures import switching as draw
    from toolkit.schedule.spec import in_order

    phases = [(name, n_steps) for name, n_steps in switching.phases() if n_steps]
    step_seconds: list[float] = []
    for decision in switching.decisions:
        step_seconds += [decision.seconds] * (decision.step - len(step_seconds))
    notes = [f"trained {' and then '.join(f'{n} steps by {name}' for name, n in phases)}"]
    with suppress(UserError):  # a schedule of the user's own has no name
        repeated = in_order((switching.candidates[name], n) for name, n in phases).overrides()
        notes[0] += f"; to repeat it, leave switch out and give {repeated}"
    with note_write_errors(notes, folder):
        write_csv(folder / "looks.csv", [asdict(decision) for decision in switching.decisions])
        if switching.decisions:
            figure = draw(step_seconds, [name for name, n in phases for _ in range(n)])
            save(figure, folder / "switching")
            tracker.log({"switching": figure})
    return notes


def conclude_measured(
    measured: "Measurements", run: "TrainingRun", notes: list[str], folder: Path, tracker: "Tracker"
) -> list[dict[str, Any]]:
    """Write what was measured, and what is predicted; a row a rank."""
    from toolkit.cost.timeline import ACTIVATIONS, WEIGHTS
    from toolkit.figures import save, timelines
    from toolkit.results import track_measured
    from toolkit.training.profiling import beside_prediction

    rows: list[dict[str, Any]] = [*measured.by_rank()]
    try:
        model, form = run.build_model(), run.samples.form
        lines = [*beside_prediction(measured, model, form, run.options)]
    except (ValueError, RuntimeError) as error:  # what can run cannot always be analysed
        notes.append(f"nothing is predicted beside what was measured: {first_line(error)}")
        lines = [measured.timeline()]
    for rank, row in enumerate(rows if len(lines) > 1 else ()):
        if run.options.checkpoint == "none":  # else they live within ops, where none are measured
            row["predicted_activations"] = lines[1].peak_memory(rank, ACTIVATIONS)
        row["predicted_weights"] = lines[1].peak_memory(rank, WEIGHTS)
    with note_write_errors(notes, folder):
        figure = timelines(lines)
        write_csv(folder / "ranks.csv", rows)
        save(figure, folder / "timeline")
        lines[0].to_chrome_trace(folder / "trace.json")
        lines[0].to_frame().to_csv(folder / "spans.csv", index=False)
        track_measured(tracker, figure, rows, *lines)
    return rows


if __name__ == "__main__":
    main()
