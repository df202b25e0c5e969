"""Runs in W&B. A failure there is reported once, and training continues.

    with track(config, folder, ...) as tracker:
        tracker.log({"train/loss": 0.5}, step=10)

Experiments write their own results; nothing depends on W&B.
"""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from toolkit.errors import UserError, first_line
from toolkit.extras import install_command
from toolkit.files import write_json
from toolkit.metric import Metric
from toolkit.options import AROUND, TrackingOptions, without
from toolkit.results.provenance import provenance
from toolkit.results.record import DamagedError, read_json
from toolkit.results.tracker import STEP, Tracker
from toolkit.torchrun import is_rank_zero

if TYPE_CHECKING:
    from toolkit.schedule import Schedule, SteadyState

WANDB_RUN = "wandb_run.json"
"""File in a run's folder with its id and group in W&B, which a resumed run keeps."""

_LONGEST_TAG = 64  # characters that W&B takes
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
    # A comparison has one run after another in a process.
    "reinit": "create_new",
}


@dataclass(frozen=True)
class RunLabels:
    """What a run is found by in W&B.

    Attributes:
        name: name of the run, unless the options have one.
        group: group of the run, unless the options have one.
        tags: tags of the run, after those of the options.
        job_type: what the run does: train, compare (as one of a comparison), or differences.
    """

    name: str
    group: str | None = None
    tags: Sequence[str] = ()
    job_type: str = "train"


@contextmanager
def track(
    config: Mapping[str, Any],
    folder: Path,
    run_labels: RunLabels,
    *,
    device: str,
    resume: bool = False,
    run_folder: Path | None = None,
) -> Iterator[Tracker]:
    """Track a run as its options say, and finish it however it ends; only the first rank tracks.

    Args:
        config: the run's options; their ``tracking`` are those of TrackingOptions.
        folder: folder of its results; W&B's files go to ``folder/wandb``.
        run_labels: what the run is found by.
        device: the device in words.
        resume: continue the run that was tracked before in this folder, if there is one.
        run_folder: the run's own folder, if it is one of a comparison in ``folder``.

    Raises:
        UserError: invalid tracking options.
    """
    options = TrackingOptions(**config["tracking"])
    if not is_rank_zero() or options.mode == "disabled":
        yield Tracker()
        return

    # 1. The run's identity, which a resumed run keeps.
    identity_path = (run_folder or folder) / WANDB_RUN
    saved_identity = read_identity(identity_path) if resume else {}
    # An agent of a W&B sweep names its runs.
    run_id = (
        saved_identity.get("id") or os.environ.get("WANDB_RUN_ID") or uuid4().hex[:8]
    )
    group = options.group or saved_identity.get("group") or run_labels.group
    identity = {"id": run_id, "group": group}
    # W&B refuses a whole run for one tag that is too long or empty.
    new_tags = [tag[:_LONGEST_TAG] for tag in run_labels.tags if tag]

    # 2. The run itself. All of W&B's files are below the results, none in the home folder.
    wandb_folder = folder / "wandb"
    with environment(
        WANDB_SILENT="true",
        WANDB_CACHE_DIR=str(wandb_folder / "cache"),
        WANDB_DATA_DIR=str(wandb_folder / "data"),
    ):
        tracker = _start(
            options,
            identity_path,
            **identity,
            dir=str(folder),
            name=options.name or run_labels.name,
            job_type=run_labels.job_type,
            tags=[*dict.fromkeys([*options.tags, *new_tags])],
            config=_tracked_options(config, device),
        )
        try:
            with tracker:
                yield tracker
        finally:
            shutil.rmtree(wandb_folder / "cache", ignore_errors=True)


