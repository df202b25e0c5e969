"""Runs in W&B. A failure there is reported once, and training continues.

    with track(config, folder, ...) as tracker:
        tracker.log({"train/loss": 0.5}, step=10)

Experiments write their own results; nothing depends on W&B.
"""

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from io import BytesIO
from math import isfinite
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from tqdm.auto import tqdm

from toolkit.errors import UserError, first_line
from toolkit.files import write_json
from toolkit.format import MIB
from toolkit.options import AROUND, TrackingOptions, without
from toolkit.results.provenance import provenance
from toolkit.results.record import DamagedError, read_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from toolkit.cost import Timeline
    from toolkit.schedule import Schedule
    from toolkit.training import Epoch, Step

STEP = "step"
WANDB_RUN = "wandb_run.json"
"""File in a run's folder with its id and group in W&B, which a resumed run keeps."""

_INTERRUPTED = 130  # exit status
_MOST_ROWS = 10_000  # of a table; W&B's pages show no more
_MOST_OPS = 1024  # micro-batches x stages of a schedule that is tracked
_SETTINGS: dict[str, Any] = {
    "silent": True,
    "console": "off",
    "init_timeout": 20.0,  # seconds
    "login_timeout": 1.0,
    "finish_timeout": 300.0,  # to send what is left, which stays on disk
    "finish_timeout_raises": True,
    "disable_git": True,
    "disable_code": True,
    "x_disable_meta": True,  # it has the command line, which may hold secrets
    "reinit": "create_new",
}
_reported: set[str] = set()  # notes that this process has printed


class Tracker:
    """Logs to a run of W&B, until it fails for the first time; without a run, logs nothing.

    Args:
        run: as ``wandb.init`` returns it.
        every: training steps from one logged step to the next.
    """

    def __init__(self, run: Any = None, every: int = 1) -> None:
        self.on = run is not None  # whether anything is done with what is logged
        self.notes: list[str] = []  # what went wrong
        self.where = ""  # how to find the run, once it has ended
        self._run = run
        self._every = every
        self._steps_done = 0
        self._state: tuple[str, int] | None = None

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Log numbers at a training step; or figures as images, and lists of rows as tables.

        Args:
            values: values by name.
            step: training steps that the run has done; None for values of the whole run.
        """
        step_field = {} if step is None else {STEP: step}
        self._try(
            lambda run: run.log(
                step_field | {name: _logged(value) for name, value in values.items()}
            )
        )

    def step(self, step: "Step") -> None:
        """Log a training step."""
        if not self.on:
            return
        self._steps_done = step.result.step + 1
        values: dict[str, Any] = {}
        if self._steps_done % self._every == 0:  # reading the loss waits for the device
            values["train/lr"] = step.learning_rate
            if len(step.result.losses):
                values["train/loss"] = float(step.result.loss)
        for delay in step.result.delays:
            for name, value in asdict(delay).items():
                if name not in ("step", "stage") and isfinite(value):
                    values[f"delay/{name}_stage_{delay.stage}"] = value
        if values:
            self.log(values, self._steps_done)

    def epoch(self, epoch: "Epoch") -> None:
        """Log an epoch's metrics."""
        values = {
            f"epoch/{name}": value for name, value in asdict(epoch).items() if value is not None
        }
        self.log(values | {"epoch": values.pop("epoch/epoch")}, self._steps_done)

    def summary(self, values: Mapping[str, Any]) -> None:
        """Set results of the whole run."""
        self._try(lambda run: run.summary.update(dict(values)))

    def config(self, values: Mapping[str, Any]) -> None:
        """Add to the run's options."""
        self._try(lambda run: run.config.update(dict(values)))

    def files(self, name: str, paths: Sequence[Path]) -> None:
        """Upload files as an artifact."""

        def upload(run: Any) -> None:
            import wandb

            artifact = wandb.Artifact(f"{name}-{run.id}", type="model")
            for path in paths:
                artifact.add_file(str(path))
            run.log_artifact(artifact)

        self._try(upload)

    def end(self, state: str, status: int) -> None:
        """Set how the run has ended; the first call counts.

        Args:
            state: the end in words, such as finished or ``failed: ...``.
            status: exit status of the run in W&B.
        """
        self._state = self._state or (state, status)

    def close(self) -> None:
        """Finish the run, and set :attr:`where` to its URL or its ``wandb sync`` command."""
        if self._run is None:
            return
        state, status = self._state or ("finished", 0)
        self.summary({"state": state})
        run_folder = Path(self._run.dir).parent
        try:
            self._run.finish(exit_code=status)
        except Exception as error:
            sync_hint = f"to send the rest: wandb sync {shlex.quote(str(run_folder))}"
            self._fail(f"{first_line(error)}; {sync_hint}")
        if self.on and self._run.url:
            self.where = f"tracked online: {self._run.url}"
        elif self.on:  # a resumed run has several folders, which `wandb sync` joins by their id
            folders = f"{shlex.quote(str(run_folder.parent))}/offline-run-*-{self._run.id}*"
            self.where = f"tracked offline: wandb sync {folders}"

    def note(self, text: str) -> None:
        """Keep a note on what went wrong, and print it once in a process."""
        self.notes.append(text)
        if text not in _reported:
            _reported.add(text)
            tqdm.write(f"warning: {text}", file=sys.stderr)

    def _try(self, call: Callable[[Any], object]) -> None:
        """Call with the run; W&B's first error is noted, and nothing is tried after it."""
        if self.on:
            try:
                call(self._run)
            except Exception as error:
                self._fail(first_line(error))

    def _fail(self, why: str) -> None:
        if self.on:
            self.on = False
            self.note(f"not tracked to the end: W&B has failed ({why})")


