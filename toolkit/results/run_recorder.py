"""Record a training run: what it shows, tracks and writes, from its first step to its result."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from toolkit.errors import UserError
from toolkit.files import note_write_errors, write_csv, write_json
from toolkit.options import EXIT_STOPPED
from toolkit.results.collect import flat_options
from toolkit.results.measured_tables import write_measured
from toolkit.results.progress import RunProgress
from toolkit.results.provenance import describe, provenance
from toolkit.results.record import RESULT, SCHEMA, Ledger, PlainRow
from toolkit.results.statistics import delay_means
from toolkit.results.tracker import Tracker
from toolkit.results.wandb_run import RunLabels, track, track_schedule
from toolkit.runtime import SwitchDecision, Switching
from toolkit.runtime.meters.measurements import Measurements
from toolkit.schedule.spec_phases import in_order
from toolkit.torchrun import is_rank_zero
from toolkit.training import (
    Epoch,
    Listeners,
    Outcome,
    Step,
    StoppedError,
    TrainingRun,
    run_with_checkpoints,
)
from toolkit.training.profiling import Profile
from toolkit.training.stop_signals import Signals


class RunRecorder:
    """Train a run, and record it in its folder and in W&B, while the context lasts.

    Every rank of a run has a recorder, and only rank 0 writes, tracks and concludes. A resumed run
    continues its tables. ``result.json`` is written once, at the end of the context, when W&B's run
    is closed: its notes say whether that failed.

    Args:
        run: an untrained run.
        folder: folder of the run.
        resume: continue the tables and the W&B run of ``folder``, if there are any. Whether the
            training itself continues is up to :meth:`training`.
        group: group of the run in W&B, unless the options have one.
        comparison: folder of the comparison that the run belongs to, which gets the W&B files. The
            comparison keeps the run's epochs, and this run has no result of its own.
        rule: name of the run's rule in the comparison.

    Attributes:
        tracker: the run in W&B, from the begin of the context.
        delays: table of the delay diagnostics.
        profile: trace of some steps, if the options ask for one.
        result: content of ``result.json``, from :meth:`conclude` on.
        unwritten: why ``result.json`` is not written; empty if it is.
    """

    def __init__(
        self,
        run: TrainingRun,
        folder: Path,
        *,
        resume: bool,
        group: str | None = None,
        comparison: Path | None = None,
        rule: str | None = None,
    ) -> None:
        is_writer = is_rank_zero()
        self.run = run
        self.folder = folder
        self.result: PlainRow | None = None
        self.unwritten: list[str] = []
        self.profile = Profile(
            run.recorded_options.get("profile", 0),
            folder / "profile.json",
            traces=is_writer,
        )
        self.delays = Ledger(
            folder / "delays.csv", ["step", "stage"], resume=resume, writes=is_writer
        )
        # A comparison writes the epochs of its runs itself, once a run has ended.
        self._epochs: Ledger | None = None
        if comparison is None:
            self._epochs = Ledger(
                folder / "epochs.csv", ["epoch"], resume=resume, writes=is_writer
            )
        self._name = f"{run.schedule.name}, seed {run.options.seed}"
        self._tracking = track(
            run.recorded_options,
            comparison or folder,
            RunLabels(
                self._name,
                group,
                _tags(run, rule),
                "compare" if comparison else "train",
            ),
            device=describe(run.device),
            resume=resume,
            run_folder=folder if comparison else None,
        )

    def __enter__(self) -> "RunRecorder":
        # By hand, since the result is written after the tracking has been closed, also after an
        # error.
        self.tracker: Tracker = self._tracking.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            self._tracking.__exit__(*error)
        finally:  # also if Ctrl-C ends an upload
            if self.result is not None:
                self._write_result(self.result)

    @contextmanager
    def training(
        self,
        progress: RunProgress,
        *,
        resume: bool | None,
        weights: bool = True,
        on_note: Callable[[str], None] = lambda note: None,
        signals: Signals | None = None,
    ) -> Iterator[Callable[[], Outcome]]:
        """Yield a function that trains the run with checkpoints in its folder.

        Args:
            progress: shows the training steps.
            resume: continue from the latest intact checkpoint; None: if there is one.
            weights: also keep the best checkpoint and the final weights.
            on_note: called with each note on the run.
            signals: signals that end it; by default those of this process.

        Raises:
            StoppedError: a signal has ended the run.
            DivergedError: its loss has diverged.
        """

        def on_epoch(epoch: Epoch) -> None:
            self.tracker.epoch(epoch)
            if self._epochs is not None:
                progress.note(f"test {epoch.text(self.run.samples.form.metric)}")
                self._epochs.put([as_row(epoch)])

        def on_step(step: Step) -> None:
            progress.trained(step)
            self.tracker.step(step)
            self.delays.put([asdict(delay) for delay in step.result.delays])
            self.profile.step()

        # Before the training, so that a run that fails early can be found by its schedule.
        track_schedule(self.tracker, self.run.schedule)
        progress.run(self._name)
        if self.run.switching is not None:
            self.run.switching.on_decision = partial(self._record_decision, on_note)
        try:
            with self.profile:
                # The caller calls it: tracebacks of a backward are some frames shorter.
                yield partial(
                    run_with_checkpoints,
                    self.run,
                    self.folder,
                    resume=resume,
                    weights=weights,
                    listeners=Listeners(on_epoch, on_step, on_note),
                    signals=signals,
                )
        except StoppedError as stopped:
            self.tracker.end(f"stopped by {stopped}", EXIT_STOPPED)
            raise

    def _record_decision(
        self, on_note: Callable[[str], None], decision: SwitchDecision
    ) -> None:
        """Track a decision on the schedule, and note it if the schedule changes."""
        values: dict[str, float] = {"switch/seconds": decision.seconds}
        for name, seconds in decision.predicted.items():
            values[f"switch/predicted/{name}"] = seconds
        if self.run.switching is not None:
            chosen = self.run.switching.candidates[decision.schedule]
            values["switch/staleness"] = chosen.mean_staleness
        self.tracker.log(values, decision.step)
        if decision.reason:
            on_note(
                f"step {decision.step}: {decision.schedule} from here on ({decision.reason})"
            )

    def upload_weights(self) -> None:
        """Upload the latest weights to W&B, if tracking.checkpoints says so."""
        if self.run.recorded_options["tracking"]["checkpoints"]:
            checkpoints = self.folder / "checkpoints"
            # Names have the step with leading zeros, so that the last name is the latest.
            latest = sorted(checkpoints.glob("step_*.ckpt"))[-1:]
            paths = [*latest, checkpoints / "best.ckpt", self.folder / "model.pt"]
            self.tracker.files("weights", [path for path in paths if path.exists()])

    def conclude(
        self, outcome: Outcome, measured: Measurements | None, start: float
    ) -> PlainRow:
        """Write the tables and figures of a run that has ended, and return its result.

        Only rank 0 calls it.

        Args:
            outcome: how it has ended.
            measured: measurements of all ranks, if any.
            start: when the experiment began, by ``time.perf_counter``.
        """
        # 1. Tables and figures. What cannot be written becomes a note of the result.
        run, folder = outcome.run, self.folder
        notes = [*outcome.notes, *_notes_on(outcome)]
        epochs = [as_row(epoch) for epoch in outcome.epochs]
        delays = self.delays.rows()
        with note_write_errors(notes, folder):
            # Again, as a whole: during the training each row was written for whoever watches, and
            # what failed then may succeed now.
            write_csv(folder / "epochs.csv", epochs)
            if delays:
                write_csv(folder / "delays.csv", delays)
        # Without measurements there is still a row per rank, so that readers need no special case.
        ranks: list[PlainRow] = [{"rank": rank} for rank in range(run.runtime.n_ranks)]
        step_seconds: dict[str, float] = {}
        if measured:
            tables = write_measured(measured, run, folder, self.tracker)
            ranks = tables.ranks
            step_seconds = tables.step_seconds
            notes += tables.notes
        if run.switching is not None:
            notes += _write_switching(run.switching, folder, self.tracker)

        # 2. W&B. Uploads count as time of the experiment.
        self.upload_weights()
        seconds = time.perf_counter() - start
        self.tracker.last_epoch(outcome.epochs[-1])
        self.tracker.summary({"notes": "\n".join(notes), "seconds": seconds})

        # 3. The result. It is written when W&B's run is closed, with notes on what failed there.
        self.result = {
            "schema": SCHEMA,
            "schedule": run.schedule.name,
            "metrics": epochs[-1],
            "judged_by": run.samples.form.metric.name,
            "notes": notes,
            "damaged": _damaged(run),
            "delays": delay_means(delays, ["stage"]),
            "ranks": ranks,
            "step_seconds": step_seconds,
            "provenance": provenance(
                run.recorded_options, describe(run.device), seconds
            ),
        }
        return self.result

    def _write_result(self, result: PlainRow) -> None:
        # Only now are the tracker's notes complete: closing its run may fail, too.
        notes = [*result["notes"], *self.tracker.notes]
        with note_write_errors(self.unwritten, self.folder):
            write_json(self.folder / RESULT, result | {"notes": notes})


def _tags(run: TrainingRun, rule: str | None) -> list[str]:
    """Return what a run is found by in W&B: its rule or schedule, its model and its data."""
    options = flat_options(run.recorded_options)
    return [
        rule or run.schedule.name,
        *(str(options.get(name, "")) for name in ("model", "data")),
    ]


def as_row(epoch: Epoch) -> PlainRow:
    """Return an epoch's metrics, without those that are None."""
    return {name: value for name, value in asdict(epoch).items() if value is not None}


