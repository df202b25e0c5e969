"""The options of the benchmarks; see :mod:`toolkit.cli.schema`."""

from typing import Any

from toolkit.cli.registry import schema
from toolkit.options import option, option_list


@schema("bench", "simulator")
class SimulatorBench:
    """Lowering, verifying and simulating, against torch's own."""

    _target_: str = "benchmarks.simulator.run"
    stages: int = option(64, "of 1F1B")
    microbatches: int = option(512, "of 1F1B")
    cyclic: int = option(256, "stages and micro-batches of CDP")
    rounds: int = option(3, "timed runs of each, taken in turn")


@schema("bench", "grouped")
class GroupedBench:
    """A training step, and the training loop, order "grouped", against plain PyTorch."""

    _target_: str = "benchmarks.grouped.run"
    model: str = option("resnet18", "any of toolkit.model.MODELS")
    image_size: int = option(32, "pixels")
    stages: int = option(4, "parts into which the model is cut")
    microbatches: int = option(8, "micro-batches of a training step")
    batch: int = option(16, "images of a micro-batch")
    rounds: int = option(10, "timed runs of each method, taken in turn")
    steps: int = option(10, "training steps of a loop")
    precision: str = option("fp32", "fp32, tf32, bf16 or fp16")
    channels_last: bool = option(False, "memory format of images and convolutions")
    compile: str = option("none", "torch.compile: none, default, reduce-overhead, max-autotune")


@schema("bench", "resume")
class ResumeBench:
    """Whether runs that are killed and resumed end with the weights of those that are not."""

    _target_: str = "benchmarks.resume.run"
    rules: list[str] = option_list(["dp", "cdp_v1", "cdp_v2"], "schedules")
    runtimes: list[str] = option_list(
        ["single_process", "distributed", "restarted"],
        "of those that can be resumed; restarted: distributed, by torchrun's own restarts",
    )
    runs: int = option(20, "of each rule on each runtime")
    kills: int = option(2, "of each run, at random moments")
    ranks: int = option(2, "workers and stages")
    epochs: int = option(2, "of each run")
    options: list[str] = option_list([], "more options of experiments/train.py")


@schema("bench", "peak")
class PeakBench:
    """Peak memory of one GPU that holds all workers of a schedule, against the predictions."""

    _target_: str = "benchmarks.peak.run"
    models: list[str] = option_list(["resnet50", "vit_b_16"], "of toolkit.model.MODELS")
    workers: list[int] = option_list([4, 8], "numbers of workers, stages and micro-batches")
    image_size: int = option(224, "pixels")
    batch: int = option(32, "images of a micro-batch")
    partition: str = option("activations", "by which stages are equal, or flops, parameters")
    precision: str = option("fp32", "fp32, tf32, bf16 or fp16")
    checkpoint: Any = option("none", "stages that compute their forward twice: none, all or [0,1]")


@schema("bench", "failure")
class FailureBench:
    """Whether a job on many processes ends with one named error, whatever befalls a rank."""

    _target_: str = "benchmarks.failure.run"
    ranks: int = option(4, "processes that train")
    rounds: int = option(10, "jobs that each fault ends")
    timeout: float = option(5.0, "runtime.timeout of the jobs, in seconds")
    margin: float = option(5.0, "seconds beyond the time-out within which all has ended")
    faults: list[str] = option_list(
        ["killed", "stopped", "cut", "no_port"], "what is done to a random rank"
    )


@schema("bench", "data_fuzz")
class DataFuzzBench:
    """Damaged image sets: each refused by one clear error, or read as its files say."""

    _target_: str = "benchmarks.data_fuzz.run"
    mutations: int = option(300, "damaged sets, of every kind in turn")
    limit: float = option(30.0, "seconds after which reading one counts as a hang")
    kinds: list[str] = option_list([], "of mutations; all unless given")
    sets: list[str] = option_list(["batches", "cifar", "folder"], "what is damaged")


@schema("bench", "checkpoint_fuzz")
class CheckpointFuzzBench:
    """Damaged checkpoints: each named, or the one before it used, when the run is resumed."""

    _target_: str = "benchmarks.checkpoint_fuzz.run"
    mutations: int = option(300, "damaged checkpoints, of every kind in turn")
    limit: float = option(60.0, "seconds after which a run that is resumed counts as a hang")


@schema("bench", "explorer")
class ExplorerBench:
    """How soon the explorer has redrawn itself, held to 300 ms."""

    _target_: str = "benchmarks.explorer.run"
    size: int = option(16, "stages and micro-batches")
    rounds: int = option(5, "changes of a control, of every schedule in turn")


@schema("bench", "links")
class LinksBench:
    """Training on links of limited bandwidth, made with network namespaces; as root."""

    _target_: str = "benchmarks.links.run"
    workers: list[int] = option_list([2, 4], "numbers of workers, each a process")
    ratios: list[float] = option_list(
        [0.5, 1.0, 2.0, 0.0], "time of sending all parameters to that of computing; 0: no limit"
    )
    methods: list[str] = option_list([], "what is compared; all unless given")
    rounds: int = option(3, "runs of each method on each link, in random order")
    steps: int = option(10, "training steps of a run")
    skip: int = option(3, "steps are timed from the end of this one on; the first is 0")
    model: str = option("resnet18", "any of toolkit.model.MODELS")
    image_size: int = option(32, "pixels")
    batch: int = option(24, "images of a worker")
    stages: int = option(8, "parts into which the model is cut")
    partition: Any = option("parameters", "flops, parameters, activations, or [names of modules]")
    chunk_mb: float | None = option(None, "of CDP's messages; the runtime's own unless given")
    chains: str | None = option("rotated", "of CDP-v1: in_order or rotated")
    timeout: float = option(600.0, "seconds in which a run has to end")


@schema("bench", "tracking")
class TrackingBench:
    """What tracking a run with W&B, offline, adds to its training steps."""

    _target_: str = "benchmarks.tracking.run"
    model: str = option("resnet8", "any of toolkit.model.MODELS")
    image_size: int = option(32, "pixels")
    stages: int = option(4, "stages and micro-batches")
    batch: int = option(8, "images of a micro-batch")
    rounds: int = option(15, "timed rounds with and without tracking, in turn")
    steps: int = option(40, "training steps of a round")
    every: int = option(10, "training steps from one logged point to the next")
    most: float = option(0.02, "share of a step's time that tracking may add, the median")
