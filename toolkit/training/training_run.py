"""One training run, from its configuration to its metrics."""

import gc
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from functools import partial
from math import isfinite
from typing import Any

import torch
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from toolkit.cli.build import build_model, build_schedule, check_target
from toolkit.cli.validate import check_counts
from toolkit.errors import UserError, first_line
from toolkit.model import partition
from toolkit.runtime.base import Runtime
from toolkit.runtime.meters.measurements import Measurements
from toolkit.runtime.process_group.group import World
from toolkit.runtime.process_group.join import join
from toolkit.runtime.step_options import StepOptions, allow_tf32
from toolkit.runtime.updater import takes_names
from toolkit.schedule import Schedule
from toolkit.training.data import SampleSet, load
from toolkit.training.loop import (
    DivergedError,
    Epoch,
    Position,
    Step,
    Stretches,
    cross_entropy,
    fit,
)


@dataclass(frozen=True)
class TrainingRun:
    """Everything that a run needs, built and checked, before the first step.

    Attributes:
        config: its options.
        schedule: the schedule by which it trains.
        samples: the samples for training and for the test.
        runtime: the runtime that trains.
        device: the device of the model.
        rate: function from a training step to the learning rate of its update.
    """

    config: DictConfig
    schedule: Schedule
    samples: SampleSet
    runtime: Runtime
    device: torch.device
    rate: Callable[[int], float]

    @property
    def n_ranks(self) -> int:
        """Processes that train together."""
        return self.runtime.n_ranks

    @property
    def batch_size(self) -> int:
        """Samples a training step."""
        return self.config.batch * self.schedule.n_microbatches

    def run(
        self,
        on_epoch: Callable[[Epoch], None] = lambda epoch: None,
        on_step: Callable[[Step], None] = lambda step: None,
        position: Position | None = None,
        stretches: Stretches | None = None,
    ) -> list[Epoch]:
        """Train, from ``position`` on if one is given; one entry an epoch. See :func:`fit`."""
        return fit(
            self.runtime,
            self.samples,
            epochs=self.config.epochs,
            batch_size=self.batch_size,
            seed=self.config.seed,
            device=self.device,
            rate=self.rate,
            on_epoch=on_epoch,
            on_step=on_step,
            position=position,
            stretches=stretches,
            options=_step_options(self.config),
        )

    def run_to_end(
        self,
        on_epoch: Callable[[Epoch], None] = lambda epoch: None,
        on_step: Callable[[Step], None] = lambda step: None,
    ) -> list[Epoch]:
        """As :meth:`run`, but a loss that diverges ends it with epochs of NaN, as many as are left.

        Those are not passed to ``on_epoch``.
        """
        try:
            return self.run(on_epoch, on_step)
        except DivergedError as error:
            return error.all_epochs(self.config.epochs)

    def left_out(self) -> list[str]:
        """Sentences on updates that were not made. Every rank calls it, after the last step."""
        if _step_options(self.config).scale == 1:
            return []
        of = self.runtime.steps_done
        return [
            f"stage {j} left out {n} of {of} updates, whose gradients were not finite: lower"
            " loss_scale, or take precision=bf16"
            for j, n in enumerate(self.runtime.skipped())
            if n
        ]

    def measurements(self) -> Measurements | None:
        """What all ranks have measured, if anything. Every rank calls it."""
        return self.runtime.measurements() if self.runtime.measures else None


