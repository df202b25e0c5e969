"""Order "grouped": the schedule's trajectory at nearly the speed of plain training."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from toolkit.runtime.capture import StepCapture
from toolkit.runtime.delay_effect import compare_gradients
from toolkit.runtime.gradient_norms import gradient_norms
from toolkit.runtime.grouped_pass import (
    GroupedPass,
    StepReads,
    VersionRead,
    add_counts,
)
from toolkit.runtime.microbatches import BatchReader, StageDelay, StepResult
from toolkit.runtime.stage import StageRunner, Values
from toolkit.runtime.updater import GradientSum, Weights, advance_statistics, renew

Versions = Sequence[dict[int, Weights]]
VersionOf = Callable[[int, int, int], int]
"""From stage, micro-batch and step to the weight version that is read."""


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
        capture: StepCapture | None = None,
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
            inputs, targets = share
            self.options.begin_step()
            delays: tuple[StageDelay, ...] = ()
            if self.diagnostics and current_step % self.diagnostics == 0:
                delays = self._measure_delays(current_step, versions, inputs, targets)
            # Not kept in a variable: its outputs would live through the next step.
            yield replace(
                self._step(current_step, versions, inputs, targets), delays=delays
            )

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
            # Ascending, so that the samples of a group keep their order.
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
