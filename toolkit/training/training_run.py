"""One training run, built and checked from plain options and objects."""

import gc
import os
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from toolkit.errors import UserError
from toolkit.model import InputSpec, Stages, check_independent, partition
from toolkit.options import StepSettings, TrainingOptions
from toolkit.runtime import SingleProcess, Switching
from toolkit.runtime.base import Runtime
from toolkit.runtime.make_optimizer import MakeOptimizer
from toolkit.runtime.meters.measurements import Measurements
from toolkit.runtime.process_group.columns import width_of
from toolkit.runtime.process_group.join import join
from toolkit.runtime.process_group.world import World
from toolkit.runtime.step_options import StepOptions, allow_tf32
from toolkit.schedule import Schedule
from toolkit.schedule.spec import same_sized
from toolkit.training import loop
from toolkit.training.data import SampleSet
from toolkit.training.devices import options_of_width, pick_device
from toolkit.training.evaluation import cross_entropy
from toolkit.training.loop import DivergedError, Epoch, LoopCallback, Position, Step
from toolkit.training.lr import Constant, Rates
from toolkit.training.optimizer_check import check_optimizer


@dataclass(frozen=True)
class TrainingRun:
    """A run before its first step: its objects are built and checked. Make it by :func:`prepare`.

    Attributes:
        options: plain values.
        step_options: those of the options that the runtime takes.
        schedule: schedule of the training, its phases in training steps.
        samples: samples for training and for the test.
        runtime: what carries out the training steps.
        switching: what chooses the schedules, if the options say so.
        device: device of the model.
        optimizer: an optimizer of a single number, which has the options of all.
        rate: function from a training step to the learning rate of its update.
        build_model: function that builds the model with its first weights.
        lr: object whose ``factor`` scales the optimizer's rate.
        recorded_options: all options as plain values, for results and checkpoints.
        again: function that builds the run afresh, by another schedule.
    """

    options: TrainingOptions
    step_options: StepOptions
    schedule: Schedule
    samples: SampleSet
    runtime: Runtime
    switching: Switching | None
    device: torch.device
    optimizer: Optimizer
    rate: Callable[[int], float]
    build_model: Callable[[], nn.Module]
    lr: Any
    recorded_options: Mapping[str, Any]
    again: Callable[[Schedule], "TrainingRun"]

    @property
    def batch_size(self) -> int:
        """Samples a training step."""
        return self.options.batch * self.schedule.n_microbatches

    def run(
        self,
        on_epoch: Callable[[Epoch], None] = lambda epoch: None,
        on_step: Callable[[Step], None] = lambda step: None,
        position: Position | None = None,
        callback: LoopCallback | None = None,
    ) -> list[Epoch]:
        """Train, and test after each epoch. Every rank calls it, and gets the same metrics.

        Args:
            on_epoch: function that is called with each epoch's metrics.
            on_step: function that is called after each step.
            position: place to start from, whose state the runtime has; by default the first step.
            callback: places to pause at; by default the ends of epochs.

        Returns:
            metrics of each epoch, those before ``position`` included.

        Raises:
            DivergedError: the loss has diverged, and ``options.guard`` is not off.
            UserError: epochs had another number of steps before ``position``.
        """
        return loop.fit(
            self, position or Position(), callback or LoopCallback(), on_epoch, on_step
        )

    def run_to_end(self) -> list[Epoch]:
        """Train as :meth:`run` does; if the loss diverges, the remaining epochs are NaN."""
        try:
            return self.run()
        except DivergedError as error:
            return error.all_epochs(self.options.epochs)

    def skipped_updates(self) -> list[str]:
        """Return sentences on skipped updates. Every rank calls it, after the last step."""
        # Only float16 skips updates.
        if self.step_options.scale == 1:
            return []
        sentences = []
        for stage, n_skipped in enumerate(self.runtime.skipped()):
            if n_skipped:
                sentences.append(
                    f"stage {stage} left out {n_skipped} of {self.runtime.steps_done} updates,"
                    " whose gradients were not finite: lower loss_scale, or take precision=bf16"
                )
        return sentences

    def measurements(self) -> Measurements | None:
        """Return the measurements of all ranks, or None. Every rank calls it."""
        return self.runtime.measurements() if self.runtime.measures else None