class Rates(LambdaLR):
    """A LambdaLR that keeps this run's optimizer options after a checkpoint is loaded.

    torch's ``load_state_dict`` would restore the saved ones.

    Args:
        optimizer: the optimizer, with the run's own options.
        factor: factor on its learning rates, by training step.
        options: names of the options to keep, besides the learning rate.
    """

    def __init__(
        self, optimizer: Optimizer, factor: Callable[[int], float], options: Collection[str] = ()
    ) -> None:
        self._own = [
            {name: group[name] for name in options if name in group}
            for group in optimizer.param_groups
        ]
        super().__init__(optimizer, factor)

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in super().state_dict().items() if name != "_own"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on at the update where ``state_dict`` was taken; the optimizer has its state."""
        bases = self.base_lrs
        super().load_state_dict(state_dict)
        self.base_lrs = bases
        factors = [factor(self.last_epoch) for factor in self.lr_lambdas]
        self._last_lr = [base * factor for base, factor in zip(bases, factors, strict=True)]
        groups = zip(self.optimizer.param_groups, self._own, bases, self._last_lr, strict=True)
        for group, own, base, rate in groups:
            group |= own
            group["initial_lr"], group["lr"] = base, rate


def prepare(
    config: DictConfig, samples: SampleSet | None = None, schedule: Schedule | None = None
) -> TrainingRun:
    """Build what ``config`` describes: equal seeds give equal weights and batches.

    Args:
        config: options as ``experiments/train.py`` composes them; the sizes of a schedule that
            has its own are written into them.
        samples: samples for training and for the test, if they are loaded already.
        schedule: a schedule in the place of the one that ``config`` describes.

    Raises:
        UserError: a part cannot be built, or does not fit the others; or the runtime takes many
            processes and this is not one of them.
    """
    check_counts(config, "stages", "microbatches", "batch", "epochs")
    schedule = build_schedule(config.schedule) if schedule is None else schedule
    config.stages, config.microbatches = schedule.n_stages, schedule.n_workers
    options, world = join_ranks(config, schedule)
    device = world.device if world else pick_device(config.device)
    samples = load(config.data) if samples is None else samples
    form = samples.form
    gc.collect()  # models of earlier runs: torch.fx ties them to themselves, GPU memory and all
    torch.manual_seed(config.seed)
    model = build_model(config.model, form).to(device)
    example = form.example(config.batch)
    stages = partition(model, schedule.n_stages, example, config.partition)
    if stages.output.shape != (expected := form.output(config.batch)):
        raise UserError(
            f"the model's output for {config.batch} {form.samples} has shape"
            f" {list(stages.output.shape)}, and {form.n_classes} {form.answers} ask for"
            f" {list(expected)}: tell the model by model.arguments, such as"
            f" +model.arguments.{form.usual_argument}={form.n_classes}"
        )
    batch_size = config.batch * schedule.n_microbatches
    batches = samples.train(batch_size, config.seed, 0, device)
    if not hasattr(batches, "between"):
        raise UserError(
            f"data: train() gives a {type(batches).__name__}, and training takes batches with"
            " between(first, last), to go on in the midst of an epoch:"
            " toolkit.training.data.Datasets makes such of two of torch's Datasets"
        )
    steps_per_epoch = len(batches)
    check_target(config.lr, "lr", "toolkit.training.lr.Constant")
    rates = instantiate(config.lr)
    if not callable(getattr(rates, "factor", None)):
        raise UserError(
            f"lr: {config.lr._target_} gives a {type(rates).__name__}, and training takes what has"
            " factor(step, steps_per_epoch, epochs, batch), such as toolkit.training.lr.Constant"
        )
    make_optimizer, full_rate = _optimizer(config.optimizer)

    def factor(step: int) -> float:
        found: float = rates.factor(step, steps_per_epoch, config.epochs, batch_size)
        return found

    step_options = _step_options(config)
    allow_tf32(step_options.precision == "tf32")
    torch.backends.cudnn.benchmark = config.cudnn_benchmark
    runtime = instantiate(options, _partial_=True)(
        stages,
        schedule,
        optimizer=make_optimizer,
        loss=_loss(config.label_smoothing),
        lr_scheduler=lambda optimizer: Rates(optimizer, factor, [*config.optimizer]),
        seed=config.seed,
        options=step_options,
        **({"world": world} if world else {}),
        **_diagnostics(config),
    )
    return TrainingRun(
        config, schedule, samples, runtime, device, lambda step: full_rate * factor(step)
    )


def join_ranks(config: DictConfig, schedule: Schedule) -> tuple[dict[str, Any], World | None]:
    """The runtime's own options; and the ranks, where it takes a process for each.

    Raises:
        UserError: this process is a rank where it should be none, or the other way round; or the
            runtime cannot run the schedule.
    """
    options: dict[str, Any] = dict(config.runtime)
    kind: type[Runtime] = get_class(options["_target_"])
    if not kind.distributed:
        if (started := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
            raise UserError(
                f"runtime=single_process is one process and {started} were started: leave torchrun"
                " out, or choose runtime=distributed"
            )
        return options, None
    kind.check_schedule(schedule)  # before ranks are started
    reach = {name: options.pop(name) for name in ("backend", "timeout", "interface")}
    return options, join(schedule.n_ranks, device=config.device, **reach)


def _loss(label_smoothing: float) -> Callable[[Tensor, Tensor], Tensor]:
    if not 0 <= label_smoothing < 1:
        raise UserError(f"label_smoothing is 0 or more, and below 1: got {label_smoothing}")
    return partial(cross_entropy, label_smoothing=label_smoothing)


def _step_options(config: DictConfig) -> StepOptions:
    options = {field.name: config[field.name] for field in fields(StepOptions)}
    if OmegaConf.is_list(options["checkpoint"]):
        options["checkpoint"] = tuple(options["checkpoint"])
    return StepOptions(**options)


def _diagnostics(config: DictConfig) -> dict[str, int]:
    if config.diagnostics and "timeout" in config.runtime:
        raise UserError(
            f"diagnostics={config.diagnostics} takes all micro-batches in one process: use"
            " runtime=single_process, whose trajectory is the same"
        )
    return {"diagnostics": config.diagnostics} if config.diagnostics else {}


def _optimizer(config: DictConfig) -> tuple[Callable[..., Optimizer], float]:
    """What makes the optimizer of a stage, and its learning rate."""
    check_target(config, "optimizer", "torch.optim.SGD")
    if not (isinstance(config.get("lr", 0), int | float) and isfinite(config.get("lr", 0))):
        raise UserError(f"optimizer.lr is a number: got {config.lr!r}")
    # Its own lists would be kept in the optimizer's state, and so in checkpoints.
    make: Callable[..., Optimizer] = instantiate(config, _partial_=True, _convert_="all")
    try:
        parameter = torch.zeros(1, requires_grad=True)
        made = make([("weight", parameter) if takes_names(make) else parameter])
    except (TypeError, ValueError, IndexError) as error:
        raise UserError(f"optimizer cannot be made: {first_line(error)}") from error
    return make, made.param_groups[0]["lr"]


def pick_device(name: str) -> torch.device:
    """``auto`` is CUDA where there is one.

    Raises:
        UserError: no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (ImportError, RuntimeError, AssertionError) as error:
        reason = first_line(error)
        raise UserError(f"device={name} cannot be used: {reason}; try device=auto") from error
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device={name} cannot train: it is auto, cpu, cuda or cuda:1")
    return device
