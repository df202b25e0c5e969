"""A warning before a training run: is its learning rate stable at the first weights?"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

import torch

from toolkit.plan.curvature import Batch, Curvature, largest_curvature
from toolkit.plan.stability import Recurrence, coupling_of
from toolkit.training import TrainingRun

_TOLERANCE = 0.1  # of the curvature
_SECONDS = 3.0  # for a measurement; what is found by then is a lower bound
_MOST_STEPS = 1000  # at which the schedule of the learning rate is looked up
_LATEST = 50  # steps of delay; matrices of more take long
_FAST = 1.4  # growth of deviations in a step; slower growth ends as the curvature falls

_log = logging.getLogger(__name__)


def check_rate(
    run: TrainingRun, on_activity: Callable[[str], None] = lambda activity: None
) -> str | None:
    """Return a warning if SGD's highest rate is far from stable at the first weights, or None.

    Far from stable: deviations grow more than 1.4 times a step. Slower growth ends by itself as
    the curvature falls: a ResNet-8 on digits, at constant rates, trained as well at 1.3 times
    (CDP-v1) and 1.6 (CDP-v2), and worse at 1.6 (CDP-v1), 2.0 (CDP-v2) and 5.5 (DP).

    The curvature is first measured on one micro-batch. If that predicts fast growth, it is
    measured on all micro-batches of the first step, with the share of each stage in the steepest
    direction. Of schedules that follow one another the first counts. Nothing is changed, and
    nothing is raised: a curvature that cannot be measured is logged at debug level.

    Args:
        run: a run before its first step.
        on_activity: called with what begins, which may take seconds.
    """
    try:
        return _check(run, on_activity)
    except Exception as error:  # whatever it is, the training may still do without it
        _log.debug("the stability of the learning rate is not checked: %s", error)
        return None


def stage_shares(run: TrainingRun, curvature: Curvature) -> list[float]:
    """Return the share of each stage in the steepest direction."""
    shares = []
    for stage in run.runtime.stages:
        names = [name for name, _ in stage.named_parameters()]
        shares.append(sum(curvature.shares.get(name, 0.0) for name in names))
    return shares


def first_curvature(
    run: TrainingRun, n_microbatches: int, *, tolerance: float, seconds: float = inf
) -> Curvature:
    """Measure the largest curvature of a run's first weights.

    Args:
        run: a run before its first step.
        n_microbatches: micro-batches of the first step to measure it on; shares are found too if
            these are all.
        tolerance: its relative error.
        seconds: time after which it ends with what it has found.

    Raises:
        UserError: as :func:`largest_curvature`.
    """
    batches = run.samples.train(run.batch_size, run.options.seed, 0, run.device)
    inputs, targets = next(iter(batches.between(0, 1)))
    microbatch_size = run.options.batch
    microbatches: Sequence[Batch] = [
        *zip(inputs.split(microbatch_size), targets.split(microbatch_size), strict=True)
    ]
    # A model of its own, with the weights that the run begins with: measuring must not change the
    # run.
    with torch.random.fork_rng([run.device] if run.device.type == "cuda" else []):
        torch.manual_seed(run.options.seed)  # for the weights that the run has
        model = run.build_model().to(run.device)
    return largest_curvature(
        model,
        run.runtime.loss,
        microbatches[:n_microbatches],
        tolerance=tolerance,
        seconds=seconds,
        shares=n_microbatches >= len(microbatches),
        seed=run.options.seed,
    )


def _check(run: TrainingRun, on_activity: Callable[[str], None]) -> str | None:
    # 1. Cases that the limits cover, and the rate to check.
    options = run.optimizer.param_groups[0]
    # The limits are derived for SGD with momentum; dampening and adaptive rates have others.
    if not isinstance(run.optimizer, torch.optim.SGD) or options["dampening"]:
        return None
    batches = run.samples.train(run.batch_size, run.options.seed, 0, run.device)
    schedule = run.schedule.at(0)
    if schedule.max_staleness > _LATEST:
        return None
    n_steps = run.schedule.next_change(0) or len(batches) * run.options.epochs
    # The highest rate of the schedule counts, which warm-up reaches late.
    rate = max(map(run.rate, range(0, n_steps, max(1, n_steps // _MOST_STEPS))))
    recurrence = Recurrence(schedule, options["momentum"], options["nesterov"])
    # 2. A first look at one micro-batch.
    on_activity("checking the learning rate: curvature of a micro-batch")
    # One micro-batch takes a fraction of the time, and settles it for most rates.
    first_estimate = first_curvature(run, 1, tolerance=_TOLERANCE, seconds=_SECONDS)
    if (
        first_estimate.value <= 0
        or recurrence.growth(rate * first_estimate.value) < _FAST
    ):
        return None
    # 3. All micro-batches of the first step, and how the stages share the steepest direction. The
    # mean loss is usually flatter than that of one micro-batch, so this may take the warning back.
    n_microbatches = schedule.n_microbatches
    on_activity(
        f"checking the learning rate: curvature of {n_microbatches} micro-batches"
    )
    curvature = first_curvature(
        run, n_microbatches, tolerance=_TOLERANCE, seconds=_SECONDS
    )
    coupling = coupling_of(stage_shares(run, curvature))
    recurrence = replace(recurrence, coupling=coupling)
    growth = recurrence.growth(rate * curvature.value)
    if growth < _FAST:
        return None
    # 4. The warning, with the remedies that this schedule and optimizer leave.
    on_activity("checking the learning rate: the largest stable one")
    certificate = recurrence.certify()
    stable_rate = certificate.rate(curvature.value)
    is_late = schedule.max_staleness > 0
    remedies = []
    if is_late and not options["nesterov"]:
        remedies.append("optimizer.nesterov=true")
    if is_late and schedule.corrected.kind == "none":
        remedies.append("schedule.correction=extrapolate")
    remedies.append(
        f"optimizer.lr={stable_rate / rate * options['lr']:.2g} or somewhat higher"
    )
    if is_late:
        remedies.append("'schedule.phases=[{schedule: dp, epochs: 1}]'")
    return (
        f"{schedule.name}: the learning rate {rate:.3g} is far above {stable_rate:.2g}, the largest"
        f" that is stable at the first weights ({certificate.limit:.3g} / curvature"
        f" {curvature.value:.3g}): there deviations grow {growth:.2g} times a step; if the loss"
        f" diverges, try {', '.join(remedies)}"
    )
