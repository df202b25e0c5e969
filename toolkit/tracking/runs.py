"""Runs on disk: what their folders tell, whole, unfinished or damaged."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import isfinite, isnan, nan, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config.shorthands import spell_out
from toolkit.config.sweeps import left_in
from toolkit.measure import ACCURACY, LOSS, Measure
from toolkit.messages import first_line
from toolkit.options import COMPARED, RESUMED_OTHERWISE
from toolkit.tracking.reading import (
    LARGEST,
    DamagedError,
    Numbers,
    mappings,
    number_rows,
    numbers_of,
    per_cent,
    read_csv,
    read_json,
    read_yaml,
    text_or_none,
    whole_number,
)

if TYPE_CHECKING:
    from toolkit.schedule import Schedule

STATES = ("finished", "running", "stopped", "failed", "unfinished", "damaged")
_OWN = "report"  # the experiment that reads runs, and is none
_CATALOG = "toolkit.schedule.catalog."
_MOST_SEEDS = 10_000  # of a comparison; more are a damaged option
_MOST_OPS = 1_000_000  # of a schedule
_TEXTS = ("toolkit.training.data.text", "toolkit.training.data.token_files")
_DIVERGED = re.compile(r"(training|test) loss of epoch \d+")  # in what a run has ended with
_RESOLVER = re.compile(r"\$\{[^}]*:")  # as of the environment, which is nobody else's
_NOT_ENDED = {
    "finished": "",
    "running": "it is running, or was killed",
    "stopped": "it was stopped: resume=FOLDER goes on",
    "failed": "it failed and does not say why",
}


@dataclass(frozen=True)
class Run:
    """One training, or another result, as its folder tells.

    Attributes:
        folder: where it is; several runs of a comparison share it.
        kind: the experiment, such as train or compare.
        state: one of :data:`STATES`.
        message: why it has not finished, or what is missing; empty if nothing is.
        left_out: whether what is missing keeps it out of figures.
        rule: what the configuration calls its schedule.
        schedule: the schedule's name.
        seed: of weights and data.
        config: its own options, those of a single training also where it is one of a comparison.
        judged_by: what tells how good its model is.
        metrics: of the last epoch; accuracies in per cent.
        epochs: the metrics of every epoch.
        delays: what the delay did to the gradients, a row a stage.
        ranks: what was measured, a row a rank.
        notes: on what did not go as it should; of a comparison, on all of its runs.
        repeats: runs that ``metrics`` is the mean of, where no run has been kept by itself.
        provenance: command, commit, versions, device, started, seconds.
    """

    folder: Path
    kind: str
    state: str
    message: str = ""
    left_out: bool = False
    rule: str | None = None
    schedule: str | None = None
    seed: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    judged_by: Measure = ACCURACY
    metrics: Numbers = field(default_factory=dict)
    epochs: Sequence[Numbers] = ()
    delays: Sequence[Numbers] = ()
    ranks: Sequence[Numbers] = ()
    notes: Sequence[str] = ()
    repeats: int = 1
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def trains(self) -> bool:
        """Whether it is one of the experiments that train a model."""
        return self.kind in ("train", "compare")

    @property
    def diverged(self) -> bool:
        """Whether its loss did, which ended it."""
        lost = any(isnan(epoch.get("train_loss", 0.0)) for epoch in self.epochs)
        return lost or _DIVERGED.search(self.message) is not None

    @property
    def counts(self) -> bool:
        """Whether it has a final accuracy, and tells what of."""
        told = isfinite(self.metrics.get("top1", nan)) and isinstance(
            self.config.get("schedule"), dict
        )
        return self.trains and self.state == "finished" and told and not self.left_out


def read_runs(folders: Sequence[str | Path]) -> list[Run]:
    """Every run below the folders, in the order of their names; what is damaged is one, too.

    Raises:
        ValueError: a folder that does not exist, or no runs in any.
    """
    paths = [Path(folder) for folder in folders]
    for path in paths:
        if not path.is_dir():
            raise ValueError(
                f"{path} is not a folder: give the output folder of a run, or one above"
            )
    found: dict[Path, Path] = {}
    for path in paths:
        for folder in _run_folders(path):
            found.setdefault(folder.resolve(), folder)
    runs = [run for folder in found.values() for run in _runs_of(folder)]
    if not runs:
        where = ", ".join(map(str, paths)) or "no folder"
        raise ValueError(
            f"no runs in {where}: looked for result.json, status.json and .hydra/config.yaml, also"
            " in the folders below; python experiments/train.py hydra.run.dir=FOLDER makes one"
        )
    return runs


def rebuild_schedule(options: Mapping[str, Any]) -> "Schedule":
    """The schedule that a run's options describe.

    Only the catalogue's own functions are called, and nothing is read from the environment,
    whatever a result names.

    Raises:
        ValueError: they describe none, or none of this version.
    """
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from toolkit.config import build_schedule

    target = options.get("_target_")
    name = target.removeprefix(_CATALOG) if isinstance(target, str) else ""
    if not isinstance(target, str) or not target.startswith(_CATALOG) or not name.isidentifier():
        raise ValueError(f"{target!r} is not a schedule of the catalogue")
    sizes = [options.get(name) for name in ("n", "n_stages", "n_microbatches", "accumulate")]
    n_ops = prod(size for size in sizes if isinstance(size, int) and size > 0)
    if "${" in str(options) or n_ops > _MOST_OPS:
        raise ValueError("its options are not those of a schedule that has run")
    try:
        return build_schedule(OmegaConf.create(dict(options)))
    except (HydraException, OmegaConfBaseException, OSError, TypeError) as error:
        raise ValueError(first_line(error)) from error


def group_of(folder: Path) -> str:
    """The name under which the runs of a comparison in ``folder`` stand together in W&B."""
    folder = folder.resolve()
    swept = (folder.parent / "sweep.json").exists()
    return "/".join(folder.parts[-2:] if swept else folder.parts[-1:])


def _run_folders(top: Path) -> Iterator[Path]:
    """Folders of runs, from ``top`` down; below a comparison there are none of their own."""
    for place, names, files in os.walk(top):
        folder = Path(place)
        names[:] = sorted(
            (n for n in names if not n.startswith(".") and n not in ("checkpoints", "wandb")),
            key=_by_number,
        )
        job = (folder / ".hydra" / "config.yaml").exists()
        if job or "result.json" in files or "status.json" in files:
            yield folder
            if "runs.csv" in files:
                names.clear()


def _by_number(name: str) -> list[tuple[int, str]]:
    """Orders job 10 after job 9."""
    return [
        (int(part or 0), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)
    ]


def _runs_of(folder: Path) -> list[Run]:
    """The runs of one folder: one, or those of a comparison; none of a report's."""
    state, message = "unfinished", "there is no result.json"
    result: dict[str, Any] = {}
    try:
        if (folder / "result.json").exists():
            result = read_json(folder / "result.json")
            state, message = "finished", ""
        state, message = _status(folder, state, message)
    except DamagedError as error:
        state, message = "damaged", str(error)
    source = result.get("provenance")
    lacking = state == "finished" and not isinstance(source, dict)
    if lacking:
        message = "result.json has no provenance: it is of another version"
    told = source if isinstance(source, dict) else {}
    config = told["config"] if isinstance(told.get("config"), dict) else _options(folder)
    kind, choice = _job(folder)
    kind = kind or _kind(told.get("command"), config) or "unknown"
    if kind == _OWN:
        return []
    by = _judged_by(result, config)
    base = Run(
        *(folder, kind, state, message, lacking),
        rule=choice,
        config=config,
        judged_by=by,
        notes=_notes(result.get("notes")),
        provenance=told,
    )
    try:
        if kind == "compare" and state != "damaged":
            return _compared(base, result)
        return [_trained(base, result)]
    except DamagedError as error:
        return [replace(base, state="damaged", message=str(error))]