def prepare(  # noqa: PLR0913 - options, by keyword
    options: TrainingOptions,
    *,
    model: nn.Module | Callable[[], nn.Module],
    samples: SampleSet,
    schedule: Schedule,
    optimizer: MakeOptimizer,
    lr: Any = None,
    runtime: Callable[..., Runtime] = SingleProcess,
    world: World | None = None,
    recorded_options: Mapping[str, Any] | None = None,
) -> TrainingRun:
    """Build a training run: equal seeds give equal weights and batches.

    Args:
        options: plain values.
        model: a module for the samples, which is copied; or a function that builds one, called
            after ``options.seed`` has seeded torch.
        samples: samples for training and for the test.
        schedule: schedule of as many stages as the model is cut into.
        optimizer: function from a stage's parameters to its optimizer.
        lr: learning rate's factor, as of :mod:`toolkit.training.lr`; by default constant.
        runtime: class of the runtime, or a function that takes the same arguments.
        world: ranks that this process has joined, for a runtime with a process a rank.
        recorded_options: options to record in results and checkpoints; by default ``options``.

    Raises:
        UserError: a part cannot be built, or does not fit the others.
    """
    arguments = _RunArguments(
        options=options,
        model=model,
        samples=samples,
        schedule=schedule,
        optimizer=optimizer,
        lr=Constant() if lr is None else lr,
        runtime=runtime,
        world=world,
        recorded_options=asdict(options)
        if recorded_options is None
        else recorded_options,
    )
    return _build(arguments)


@dataclass(frozen=True)
class _RunArguments:
    """The arguments of :func:`prepare`, from which a run is built, and built again."""

    options: TrainingOptions
    model: nn.Module | Callable[[], nn.Module]
    samples: SampleSet
    schedule: Schedule
    optimizer: MakeOptimizer
    lr: Any
    runtime: Callable[..., Runtime]
    world: World | None
    recorded_options: Mapping[str, Any]


def _build(arguments: _RunArguments) -> TrainingRun:
    """Build the objects of a run, and check that they fit; errors as :func:`prepare`."""
    options = arguments.options
    world = arguments.world
    if options.diagnostics and world:
        raise UserError(
            f"diagnostics={options.diagnostics} takes all micro-batches in one process: use"
            " runtime=single_process, whose trajectory is the same"
        )
    device = world.device if world else pick_device(options.device)
    step_options = check_settings(options, arguments.optimizer, arguments.lr)

    # 1. The stages. A copy of a module has its weights; a function draws them from the seed.
    # torch.fx ties models of earlier runs to themselves, GPU memory and all.
    gc.collect()
    torch.manual_seed(options.seed)
    build_model = arguments.model
    if isinstance(arguments.model, nn.Module):
        build_model = partial(deepcopy, arguments.model)
    model = build_model().to(device)
    stages = _cut(model, arguments.schedule.n_stages, arguments.samples.form, options)

    # 2. The steps of an epoch, in which phases and learning rates are counted.
    batch_size = options.batch * arguments.schedule.n_microbatches
    steps_per_epoch = _steps_per_epoch(
        arguments.samples, batch_size, options.seed, device
    )
    schedule = arguments.schedule.in_steps(steps_per_epoch)
    # The rate of every stage's optimizer, as :attr:`TrainingRun.rate` reports it.
    optimizer_of_one_number = check_optimizer(arguments.optimizer)
    optimizer_rate = optimizer_of_one_number.param_groups[0]["lr"]

    def factor(step: int) -> float:
        return float(
            arguments.lr.factor(step, steps_per_epoch, options.epochs, batch_size)
        )

    # 3. The runtime.
    runtime = _make_runtime(arguments, stages, schedule, step_options, factor)
    return TrainingRun(
        options=options,
        step_options=step_options,
        schedule=schedule,
        samples=arguments.samples,
        runtime=runtime,
        switching=_switching(runtime, schedule, options),
        device=device,
        optimizer=optimizer_of_one_number,
        rate=lambda step: optimizer_rate * factor(step),
        build_model=build_model,
        lr=arguments.lr,
        recorded_options=arguments.recorded_options,
        again=lambda schedule: _build(replace(arguments, schedule=schedule)),
    )


def check_settings(
    options: TrainingOptions, optimizer: MakeOptimizer, lr: Any
) -> StepOptions:
    """Check what takes no time to check; return the options that a runtime takes.

    Data and models take seconds or minutes to load and to trace, so this is the first check.

    Raises:
        UserError: a value is out of range, or the optimizer cannot be made.
    """
    step_options = StepOptions(
        **{field.name: getattr(options, field.name) for field in fields(StepSettings)}
    )
    check_optimizer(optimizer)
    _check_method("lr:", lr, "factor", "lr.Constant")
    return step_options


