"""Order "grouped": the schedule's trajectory at nearly the speed of plain training.

At each stage, the micro-batches that read the same weight version run as one batch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from toolkit.runtime.diagnostics import StageDelay, compare_gradients
from toolkit.runtime.microbatches import BatchReader, StepResult, take
from toolkit.runtime.stage import StageRunner, Values, leaves, predicted, take_gradients
from toolkit.runtime.updater import GradientNorm, GradientSum, Weights, norms
from toolkit.schedule import Schedule

Loss = Callable[[Tensor, Tensor], Tensor]
Groups = list[tuple[int, ...]]


class Grouped:
    """Runs one training step after another; keeps the versions that later steps read.

    Args:
        runners: of each stage.
        schedule: for as many.
        loss: mean loss of a micro-batch.
        diagnostics: steps between two looks at what the delay does to the gradients; 0: none.
    """

    def __init__(
        self,
        runners: Sequence[StageRunner],
        schedule: Schedule,
        loss: Loss,
        diagnostics: int = 0,
    ) -> None:
        self.runners = runners
        self.schedule = schedule
        self.loss = loss
        self.options = runners[0].options
        self.diagnostics = diagnostics

    def run(
        self,
        source: BatchReader,
        versions: list[dict[int, Weights]],
        step: int,
        n_steps: int | None,
    ) -> Iterator[StepResult]:
        """Train from ``step`` on; ``versions[stage]`` follows the newest weights.

        Each step's updates are in before its result is there.
        """
        for t, share in enumerate(take(source, n_steps), start=step):
            assert share is not None  # all is read
            self.options.begin_step()
            delays: tuple[StageDelay, ...] = ()
            if self.diagnostics and t % self.diagnostics == 0:
                delays = self._look(t, versions, *share)
            results = [self.step(t, versions, *share)]
            yield replace(results.pop(), delays=delays)  # kept by whoever takes it, and not here

    def step(
        self, step: int, versions: list[dict[int, Weights]], inputs: Values, targets: Tensor
    ) -> StepResult:
        """Run training step ``step``; ``versions[stage]`` gains version ``step + 1``."""
        result, totals = self.gradients(step, versions, inputs, targets, self.schedule.version)
        known = zip(self.runners, totals, norms(self.runners, totals), strict=True)
        for runner, total, norm in known:
            self._update(runner, total, versions[runner.index], step, norm)
        return result

    def gradients(
        self,
        step: int,
        versions: Sequence[Mapping[int, Weights]],
        inputs: Values,
        targets: Tensor,
        version: Callable[[int, int, int], int],
    ) -> tuple[StepResult, list[GradientSum]]:
        """What training step ``step`` sums for each stage; nothing is updated.

        Args:
            step: from which the schedule's delays and what is drawn at random follow.
            versions: ``versions[stage]``, the weights.
            inputs: of all micro-batches.
            targets: of all micro-batches.
            version: which of the weights (stage, microbatch, step) reads.
        """
        n_microbatches = self.schedule.n_microbatches
        groups: Groups = [tuple(range(n_microbatches))]
        batches = [inputs]
        read: list[dict[int, Weights]] = []
        for runner in self.runners:
            by_version = self._by_version(runner.index, step, version)
            batches = _regroup(batches, groups, list(by_version.values()))
            groups = list(by_version.values())
            known = versions[runner.index]
            # A leaf per version: gradients of different versions must not meet before the sum.
            own = {v: leaves(self._read(known, v, step)) for v in by_version}
            batches = [
                runner.forward(own[v], batch, group, step)
                for (v, group), batch in zip(by_version.items(), batches, strict=True)
            ]
            read.append(own)
        ((outputs,),) = _regroup(batches, groups, [tuple(range(n_microbatches))])
        parts = zip(outputs.chunk(n_microbatches), targets.chunk(n_microbatches), strict=True)
        losses = torch.stack([self.loss(output, target) for output, target in parts])
        (losses.mean() * self.options.scale).backward()
        totals = []
        for runner, own in zip(self.runners, read, strict=True):
            total = GradientSum()
            for weights in own.values():
                total.add(take_gradients(weights))
            total.add(runner.take_statistics())
            totals.append(total)
        everyone = tuple(range(n_microbatches))
        outputs = outputs.detach()
        if self.options.in_cuda_graphs:
            outputs = outputs.clone()  # the next step takes its memory
        return StepResult(step, everyone, losses.detach(), outputs), totals

    def _look(
        self, step: int, versions: Sequence[Mapping[int, Weights]], inputs: Values, targets: Tensor
    ) -> tuple[StageDelay, ...]:
        """What delay does to the gradients of ``step``, in the time of two forwards and backwards.

        Nothing is updated.
        """
        delayed, fresh = (
            [total.tensors for total in self.gradients(step, versions, inputs, targets, version)[1]]
            for version in (self.schedule.version, lambda j, m, t: t)
        )
        return compare_gradients(step, self.schedule, self.runners, versions, delayed, fresh)

    def _update(
        self,
        runner: StageRunner,
        total: GradientSum,
        versions: dict[int, Weights],
        step: int,
        norm: GradientNorm | None,
    ) -> None:
        oldest = self.schedule.oldest_version(runner.index, step + 1)
        oldest = min(oldest, step) if self.diagnostics else oldest  # which look at the last
        n_microbatches = self.schedule.n_microbatches
        runner.update(total, n_microbatches, keep_old=oldest <= step, norm=norm)
        versions[step + 1] = runner.newest()
        # Not earlier: later steps still read versions from oldest on.
        for version in [version for version in versions if version < oldest]:
            del versions[version]

    def _read(self, versions: Mapping[int, Weights], version: int, step: int) -> Weights:
        """What a stage reads at ``step`` of which the schedule says ``version``."""
        if not self.schedule.predicts(version, step):
            return versions[version]
        return predicted(versions[version - 1], versions[version], step - version)

    def _by_version(
        self, stage: int, step: int, version: Callable[[int, int, int], int]
    ) -> dict[int, tuple[int, ...]]:
        """The micro-batches that read each version, in order of their first."""
        groups: dict[int, tuple[int, ...]] = {}
        for m in range(self.schedule.n_microbatches):
            read = version(stage, m, step)
            groups[read] = (*groups.get(read, ()), m)
        return groups


def _regroup(batches: list[Values], groups: Groups, wanted: Groups) -> list[Values]:
    """The same micro-batches, in other groups. Copies only where groups merge."""
    if groups == wanted:
        return batches
    order = [m for group in groups for m in group]
    wanted_order = [m for group in wanted for m in group]
    regrouped: list[list[Tensor]] = [[] for _ in wanted]
    for parts in zip(*batches, strict=True):
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        if order != wanted_order:
            chunks = dict(zip(order, whole.chunk(len(order)), strict=True))
            whole = torch.cat([chunks[m] for m in wanted_order])
        size = whole.shape[0] // len(order)
        sizes = [size * len(group) for group in wanted]
        pieces = whole.split(sizes) if len(sizes) > 1 else [whole]
        for tensors, piece in zip(regrouped, pieces, strict=True):
            tensors.append(piece)
    return [tuple(tensors) for tensors in regrouped]