def _tracked_options(config: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Return a run's options, without those around a run, and where they come from."""
    origin = provenance(config, device, 0)
    run_options = without(origin.pop("config"), AROUND)
    return run_options | {"provenance": origin}


def _start(options: TrackingOptions, identity_path: Path, **run_fields: Any) -> Tracker:
    """Start a run in W&B, or continue the one with its id; a failure becomes a note."""
    tracker = Tracker()
    try:
        import wandb

        Path(run_fields["dir"], "wandb").mkdir(parents=True, exist_ok=True)
        # Before W&B starts, so that a run that is killed meanwhile keeps its id.
        identity = {name: run_fields[name] for name in ("id", "group")}
        write_json(identity_path, identity)
        return Tracker(_init(wandb, options, run_fields), options.every)
    except ImportError:
        tracker.note(
            f"not tracked: {install_command('wandb')}, or tracking.mode=disabled"
        )
    except Exception as error:
        hint = ""
        if options.mode == "online":
            hint = ": run `wandb login`, or tracking.mode=offline; results are in its folder"
        tracker.note(f"not tracked: W&B has failed ({first_line(error)}){hint}")
    return tracker


def _init(wandb: Any, options: TrackingOptions, run_fields: Mapping[str, Any]) -> Any:
    """Return a run of W&B that knows how its curves are drawn."""
    # Versions of the package know different settings.
    known_settings = _SETTINGS.keys() & wandb.Settings.model_fields.keys()
    run = wandb.init(
        mode=options.mode,
        project=options.project,
        entity=options.entity,
        # Continues the run of this id if there is one, and else begins it.
        resume="allow",
        settings=wandb.Settings(**{name: _SETTINGS[name] for name in known_settings}),
        **run_fields,
    )
    # W&B's own counter grows with every call of log(). Curves are drawn over steps and epochs.
    run.define_metric(STEP, hidden=True)
    run.define_metric("*", step_metric=STEP)
    run.define_metric("epoch", hidden=True)
    run.define_metric("epoch/*", step_metric="epoch")
    run.define_metric("epoch/top1", step_metric="epoch", summary="max,last")
    run.define_metric("epoch/test_loss", step_metric="epoch", summary="min,last")
    return run


def track_differences(
    config: Mapping[str, Any],
    folder: Path,
    *,
    device: str,
    rows: Sequence[Mapping[str, Any]],
    labels: Mapping[str, str],
    metric: Metric,
) -> None:
    """Track what a comparison has found, if anything, as a run of its group.

    Its summary has each rule's mean and its difference from the first rule with half of the
    95 % interval, in the metric's units.

    Args:
        config: options of the comparison.
        folder: folder of the comparison.
        device: the device in words.
        rows: a row per rule, as :func:`toolkit.results.over_seeds` makes them.
        labels: the name of each rule in tables.
        metric: by which the rules are compared.
    """
    summary: dict[str, float] = {}
    for row in rows:
        label = labels[row["rule"]]
        mean_name, _, difference_name, interval_name = metric.columns
        values = {
            f"{metric.name}/{label}": row[mean_name],
            f"difference/{label}": row[difference_name],
            f"difference_95/{label}": row[interval_name],
        }
        summary |= {name: value for name, value in values.items() if isfinite(value)}
    # Without a finite value there is no difference to show, and an empty run would only be in the
    # way.
    if not summary:
        return
    with track(
        config,
        folder,
        RunLabels("differences", group_of(folder), job_type="differences"),
        device=device,
        resume=bool(config.get("resume")),
    ) as tracker:
        tracker.summary(summary)
        tracker.log({"comparison": [dict(row) for row in rows]})


def group_of(folder: Path) -> str:
    """Return the W&B group of a comparison's runs; in a sweep it starts with the sweep's name."""
    folder = folder.resolve()
    # Folders of a sweep's jobs have numbers as names, which several sweeps have in common.
    is_in_sweep = (folder.parent / "sweep.json").exists()
    if is_in_sweep:
        return f"{folder.parent.name}/{folder.name}"
    return folder.name


def read_identity(path: Path) -> dict[str, Any]:
    """Return a run's id and group in W&B; empty if the file is missing or damaged."""
    with suppress(DamagedError):
        return read_json(path)
    return {}


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Set environment variables that are unset, and unset them at the end."""
    added_variables = {
        name: value for name, value in values.items() if name not in os.environ
    }
    os.environ.update(added_variables)
    try:
        yield
    finally:
        # Variables that the user has set stay as they were.
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
    from toolkit.schedule import ScheduleSpec, steady_state

    with suppress(UserError):  # no method of the catalogue
        tracker.config({"schedule_family": ScheduleSpec.of(schedule).family})
    try:
        steady = steady_state(schedule)
    except ValueError as error:  # training may still accept the schedule
        tracker.note(f"the schedule is not tracked: {first_line(error)}")
        return
    # Fractions are exact, but W&B takes numbers of JSON.
    units_by_slot = [*map(float, steady.units_by_slot)]
    n_steps = len(steady.traffic) / float(schedule.period)
    activations = _activation_rows(steady)
    traffic = _traffic_rows(steady)
    fullest_peak = max(row["fullest rank"] for row in activations)
    tracker.summary(
        {
            "schedule/ranks": schedule.n_ranks,
            "schedule/peak_activations": steady.peak_activations / schedule.n_stages,
            "schedule/peak_activations_of_rank": fullest_peak / schedule.n_stages,
            "schedule/staleness_mean": schedule.mean_staleness,
            "schedule/staleness_max": schedule.max_staleness,
            "schedule/traffic_mean": sum(units_by_slot) / len(units_by_slot),
            "schedule/traffic_max": max(units_by_slot),
            "schedule/messages_a_step": sum(row["messages"] for row in traffic)
            / n_steps,
        }
    )
    tracker.log(
        {
            "schedule/activations_by_slot": activations,
            "schedule/traffic_by_slot": traffic,
            "schedule/grid": schedules([schedule]),
        }
    )


def _activation_rows(steady: "SteadyState") -> list[dict[str, int]]:
    """Return a row per slot: activations of stages that are alive."""
    rows = []
    for slot, (total, ranks) in enumerate(
        zip(steady.total_activations, steady.activations, strict=True)
    ):
        rows.append({"slot": slot, "all ranks": total, "fullest rank": max(ranks)})
    return rows


def _traffic_rows(steady: "SteadyState") -> list[dict[str, float]]:
    """Return a row per slot: messages, and the parameters of stages that they carry."""
    rows = []
    for slot, ranks in enumerate(steady.traffic):
        units = [rank.units for rank in ranks]
        rows.append(
            {
                "slot": slot,
                "messages": sum(rank.messages for rank in ranks),
                "all ranks": float(sum(units)),
                "busiest rank": float(max(units)),
            }
        )
    return rows
