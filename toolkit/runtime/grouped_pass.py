"""The computations of a training step in order "grouped".

At each stage, the micro-batches that read the same weight version run as one batch. CDP-v2 with
four stages and micro-batches::

    stage 0   [0 1 2] [3]      micro-batch 3 reads the newest version, the others the one before
    stage 1   [0 1] [2 3]      groups change: the batches are cut and joined again
    stage 2   [0] [1 2 3]
    stage 3   [0 1 2 3]        all read the newest version
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

import torch
from torch import Tensor

from toolkit.runtime.losses import COUNT, LossValue, loss_factor
from toolkit.runtime.microbatch_losses import MicrobatchLosses
from toolkit.runtime.stage import (
    StageRunner,
    Values,
    compensated,
    leaves,
    take_gradients,
)
from toolkit.runtime.updater import GradientSum, Weights, add_to_sums
from toolkit.schedule import Schedule

Groups = list[tuple[int, ...]]
"""The micro-batches of each batch, in the order of their samples."""


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
        # The loss has a graph apart from that of the stages, so each can be recorded by itself.
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
        # One backward through all stages: groups are joined and cut again by autograd on the way.
        torch.autograd.backward(outputs, output_gradients)
        no_tensors: Weights = {}
        terms = []
        for stage, runner in enumerate(self.runners):
            gradients_of_reads = self._take_gradients(
                reads.stages[stage],
                forward.leaves[stage],
                reads.newest[stage],
                gradients.counts,
            )
            # A stage that runs its micro-batches one by one has statistics of each, so more than
            # reads.
            statistics = runner.statistics_of_forwards()
            pairs = zip_longest(gradients_of_reads, statistics, fillvalue=no_tensors)
            terms.append([weights | norms for weights, norms in pairs])
        # The sum over all stages takes one operation for each further version.
        totals = [GradientSum() for _ in self.runners]
        for terms_of_stages in zip_longest(*terms, fillvalue=no_tensors):
            add_to_sums(totals, terms_of_stages)
        return totals

    def _take_gradients(
        self,
        stage_reads: Sequence[VersionRead],
        stage_leaves: Sequence[Weights],
        newest: Weights,
        counts: Tensor | None,
    ) -> list[Weights]:
        """Take a stage's gradients of each version that was read, compensated if it is to be."""
        gradients_of_reads = []
        for read, weights in zip(stage_reads, stage_leaves, strict=True):
            gradients = take_gradients(weights)
            if read.compensated:
                strength = self._compensation(read, counts)
                gradients = compensated(gradients, weights, newest, strength)
            gradients_of_reads.append(gradients)
        return gradients_of_reads

    def _compensation(self, read: VersionRead, counts: Tensor | None) -> Tensor | float:
        """Return the factor of the correction; see :func:`toolkit.runtime.stage.compensated`."""
        # Such gradients are those of one micro-batch each.
        (microbatch,) = read.microbatches
        count = None
        if counts is not None:
            count = counts[microbatch]
        factor = loss_factor(count, len(self.microbatches), self.options.scale)
        return self.schedule.corrected.c / factor


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
    # batches   [0 1] [2 3]     joined   [0 1 2 3]     cut   [0] [1 2 3]
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
    # From [tensor][group] to [group][tensor].
    return [*zip(*regrouped, strict=True)]
