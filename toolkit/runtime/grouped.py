"""Order "grouped": the schedule's trajectory at nearly the speed of plain training.

At each stage, the micro-batches that read the same weight version run as one batch.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import nan, prod

import torch
from torch import Tensor

from toolkit.runtime.losses import COUNT, CheckedLoss, loss_factor
from toolkit.runtime.microbatches import BatchReader, StageDelay, StepResult
from toolkit.runtime.stage import StageRunner, Values, compensated, leaves, take_gradients
from toolkit.runtime.updater import GradientSum, Weights, gradient_norms
from toolkit.schedule import Schedule

Groups = list[tuple[int, ...]]
Versions = Sequence[dict[int, Weights]]


class Grouped:
    """Runs one training step after another; keeps the versions that later steps read.

    ``diagnostics``: steps between two measurements of the delay's effect on gradients; 0: none.
    """

    def __init__(
        self,
        runners: Sequence[StageRunner],
        schedule: Schedule,
        loss: CheckedLoss,
        diagnostics: int = 0,
    ) -> None:
        self.runners, self.schedule, self.loss = runners, schedule, loss
        self.options = runners[0].options
        self.diagnostics = diagnostics
        self.microbatches = tuple(range(schedule.n_microbatches))

    def run(self, source: BatchReader, versions: Versions, step: int) -> Iterator[StepResult]:
        """Train from ``step`` on; ``versions[stage]`` follows the newest weights.

        A step's updates are complete before its result is yielded.
        """
        for t, share in enumerate(source, start=step):
            assert share is not None  # a single process reads every micro-batch
            self.options.begin_step()
            delays: tuple[StageDelay, ...] = ()
            if self.diagnostics and t % self.diagnostics == 0:
                delays = self._measure_delays(t, versions, *share)
            # Not kept in a variable: its outputs would live through the next step.
            yield replace(self._step(t, versions, *share), delays=delays)

    def _step(self, step: int, versions: Versions, inputs: Values, targets: Tensor) -> StepResult:
        result, totals = self._gradients(step, versions, inputs, targets, self.schedule.version)
        norms = gradient_norms(self.runners, totals)
        for runner, known, total, norm in zip(self.runners, versions, totals, norms, strict=True):
            oldest = self.schedule.oldest_version(runner.index, step + 1)
            if self.diagnostics:
                oldest = min(oldest, step)  # they measure how far the last update moved
            n = self.schedule.n_microbatches
            runner.update(total, n, keep_old=oldest <= step, norm=norm)
            known[step + 1] = runner.newest()
            for version in [version for version in known if version < oldest]:
                del known[version]
        return result

    def _gradients(
        self,
        step: int,
        versions: Versions,
        inputs: Values,
        targets: Tensor,
        version: Callable[[int, int, int], int],
    ) -> tuple[StepResult, list[GradientSum]]:
        """Sum each stage's gradients, on ``version(stage, microbatch, step)`` of the weights."""
        groups: Groups = [self.microbatches]
        batches = [inputs]
        read: list[list[tuple[int, tuple[int, ...], Weights]]] = []
        for runner, known in zip(self.runners, versions, strict=True):
            by_version: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
            for m in self.microbatches:
                v = version(runner.index, m, step)
                # A gradient is compensated before it is summed.
                by_version[(v, m) if self.schedule.compensates(v, step) else (v,)].append(m)
            wanted = list(map(tuple, by_version.values()))
            batches, groups = _regroup(batches, groups, wanted), wanted
            # A leaf per version: gradients of different versions must not meet before the sum.
            reads_of_stage = []
            for (v, *_), group in zip(by_version, groups, strict=True):
                reads_of_stage.append((v, group, leaves(self._read(runner, known, v, step))))
            read.append(reads_of_stage)
            batches = [
                runner.forward(weights, batch, group, step)
                for (_, group, weights), batch in zip(reads_of_stage, batches, strict=True)
            ]
        (values,) = _regroup(batches, groups, [self.microbatches])
        n = len(self.microbatches)
        outputs = zip(*(value.chunk(n) for value in values), strict=True)
        parts = zip(outputs, targets.chunk(n), strict=True)
        losses = [self.loss(output, target) for output, target in parts]
        counts = [loss.count for loss in losses if loss.count is not None]
        torch.stack([loss.root(n, self.options.scale) for loss in losses]).sum().backward()
        totals = [GradientSum() for _ in self.runners]
        for runner, known, reads_of_stage, total in zip(
            self.runners, versions, read, totals, strict=True
        ):
            for v, group, weights in reads_of_stage:
                gradients = take_gradients(weights)
                if self.schedule.compensates(v, step):
                    # Compensated gradients are those of one micro-batch each.
                    factor = loss_factor(losses[group[0]].count, n, self.options.scale)
                    strength = self.schedule.corrected.c / factor
                    gradients = compensated(gradients, weights, known[step], strength)
                total.add(gradients)
            total.add(runner.take_statistics())
            if counts:
                total.add({COUNT: torch.stack(counts).sum()})
        first = values[0].detach()
        if self.options.in_cuda_graphs:
            first = first.clone()  # the next replay of the graph overwrites this memory
        means = torch.stack([loss.mean() for loss in losses])
        counted = torch.stack(counts) if counts else None
        return StepResult(step, self.microbatches, means, first, counts=counted), totals

    def _read(
        self, runner: StageRunner, versions: Mapping[int, Weights], version: int, step: int
    ) -> Weights:
        """The weights that a stage reads at ``step``: a version, or a prediction made from it."""
        if not self.schedule.predicts(runner.index, version, step):
            return versions[version]
        pair = versions[version - 1], versions[version]
        return runner.predict(*pair, version, step, self.schedule.corrected)

    def _measure_delays(
        self, step: int, versions: Versions, inputs: Values, targets: Tensor
    ) -> tuple[StageDelay, ...]:
        """Compare each stage's delayed gradient with that of the newest weights; update nothing."""
        _, delayed = self._gradients(step, versions, inputs, targets, self.schedule.version)
        _, fresh = self._gradients(step, versions, inputs, targets, lambda j, m, t: t)
        found = []
        for runner, known, used, new in zip(self.runners, versions, delayed, fresh, strict=True):
            for total in (used, new):
                total.divide_by_count(runner.masters)
            j, masters, scale = runner.index, runner.masters, self.options.scale
            newest = _flat(known[step], masters)
            before = _flat(known[step - 1], masters) if step - 1 in known else newest * nan
            pair = gradient, fresh_gradient = [
                _flat(x.tensors, masters) / scale for x in (used, new)
            ]
            lengths = [float(x.norm()) for x in pair]
            cosine = float(gradient @ fresh_gradient) / prod(lengths) if all(lengths) else nan
            late = [step - self.schedule.version(j, m, step) for m in self.microbatches]
            norms = *lengths, float(newest.norm()), float((newest - before).norm())
            found.append(StageDelay(step, j, sum(late) / len(late), cosine, *norms))
        return tuple(found)


def _flat(tensors: Mapping[str, Tensor], names: Mapping[str, Tensor]) -> Tensor:
    """The named tensors as one, in double precision; missing ones count as 0."""
    parts = [tensors.get(name, torch.zeros_like(like)).flatten() for name, like in names.items()]
    return torch.cat(parts).double() if parts else torch.zeros(1, dtype=torch.float64)


def _regroup(batches: list[Values], groups: Groups, wanted: Groups) -> list[Values]:
    """Return the same micro-batches in other groups; copy only where groups merge."""
    if groups == wanted:
        return batches
    order, wanted_order = ([m for group in of for m in group] for of in (groups, wanted))
    regrouped: list[list[Tensor]] = []
    for parts in zip(*batches, strict=True):
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        if order != wanted_order:
            chunks = dict(zip(order, whole.chunk(len(order)), strict=True))
            whole = torch.cat([chunks[m] for m in wanted_order])
        size = whole.shape[0] // len(order)
        # No split into one piece: its gradient would be copied.
        sizes = [size * len(group) for group in wanted]
        regrouped.append([*whole.split(sizes)] if len(sizes) > 1 else [whole])
    return [*zip(*regrouped, strict=True)]
