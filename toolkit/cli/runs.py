"""Build the runs of a configuration, and the options that all parts of a run share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from math import inf
from typing import TYPE_CHECKING, Any

from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf

from toolkit.cli.check_options import check_counts, check_own, check_training
from toolkit.cli.instantiate import build_hardware, load_samples, make, plain
from toolkit.cli.models import build_model
from toolkit.cli.schedules import build_schedule
from toolkit.errors import UserError
from toolkit.options import TrainingOptions, TuneOptions, with_own
from toolkit.schedule import Schedule
from toolkit.terminal import show_import

if TYPE_CHECKING:
    from toolkit.cost.worker_forms import CostsOf
    from toolkit.model import InputSpec
    from toolkit.runtime import World
    from toolkit.training import TrainingRun
    from toolkit.training.data import SampleSet

# Options of a runtime that are those of join().
_JOIN = ("backend", "timeout", "interface")
# A delay; {within: 0.1} is one that may cost a tenth of a step.
_AFFORDABLE = "affordable"


@dataclass(frozen=True)
class Settings:
    """Settings of a training run that depend neither on its data nor on its model.

    Attributes:
        options: plain values.
        optimizer: function from a stage's parameters to its optimizer.
        lr: learning rate's factor.
    """

    options: TrainingOptions
    optimizer: Any
    lr: Any


def build_settings(config: DictConfig) -> Settings:
    """Build and check the settings of a run, which takes no time once torch is imported.

    Raises:
        UserError: a value is out of range.
    """
    options = check_training(config)
    show_import()
    from toolkit.training.training_run import check_settings

    lr = make(config.lr, "lr", "toolkit.training.lr.Constant")
    # Lists of OmegaConf would be kept in the optimizer's state, and so in checkpoints.
    as_factory = {"_partial_": True, "_convert_": "all"}
    optimizer = make(config.optimizer, "optimizer", "torch.optim.SGD", **as_factory)
    check_settings(options, optimizer, lr)
    return Settings(options, optimizer, lr)


def build_run(
    config: DictConfig,
    samples: "SampleSet | None" = None,
    on_activity: Callable[[str], object] = lambda text: None,
) -> "TrainingRun":
    """Build the training run that ``config`` describes.

    Args:
        config: options as ``cyclic-dp train`` composes them; the sizes of a schedule that
            has its own are written into them.
        samples: samples for training and for the test, if they are loaded already.
        on_activity: function that is called with what begins next, which may take seconds.

    Raises:
        UserError: a part cannot be built, or does not fit the others; or the runtime takes many
            processes and this is not one of them.
    """
    from toolkit.training import prepare

    check_counts(config, "stages", "microbatches")
    settings = build_settings(config)
    on_activity("reading the data")
    # Samples may take long to load: once, and only when a delay or the run needs them.
    load = cache(lambda: samples or load_samples(config.data))
    settle_delays(config, lambda: load().form)
    schedule = build_schedule(config.schedule)
    # Results keep the sizes that the schedule has, which a file of rank orders brings along.
    config.stages = schedule.n_stages
    config.microbatches = schedule.n_workers
    # Ranks meet before most of the work, so that one that fails there ends the others as well.
    world = join_world(config, schedule)
    samples = load()
    runtime = dict(config.runtime)
    if world is not None:  # which has the options of join() already
        for name in _JOIN:
            runtime.pop(name, None)
    on_activity("tracing the model")
    return prepare(
        settings.options,
        model=partial(build_model, config.model, samples.form),
        samples=samples,
        schedule=schedule,
        optimizer=settings.optimizer,
        lr=settings.lr,
        runtime=instantiate(runtime, _partial_=True),
        world=world,
        recorded_options=plain(config),
    )


def join_world(config: DictConfig, schedule: Schedule) -> "World | None":
    """Join the ranks of a runtime with a process a rank; None for one in a single process."""
    from toolkit.runtime.base import Runtime
    from toolkit.training.training_run import join_ranks

    runtime = get_class(config.runtime._target_)
    if not issubclass(runtime, Runtime):
        raise UserError(
            f"runtime: {config.runtime._target_} is not a runtime; expected a class such as"
            " toolkit.runtime.SingleProcess"
        )
    reach = {
        name: config.runtime[name]
        for name in (*_JOIN, "width")
        if name in config.runtime
    }
    return join_ranks(runtime, schedule, device=config.device, **reach)


def rule_config(config: DictConfig, rule: str, seed: int, **more: Any) -> DictConfig:
    """Return the configuration of one run of a comparison, with its rule's own options.

    Raises:
        UserError: ``own`` names a rule that is not compared, or an option that it cannot have.
    """
    check_own(config)
    # Plain dicts, since OmegaConf would refuse options that the schema of the group lacks.
    options = with_own(plain(config), plain(config.own).get(rule) or {})
    return OmegaConf.create(
        options | {"schedule": options["rules"][rule], "seed": seed} | more
    )


@dataclass
class RuleBuilder:
    """Builds the runs of a comparison, by rule and seed; other processes take it pickled.

    Attributes:
        options: plain options of the comparison.
        loaded: its samples; None: each process loads them before its first run.
    """

    options: Mapping[str, Any]
    loaded: "SampleSet | None" = None

    def __call__(self, rule: str, seed: int) -> "TrainingRun":
        """Build the run of ``rule`` with ``seed``."""
        config = OmegaConf.create(dict(self.options))
        # A loss that is high, but a number, is a result like any other.
        config_of_rule = rule_config(config, rule, seed, guard="stop", guard_factor=inf)
        return build_run(config_of_rule, self.samples)

    @cached_property
    def samples(self) -> "SampleSet":
        """The samples of all runs."""
        return self.loaded or load_samples(OmegaConf.create(self.options["data"]))


def check_comparison(config: DictConfig) -> None:
    """Check the options of ``cyclic-dp compare`` that depend neither on data nor on a model.

    Raises:
        UserError: a value is out of range, or there are no rules.
    """
    check_counts(config, "seeds")
    check_own(config)
    check_parallel(config)
    if not config.rules:
        raise UserError(
            "there are no rules to compare: leave one, or add +schedule@rules.NAME=..."
        )
    TuneOptions(**plain(config)["tune"])
    for rule in config.rules:
        build_settings(rule_config(config, rule, config.seed))


def check_parallel(config: DictConfig) -> None:
    """Raise UserError unless ``parallel`` runs of a comparison can train at the same time."""
    check_counts(config, "parallel")
    if config.parallel == 1:
        return
    from toolkit.runtime import SingleProcess

    runtime = get_class(config.runtime._target_)
    if not issubclass(runtime, SingleProcess):
        raise UserError(
            f"parallel={config.parallel} trains each run in one process: got the runtime"
            f" {runtime.__name__}; take runtime=single_process, or parallel=1"
        )


def settle_delays(
    config: DictConfig,
    form: "Callable[[], InputSpec]",
    costs_of: "CostsOf | None" = None,
) -> None:
    """Write into ``config`` the delays that its schedules can afford, as matrices.

    Args:
        config: options of an experiment; those of a schedule with ``delay: affordable``, or
            ``delay: {within: SHARE}``, change.
        form: returns the form of the samples; called if a schedule asks for such a delay.
        costs_of: costs of stages; by default those of the model.

    Raises:
        UserError: no hardware is chosen, or the model cannot be analysed.
    """
    affordable_options = _affordable_options(config)
    if not affordable_options:
        return
    if not config.get("hardware"):
        raise UserError(
            "schedule.delay=affordable depends on the machine: choose one, as in"
            " hardware=ethernet_10; conf/hardware has more"
        )
    import torch

    from toolkit.cost import affordable_delay
    from toolkit.cost.worker_forms import ModelCosts, fastest_form

    hardware = build_hardware(config.hardware)
    if costs_of is None:
        samples = form()
        example = samples.example(config.batch, torch.device("meta"))
        with torch.device("meta"):
            model = build_model(config.model, samples)
        costs_of = ModelCosts(model, example, config.precision, config.checkpoint)
    # Each schedule has its own: the delay follows from its timing and its cut.
    for options, limit in affordable_options:
        # A delay with which the schedule can be built; the affordable one follows from its timing.
        options.delay = 1
        schedule = build_schedule(options).final
        cut = config.partition
        if cut is None:
            cut = fastest_form(schedule, costs_of, hardware, chains=()).partition
        costs = costs_of(schedule.n_stages, cut)
        optimizer_bytes = [
            config.get("optimizer_words", 1.0) * cost.parameter_bytes for cost in costs
        ]
        delay_matrix = affordable_delay(
            schedule, costs, hardware, optimizer_bytes=optimizer_bytes, **limit
        )
        options.delay = [[*row] for row in delay_matrix]


def _affordable_options(config: DictConfig) -> list[tuple[DictConfig, dict[str, Any]]]:
    """Return the options of schedules with an affordable delay, and the limit of each.

    The limit is ``{"within": SHARE}``, or empty for the usual share.
    """
    schedule_options = [config.get("schedule")]
    for group in ("rules", "also"):
        schedule_options += (config.get(group) or {}).values()
    affordable_options: list[tuple[DictConfig, dict[str, Any]]] = []
    for options in schedule_options:
        if not isinstance(options, DictConfig):
            continue
        delay: Any = options.get("delay")
        # The word, or a mapping of ``within`` alone: other mappings describe random delays.
        if delay == _AFFORDABLE:
            affordable_options.append((options, {}))
        elif isinstance(delay, DictConfig) and [*delay] == ["within"]:
            affordable_options.append((options, plain(delay)))
    return affordable_options
