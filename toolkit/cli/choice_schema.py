"""Options of each choice of a group; see :mod:`toolkit.cli.schema`."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from toolkit.cli.registry import schema
from toolkit.options import option, option_list


@dataclass
class ScheduleFile:
    """Options of every schedule."""

    file: str | None = option(None, "a CSV file of rank orders, instead of a named method")
    period: int | None = option(None, "slots from step to step of that file; unset: as it says")


@dataclass
class Workers(ScheduleFile):
    """Options of the methods whose workers each compute the whole model."""

    _target_: str = MISSING
    n: int = MISSING
    n_stages: int = MISSING
    placement: str = option("per_microbatch", "the rank of an op: one, per_stage, ...")
    state: str = option("replicated", "or sharded: ZeRO")


@dataclass
class Rule(Workers):
    """Options of data parallelism and its cyclic variants."""

    accumulate: int = option(1, "micro-batches that each of the n workers runs in a step")
    predict: bool = option(False, "extrapolate late weights to the step that reads them")


@schema("schedule", "data_parallel")
class DataParallel(Rule):
    """Options of data parallelism, optionally with delayed weights."""

    _target_: str = "toolkit.schedule.catalog.data_parallel"
    delay: Any = option(0, "steps; a list, one a stage; a matrix; or options of a RandomDelay")


@schema("schedule", "cyclic")
class Cyclic(Rule):
    """Options of cyclic data parallelism."""

    _target_: str = "toolkit.schedule.catalog.cyclic"
    delay: Any = option("freshest", "or steps, a list of them, a matrix, options of a RandomDelay")
    chains: str = option("in_order", "or rotated: the same bytes and updates on every rank")


@schema("schedule", "published")
class Published(Workers):
    """Options of the schedule of the published code."""

    _target_: str = "toolkit.schedule.catalog.published"


@schema("schedule", "pipeline")
class Pipeline(ScheduleFile):
    """Methods that stages and micro-batches determine."""

    _target_: str = MISSING
    n_stages: int = MISSING
    n_microbatches: int = MISSING


@schema("schedule", "unflushed")
class Unflushed(Pipeline):
    """Options of pipelines without a flush between training steps."""

    _target_: str = "toolkit.schedule.catalog.pipedream_2bw"
    predict: bool = option(False, "extrapolate late weights to the step that reads them")


@schema("schedule", "interleaved")
class Interleaved(Pipeline):
    """Options of interleaved pipelines, whose ranks have several stages each."""

    _target_: str = "toolkit.schedule.catalog.interleaved_1f1b"
    n_ranks: int = 2


@schema("hardware", "hardware")
class Hardware:
    """Options of :class:`toolkit.cost.Hardware`; bytes, FLOP and seconds."""

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


@schema("runtime", "single_process")
class SingleProcessRuntime:
    """Options of :class:`toolkit.runtime.SingleProcess`."""

    _target_: str = "toolkit.runtime.SingleProcess"
    order: str = option("grouped", "fast; or scheduled: slot by slot, as the program says")


@dataclass
class Ranks:
    """Options of every runtime with one process per rank."""

    _target_: str = MISSING
    backend: str = option("auto", "nccl or gloo")
    timeout: float = option(120.0, "seconds after which a rank that does not answer ends the job")
    interface: str | None = option(
        None, "network interface of this machine's messages, such as eth1"
    )


@schema("runtime", "distributed")
class DistributedRuntime(Ranks):
    """Options of :class:`toolkit.runtime.Distributed`."""

    _target_: str = "toolkit.runtime.Distributed"
    record: int = option(6, "training steps of which messages, memory and time are measured")
    overlap: bool = option(True, "messages and updates overlap with computing")
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


@schema("runtime", "ddp")
class DDPRuntime(Ranks):
    """Options of :class:`toolkit.runtime.baselines.DDP`."""

    _target_: str = "toolkit.runtime.baselines.DDP"
    compression: str = "none"
    bucket_mb: float = option(25.0, "of gradients that are averaged at once")
    bucket_view: bool = option(False, "gradients are views of the buckets")


@schema("runtime", "fsdp")
class FSDPRuntime(Ranks):
    """Options of :class:`toolkit.runtime.baselines.FSDP`."""

    _target_: str = "toolkit.runtime.baselines.FSDP"
    reshard: bool = option(True, "ZeRO-3; false: ZeRO-2")
    cpu_offload: bool = option(False, "shares are kept in the memory of the CPU")


@schema("runtime", "delayed_allreduce")
class DelayedAllReduceRuntime(Ranks):
    """Options of :class:`toolkit.runtime.baselines.DelayedAllReduce`."""

    _target_: str = "toolkit.runtime.baselines.DelayedAllReduce"
    compression: str = "none"


@schema("runtime", "torch_pipelining")
class TorchPipeliningRuntime(Ranks):
    """Options of :class:`toolkit.runtime.baselines.TorchPipelining`."""

    _target_: str = "toolkit.runtime.baselines.TorchPipelining"


@dataclass
class OwnModel:
    """The user's own model instead of a named one."""

    target: str | None = option(None, "package.module.function")
    arguments: dict[str, Any] = field(default_factory=dict, metadata={"help": "of that function"})


