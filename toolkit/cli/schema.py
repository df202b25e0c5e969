"""The options of every experiment, typed. The files in conf/ give them their values.

A schema is registered as ``schema/<group>/<name>``; a file of the group begins with it, so that a
misspelt option or a value of the wrong type fails when the configuration is composed.
"""

import os
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from toolkit.cli.bench_schema import (
    CheckpointFuzzBench,
    DataFuzzBench,
    ExplorerBench,
    FailureBench,
    GroupedBench,
    LinksBench,
    PeakBench,
    ResumeBench,
    SimulatorBench,
    TrackingBench,
)
from toolkit.cli.model_schema import (
    Cifar10,
    Digits,
    Gpt,
    ImageFolder,
    Model,
    Synthetic,
    Text,
    TokenFiles,
    option,
    option_list,
)
from toolkit.cli.optimizer_schema import (
    LAMB,
    LARS,
    SGD,
    AdamW,
    ConstantRate,
    CosineRate,
    MuonOptimizer,
    NAdam,
    StepRate,
)


@dataclass
class ScheduleFile:
    """What every schedule has."""

    file: str | None = option(None, "a CSV file of rank orders, instead of a named method")
    period: int | None = option(None, "slots from step to step of that file; unset: as it says")


@dataclass
class Workers(ScheduleFile):
    """What the methods have whose workers each have the model."""

    _target_: str = MISSING
    n: int = MISSING
    n_stages: int = MISSING
    placement: str = option("per_microbatch", "the rank of an op: one, per_stage, ...")
    state: str = option("replicated", "or sharded: ZeRO")


@dataclass
class Rule(Workers):
    accumulate: int = option(1, "micro-batches that each of the n workers runs in a step")
    predict: bool = option(False, "extrapolate late weights to the step that reads them")


@dataclass
class DataParallel(Rule):
    _target_: str = "toolkit.schedule.catalog.data_parallel"
    delay: Any = option(0, "steps; a list, one a stage; a matrix; or options of a RandomDelay")


@dataclass
class Cyclic(Rule):
    _target_: str = "toolkit.schedule.catalog.cyclic"
    delay: Any = option("freshest", "or steps, a list of them, a matrix, options of a RandomDelay")
    chains: str = option("in_order", "or rotated: the same bytes and updates on every rank")


@dataclass
class Published(Workers):
    _target_: str = "toolkit.schedule.catalog.published"


@dataclass
class Pipeline(ScheduleFile):
    """Methods that stages and micro-batches determine."""

    _target_: str = MISSING
    n_stages: int = MISSING
    n_microbatches: int = MISSING


@dataclass
class Unflushed(Pipeline):
    _target_: str = "toolkit.schedule.catalog.pipedream_2bw"
    predict: bool = option(False, "extrapolate late weights to the step that reads them")


@dataclass
class Interleaved(Pipeline):
    _target_: str = "toolkit.schedule.catalog.interleaved_1f1b"
    n_ranks: int = 2


@dataclass
class Hardware:
    _target_: str = "toolkit.cost.Hardware"
    name: str = MISSING
    flops: float = MISSING
    memory_bandwidth: float = MISSING
    link_bandwidth: float = MISSING
    link_latency: float = 0.0
    memory: float = MISSING
    speeds: list[float] = field(default_factory=list)
    memories: list[float] = field(default_factory=list)
    flops_in_16_bits: float | None = None


@dataclass
class SingleProcessRuntime:
    _target_: str = "toolkit.runtime.SingleProcess"
    order: str = option("grouped", "fast; or scheduled: slot by slot, as the program says")


@dataclass
class Ranks:
    """What every runtime has that takes a process a rank."""

    _target_: str = MISSING
    backend: str = option("auto", "nccl or gloo")
    timeout: float = option(120.0, "seconds after which a rank that does not answer ends the job")
    interface: str | None = option(
        None, "network interface of this machine's messages, such as eth1"
    )


@dataclass
class DistributedRuntime(Ranks):
    _target_: str = "toolkit.runtime.Distributed"
    record: int = option(6, "training steps of which messages, memory and time are measured")
    overlap: bool = option(True, "messages and updates go on beside computing")
    chunk_mb: float | None = option(
        None, "largest part of a message sent at once; null: 1, or all of it with nccl unless paced"
    )
    compression: str = option("none", "fp16 or bf16: messages of gradients and weights")
    per_machine: int = option(
        0, "ranks a machine: all-reduces within each first; 0: the backend's own"
    )
    pacing: bool = option(
        False, "spread what is sent over the step; the smaller the chunks, the more even"
    )


@dataclass
class DDPRuntime(Ranks):
    _target_: str = "toolkit.runtime.baselines.DDP"
    compression: str = "none"
    bucket_mb: float = option(25.0, "of gradients that are averaged at once")
    bucket_view: bool = option(False, "gradients are views of the buckets")


@dataclass
class FSDPRuntime(Ranks):
    _target_: str = "toolkit.runtime.baselines.FSDP"
    reshard: bool = option(True, "ZeRO-3; false: ZeRO-2")
    cpu_offload: bool = option(False, "shares are kept in the memory of the CPU")


