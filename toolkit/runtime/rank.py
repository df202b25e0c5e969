"""One rank at work: its buffers, and what an instruction does to them.

What crosses from rank to rank is given and taken as a payload. Order "scheduled" of
``SingleProcess`` hands it over in memory; the executor sends it to another process.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from toolkit.model.node_costs import differentiable
from toolkit.runtime.compressed_sums import CompressedSum
from toolkit.runtime.compressed_weights import CompressedWeights
from toolkit.runtime.losses import COUNT, CheckedLoss, LossValue, loss_factor
from toolkit.runtime.rank_compression import RankCompressor
from toolkit.runtime.saved_forward import Gradients, SavedForward
from toolkit.runtime.split_backward import first_half
from toolkit.runtime.stage import (
    StageRunner,
    Values,
    compensated,
    leaves,
    take_gradient,
)
from toolkit.runtime.updater import GradientSum, Weights
from toolkit.schedule import Action, Buffer, Instruction, Program

Payload = Weights | GradientSum | CompressedSum | CompressedWeights | Gradients
"""A weight version, a sum of gradients, or what crosses a boundary, by the kind of buffer."""

Watching = Callable[[Weights, Values, list[Tensor]], AbstractContextManager[None]]


class MicrobatchSource(Protocol):
    """Supplies micro-batches, and takes their results."""

    def microbatch(self, step: int, m: int) -> tuple[Values, Tensor]:
        """Return the inputs and targets of a micro-batch, ``[b, ...]`` each."""
        ...

    def finished(
        self, step: int, microbatch: int, loss: LossValue, output: Tensor
    ) -> None:
        """Take the results of a micro-batch, detached."""
        ...


class Rank:
    """The memory of one rank; each dictionary entry is one buffer of the program.

    Args:
        program: the program of all ranks.
        runners: compute with the stages that this rank runs, by stage.
        updaters: update the stages that this rank updates, by stage.
        versions: ``[stage][version]``, the weights of the stages that it owns, as long as this or a
            later program reads them. It is kept up to date.
        loss: the loss. None: the caller takes the last stage's outputs from :meth:`take_outputs`,
            and gives their gradients to :meth:`give_gradients` before the backward.
        microbatches: inputs, and where results go.
        watching: context of each forward, from its weights, inputs and buffers.

    Attributes:
        next_step: the step that follows the program; the versions that it reads are kept.
        is_read_alone: whether another rank may read the versions of this one between two steps,
            while this one is ahead.
        weights: versions and predictions, by ``Instruction.weights``.
        saved: what forwards have left, by stage, micro-batch and step.
        boundaries: activations and their gradients, by buffer, stage, micro-batch and step.
        sums: sums of gradients, by stage and step.
        compressor: of the messages that this rank hands on; None: they travel as they are.
    """

    def __init__(
        self,
        program: Program,
        runners: Mapping[int, StageRunner],
        updaters: Mapping[int, StageRunner],
        versions: Mapping[int, dict[int, Weights]],
        loss: CheckedLoss | None,
        microbatches: MicrobatchSource,
        watching: Watching | None = None,
    ) -> None:
        self.schedule = schedule = program.schedule
        self.last_stage = schedule.n_stages - 1
        self.next_step = program.steps.stop
        self.is_read_alone = False
        self.runners = runners
        self.updaters = updaters
        self.versions = versions
        self.loss = loss
        self.microbatches = microbatches
        self.watching = watching or (lambda *tensors: nullcontext())
        self.weights: dict[tuple, Weights] = {}
        self.saved: dict[tuple, SavedForward] = {}
        self.boundaries: dict[tuple, Gradients] = {}
        self.sums: defaultdict[tuple, GradientSum] = defaultdict(GradientSum)
        self.compressor: RankCompressor | None = None

    def execute(self, i: Instruction) -> None:
        """Carry out an instruction that involves no other rank."""
        _METHODS[i.action](self, i)

    def give(self, i: Instruction) -> Payload:
        """Return what ``i`` sends to another rank. Only weights stay here."""
        if i.buffer == Buffer.WEIGHTS and self.compressor is not None:
            return self.compressor.weights.messages[i.stage, _int(i.version)]
        if i.buffer == Buffer.WEIGHTS:
            # Until their FREE, which may come later.
            return self.weights[i.stage, i.version]
        if i.buffer == Buffer.GRADIENT:
            total = self.sums.pop((i.stage, i.step))
            # A collective adds the parts of all ranks: their codes could not be added.
            if self.compressor is None or i.action != Action.SEND:
                return total
            return self.compressor.sums.compress(
                i, total, self.runners[i.stage].masters
            )
        return self.boundaries.pop((i.buffer, i.stage, i.microbatch, i.step))

    def take_outputs(self, i: Instruction) -> Values:
        """Take what the last stage's forward ``i`` has computed, detached."""
        outputs = self.boundaries.pop(
            (Buffer.ACTIVATION, i.stage, i.microbatch, i.step)
        )
        return cast(Values, outputs)

    def give_gradients(
        self, i: Instruction, gradients: Gradients, count: Tensor | None = None
    ) -> None:
        """Give the gradients of the outputs of ``i``: of :meth:`LossValue.root`, and its count.

        Args:
            i: a forward of the last stage, whose loss the caller computes.
            gradients: of the outputs, from :meth:`LossValue.root`; None without a gradient.
            count: count of the loss, shape ``[]``; None for a mean.
        """
        self._give_input_gradients(i._replace(stage=i.stage + 1), gradients, count)

    def take(self, i: Instruction, payload: Payload) -> None:
        """Take over what ``i`` received from another rank; a sum of gradients is added."""
        if isinstance(payload, GradientSum):
            self.sums[i.stage, i.step].add(payload.tensors)
        elif isinstance(payload, CompressedSum):
            self.sums[i.stage, i.step].add(payload.decoded())
        elif isinstance(payload, CompressedWeights):
            assert self.compressor is not None
            version = _int(i.version)
            # A message of weights may be a difference to the version before.
            base = self.weights.get((i.stage, version - 1))
            weights = self.compressor.weights.receive((i.stage, version), payload, base)
            self.weights[i.stage, version] = weights
        elif isinstance(payload, dict):
            self.weights[i.stage, i.version] = payload
        else:
            self.boundaries[i.buffer, i.stage, i.microbatch, i.step] = payload

    def _forward(self, i: Instruction) -> None:
        # 1. The inputs: data, or what the stage before has made.
        microbatch = _int(i.microbatch)
        step = _int(i.step)
        if i.stage == 0:
            inputs, _ = self.microbatches.microbatch(step, microbatch)
        else:
            activations = self.boundaries.pop(
                (Buffer.ACTIVATION, i.stage - 1, microbatch, step)
            )
            # Each stage has a graph of its own, which ends at its inputs: also where the stage
            # before is on this rank, its backward is another op of the program.
            inputs = tuple(
                tensor.detach().requires_grad_(differentiable(tensor))
                for tensor in activations
                if tensor is not None
            )
        # 2. Run. Leaves of its own for each micro-batch: its backward uses this version even after
        # later updates, and its gradients do not meet those of others before the sum.
        weights = leaves(self.weights[i.weights])
        runner = self.runners[i.stage]
        with self.watching(weights, inputs, runner.buffers):
            outputs = runner.forward(weights, inputs, (microbatch,), step)
        statistics = runner.take_statistics()
        # 3. What the backward begins with: the loss, or gradients that another op will bring.
        gradients: Gradients = ()
        count: Tensor | None = None
        if i.stage == self.last_stage and self.loss is not None:
            _, targets = self.microbatches.microbatch(step, microbatch)
            loss = self.loss(outputs, targets)
            count = loss.count
            self.microbatches.finished(
                step, microbatch, LossValue(loss.mean(), count), outputs[0].detach()
            )
            # The backward begins at the loss, scaled so that the step's gradients only add up.
            outputs = (loss.root(self.schedule.n_microbatches, runner.options.scale),)
            gradients = (torch.ones_like(outputs[0]),)
        else:
            detached_outputs = tuple(tensor.detach() for tensor in outputs)
            self.boundaries[Buffer.ACTIVATION, i.stage, microbatch, step] = (
                detached_outputs
            )
        # 4. Keep places in the graph instead of the outputs, whose memory is free once they are
        # sent.
        edges = [
            get_gradient_edge(tensor) if tensor.requires_grad else None
            for tensor in outputs
        ]
        saved = SavedForward(weights, inputs, edges, statistics, gradients, count)
        self.saved[i.stage, microbatch, step] = saved

    def _take_output_gradients(self, i: Instruction) -> SavedForward:
        saved = self.saved[i.stage, i.microbatch, i.step]
        if i.stage < self.last_stage or self.loss is None:
            gradient_key = (
                Buffer.ACTIVATION_GRADIENT,
                i.stage + 1,
                i.microbatch,
                i.step,
            )
            gradients = self.boundaries.pop(gradient_key)
            n_outputs = len(saved.outputs)
            saved.gradients = gradients[:n_outputs]
            if len(gradients) > n_outputs:
                # The count of the loss follows the gradients from stage to stage: each needs it.
                saved.count = gradients[n_outputs]
        return saved

    def _backward(self, i: Instruction) -> None:
        saved = self._take_output_gradients(i)
        # Gradients come to rest on the leaves: the weights of this micro-batch, and its inputs.
        torch.autograd.backward(*saved.take_roots())
        if i.stage > 0:
            self._give_input_gradients(
                i, tuple(map(take_gradient, saved.inputs)), saved.count
            )
        self._add_gradients(i, saved)

    def _backward_input(self, i: Instruction) -> None:
        if not self.runners[i.stage].splits:
            self._backward(i)  # all at once; BACKWARD_WEIGHT then has nothing to do
            return
        saved = self._take_output_gradients(i)
        weights = list(saved.weights.values())
        input_gradients, saved.second_half = first_half(
            *saved.take_roots(), saved.inputs, weights
        )
        if i.stage > 0:
            self._give_input_gradients(i, input_gradients, saved.count)

    def _backward_weight(self, i: Instruction) -> None:
        if not self.runners[i.stage].splits:  # the first half has done all
            return
        saved = self.saved[i.stage, i.microbatch, i.step]
        for segment in saved.second_half:
            segment.run()
        self._add_gradients(i, saved)

    def _add_gradients(self, i: Instruction, saved: SavedForward) -> None:
        gradients = saved.take_weight_gradients()
        if i.buffer == Buffer.COMPENSATED:
            stale_weights, newest_weights = (self.weights[key] for key in i.reads)
            scale = self.runners[i.stage].options.scale
            # The correction is quadratic in the gradient of the mean loss. These gradients are
            # ``factor`` times that one.
            factor = loss_factor(saved.count, self.schedule.n_microbatches, scale)
            strength = self.schedule.corrected.c / factor
            gradients = compensated(gradients, stale_weights, newest_weights, strength)
        # Statistics of norms travel with the sum, since they too are summed over micro-batches.
        terms = gradients | saved.statistics
        if saved.count is not None:
            # The sum adds in place, and stages share the count.
            terms[COUNT] = saved.count.clone()
        self.sums[i.stage, i.step].add(terms)

    def _give_input_gradients(
        self, i: Instruction, gradients: Gradients, count: Tensor | None = None
    ) -> None:
        if count is not None:
            gradients = (*gradients, count)
        self.boundaries[Buffer.ACTIVATION_GRADIENT, i.stage, i.microbatch, i.step] = (
            gradients
        )

    def _update(self, i: Instruction) -> None:
        updater = self.updaters[i.stage]
        total = self.sums.pop((i.stage, i.step))
        # Other micro-batches may still read the old version; FREE drops it after its last reader.
        updater.update(total, self.schedule.n_microbatches, keep_old=True)
        newest = updater.newest()
        if self.compressor is not None and i.stage in self.compressor.weights.stages:
            # All ranks compute with what the message says, and so does this one.
            version = _int(i.version)
            base = self.weights.get((i.stage, version - 1))
            newest = self.compressor.weights.encode((i.stage, version), newest, base)
        self.weights[i.weights] = newest
        # Later programs read the versions of stages that this rank owns.
        if i.stage in self.versions:
            self.versions[i.stage][_int(i.version)] = newest
            if self.is_read_alone:
                # What readers needed until this update: it may have been freed before.
                self._drop_old_versions(i.stage)

    def _predict(self, i: Instruction) -> None:
        stale_weights, previous_weights = (self.weights[key] for key in i.reads)
        self.weights[i.weights] = self.runners[i.stage].predict(
            previous_weights,
            stale_weights,
            _int(i.version),
            _int(i.step),
            self.schedule.corrected,
        )

    def _free(self, i: Instruction) -> None:
        if i.buffer == Buffer.ACTIVATION:
            del self.saved[i.stage, i.microbatch, i.step]
            return
        if i.buffer == Buffer.WEIGHTS and self.compressor is not None:
            version = _int(i.version)
            is_newest = (i.stage, version + 1) not in self.weights
            # Before it is gone: another thread may receive the next version right now.
            self.compressor.weights.free(
                (i.stage, version), self.weights[i.weights], is_newest=is_newest
            )
        del self.weights[i.weights]
        if i.buffer == Buffer.WEIGHTS and i.stage in self.versions:
            self._drop_old_versions(i.stage)
        if i.buffer == Buffer.WEIGHTS and self.compressor is not None:
            self.compressor.weights.forget(
                (i.stage, _int(i.version)), self._has_version
            )

    def _has_version(self, key: tuple[int, int]) -> bool:
        """Whether this or a later program reads a version, by stage and number."""
        stage, version = key
        return key in self.weights or version in self.versions.get(stage, {})

    def _drop_old_versions(self, stage: int) -> None:
        """Drop the versions of an owned stage that neither this nor a later program reads."""
        versions_of_stage = self.versions[stage]
        # A copy: an update of another thread may add one.
        versions = [*versions_of_stage]
        next_step = self.next_step
        if self.is_read_alone:
            # A reader between the steps n - 1 and n adds its gradients to update n only later, so
            # until that is made it may ask for what step n reads, however far this rank is.
            next_step = min(next_step, max(versions))
        # The next program may read versions that this one is done with.
        oldest = self.schedule.oldest_version(stage, next_step)
        for version in versions:
            if version < oldest:
                # None: an update of another thread may drop the same.
                versions_of_stage.pop(version, None)


_METHODS: dict[Action, Callable[[Rank, Instruction], None]] = {
    Action.FORWARD: Rank._forward,
    Action.BACKWARD: Rank._backward,
    Action.BACKWARD_INPUT: Rank._backward_input,
    Action.BACKWARD_WEIGHT: Rank._backward_weight,
    Action.UPDATE: Rank._update,
    Action.PREDICT: Rank._predict,
    Action.FREE: Rank._free,
}


def _int(value: int | None) -> int:
    assert value is not None
    return value