@schema("model", "build")
class Model(OwnModel):
    """Options of :func:`toolkit.model.build`."""

    _target_: str = "toolkit.model.build"
    name: str = MISSING
    width: int | None = option(None, "channels of a ResNet's first layers; null: as published")


@schema("model", "gpt")
class Gpt(OwnModel):
    """Options of :func:`toolkit.model.gpt`."""

    _target_: str = "toolkit.model.gpt"
    name: str = option(MISSING, "by which it is called")
    layers: int = option(4, "blocks of attention and a perceptron")
    width: int = option(128, "numbers that stand for a token; a multiple of heads")
    heads: int = option(4, "of attention")
    dropout: float = option(0.0, "share of numbers that training leaves out")


@schema("data", "digits")
class Digits:
    """Options of :func:`toolkit.training.data.digits`."""

    _target_: str = "toolkit.training.data.digits"


@schema("data", "synthetic")
class Synthetic:
    """Options of :func:`toolkit.training.data.synthetic`."""

    _target_: str = "toolkit.training.data.synthetic"
    n_train: int = 512
    n_test: int = 256
    n_classes: int = 10
    image_size: int = 32
    in_channels: int = 3


@schema("data", "cifar10")
class Cifar10:
    """Options of :func:`toolkit.training.data.cifar10`."""

    _target_: str = "toolkit.training.data.cifar10"
    root: str | None = None
    crop_padding: int = 4
    flip: bool = True
    n_train: int | None = option(None, "training images, of all classes alike; null: all")
    n_test: int | None = option(None, "test images, of all classes alike; null: all")
    damaged: str = option("refuse", "refuse or skip images in class folders that are damaged")


@schema("data", "image_folder")
class ImageFolder:
    """Options of :func:`toolkit.training.data.image_folder`."""

    _target_: str = "toolkit.training.data.image_folder"
    root: str | None = None
    image_size: int = 224
    num_workers: int | None = option(None, "processes that read; null: this rank's share of cores")
    prefetch_factor: int = option(2, "batches that each of them reads ahead")
    validation: str = "val"
    damaged: str = option("refuse", "refuse damaged images, or skip: others of the class stand in")


@schema("data", "text")
class Text:
    """Options of :func:`toolkit.training.data.text`."""

    _target_: str = "toolkit.training.data.text"
    root: str | None = option(None, "a file, or a folder of .txt files; null: Python's reference")
    length: int = option(64, "bytes of a sequence, each a token")
    test_share: float = option(0.1, "of the text, at its end")


@schema("data", "tokens")
class TokenFiles:
    """Options of :func:`toolkit.training.data.token_files`."""

    _target_: str = "toolkit.training.data.token_files"
    root: str | None = option(None, "a folder with train.bin and val.bin, of numbers")
    length: int = option(1024, "tokens of a sequence")
    vocabulary: int = option(50257, "how many tokens there are")
    dtype: str = option("uint16", "of the numbers, as numpy calls it")