def _notes(told: Any) -> list[str]:
    return [note for note in told if isinstance(note, str)] if isinstance(told, list) else []


def _judged_by(result: Mapping[str, Any], config: Mapping[str, Any]) -> Measure:
    """As its result tells; of a run without one, as is usual for its data."""
    data = config.get("data")
    text = isinstance(data, dict) and data.get("_target_") in _TEXTS
    by_name = {measure.name: measure for measure in (ACCURACY, LOSS)}
    return by_name.get(str(result.get("judged_by")), LOSS if text else ACCURACY)


def _status(folder: Path, state: str, message: str) -> tuple[str, str]:
    """What status.json says, or else what was seen."""
    if not (folder / "status.json").exists():
        return state, message
    status = read_json(folder / "status.json")
    said = status.get("state")
    if said not in STATES[:4]:
        raise DamagedError(f"status.json: unknown state {said!r}")
    if said == "finished" and state != "finished":
        return "damaged", "status.json says finished, and there is no result.json"
    if said == "stopped" and not left_in(folder):
        return said, "it was stopped before anything of it was saved: start it again"
    return said, str(status.get("message") or _NOT_ENDED[said])


def _trained(run: Run, result: Mapping[str, Any]) -> Run:
    """A single training, or another experiment's result."""
    config = run.config
    schedule = config.get("schedule")
    run = replace(run, seed=whole_number(config.get("seed")))
    if run.kind != "train":
        return replace(run, rule=None)
    from_file = isinstance(schedule, dict) and bool(schedule.get("file"))
    run = replace(
        run,
        schedule=text_or_none(result.get("schedule")) or _schedule_name(schedule),
        rule=(None if from_file else run.rule) or text_or_none(result.get("schedule")),
        delays=number_rows(result.get("delays")),
    )
    if run.state == "damaged":
        return run
    epochs = read_csv(run.folder / "epochs.csv")
    ranks = read_csv(run.folder / "ranks.csv")
    run = replace(run, epochs=[per_cent(row) for row in epochs], ranks=ranks)
    if run.state != "finished":
        return run
    metrics = result.get("metrics")
    numbers = numbers_of(metrics) if isinstance(metrics, dict) else {}
    if "top1" not in numbers:
        told = "the metrics in result.json have no top1: they are of another version"
        return replace(run, message=run.message or told)
    changed = next((note for note in run.notes if note.startswith(RESUMED_OTHERWISE)), "")
    run = replace(run, message=run.message or changed)  # its options are but the last ones
    seconds = numbers_of(run.provenance).get("seconds", nan)
    return replace(run, metrics=per_cent(numbers) | {"seconds": seconds})


