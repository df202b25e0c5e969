"""Options of training runs: defaults, names, and which of them change a trajectory.

The module loads no torch, so that ``--help`` is fast.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolkit.errors import UserError, check_choice

EXIT_STOPPED = 75
"""Exit status of a run or a sweep that a signal has ended and that can be resumed."""

RESUMED_OTHERWISE = "resumed with other options than those of the checkpoint"
"""Beginning of the note on a run that was resumed with other options."""

AROUND = frozenset(
    {
        "tracking",
        "resume",
        "trust",
        "rules",
        "own",
        "tune",
        "seeds",
        "margin",
        "parallel",
    }
)
"""Options around a run: its tracking, the run that it resumes, its comparison."""

OWN = ("optimizer", "lr", "clip", "ema", "readout", "runtime")
"""Options in which the rules of a comparison may differ, besides their schedules."""

INDIFFERENT = AROUND | {
    # When to save, and what to do if the loss diverges.
    "save",
    "guard",
    "guard_factor",
    # What to measure.
    "profile",
    "diagnostics",
    "stability",
    # Results are equal up to rounding. Two runtimes may differ more: see trajectory_options.
    "runtime",
    "device",
    "threads",
    "cudnn_benchmark",
    "data.num_workers",
    "data.prefetch_factor",
    # microbatches has its value.
    "workers",
}
"""Options, or groups of them, that do not change a training's trajectory."""

_COMPRESSIONS = ("compression", "boundary_compression")
_COMPRESSION_SETTINGS = (
    "low_rank",
    "compression_start",
    "warm_start",
    "error_feedback",
)
_LOCAL_STEPS = ("period", "start", "outer_lr", "outer_momentum")


READOUTS = ("newest", "extrapolated", "as_published")


def option(default: Any, description: str) -> Any:
    """Return a dataclass field with the line that ``--help`` prints for it."""
    return field(default=default, metadata={"help": description})


@dataclass(frozen=True)
class StepSettings:
    """Values of :class:`toolkit.runtime.StepOptions`, which explains and checks them."""

    precision: str = option("fp32", "fp32, tf32, bf16 or fp16")
    loss_scale: float = option(1024.0, "factor on the loss under fp16")
    checkpoint: str | Sequence[int] = option(
        "none", "stages that compute their forward twice: none, all or [0,1]"
    )
    clip: float | None = option(None, "largest norm of a gradient")
    clip_by: str = option("stage", "stage or model: scope of that norm")
    ema: float | None = option(
        None, "decay of an average of the weights, which is tested too"
    )
    compile: str = option(
        "none", "torch.compile: none, default, reduce-overhead, max-autotune"
    )
    channels_last: bool = option(False, "memory format of images and convolutions")
    norms: str = option(
        "auto", "fused or separate: batch norms of micro-batches that run as one"
    )