@schema("optimizer", "sgd")
class SGD:
    """Options of :class:`torch.optim.SGD`."""

    _target_: str = "torch.optim.SGD"
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 1e-4
    nesterov: bool = False


@schema("optimizer", "adamw")
class AdamW:
    """Options of :class:`torch.optim.AdamW`."""

    _target_: str = "torch.optim.AdamW"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2


@schema("optimizer", "nadam")
class NAdam:
    """Options of :class:`torch.optim.NAdam`."""

    _target_: str = "torch.optim.NAdam"
    lr: float = 1e-3
    betas: tuple[float, float] = option((0.99, 0.999), "the first of arXiv 2505.01099, for delays")
    eps: float = 1e-8
    weight_decay: float = 1e-2
    momentum_decay: float = 4e-3
    decoupled_weight_decay: bool = option(True, "weight decay as in AdamW")


@schema("optimizer", "muon")
class MuonOptimizer:
    """Options of :func:`toolkit.training.optimizers.muon`."""

    _target_: str = "toolkit.training.optimizers.muon"
    lr: float = 1e-3
    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = option(5, "of Newton and Schulz, towards an orthogonal update")
    adamw: list[str] = option_list(
        ["embed", "head", "fc", r"^conv1\.", r"^conv_proj\."],
        "patterns of the names of matrices that AdamW updates",
    )
    betas: tuple[float, float] = option((0.9, 0.95), "of AdamW")
    eps: float = option(1e-8, "of AdamW")
    weight_decay: float = 1e-2


@schema("optimizer", "lars")
class LARS:
    """Options of timm's Lars; arXiv 1708.03888."""

    _target_: str = "toolkit.training.optimizers.lars"
    lr: float = 1.0
    momentum: float = 0.9
    dampening: float = 0.0
    weight_decay: float = 1e-4
    nesterov: bool = False
    trust_coeff: float = option(1e-3, "eta: the rate of a tensor is eta |w| / (|g| + decay |w|)")
    eps: float = option(1e-8, "added to that denominator")
    trust_clip: bool = option(False, "LARC: never more than optimizer.lr")
    always_adapt: bool = option(False, "adapt without weight decay, too")


@schema("optimizer", "lamb")
class LAMB:
    """Options of timm's Lamb; arXiv 1904.00962."""

    _target_: str = "toolkit.training.optimizers.lamb"
    lr: float = 1e-3
    bias_correction: bool = True
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 1e-2
    grad_averaging: bool = option(True, "weigh a gradient by 1 - beta_1 in its average")
    max_grad_norm: float | None = option(None, "as the option clip, for each stage")
    trust_clip: bool = option(False, "LAMBC: a trust ratio is 1 at most")
    always_adapt: bool = option(False, "adapt without weight decay, too")
    decoupled_decay: bool = option(False, "weight decay as in AdamW")


@schema("lr", "constant")
class ConstantRate:
    """Options of :class:`toolkit.training.lr.Constant`."""

    _target_: str = "toolkit.training.lr.Constant"
    warmup_epochs: float = option(0.0, "epochs in which the rate rises to optimizer.lr")
    reference_batch: int | None = option(None, "samples a step that optimizer.lr is meant for")


@schema("lr", "step")
class StepRate(ConstantRate):
    """Options of :class:`toolkit.training.lr.Step`."""

    _target_: str = "toolkit.training.lr.Step"
    every_epochs: int = option(30, "epochs from one fall of the rate to the next")
    gamma: float = option(0.1, "factor of each fall")


@schema("lr", "cosine")
class CosineRate(ConstantRate):
    """Options of :class:`toolkit.training.lr.Cosine`."""

    _target_: str = "toolkit.training.lr.Cosine"
    final: float = option(0.0, "share of optimizer.lr at the end")