def _compared(base: Run, result: Mapping[str, Any]) -> list[Run]:
    """Each rule with each seed; where runs.csv has not been kept, each rule."""
    rules = _rules(base.config)
    known = _rules(read_yaml(base.folder / COMPARED)) | rules  # also of those left out since
    rest = {name: value for name, value in base.config.items() if name not in ("rules", "seeds")}
    summed = result.get("metrics")
    rows = [row for row in mappings(summed) if text_or_none(row.get("rule"))]
    named = {row["rule"]: text_or_none(row.get("schedule")) for row in rows}
    told = mappings(result.get("delays"))

    def run(rule: str, **more: Any) -> Run:
        options = known.get(rule)
        single = rest | ({"schedule": options} if isinstance(options, dict) else {})
        delays = [numbers_of(row) for row in told if row.get("rule") == rule]
        name = named.get(rule) or _schedule_name(options) or rule
        seen = {"rule": rule, "schedule": name, "config": single, "delays": delays}
        return replace(base, **{**seen, **more})

    if not (base.folder / "runs.csv").exists() and base.state == "finished":
        return [run(row["rule"], **_mean(row, base.config)) for row in rows] or [
            replace(base, message="there are no runs.csv and no rules in result.json")
        ]
    epochs = _epochs_by_run(base.folder / "runs.csv")
    first, seeds = whole_number(rest.get("seed")) or 0, whole_number(base.config.get("seeds")) or 0
    planned = range(first, first + min(seeds, _MOST_SEEDS))
    keys = dict.fromkeys([(rule, seed) for seed in planned for rule in rules] + [*epochs])
    found, begun = [], False
    for rule, seed in keys:
        rows_of = epochs.get((rule, seed), [])
        whole = base.state == "finished" or len(rows_of) == whole_number(rest.get("epochs"))
        single = run(rule, seed=seed, epochs=rows_of)
        single = replace(single, config={**single.config, "seed": seed})
        lost = next((row["epoch"] for row in rows_of if isnan(row.get("train_loss", 0.0))), None)
        if lost is not None:
            message = f"its loss diverged in epoch {lost:.0f}"
            single = replace(single, state="failed", message=message)
        elif rows_of and whole:
            message = base.message if base.state == "finished" else ""
            single = replace(single, state="finished", metrics=dict(rows_of[-1]), message=message)
        elif base.state == "finished":
            single = replace(single, state="unfinished", message="runs.csv does not have it")
        elif begun:  # one at a time
            single = replace(single, state="unfinished", message="it has not begun")
        else:
            begun = True
        found.append(single)
    return found or [base]


