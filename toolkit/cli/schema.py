"""The options of every experiment, typed; files in conf/ override their values.

A schema is registered as ``schema/<group>/<name>``; a file of the group begins with it, so that a
misspelt option or a value of the wrong type fails when the configuration is composed.
"""

from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from toolkit.cli import bench_schema, choice_schema  # noqa: F401  they register themselves
from toolkit.cli.registry import SCHEMAS, schema, schema_of
from toolkit.options import (
    SaveOptions,
    TrackingOptions,
    TrainingOptions,
    option,
    option_list,
)

Tracking = schema_of(TrackingOptions)
Save = schema_of(SaveOptions)


@dataclass
class SaveUnderWay(Save):  # type: ignore[valid-type, misc]
    """When the running run of a comparison is saved; finished runs keep no checkpoints."""

    epochs: int | None = option(None, "epochs from one to the next")
    minutes: float | None = option(10.0, "minutes from one to the next")


@dataclass
class Training:
    """Options that train and compare share."""

    model: Any = MISSING
    data: Any = MISSING
    optimizer: Any = MISSING
    lr: Any = MISSING
    runtime: Any = MISSING
    stages: int = option(4, "parts into which the model is cut")
    microbatches: int = option(4, "micro-batches of a training step, or of a round of them")
    workers: int | None = option(None, "sets microbatches: in data parallelism, one a worker")
    threads: int | None = option(None, "CPU threads of torch; all cores unless given")
    tracking: Tracking = field(default_factory=Tracking)  # type: ignore[valid-type]


@schema("experiment", "train")
class Train(schema_of(TrainingOptions), Training):  # type: ignore[misc]
    """Options of experiments/train.py."""

    schedule: Any = MISSING
    resume: str | None = option(None, "output directory of a run to continue")
    save: Save = field(default_factory=Save)  # type: ignore[valid-type]
    profile: int = option(0, "training steps that torch.profiler traces, in profile.json")


_GUARD = "guard", "guard_factor"  # in a comparison, only NaN ends a run


@schema("experiment", "compare")
class Compare(schema_of(TrainingOptions, *_GUARD), Training):  # type: ignore[misc]
    """Options of experiments/compare.py."""

    rules: dict[str, Any] = field(default_factory=dict)
    save: SaveUnderWay = field(default_factory=SaveUnderWay)
    resume: str | None = option(None, "output directory of a comparison to continue")
    seeds: int = option(5, "runs of each rule, with seeds 0, 1, ...")
    seed: int = option(0, "the first seed")


@dataclass
class Analysed:
    """Options of experiments that analyse a model without training it."""

    model: Any = MISSING
    hardware: Any = MISSING
    batch: int = option(32, "images, or sequences, of a micro-batch")
    shape: list[int] | None = option(
        None, "of a sample: [channels,height,width] or [tokens]; null: [3,224,224] or [1024]"
    )
    classes: int | None = option(None, "scores of an answer; null: 1000 classes or 50257 tokens")
    precision: str = option("fp32", "fp32, tf32, bf16 or fp16")


@schema("experiment", "memory")
class Memory(Analysed):
    """Options of experiments/memory.py."""

    workers: Any = option_list([4, 8, 32], "numbers of workers, shifted uniformly")
    axis: str = option("roofline", "time of an operation: roofline, flops, bytes or measured")
    device: str = option("auto", "where the measured axis is measured")
    threads: int | None = option(None, "CPU threads of torch; all cores unless given")


@schema("experiment", "simulate")
class Simulate(Analysed):
    """Options of experiments/simulate.py."""

    schedule: Any = MISSING
    also: dict[str, Any] = field(default_factory=dict)
    stages: int = option(4, "parts into which the model is cut")
    microbatches: int = option(8, "micro-batches of a training step")
    workers: int | None = option(None, "sets microbatches: in data parallelism, one a worker")
    batch: int = option(8, "images, or sequences, of a micro-batch")
    steps: int = option(6, "training steps that are drawn; rates are of the steady state")
    optimizer_words: float = option(1.0, "numbers kept of each parameter: 1, momentum; 2, Adam's")
    measured: bool = option(False, "time the stages on the device, not by the roofline")
    device: str = option("auto", "where they are timed")
    threads: int | None = option(None, "CPU threads of torch; all cores unless given")
    partition: Any = option("flops", "flops, parameters, activations, or [names of modules]")
    checkpoint: Any = option("none", "stages that compute their forward twice: none, all or [0,1]")


@schema("experiment", "communication")
class Communication:
    """Options of experiments/communication.py."""

    workers: int = option(8, "N: workers, stages and micro-batches")
    measured: bool = option(False, "also run every setting, on as many processes as it has ranks")
    width: int = option(256, "of the layers of the model that is run: a square matrix a stage")
    batch: int = option(64, "samples of a micro-batch of what is run")
    timeout: float = option(120.0, "seconds after which a silent process ends the run")


@schema("experiment", "pipelines")
class Pipelines:
    """Options of experiments/pipelines.py."""

    ranks: int = option(8, "p: ranks, each with an equal share of the model")
    microbatches: Any = option_list([8, 16, 32], "of a training step: numbers to compare")


@schema("experiment", "report")
class Report:
    """Options of experiments/report.py."""

    runs: Any = option(None, "output folder of runs, or one above; a glob, or a list of those")
    title: str = option("Runs compared", "of the report")
    publish: str | None = option(None, "wandb: also as a report and a workspace there")
    entity: str | None = option(None, "user or team in W&B that publishes it")
    project: str | None = option(None, "project in W&B in which the runs are tracked")


@schema("experiment", "bench")
class Bench:
    """Options of experiments/bench.py."""

    bench: Any = MISSING
    device: str = option("auto", "auto, cpu, cuda, cuda:1, ...")
    threads: int | None = option(None, "CPU threads of torch; all cores unless given")
    seed: int = option(0, "of weights and images")


@cache
def register() -> None:
    """Make the schemas known to Hydra."""
    store = ConfigStore.instance()
    for group, schemas in SCHEMAS.items():
        for name, node in schemas.items():
            store.store(group=f"schema/{group}", name=name, node=node)


def experiments() -> list[str]:
    """Return the names of the experiments."""
    return [*SCHEMAS["experiment"]]


def descriptions(experiment: str) -> dict[str, str]:
    """Return the help text of each top-level option of an experiment."""
    return helps(SCHEMAS["experiment"][experiment])


def helps(kind: type | None) -> dict[str, str]:
    """Help texts of a schema's fields; empty if ``kind`` is not a schema."""
    found = fields(kind) if is_dataclass(kind) else ()
    return {f.name: f.metadata["help"] for f in found if "help" in f.metadata}


def options(experiment: str) -> list[str]:
    """Return the dotted names of an experiment's options, for every choice of its groups."""
    own = fields(SCHEMAS["experiment"][experiment])
    found = [f.name for f in own]
    for option_ in own:
        if is_dataclass(kind := option_.default_factory):
            found += [f"{option_.name}.{f.name}" for f in fields(kind)]
    for group, schemas in SCHEMAS.items():
        rule = group == "schedule" and "rules" in found
        if group in found or rule:
            prefix = "rules.NAME" if rule else group
            names = (f.name for node in schemas.values() for f in fields(node))
            found += sorted({f"{prefix}.{name}" for name in names if name != "_target_"})
    return found