def _make_runtime(
    arguments: _RunArguments,
    stages: Stages,
    schedule: Schedule,
    step_options: StepOptions,
    factor: Callable[[int], float],
) -> Runtime:
    """Set torch's options for the process, and build the runtime.

    Args:
        arguments: arguments of the run.
        stages: the model.
        schedule: with lengths in training steps.
        step_options: the options that the runtime takes.
        factor: from a training step to what scales the optimizer's learning rate.
    """
    options = arguments.options
    allow_tf32(step_options.precision == "tf32")
    torch.backends.cudnn.benchmark = options.cudnn_benchmark
    # Only some runtimes take these.
    further_options: dict[str, Any] = {}
    if arguments.world:
        further_options["world"] = arguments.world
    if options.diagnostics:
        further_options["diagnostics"] = options.diagnostics
    further_options |= options_of_width(
        arguments.runtime, stages.model, options.save, options.label_smoothing
    )
    return arguments.runtime(
        stages,
        schedule,
        optimizer=arguments.optimizer,
        loss=partial(cross_entropy, label_smoothing=options.label_smoothing),
        lr_scheduler=partial(Rates, factor=factor),
        seed=options.seed,
        options=step_options,
        **further_options,
    )


def _steps_per_epoch(
    samples: SampleSet, batch_size: int, seed: int, device: torch.device
) -> int:
    """Return the training steps of an epoch; UserError if the samples' batches cannot be used."""
    batches = samples.train(batch_size, seed, 0, device)
    _check_method(
        "data: train()",
        batches,
        "between",
        "data.Datasets makes of two of torch's Datasets",
    )
    return len(batches)


def _cut(
    model: nn.Module, n_stages: int, form: InputSpec, options: TrainingOptions
) -> Stages:
    """Cut the model into stages; raise UserError if it does not fit the samples, or mixes them."""
    # Samples are checked below, once the shape of the output has been.
    example = form.example(options.batch)
    stages = partition(model, n_stages, example, options.partition, check=False)
    expected = form.output(options.batch)
    if stages.output.shape != expected:
        raise UserError(
            f"the model's output has shape {list(stages.output.shape)}; expected {list(expected)}"
            f" for {options.batch} {form.samples}: set its size, as by"
            f" +model.arguments.{form.usual_argument}={form.n_classes}"
        )
    # Two micro-batches of two samples; see :mod:`toolkit.model.independence`.
    check_independent(stages, form.example(4))
    return stages


def _check_method(name: str, value: object, method: str, example: str) -> None:
    """Raise UserError unless a user's object has the method that training calls."""
    if not hasattr(value, method):
        raise UserError(
            f"{name} got a {type(value).__name__}; expected an object with {method}(), such as"
            f" toolkit.training.{example}"
        )


def _switching(
    runtime: Runtime, schedule: Schedule, options: TrainingOptions
) -> Switching | None:
    """Return what chooses among the schedules that the options name, if they name any."""
    candidate_of_name = {}
    for candidate_options in options.switch.candidates:
        candidate = same_sized(schedule.final, candidate_options).build()
        candidate_of_name[candidate.name] = candidate
    if not candidate_of_name:
        return None
    return Switching(runtime, candidate_of_name, options.switch)


def join_ranks(
    runtime: type[Runtime],
    schedule: Schedule,
    *,
    device: str = "auto",
    width: int = 1,
    **options: Any,
) -> World | None:
    """Join the other ranks, if ``runtime`` takes a process for each; else return None.

    ``options`` are those of :func:`toolkit.runtime.join`, and ``width`` is the number of processes
    of a rank. A process too many or too few is refused.
    """
    runtime.check_installed()  # before ranks wait for each other
    if runtime.distributed:
        runtime.check_schedule(schedule)  # before ranks are started
        return join(schedule.n_ranks * width_of(width), device=device, **options)
    n_processes = int(os.environ.get("WORLD_SIZE", "1"))  # set by torchrun
    if n_processes > 1:
        raise UserError(
            f"runtime=single_process or controller is one process and {n_processes} were started:"
            " leave torchrun out, or choose runtime=distributed"
        )
    return None