def _rules(options: Any) -> dict[str, Any]:
    rules = options.get("rules") if isinstance(options, dict) else None
    return rules if isinstance(rules, dict) else {}


def _mean(row: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """What a comparison says of a rule, all seeds together."""
    numbers = numbers_of(row)
    metrics = {}
    for by in (ACCURACY, LOSS):
        names = by.metric, *(f"{by.name}_{part}" for part in ("sd", "difference", "difference_95"))
        for name, column in zip(names, by.columns, strict=True):
            metrics[name] = numbers.get(column, nan)
    return {
        "metrics": metrics,
        "repeats": whole_number(config.get("seeds")) or 1,
        "message": "runs.csv has not been kept: means over seeds",
    }


def _epochs_by_run(path: Path) -> dict[tuple[str, int], list[dict[str, float]]]:
    """The epochs of each rule with each seed."""
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    for row in read_csv(path, words=("rule",)):
        rule, seed = row.pop("rule", None), row.pop("seed", None)
        whole = isinstance(seed, float) and seed.is_integer() and abs(seed) < LARGEST
        if not isinstance(rule, str) or not whole:
            raise DamagedError("runs.csv: a row without rule and seed")
        found.setdefault((rule, int(seed)), []).append(per_cent(row))
    return found


def _options(folder: Path) -> dict[str, Any]:
    """Options as Hydra has written them; empty where it wrote none."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    config: Any = read_yaml(folder / ".hydra" / "config.yaml")
    if not isinstance(config, dict):
        config = {}
    spell_out(config)
    if not _RESOLVER.search(str(config)):
        with suppress(OmegaConfBaseException, ValueError):  # else as it was written
            config = OmegaConf.to_container(OmegaConf.create(config), resolve=True)
    return config


def _job(folder: Path) -> tuple[str, str | None]:
    """The experiment, and its choice of a schedule; empty where Hydra wrote none."""
    hydra = read_yaml(folder / ".hydra" / "hydra.yaml")
    kind = choice = None
    with suppress(KeyError, TypeError, AttributeError):
        kind = text_or_none(hydra["hydra"]["job"]["name"])
        choice = text_or_none(hydra["hydra"]["runtime"]["choices"].get("schedule"))
    return kind or "", choice


def _kind(command: Any, config: Mapping[str, Any]) -> str:
    """The experiment, from a command or from what its options are."""
    if isinstance(command, str) and (found := re.search(r"(?:^|[\s/])(\w+)\.py\b", command)):
        return found[1]
    if "optimizer" in config:
        return "compare" if "rules" in config else "train" if "schedule" in config else ""
    return ""


def _schedule_name(options: Any) -> str | None:
    try:
        return rebuild_schedule(options).name if isinstance(options, dict) else None
    except ValueError:
        return None
