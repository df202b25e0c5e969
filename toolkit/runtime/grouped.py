"""Order "grouped": the schedule's trajectory at nearly the speed of plain training.

At each stage, the micro-batches that read the same weight version run as one batch. CDP-v2 with
four stages and micro-batches::

    stage 0   [0 1 2] [3]      micro-batch 3 reads the newest version, the others the one before
    stage 1   [0 1] [2 3]      groups change: the batches are cut and joined again
    stage 2   [0] [1 2 3]
    stage 3   [0 1 2 3]        all read the newest version
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from toolkit.runtime.delay_effect import compare_gradients
from toolkit.runtime.gradient_norms import gradient_norms
from toolkit.runtime.losses import COUNT, LossValue, loss_factor
from toolkit.runtime.microbatch_losses import MicrobatchLosses
from toolkit.runtime.microbatches import BatchReader, StageDelay, StepResult
from toolkit.runtime.stage import (
    StageRunner,
    Values,
    compensated,
    leaves,
    take_gradients,
)
from toolkit.runtime.updater import (
    GradientSum,
    Weights,
    add_to_sums,
    advance_statistics,
    renew,
)
from toolkit.schedule import Schedule

if TYPE_CHECKING:
    from toolkit.runtime.capture import StepCapture

Groups = list[tuple[int, ...]]
"""The micro-batches of each batch, in the order of their samples."""
Versions = Sequence[dict[int, Weights]]
VersionOf = Callable[[int, int, int], int]
"""From stage, micro-batch and step to the weight version that is read."""


@dataclass(frozen=True)
class VersionRead:
    """The micro-batches that read the same version of a stage's weights, and run as one batch.

    Attributes:
        version: number of the version.
        microbatches: numbers of the micro-batches, in the order of their samples.
        weights: the version, or a prediction made from it.
        compensated: whether the gradient is corrected by the newest weights.
    """

    version: int
    microbatches: tuple[int, ...]
    weights: Weights
    compensated: bool


@dataclass(frozen=True)
class StepReads:
    """All weights that a training step reads.

    Attributes:
        step: number of the training step.
        stages: reads of each stage.
        newest: newest weights of each stage.
    """

    step: int
    stages: Sequence[Sequence[VersionRead]]
    newest: Sequence[Weights]


@dataclass(frozen=True)
class Forward:
    """A forward through all stages, ready for its backward.

    Attributes:
        outputs: what the last stage returns, ``[n_microbatches * b, ...]`` each.
        leaves: for each stage and read, the weights as leaves, which gather gradients.
    """

    outputs: Values
    leaves: Sequence[Sequence[Weights]]


@dataclass(frozen=True)
class LossGradients:
    """The losses of a step, and where its backward begins.

    Attributes:
        losses: mean losses, ``[n_microbatches]``, detached.
        counts: counts of the losses, ``[n_microbatches]``, if they have some.
        output_gradients: gradient of each output; None where it needs none.
    """

    losses: Tensor
    counts: Tensor | None
    output_gradients: tuple[Tensor | None, ...]


class GroupedPass:
    """The forward, the losses and the backward of a training step, all micro-batches at once.

    The three read nothing but their arguments, so each can be captured and replayed.
    """

    def __init__(
        self,
        runners: Sequence[StageRunner],
        schedule: Schedule,
        losses: MicrobatchLosses,
    ) -> None:
        self.runners = runners
        self.schedule = schedule
        self.losses = losses
        self.options = runners[0].options
        self.microbatches = tuple(range(schedule.n_microbatches))

    def forward(self, reads: StepReads, inputs: Values) -> Forward:
        """Run all stages, each on its versions of the weights.

        Args:
            reads: the weights that the step reads.
            inputs: ``[n_microbatches * b, ...]`` each, on the device of the stages.
        """
        groups: Groups = [self.microbatches]
        batches = [inputs]
        all_leaves = []
        for runner, stage_reads in zip(self.runners, reads.stages, strict=True):
            next_groups = [read.microbatches for read in stage_reads]
            batches = _regroup(batches, groups, next_groups)
            groups = next_groups
            # A leaf per version: gradients of different versions must not meet before the sum.
            stage_leaves = [leaves(read.weights) for read in stage_reads]
            all_leaves.append(stage_leaves)
            batches = [
                runner.forward(weights, batch, group, reads.step)
                for weights, batch, group in zip(
                    stage_leaves, batches, groups, strict=True
                )
            ]
        (outputs,) = _regroup(batches, groups, [self.microbatches])
        return Forward(outputs, all_leaves)

    def loss_gradients(self, outputs: Values, targets: Tensor) -> LossGradients:
        """Compute the losses, and their gradients with respect to ``outputs``.

        Args:
            outputs: what the last stage returns, ``[n_microbatches * b, ...]`` each.
            targets: ``[n_microbatches * b, ...]``.
        """
        n_microbatches = len(self.microbatches)
        roots = tuple(x.detach().requires_grad_(x.requires_grad) for x in outputs)
        losses: LossValue = self.losses(roots, targets, n_microbatches)
        # The gradient of the sum of all roots, without the operations that compute the sum.
        factor = losses.root_factor(n_microbatches, self.options.scale)
        losses.value.backward(torch.full_like(losses.value, factor))
        gradients = tuple(root.grad for root in roots)
        return LossGradients(losses.mean(), losses.count, gradients)

    def backward(
        self, forward: Forward, reads: StepReads, gradients: LossGradients
    ) -> list[GradientSum]:
        """Return the gradients and statistics of each stage, summed over all micro-batches.

        Args:
            forward: the forward of the same step.
            reads: the weights that it has read.
            gradients: its losses, and the gradients of its outputs.
        """
        outputs, output_gradients = [], []
        for output, output_gradient in zip(
            forward.outputs, gradients.output_gradients, strict=True
        ):
            if output_gradient is not None:
                outputs.append(output)
                output_gradients.append(output_gradient)
        torch.autograd.backward(outputs, output_gradients)
        totals = [GradientSum() for _ in self.runners]
        terms = []
        stages = zip(
            self.runners, reads.stages, forward.leaves, reads.newest, strict=True
        )
        for runner, stage_reads, stage_leaves, newest in stages:
            gradients_of_reads = []
            for read, weights in zip(stage_reads, stage_leaves, strict=True):
                stage_gradients = take_gradients(weights)
                if read.compensated:
                    strength = self._compensation(read, gradients.counts)
                    stage_gradients = compensated(
                        stage_gradients, weights, newest, strength
                    )
                gradients_of_reads.append(stage_gradients)
            statistics = runner.statistics_of_forwards()
            while len(gradients_of_reads) < len(statistics):
                gradients_of_reads.append({})
            for index, of_forward in enumerate(statistics):
                gradients_of_reads[index] |= of_forward
            terms.append(gradients_of_reads)
        # The sum over all stages takes one operation for each further version.
        for terms_of_stages in zip_longest(*terms, fillvalue={}):
            add_to_sums(totals, terms_of_stages)
        return totals

    def _compensation(self, read: VersionRead, counts: Tensor | None) -> Tensor | float:
        """Return the factor of the correction; see :func:`toolkit.runtime.stage.compensated`."""
        # Such gradients are those of one micro-batch each.
        (microbatch,) = read.microbatches
        count = None
        if counts is not None:
            count = counts[microbatch]
        factor = loss_factor(count, len(self.microbatches), self.options.scale)
        return self.schedule.corrected.c / factor


class Grouped:
    """Runs one training step after another; keeps the versions that later steps read.

    Args:
        grouped_pass: the computations of a step.
        diagnostics: steps between two measurements of the delay's effect on gradients; 0: none.
        capture: replays steps instead of computing them operation by operation; None: it does not.
    """

    def __init__(
        self,
        grouped_pass: GroupedPass,
        diagnostics: int = 0,
        capture: "StepCapture | None" = None,
    ) -> None:
        self.grouped_pass = grouped_pass
        self.runners = grouped_pass.runners
        self.schedule = grouped_pass.schedule
        self.options = grouped_pass.options
        self.microbatches = grouped_pass.microbatches
        self.diagnostics = diagnostics
        self.capture = capture

    def run(
        self, source: BatchReader, versions: Versions, step: int
    ) -> Iterator[StepResult]:
        """Train from ``step`` on; ``versions[stage]`` follows the newest weights.

        A step's updates are complete before its result is yielded.

        Args:
            source: inputs and targets of all micro-batches, a step after another.
            versions: for each stage, weight versions by number; the newest is ``step``.
            step: number of the first training step.
        """
        for current_step, share in enumerate(source, start=step):
            assert share is not None  # a single process reads every micro-batch
            self.options.begin_step()
            delays: tuple[StageDelay, ...] = ()
            if self.diagnostics and current_step % self.diagnostics == 0:
                delays = self._measure_delays(current_step, versions, *share)
            # Not kept in a variable: its outputs would live through the next step.
            yield replace(self._step(current_step, versions, *share), delays=delays)

    def _step(
        self, step: int, versions: Versions, inputs: Values, targets: Tensor
    ) -> StepResult:
        # 1. The gradients of all stages, summed over the micro-batches.
        reads = self._reads(step, versions, self.schedule.version)
        if self.capture is None:
            result, totals = self._gradients(reads, inputs, targets)
        else:
            result, totals = self.capture.gradients(
                reads, inputs, targets, self._gradients
            )
        del reads  # it would keep versions that nothing reads any more

        # 2. The memory of the next versions: that of versions that end, or new memory.
        self._end_versions(versions, step)

        # 3. What concerns all stages at once, in as few operations as possible.
        n_microbatches = self.schedule.n_microbatches
        norms = gradient_norms(self.runners, totals)
        # Averages begin with the statistics before the first update.
        for runner in self.runners:
            runner.begin_average()
        advance_statistics(self.runners, totals, n_microbatches)

        # 4. The update of each stage makes the next version.
        for runner, stage_versions, total, norm in zip(
            self.runners, versions, totals, norms, strict=True
        ):
            runner.update(total, n_microbatches, keep_old=False, norm=norm)
            stage_versions[step + 1] = runner.newest()
        return result

    def _end_versions(self, versions: Versions, step: int) -> None:
        """Drop versions that nothing reads after ``step``; keep others from the next update."""
        runners_to_renew = []
        for runner, stage_versions in zip(self.runners, versions, strict=True):
            oldest = self.schedule.oldest_version(runner.index, step + 1)
            if self.diagnostics:
                oldest = min(oldest, step)  # they measure how far the last update moved
            if oldest <= step:
                runners_to_renew.append(runner)
            for version in [*stage_versions]:
                if version < oldest:
                    weights = stage_versions.pop(version)
                    if self.capture is not None:
                        runner.recycle(weights)
        # After that, so that the next versions take the memory of those that have ended.
        renew(runners_to_renew)

    def _gradients(
        self, reads: StepReads, inputs: Values, targets: Tensor
    ) -> tuple[StepResult, list[GradientSum]]:
        """Sum each stage's gradients over all micro-batches, operation by operation."""
        forward = self.grouped_pass.forward(reads, inputs)
        self.grouped_pass.losses.examine(
            forward.outputs, targets, len(self.microbatches)
        )
        gradients = self.grouped_pass.loss_gradients(forward.outputs, targets)
        totals = self.grouped_pass.backward(forward, reads, gradients)
        add_counts(totals, gradients.counts)
        first_output = forward.outputs[0].detach()
        if self.options.in_cuda_graphs:
            # The next replay of the graph overwrites this memory.
            first_output = first_output.clone()
        result = StepResult(
            reads.step,
            self.microbatches,
            gradients.losses,
            first_output,
            counts=gradients.counts,
        )
        return result, totals

    def _reads(self, step: int, versions: Versions, version_of: VersionOf) -> StepReads:
        """Return what ``step`` reads: at each stage, ``version_of(stage, microbatch, step)``."""
        stages = []
        for runner, stage_versions in zip(self.runners, versions, strict=True):
            groups: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
            for microbatch in self.microbatches:
                version = version_of(runner.index, microbatch, step)
                group: tuple[int, ...] = (version,)
                if self.schedule.compensates(version, step):
                    # Its gradient is compensated before it is summed, so it runs apart.
                    group = (version, microbatch)
                groups[group].append(microbatch)
            stage_reads = []
            for (version, *_), microbatches in groups.items():
                weights = self._read(runner, stage_versions, version, step)
                is_compensated = self.schedule.compensates(version, step)
                read = VersionRead(
                    version, tuple(microbatches), weights, is_compensated
                )
                stage_reads.append(read)
            stages.append(stage_reads)
        newest = [stage_versions[step] for stage_versions in versions]
        return StepReads(step, stages, newest)

    def _read(
        self,
        runner: StageRunner,
        versions: Mapping[int, Weights],
        version: int,
        step: int,
    ) -> Weights:
        """Return what a stage reads at ``step``: a weight version, or a prediction from it."""
        if not self.schedule.predicts(runner.index, version, step):
            return versions[version]
        prediction = runner.predict(
            versions[version - 1],
            versions[version],
            version,
            step,
            self.schedule.corrected,
        )
        if self.capture is None:
            return prediction
        return self.capture.in_place(prediction, (runner.index, step - version))

    def _measure_delays(
        self, step: int, versions: Versions, inputs: Values, targets: Tensor
    ) -> tuple[StageDelay, ...]:
        """Compare each stage's delayed gradient with that of the newest weights; update nothing."""
        delayed_reads = self._reads(step, versions, self.schedule.version)
        fresh_reads = self._reads(step, versions, lambda stage, m, t: t)
        _, delayed_totals = self._gradients(delayed_reads, inputs, targets)
        _, fresh_totals = self._gradients(fresh_reads, inputs, targets)
        stage_delays = []
        for runner, stage_versions, delayed_total, fresh_total in zip(
            self.runners, versions, delayed_totals, fresh_totals, strict=True
        ):
            staleness = [
                step - self.schedule.version(runner.index, microbatch, step)
                for microbatch in self.microbatches
            ]
            stage_delay = compare_gradients(
                runner, step, staleness, stage_versions, delayed_total, fresh_total
            )
            stage_delays.append(stage_delay)
        return tuple(stage_delays)


def add_counts(totals: Sequence[GradientSum], counts: Tensor | None) -> None:
    """Add the counts of the losses, if any, to the sum of each stage."""
    if counts is not None:
        for total in totals:
            total.add({COUNT: counts.sum()})


def _regroup(
    batches: list[Values], groups: Groups, next_groups: Groups
) -> list[Values]:
    """Return the same micro-batches in other groups; copy only where groups merge."""
    if groups == next_groups:
        return batches
    order = [*chain.from_iterable(groups)]
    next_order = [*chain.from_iterable(next_groups)]
    regrouped: list[list[Tensor]] = []
    for tensors in zip(*batches, strict=True):
        batch = tensors[0]
        if len(tensors) > 1:
            batch = torch.cat(tensors)
        if order != next_order:
            chunks = dict(zip(order, batch.chunk(len(order)), strict=True))
            batch = torch.cat([chunks[m] for m in next_order])
        pieces = [batch]
        # No split into one piece: its gradient would be copied.
        if len(next_groups) > 1:
            size = batch.shape[0] // len(order)
            pieces = [*batch.split([size * len(group) for group in next_groups])]
        regrouped.append(pieces)
    return [*zip(*regrouped, strict=True)]