@dataclass(frozen=True)
class SaveOptions:
    """When checkpoints are saved; None: not for that reason.

    Unless all three intervals are None, each epoch that is the best so far is saved too.

    Raises:
        UserError: an interval is not above 0, or ``keep`` is below 1.
    """

    steps: int | None = option(None, "training steps from one to the next")
    epochs: int | None = option(1, "epochs from one to the next")
    minutes: float | None = option(None, "minutes from one to the next")
    keep: int = option(2, "number of latest checkpoints to keep, besides the best")
    sharded: bool = option(
        False, "every rank writes and reads its share, in a folder that all ranks see"
    )

    def __post_init__(self) -> None:
        for name in ("steps", "epochs", "minutes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UserError(f"save.{name} is above 0, or null: got {value}")
        if self.keep < 1:
            raise UserError(f"save.keep is 1 or more: got {self.keep}")

    @property
    def never(self) -> bool:
        """Whether all three intervals are None."""
        return self.steps is None and self.epochs is None and self.minutes is None


@dataclass(frozen=True)
class SwitchOptions:
    """When a run goes over to another schedule; see :class:`toolkit.runtime.Switching`.

    Raises:
        UserError: a value is out of range.
    """

    candidates: Sequence[Any] = option(
        (),
        "methods, or {schedule: METHOD} with options, to choose from; empty: never switch",
    )
    every: int = option(
        20,
        "training steps from one decision to the next; on costs, more while all stays alike",
    )
    threshold: float = option(0.05, "share of a step's time that a switch has to gain")
    staleness_price: float = option(
        0.0,
        "share of a step's time that weights one step late on average are counted as",
    )
    loss_factor: float | None = option(
        None,
        "loss, by the lowest so far, above which delay is left until the loss is calm",
    )

    def __post_init__(self) -> None:
        for name, is_valid, rule in (
            ("every", self.every >= 1, "is 1 or more training steps"),
            ("threshold", 0 <= self.threshold < 1, "is 0 or more, and below 1"),
            ("staleness_price", self.staleness_price >= 0, "is 0 or more"),
            (
                "loss_factor",
                self.loss_factor is None or self.loss_factor > 1,
                "is above 1, or null",
            ),
        ):
            if not is_valid:
                raise UserError(f"switch.{name} {rule}: got {getattr(self, name)}")


@dataclass(frozen=True)
class TrainingOptions(StepSettings):
    """Plain values of a training run; see :func:`toolkit.training.prepare`.

    Raises:
        UserError: a value is out of range.
    """

    batch: int = option(16, "samples of a micro-batch")
    epochs: int = option(10, "passes over the training data")
    seed: int = option(0, "of weights, order of the data, augmentation and dropout")
    partition: str | Sequence[str] = option(
        "flops", "flops, parameters, activations, or [names of modules]"
    )
    cudnn_benchmark: bool = option(
        False, "on GPUs cuDNN tries which convolutions are fastest"
    )
    readout: str = option(
        "newest",
        "weights to test and keep: newest, or extrapolated where late ones are read; as_published"
        " keeps the newest, and tests those of micro-batch 0 as well",
    )
    label_smoothing: float = option(
        0.0, "of the training loss; tests are plain cross-entropy"
    )
    diagnostics: int = option(
        0, "steps between two looks at what delay does to the gradients"
    )
    device: str = option("auto", "auto, cpu, cuda, cuda:1, ...")
    guard: str = option(
        "stop", "if the loss diverges: off, stop, or rollback and continue with DP"
    )
    guard_factor: float = option(
        10.0, "loss, divided by that of the first step, that counts as diverged"
    )
    save: SaveOptions = field(default_factory=SaveOptions)
    switch: SwitchOptions = field(default_factory=SwitchOptions)

    def __post_init__(self) -> None:
        check_choice("readout", self.readout, READOUTS)
        check_choice("guard", self.guard, ("off", "stop", "rollback"))
        for name, is_valid, rule in (
            ("batch", self.batch >= 1, "is 1 or more"),
            ("epochs", self.epochs >= 1, "is 1 or more"),
            (
                "label_smoothing",
                0 <= self.label_smoothing < 1,
                "is 0 or more, and below 1",
            ),
            ("guard_factor", self.guard_factor > 1, "is above 1; 10 is usual"),
        ):
            if not is_valid:
                raise UserError(f"{name} {rule}: got {getattr(self, name)}")


@dataclass(frozen=True)
class TuneOptions:
    """Short runs by which a comparison chooses the learning rate of each rule.

    Raises:
        UserError: a value is out of range.
    """

    rates: Sequence[float] | None = option(
        None, "factors on optimizer.lr at which each rule is tried, as in [0.5,1,2]"
    )
    epochs: int = option(2, "of each trial, a whole run of that length")
    seed: int = option(1000, "of the trials; none that the comparison uses")

    def __post_init__(self) -> None:
        if self.rates is not None:
            is_list = isinstance(self.rates, Sequence) and not isinstance(
                self.rates, str
            )
            if not is_list or not self.rates or not all(map(_is_factor, self.rates)):
                raise UserError(
                    f"tune.rates is a list of factors above 0: got {self.rates}"
                )
        for name, minimum in (("epochs", 1), ("seed", 0)):
            if getattr(self, name) < minimum:
                raise UserError(
                    f"tune.{name} is {minimum} or more: got {getattr(self, name)}"
                )


def _is_factor(rate: object) -> bool:
    return isinstance(rate, int | float) and rate > 0


def _tracking_mode() -> str:
    """Return the mode of the environment variable WANDB_MODE, or offline."""
    mode = os.environ.get("WANDB_MODE") or "offline"
    return {"dryrun": "offline", "run": "online", "shared": "online"}.get(mode, mode)


@dataclass(frozen=True)
class TrackingOptions:
    """How a run is tracked with W&B.

    Raises:
        UserError: an unknown mode, or ``every`` is below 1.
    """

    mode: str = field(
        default_factory=_tracking_mode, metadata={"help": "offline, online or disabled"}
    )
    project: str = "cyclic-dp"
    entity: str | None = option(
        None, "user or team; null: the default one of the account"
    )
    group: str | None = option(None, "null: the folder of a sweep or a comparison")
    name: str | None = option(None, "null: the schedule and the seed")
    tags: Sequence[str] = field(default_factory=list)
    every: int = option(10, "training steps from one logged point to the next")
    checkpoints: bool = option(
        False, "also upload the last and the best one, and model.pt"
    )

    def __post_init__(self) -> None:
        check_choice("tracking.mode", self.mode, ("offline", "online", "disabled"))
        if self.every < 1:
            raise UserError(
                f"tracking.every is 1 or more training steps: got {self.every}"
            )


def flat(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested options by dotted names: ``{"a": {"b": c}}`` becomes ``{"a.b": c}``.

    An empty group has no entry.
    """
    value_of_name: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, Mapping):
            for inner_name, inner_value in flat(value).items():
                value_of_name[f"{name}.{inner_name}"] = inner_value
        else:
            value_of_name[str(name)] = value
    return value_of_name


def without(options: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the options without those, or groups of them, that ``names`` lists."""
    # With a dot, so that `save` also leaves out `save.steps`, but not `saved`.
    groups = tuple(f"{name}." for name in names)
    return {
        name: value
        for name, value in options.items()
        if not f"{name}.".startswith(groups)
    }


def trajectory_options(runtime: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a runtime that change a trajectory: lossy messages and local steps."""
    # A runtime without compression may lack the option.
    values = {name: runtime.get(name) or "none" for name in _COMPRESSIONS}
    names = [*_LOCAL_STEPS]
    if values["compression"] != "none":
        names += _COMPRESSION_SETTINGS
    return values | {name: runtime[name] for name in names if name in runtime}


def compared(options: Mapping[str, Any], free: Collection[str]) -> dict[str, Any]:
    """Return by dotted names the options that two runs must share if ``free`` ones may differ."""
    values = without(flat(options), free)
    if "runtime" in free:
        runtime = options.get("runtime") or {}
        values |= flat({"runtime": trajectory_options(runtime)})
    return values


def with_own(
    options: Mapping[str, Any], rule_options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return ``options`` with a rule's own; a group with a ``_target_`` replaces the shared one."""
    merged = {**options}
    for name, value in rule_options.items():
        is_partial = isinstance(value, Mapping) and "_target_" not in value
        merged[name] = {**options[name], **value} if is_partial else value
    return merged


def differing(options: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the flat options that have different values in several runs."""
    first_values: dict[str, Any] = {}
    differing_names: set[str] = set()
    for options_of_run in options:
        for name, value in options_of_run.items():
            # An option that some runs lack differs only if those that have it do.
            if first_values.setdefault(name, value) != value:
                differing_names.add(name)
    return [name for name in first_values if name in differing_names]