def _damaged(run: TrainingRun) -> list[str]:
    return [*getattr(run.samples, "damaged", ())]


def _notes_on(outcome: Outcome) -> list[str]:
    """Return notes on a resumed run and on damaged images."""
    notes = []
    if outcome.resumed_at:
        detail = "seconds are of the steps since"
        if outcome.resumed_at == outcome.run.runtime.steps_done:
            detail = "there was nothing left to train"
        notes.append(f"resumed at step {outcome.resumed_at}: {detail}")
    damaged = _damaged(outcome.run)
    if damaged:
        notes.append(
            f"{len(damaged)} damaged images, each replaced by another of its class"
        )
    return notes


def _write_switching(switching: Switching, folder: Path, tracker: Tracker) -> list[str]:
    """Write and track what the run decided; return how to repeat it."""
    from toolkit.figures import save
    from toolkit.figures import switching as draw

    phases = [(name, n_steps) for name, n_steps in switching.phases() if n_steps]
    in_words = " and then ".join(
        f"{n_steps} steps by {name}" for name, n_steps in phases
    )
    note = f"trained {in_words}"
    with suppress(UserError):  # a user's schedule has no name in the catalogue
        repeated = in_order(
            (switching.candidates[name], n_steps) for name, n_steps in phases
        ).overrides()
        note += f"; to repeat it, leave switch out and give {repeated}"

    # A decision has the mean seconds of the steps since the one before it:
    #
    #     decision          20         40         60      training step
    #     seconds    |  20 x s_20 | 20 x s_40 | 20 x s_60
    step_seconds: list[float] = []
    for decision in switching.decisions:
        step_seconds += [decision.seconds] * (decision.step - len(step_seconds))
    step_names: list[str] = []
    for name, n_steps in phases:
        step_names += [name] * n_steps
    notes = [note]
    with note_write_errors(notes, folder):
        write_csv(
            folder / "looks.csv", [asdict(decision) for decision in switching.decisions]
        )
        if switching.decisions:
            figure = draw(step_seconds, step_names)
            save(figure, folder / "switching")
            tracker.log({"switching": figure})
    return notes