def _logged(value: Any) -> Any:
    """Return a value as W&B logs it: a list of rows as a table, a figure as an image."""
    import wandb

    if isinstance(value, list):
        data = [[*row.values()] for row in value[:_MOST_ROWS]]
        return wandb.Table(columns=[*value[0]] if value else [], data=data)
    if hasattr(value, "savefig"):
        from PIL import Image

        content = BytesIO()
        value.savefig(content, format="png", dpi=150, bbox_inches="tight")
        return wandb.Image(Image.open(content))
    return value


@contextmanager
def track(
    config: Mapping[str, Any],
    folder: Path,
    *,
    device: str,
    name: str,
    job_type: str = "train",
    group: str | None = None,
    resume: bool = False,
    own: Path | None = None,
    here: bool = True,
) -> Iterator[Tracker]:
    """Track a run as its options say, and finish it however it ends.

    Args:
        config: the run's options; their ``tracking`` are those of TrackingOptions.
        folder: folder of its results; W&B's files go to ``folder/wandb``.
        device: the device in words.
        name: name of the run, unless the options have one.
        job_type: the experiment.
        group: group of the run, unless the options have one.
        resume: continue the run that was tracked before in this folder, if there is one.
        own: the run's own folder, if several runs share ``folder``.
        here: whether this process tracks.

    Raises:
        UserError: invalid tracking options.
    """
    options = TrackingOptions(**config["tracking"])
    if not here or options.mode == "disabled":
        yield Tracker()
        return
    origin = provenance(config, device, 0)
    content = without(origin.pop("config"), AROUND) | {"provenance": origin}
    identity_path, wandb_folder = (own or folder) / WANDB_RUN, folder / "wandb"
    saved_identity = read_identity(identity_path) if resume else {}
    # An agent of a W&B sweep names its runs.
    identifier = saved_identity.get("id") or os.environ.get("WANDB_RUN_ID") or uuid4().hex[:8]
    group = options.group or saved_identity.get("group") or group
    wandb_folders = {
        "WANDB_CACHE_DIR": str(wandb_folder / "cache"),
        "WANDB_DATA_DIR": str(wandb_folder / "data"),
    }
    with environment(WANDB_SILENT="true", **wandb_folders):
        tracker = Tracker()
        try:
            import wandb

            wandb_folder.mkdir(parents=True, exist_ok=True)
            write_json(identity_path, {"id": identifier, "group": group})
            settings = {
                name: value
                for name, value in _SETTINGS.items()
                if name in wandb.Settings.model_fields
            }
            run = wandb.init(
                mode=options.mode,  # type: ignore[arg-type]
                dir=str(folder),
                id=identifier,
                resume="allow",
                project=options.project,
                entity=options.entity,
                group=group,
                name=options.name or name,
                tags=list(options.tags),
                job_type=job_type,
                config=content,
                settings=wandb.Settings(**settings),
            )
            run.define_metric(STEP, hidden=True)
            run.define_metric("*", step_metric=STEP)
            run.define_metric("epoch", hidden=True)
            run.define_metric("epoch/*", step_metric="epoch")
            for metric, best_value in (("epoch/top1", "max"), ("epoch/test_loss", "min")):
                run.define_metric(metric, step_metric="epoch", summary=f"{best_value},last")
            tracker = Tracker(run, options.every)
        except ImportError:
            tracker.note("not tracked: pip install wandb, or tracking.mode=disabled")
        except Exception as error:
            online = ": run `wandb login`, or tracking.mode=offline; results are in its folder"
            hint = online if options.mode == "online" else ""
            tracker.note(f"not tracked: W&B has failed ({first_line(error)}){hint}")
        try:
            yield tracker
        except KeyboardInterrupt:
            tracker.end("interrupted", _INTERRUPTED)
            raise
        except BaseException as error:
            tracker.end(f"failed: {first_line(error)}", 1)
            raise
        finally:
            tracker.close()
            shutil.rmtree(wandb_folder / "cache", ignore_errors=True)