@dataclass
class DelayedAllReduceRuntime(Ranks):
    _target_: str = "toolkit.runtime.baselines.DelayedAllReduce"
    compression: str = "none"


@dataclass
class TorchPipeliningRuntime(Ranks):
    _target_: str = "toolkit.runtime.baselines.TorchPipelining"


def _tracking_mode() -> str:
    """What WANDB_MODE of the environment asks for."""
    mode = os.environ.get("WANDB_MODE") or "offline"
    return {"dryrun": "offline", "run": "online", "shared": "online"}.get(mode, mode)


@dataclass
class Tracking:
    """Where training is tracked with W&B."""

    mode: str = field(
        default_factory=_tracking_mode, metadata={"help": "offline, online or disabled"}
    )
    project: str = "cdp-toolkit"
    entity: str | None = option(None, "user or team; null: the default one of the account")
    group: str | None = option(None, "null: the folder of a sweep or a comparison")
    name: str | None = option(None, "null: the schedule and the seed")
    tags: list[str] = field(default_factory=list)
    every: int = option(10, "training steps from one logged point to the next")
    checkpoints: bool = option(False, "also upload the last and the best one, and model.pt")


@dataclass
class Save:
    """When checkpoints are saved, in the output directory; null: not for that reason.

    After an epoch that is the best so far, too, unless all are null.
    """

    steps: int | None = option(None, "training steps from one to the next")
    epochs: int | None = option(1, "epochs from one to the next")
    minutes: float | None = option(None, "minutes from one to the next")
    keep: int = option(2, "the latest; the best stays beside them")
    sharded: bool = option(
        False, "every rank writes and reads its share, in a folder that all ranks see"
    )


@dataclass
class SaveUnderWay(Save):
    """When the run of a comparison is saved that is under way; once it has ended, none is kept."""

    epochs: int | None = option(None, "epochs from one to the next")
    minutes: float | None = option(10.0, "minutes from one to the next")
    keep: int = option(2, "the latest")


@dataclass
class Training:
    """What train and compare share."""

    model: Any = MISSING
    data: Any = MISSING
    optimizer: Any = MISSING
    lr: Any = MISSING
    runtime: Any = MISSING
    stages: int = option(4, "parts into which the model is cut")
    microbatches: int = option(4, "micro-batches of a training step, or of a round of them")
    workers: int | None = option(None, "sets microbatches: in data parallelism, one a worker")
    batch: int = option(16, "images, or sequences, of a micro-batch")
    epochs: int = option(10, "passes over the training data")
    partition: Any = option("flops", "flops, parameters, activations, or [names of modules]")
    precision: str = option("fp32", "fp32, tf32, bf16 or fp16")
    loss_scale: float = option(1024.0, "factor on the loss under fp16")
    channels_last: bool = option(False, "memory format of images and convolutions")
    compile: str = option("none", "torch.compile: none, default, reduce-overhead, max-autotune")
    cudnn_benchmark: bool = option(False, "on GPUs cuDNN tries which convolutions are fastest")
    checkpoint: Any = option("none", "stages that compute their forward twice: none, all or [0,1]")
    clip: float | None = option(None, "largest norm of a gradient")
    clip_by: str = option("stage", "stage or model: of what that norm is taken")
    label_smoothing: float = option(0.0, "of the training loss; tests are plain cross-entropy")
    ema: float | None = option(None, "decay of an average of the weights, which is tested too")
    diagnostics: int = option(0, "steps between two looks at what delay does to the gradients")
    device: str = option("auto", "auto, cpu, cuda, cuda:1, ...")
    threads: int | None = option(None, "CPU threads of torch; all cores unless given")
    tracking: Tracking = field(default_factory=Tracking)
    save: Save = field(default_factory=Save)


@dataclass
class Train(Training):
    schedule: Any = MISSING
    resume: str | None = option(None, "output directory of a run, to go on where it was saved")
    guard: str = option("stop", "if the loss diverges: off, stop, or rollback and go on with DP")
    guard_factor: float = option(10.0, "loss, by that of the first step, that counts as diverged")
    seed: int = option(0, "of weights, order of the data, augmentation and dropout")
    profile: int = option(0, "training steps that torch.profiler traces, in profile.json")


@dataclass
class Compare(Training):
    rules: dict[str, Any] = field(default_factory=dict)
    save: Save = field(default_factory=SaveUnderWay)
    resume: str | None = option(None, "output directory of a comparison, to go on where it ended")
    seeds: int = option(5, "runs of each rule, with seeds 0, 1, ...")
    seed: int = option(0, "the first seed")


@dataclass
class Analysed:
    """A model that is looked at, not trained."""

    model: Any = MISSING
    hardware: Any = MISSING
    batch: int = option(32, "images, or sequences, of a micro-batch")
    shape: list[int] | None = option(
        None, "of a sample: [channels,height,width] or [tokens]; null: [3,224,224] or [1024]"
    )
    classes: int | None = option(None, "scores of an answer; null: 1000 classes or 50257 tokens")
    precision: str = option("fp32", "fp32, tf32, bf16 or fp16")


