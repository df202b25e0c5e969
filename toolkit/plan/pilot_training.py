"""The short training of a pilot: data parallelism and a rule with late weights."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from math import inf, isfinite, nan
from statistics import mean

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from toolkit.plan.findings import TrainingFindings
from toolkit.plan.measure import Data, OnProgress
from toolkit.results import Estimate, binomial_half_width, paired_difference
from toolkit.runtime import SingleProcess
from toolkit.schedule import Schedule
from toolkit.training.data import Batch
from toolkit.training.evaluation import evaluate

NORM_BATCHES = 4
"""Batches for the running statistics before the test."""
_DIVERGED = 10.0  # times the first loss
_SURE = 3.0  # standard errors above a guess from which on DP has learned


def train_by(
    make: Callable[[int, Schedule, int], SingleProcess],
    rules: Mapping[str, Schedule],
    data: Data,
    n_steps: int,
    seeds: Sequence[int],
    on_progress: OnProgress,
) -> TrainingFindings:
    """Train under two ``rules`` by name, DP first, from the same weights and on the same batches.

    Args:
        make: makes a runtime from a seed, a schedule, and the steps between two diagnostics.
        rules: schedules by name: DP, and the rule to compare with it.
        data: batches for training and the test.
        n_steps: training steps of a run.
        seeds: one for each run of a rule.
        on_progress: called before each run.
    """
    runs = _train_runs(make, rules, data, n_steps, seeds, on_progress)
    base_runs, late_runs = runs.values()
    late_rule = [*rules][-1]
    labels = torch.cat([labels.flatten() for _, labels in data.test()])
    chance = 1 / data.samples.form.n_classes
    frequent = float(labels.bincount().max() / len(labels))
    accuracies = {}
    diverged_rules = []
    for rule, rule_runs in runs.items():
        accuracies[rule] = tuple(run.accuracy for run in rule_runs)
        if any(run.diverged for run in rule_runs):
            diverged_rules.append(rule)
    # Of all stages: the one whose gradient turns most decides.
    late_cosines = chain.from_iterable(run.cosines for run in late_runs)
    run_pairs = zip(late_runs, base_runs, strict=True)
    return TrainingFindings(
        n_steps=n_steps,
        seeds=tuple(seeds),
        n_tested=len(labels),
        tested=data.samples.form.answers,
        accuracy=accuracies,
        difference=_difference(accuracies[late_rule], accuracies["DP"], len(labels)),
        loss_ratio=mean(
            _ratio(late_run.tenths[-1], base_run.tenths[-1])
            for late_run, base_run in run_pairs
        ),
        highest=max(
            _ratio(max(run.tenths), run.first_loss) for run in [*base_runs, *late_runs]
        ),
        chance=chance,
        frequent=frequent,
        learned=_is_better_than_a_guess(
            accuracies["DP"], max(chance, frequent), len(labels)
        ),
        diverged=tuple(diverged_rules),
        cosine=min(late_cosines, default=nan),
    )


def _train_runs(
    make: Callable[[int, Schedule, int], SingleProcess],
    rules: Mapping[str, Schedule],
    data: Data,
    n_steps: int,
    seeds: Sequence[int],
    on_progress: OnProgress,
) -> dict[str, list["_Run"]]:
    """Return the runs of each rule, one for each seed; arguments as of :func:`train_by`."""
    runs: dict[str, list[_Run]] = {rule: [] for rule in rules}
    n_runs = len(rules) * len(seeds)
    for seed_index, seed in enumerate(seeds):
        for rule_index, (rule, schedule) in enumerate(rules.items()):
            n_done = seed_index * len(rules) + rule_index
            on_progress(f"training {rule}, seed {seed}", n_done / n_runs)
            # Diagnostics cost time, so only the first run of the second rule measures how far
            # delayed gradients are from fresh ones.
            diagnostics_interval = 0
            if (seed_index, rule_index) == (0, 1):
                diagnostics_interval = max(1, n_steps // 4)
            runtime = make(seed, schedule, diagnostics_interval)
            runs[rule].append(_run(runtime, data, n_steps, seed))
    on_progress("training", 1.0)
    return runs


def _is_better_than_a_guess(
    accuracies: Sequence[float], guess_accuracy: float, n_tested: int
) -> bool:
    """Whether runs are surely better than a guess that does not look at the sample."""
    standard_error = (guess_accuracy * (1 - guess_accuracy) / n_tested) ** 0.5
    return mean(accuracies) > guess_accuracy + _SURE * standard_error


def _ratio(loss: float, base_loss: float) -> float:
    """Return the ratio of two losses; float32 may round a loss to 0."""
    if base_loss:
        return loss / base_loss
    return inf if loss else 1.0


def _difference(
    late_shares: Sequence[float], base_shares: Sequence[float], n_tested: int
) -> Estimate:
    """Return the difference of accuracies in points, paired by seed.

    All seeds share a test set, whose error their spread does not show. The interval is at least the
    binomial one of the mean accuracy, which is that of the difference if the rules' mistakes
    correlate by 1/2: its variance is 2 (1 - correlation) p (1 - p) / n_tested.
    """
    difference = paired_difference(
        [100 * share for share in late_shares], [100 * share for share in base_shares]
    )
    # Few seeds may agree by chance. The test set's own error then keeps the interval honest.
    least_half_width = 100 * binomial_half_width(
        mean([*late_shares, *base_shares]), n_tested
    )
    if len(late_shares) == 1 or difference.half_width >= least_half_width:
        return difference
    return replace(difference, half_width=least_half_width)


@dataclass(frozen=True)
class _Run:
    """A training."""

    first_loss: float
    tenths: list[float]  # mean loss of each tenth of the steps
    cosines: list[float]  # of stale and fresh gradients, mean of each stage
    diverged: bool
    accuracy: float  # 0 if the training diverged


def _run(runtime: SingleProcess, data: Data, n_steps: int, seed: int) -> _Run:
    step_losses: list[Tensor] = []
    stage_cosines: list[list[float]] = []
    for result in runtime.run(islice(data.train(seed), n_steps)):
        step_losses.append(result.loss)
        if result.delays and result.step:  # at step 0 nothing is late
            stage_cosines.append([delay.cosine for delay in result.delays])
    losses = torch.stack(step_losses).double().tolist()
    tenth_size = max(1, len(losses) // 10)
    # A remainder that is shorter than a tenth is left out.
    tenths = [
        mean(losses[start : start + tenth_size])
        for start in range(0, len(losses) - tenth_size + 1, tenth_size)
    ]
    # Tenths, since the loss of a single batch may be high by chance.
    diverged = not all(map(isfinite, losses)) or max(tenths) > _DIVERGED * losses[0]
    accuracy = 0.0
    if not diverged:
        model = runtime.module()
        settle_norms(model, islice(data.train(seed), NORM_BATCHES))
        accuracy = evaluate(model, data.test()).top1
    cosines = [
        mean(cosines_of_stage) for cosines_of_stage in zip(*stage_cosines, strict=True)
    ]
    return _Run(losses[0], tenths, cosines, diverged, accuracy)


def settle_norms(model: nn.Module, batches: Iterable[Batch]) -> None:
    """Set the batch norms' running statistics to those of ``batches`` under the present weights.

    After a few training steps they are still those of the beginning. Norms that stay in evaluation
    mode while the model trains keep theirs, unlike those of torch.optim.swa_utils.update_bn.
    """
    model.train()
    for norm in model.modules():
        if isinstance(norm, _BatchNorm) and norm.training and norm.track_running_stats:
            norm.reset_running_stats()
            norm.momentum = None  # the mean over all batches
    with torch.no_grad():
        for inputs, _ in batches:
            model(inputs)