def group_of(folder: Path) -> str:
    """Return the W&B group of a comparison's runs; in a sweep it starts with the sweep's name."""
    folder = folder.resolve()
    is_in_sweep = (folder.parent / "sweep.json").exists()
    return "/".join(folder.parts[-2:] if is_in_sweep else folder.parts[-1:])


def read_identity(path: Path) -> dict[str, Any]:
    """Return a run's id and group in W&B; empty if the file is missing or damaged."""
    with suppress(DamagedError):
        return read_json(path)
    return {}


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Set environment variables that are unset, and unset them at the end."""
    added_variables = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added_variables)
    try:
        yield
    finally:
        for name in added_variables:
            os.environ.pop(name, None)


def track_schedule(tracker: Tracker, schedule: "Schedule") -> None:
    """Log a schedule's name, grid, and expected memory and traffic, unless it is large.

    By slot, the unit of memory is the activations of one stage and micro-batch. In the summary it
    is a micro-batch. The unit of traffic is the parameters of one stage.

    Args:
        tracker: tracker of the run.
        schedule: schedule of the run; only the name if it has over 1024 stages times micro-batches.
    """
    tracker.config({"schedule_label": schedule.name})
    if not tracker.on or schedule.n_stages * schedule.n_microbatches > _MOST_OPS:
        return
    from toolkit.figures import schedules
    from toolkit.schedule import steady_state
    from toolkit.schedule.choice import SCHEDULES, choice_of

    with suppress(UserError):  # no method of the catalogue
        tracker.config({"schedule_family": SCHEDULES[choice_of(schedule).schedule].kind})
    try:
        steady = steady_state(schedule)
    except ValueError as error:  # training may still accept the schedule
        tracker.note(f"the schedule is not tracked: {first_line(error)}")
        return
    units_by_slot, n_steps = steady.units_by_slot, len(steady.traffic) / float(schedule.period)
    tracker.summary(
        {
            "schedule/ranks": schedule.n_ranks,
            "schedule/peak_activations": steady.peak_activations / schedule.n_stages,
            "schedule/peak_activations_of_rank": max(map(max, steady.activations))
            / schedule.n_stages,
            "schedule/staleness_mean": schedule.mean_staleness,
            "schedule/staleness_max": schedule.max_staleness,
            "schedule/traffic_mean": float(sum(units_by_slot)) / len(units_by_slot),
            "schedule/traffic_max": float(max(units_by_slot)),
            "schedule/messages_a_step": sum(
                rank.messages for slot in steady.traffic for rank in slot
            )
            / n_steps,
        }
    )
    activations = [
        {"slot": slot, "all ranks": total, "fullest rank": max(ranks)}
        for slot, (total, ranks) in enumerate(
            zip(steady.total_activations, steady.activations, strict=True)
        )
    ]
    traffic = [
        {
            "slot": slot,
            "messages": sum(rank.messages for rank in sent),
            "all ranks": float(sum(rank.units for rank in sent)),
            "busiest rank": float(max(rank.units for rank in sent)),
        }
        for slot, sent in enumerate(steady.traffic)
    ]
    tracker.log(
        {
            "schedule/activations_by_slot": activations,
            "schedule/traffic_by_slot": traffic,
            "schedule/grid": schedules([schedule]),
        }
    )


def track_measured(
    tracker: Tracker,
    figure: "Figure",
    ranks: list[dict[str, Any]],
    timeline: "Timeline",
    predicted: "Timeline | None" = None,
) -> None:
    """Log a measured timeline: its figure, memory and messages over time, and a row per rank.

    The summary has the step times in seconds, also the predicted one, and the means over ranks.

    Args:
        tracker: tracker of the run.
        figure: drawing of ``timeline``.
        ranks: measurements, a row per rank.
        timeline: measured timeline.
        predicted: simulated timeline of the same schedule, or None.
    """
    columns = ["rank", "start", "end", "bytes", "slot"]
    send_spans = [span for span in timeline.spans if span.lane == "send"]
    tracker.log(
        {
            "measured/timeline": figure,
            "measured/memory": [
                {"seconds": seconds, "bytes": n_bytes} for seconds, n_bytes in timeline.memory()
            ],
            "measured/messages": [
                {column: getattr(span, column) for column in columns} for span in send_spans
            ],
            "measured/ranks": ranks,
        }
    )
    peaks = [timeline.peak_memory(rank) for rank in range(timeline.n_ranks)]
    scalars = {
        "measured/peak_mib_of_rank": max(peaks) / MIB,
        "measured/bytes_sent_a_step": mean(timeline.bytes_a_step()),
        "measured/messages_a_step": len(send_spans) / len(timeline.step_ends) / timeline.n_ranks,
        "measured/step_seconds": timeline.step_time,
    }
    if predicted is not None:
        scalars["predicted/step_seconds"] = predicted.step_time
    tracker.summary(scalars)