@dataclass
class Memory(Analysed):
    workers: Any = option_list([4, 8, 32], "numbers of workers, shifted uniformly")
    axis: str = option("roofline", "time of an operation: roofline, flops, bytes or measured")
    device: str = option("auto", "where the measured axis is measured")
    threads: int | None = option(None, "CPU threads of torch; all cores unless given")


@dataclass
class Simulate(Analysed):
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


@dataclass
class Communication:
    workers: int = option(8, "N: workers, stages and micro-batches")
    measured: bool = option(False, "also run every setting, on as many processes as it has ranks")
    width: int = option(256, "of the layers of the model that is run: a square matrix a stage")
    batch: int = option(64, "samples of a micro-batch of what is run")
    timeout: float = option(120.0, "seconds after which a silent process ends the run")


@dataclass
class Pipelines:
    ranks: int = option(8, "p: ranks, each with an equal share of the model")
    microbatches: Any = option_list([8, 16, 32], "of a training step: numbers to compare")


@dataclass
class Report:
    runs: Any = option(None, "output folder of runs, or one above; a glob, or a list of those")
    title: str = option("Runs compared", "of the report")
    publish: str | None = option(None, "wandb: also as a report and a workspace there")
    entity: str | None = option(None, "user or team in W&B that publishes it")
    project: str | None = option(None, "project in W&B in which the runs are tracked")


@dataclass
class Bench:
    bench: Any = MISSING
    device: str = option("auto", "auto, cpu, cuda, cuda:1, ...")
    threads: int | None = option(None, "CPU threads of torch; all cores unless given")
    seed: int = option(0, "of weights and images")


_SCHEMAS: dict[str, dict[str, type]] = {
    "experiment": {
        "train": Train,
        "compare": Compare,
        "memory": Memory,
        "communication": Communication,
        "pipelines": Pipelines,
        "simulate": Simulate,
        "bench": Bench,
        "report": Report,
    },
    "schedule": {
        "data_parallel": DataParallel,
        "cyclic": Cyclic,
        "published": Published,
        "pipeline": Pipeline,
        "interleaved": Interleaved,
        "unflushed": Unflushed,
    },
    "model": {"build": Model, "gpt": Gpt},
    "data": {
        "digits": Digits,
        "synthetic": Synthetic,
        "cifar10": Cifar10,
        "image_folder": ImageFolder,
        "text": Text,
        "tokens": TokenFiles,
    },
    "optimizer": {
        "sgd": SGD,
        "adamw": AdamW,
        "nadam": NAdam,
        "muon": MuonOptimizer,
        "lars": LARS,
        "lamb": LAMB,
    },
    "lr": {"constant": ConstantRate, "step": StepRate, "cosine": CosineRate},
    "runtime": {
        "single_process": SingleProcessRuntime,
        "distributed": DistributedRuntime,
        "ddp": DDPRuntime,
        "fsdp": FSDPRuntime,
        "delayed_allreduce": DelayedAllReduceRuntime,
        "torch_pipelining": TorchPipeliningRuntime,
    },
    "hardware": {"hardware": Hardware},
    "tracking": {"tracking": Tracking},
    "bench": {
        "checkpoint_fuzz": CheckpointFuzzBench,
        "data_fuzz": DataFuzzBench,
        "explorer": ExplorerBench,
        "failure": FailureBench,
        "grouped": GroupedBench,
        "links": LinksBench,
        "peak": PeakBench,
        "resume": ResumeBench,
        "simulator": SimulatorBench,
        "tracking": TrackingBench,
    },
}


@cache
def register() -> None:
    """Make the schemas known to Hydra."""
    store = ConfigStore.instance()
    for group, schemas in _SCHEMAS.items():
        for name, node in schemas.items():
            store.store(group=f"schema/{group}", name=name, node=node)


def experiments() -> list[str]:
    return [*_SCHEMAS["experiment"]]


def descriptions(experiment: str) -> dict[str, str]:
    """The top-level options of an experiment, and what each means."""
    return helps(_SCHEMAS["experiment"][experiment])


def helps(kind: type | None) -> dict[str, str]:
    """What the options of a schema mean, of those that tell; none of what is no schema."""
    found = fields(kind) if is_dataclass(kind) else ()
    return {f.name: f.metadata["help"] for f in found if "help" in f.metadata}


def options(experiment: str) -> list[str]:
    """Every option that some choice of groups gives an experiment, dotted."""
    own = fields(_SCHEMAS["experiment"][experiment])
    found = [f.name for f in own]
    for option_ in own:
        if is_dataclass(kind := option_.default_factory):
            found += [f"{option_.name}.{f.name}" for f in fields(kind)]
    for group, schemas in _SCHEMAS.items():
        rule = group == "schedule" and "rules" in found
        if group in found or rule:
            prefix = "rules.NAME" if rule else group
            names = (f.name for node in schemas.values() for f in fields(node))
            found += sorted({f"{prefix}.{name}" for name in names if name != "_target_"})
    return found
