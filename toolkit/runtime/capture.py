"""Replays of captured training steps: one launch of a CUDA graph instead of a thousand.

In order "grouped" the host takes longer to launch a step's operations than a fast GPU to run them.
A step computes the same operations on the same memory each time it reads the same versions of the
weights at the same addresses, so its operations are recorded once and then replayed::

    forward    inputs, versions of the weights     -> outputs        recorded
    losses     outputs, targets                    -> gradients of outputs
    backward   gradients of outputs                -> sums of gradients   recorded

The update stays outside, so any optimizer, learning-rate schedule, clipping and average works. The
losses are recorded only if they read nothing but their arguments; see
:func:`toolkit.runtime.separable`. Versions take turns in the same memory
(:meth:`toolkit.runtime.updater.Updater.recycle`), so after a few steps every step is a replay.
"""

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from toolkit.model.traced_stage import draws_at_random
from toolkit.runtime.cuda_graphs import Recorder, Replay
from toolkit.runtime.grouped_pass import (
    Forward,
    GroupedPass,
    LossGradients,
    StepReads,
    VersionRead,
    add_counts,
)
from toolkit.runtime.microbatches import StepResult
from toolkit.runtime.stage import StageRunner, Values
from toolkit.runtime.updater import GradientSum, Weights
from toolkit.schedule import Schedule
from toolkit.schedule.staleness import RandomDelay

CAPTURES = ("auto", "off")

Compute = Callable[[StepReads, Values, Tensor], tuple[StepResult, list[GradientSum]]]
"""Computes the gradients of a step operation by operation."""

# The first run loads kernels and allocates the memory of libraries, which no recording may do. And
# a kind of step that never comes again is not worth a recording.
_WARM_UP = 1  # times that a kind of step is computed before it is recorded
# Recorded kinds of steps, each with the memory of its inputs and outputs.
_MOST_KEPT = 16
_MOST_COUNTED = 256  # kinds of steps whose number is known
_MOST_REFUSED = 8  # kinds of steps that could not be recorded; then no others are tried
_IDLE = 200  # steps without a replay after which a recording makes room for another


def obstacle(runners: Sequence[StageRunner], schedule: Schedule) -> str | None:
    """Return why no step can be replayed; None if nothing speaks against it."""
    options = runners[0].options
    for runner in runners:
        if runner.one_by_one:
            if draws_at_random(runner.compute):
                return f"stage {runner.index} draws at random, such as by dropout"
            return f"stage {runner.index} runs its micro-batches one by one"
    if isinstance(schedule.delay, RandomDelay):
        return "random delays are others at each step"
    if options.in_cuda_graphs:
        return f"compile={options.compile} replays graphs of its own"
    return None


@dataclass
class _CapturedStep:
    """One kind of step, recorded.

    Attributes:
        inputs: memory that the inputs of a step are copied to.
        targets: likewise, of its targets.
        outputs: what the last stage returns.
        replay_forward: sets ``outputs``.
        gradients: losses and gradients of outputs, in memory that the backward reads.
        replay_losses: sets ``gradients``; None if the loss has to be called each time.
        replay_backward: sets the sums of gradients.
        names: for each stage, the names of the sums that the backward leaves.
        last_step: number of steps before its last use.
    """

    inputs: Values
    targets: Tensor
    outputs: Values
    replay_forward: Replay
    gradients: LossGradients
    replay_losses: Replay | None
    replay_backward: Replay
    names: Sequence[Sequence[str]]
    last_step: int = 0


@dataclass
class StepCapture:
    """Replays the gradients of steps; computes those that cannot be replayed.

    Args:
        grouped_pass: the computations of a step.
        recorder: records them.

    Attributes:
        n_replayed: training steps that were replayed.
        n_computed: the others.
    """

    grouped_pass: GroupedPass
    recorder: Recorder
    n_replayed: int = 0
    n_computed: int = 0
    # The least recently used first.
    _captured: OrderedDict[Hashable, _CapturedStep] = field(default_factory=OrderedDict)
    _times_computed: OrderedDict[Hashable, int] = field(default_factory=OrderedDict)
    _refused: set[Hashable] = field(default_factory=set)
    _has_warned: bool = False
    # Sums of gradients that the last replay has left: the same memory for all kinds of steps.
    _sums: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    _predictions: dict[Hashable, Weights] = field(default_factory=dict)

    def gradients(
        self, reads: StepReads, inputs: Values, targets: Tensor, compute: Compute
    ) -> tuple[StepResult, list[GradientSum]]:
        """Return the result of a step, and the sums of each stage's gradients.

        Args:
            reads: the weights that the step reads.
            inputs: ``[n_microbatches * b, ...]`` each.
            targets: ``[n_microbatches * b, ...]``.
            compute: computes a step that is no replay.
        """
        key = self._key(reads, inputs, targets)
        # computed (_WARM_UP times) -> recorded, and run from the recording -> replayed
        #                `-> refused, if an operation cannot be recorded: computed for ever
        captured = self._captured.get(key)
        if captured is not None:
            self._captured.move_to_end(key)
            self._replay_losses(captured, inputs, targets)
        elif self._may_capture(key):
            captured = self._try_capture(key, reads, inputs, targets)
        if captured is None:
            self._count(key)
            self.n_computed += 1
            return compute(reads, inputs, targets)
        # Forward and losses have run by now: by a replay, or as the step was recorded.
        captured.last_step = self.n_replayed + self.n_computed
        self.n_replayed += 1
        captured.replay_backward()
        return self._results(captured, reads.step)

    @torch.no_grad()
    def in_place(self, prediction: Weights, place: Hashable) -> Weights:
        """Return ``prediction`` in memory that predictions for the same ``place`` share."""
        # A prediction is new memory at each step, but recordings read fixed addresses.
        memory = self._predictions.setdefault(place, prediction)
        if memory is not prediction:
            torch._foreach_copy_(
                [memory[name] for name in prediction], [*prediction.values()]
            )
        return memory

    def _key(self, reads: StepReads, inputs: Values, targets: Tensor) -> Hashable:
        """Return what must be the same for two steps to launch the same operations."""
        key_of_reads = []
        for stage_reads, newest in zip(reads.stages, reads.newest, strict=True):
            key_of_reads += [
                _key_of_read(read, reads.step, newest) for read in stage_reads
            ]
        # Strides, too: a batch in another memory format launches other kernels.
        shapes = [
            (tensor.shape, tensor.dtype, tensor.stride())
            for tensor in (*inputs, targets)
        ]
        # Buffers and frozen weights are read in place: where one moves, recordings are void.
        constant_addresses: list[int] = []
        for runner in self.grouped_pass.runners:
            constant_addresses += [tensor.data_ptr() for tensor in runner.constants]
        losses_in_one_call = self.grouped_pass.losses.in_one_call()
        loss_options = None
        if losses_in_one_call is not None:
            _, loss_options = losses_in_one_call
        return (
            tuple(key_of_reads),
            tuple(shapes),
            tuple(constant_addresses),
            loss_options,
        )

    def _may_capture(self, key: Hashable) -> bool:
        """Whether to record a kind of step.

        To record takes as long as many steps, so where more kinds take turns than are kept, the
        others are computed: each would be gone by its next turn.
        """
        if key in self._refused or len(self._refused) >= _MOST_REFUSED:
            return False
        if self._times_computed.get(key, 0) < _WARM_UP:
            return False
        if len(self._captured) < _MOST_KEPT:
            return True
        oldest = next(iter(self._captured.values()))
        return self.n_replayed + self.n_computed - oldest.last_step > _IDLE

    def _count(self, key: Hashable) -> None:
        self._times_computed[key] = self._times_computed.get(key, 0) + 1
        self._times_computed.move_to_end(key)
        if len(self._times_computed) > _MOST_COUNTED:
            self._times_computed.popitem(last=False)

    def _try_capture(
        self, key: Hashable, reads: StepReads, inputs: Values, targets: Tensor
    ) -> _CapturedStep | None:
        """Record a kind of step, and run it up to its losses; None if it cannot be recorded."""
        try:
            captured = self._capture(reads, inputs, targets)
        except RuntimeError as error:
            self._refused.add(key)
            # What the norms have noted in the recording has no values, and belongs to no step.
            for runner in self.grouped_pass.runners:
                runner.take_statistics()
            self._warn(error)
            return None
        # Not before it is recorded: a step that is refused takes no place.
        if len(self._captured) >= _MOST_KEPT:
            self._captured.popitem(last=False)
        self._captured[key] = captured
        return captured

    def _warn(self, error: RuntimeError) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        # Where an operation fails, the end of the recording fails, too, and hides the first error.
        reason = str(error.__context__ or error).partition("\n")[0]
        warnings.warn(
            f"capture: got a step that CUDA graphs cannot replay ({reason}); it runs operation by"
            " operation. Set capture=off, or change the operation",
            stacklevel=2,
        )

    def _capture(
        self, reads: StepReads, inputs: Values, targets: Tensor
    ) -> _CapturedStep:
        grouped_pass = self.grouped_pass
        # The recording reads this memory; each step copies its batch there.
        input_memory = tuple(tensor.clone() for tensor in inputs)
        target_memory = targets.clone()
        forward, replay_forward = self.recorder.record(
            lambda: grouped_pass.forward(reads, input_memory)
        )
        replay_losses: Replay | None = None
        if grouped_pass.losses.in_one_call():
            gradients, replay_losses = self.recorder.record(
                lambda: grouped_pass.loss_gradients(forward.outputs, target_memory)
            )
        else:
            # A recording runs nothing, and the loss may read the outputs.
            replay_forward()
            gradients = grouped_pass.loss_gradients(forward.outputs, target_memory)
        names, replay_backward = self.recorder.record(
            lambda: self._backward(forward, reads, gradients)
        )
        # Where the loss is called each time, the forward has run, and its losses are there.
        if replay_losses is not None:
            replay_forward()
            replay_losses()
        return _CapturedStep(
            inputs=input_memory,
            targets=target_memory,
            outputs=tuple(output.detach() for output in forward.outputs),
            replay_forward=replay_forward,
            gradients=gradients,
            replay_losses=replay_losses,
            replay_backward=replay_backward,
            names=names,
        )

    def _backward(
        self, forward: Forward, reads: StepReads, gradients: LossGradients
    ) -> list[list[str]]:
        """Run the backward, and leave its sums in the memory that all kinds of steps share."""
        # One memory of sums for all recordings: else each would hold as much as the model has
        # weights.
        totals = self.grouped_pass.backward(forward, reads, gradients)
        for stage, total in enumerate(totals):
            sums = []
            for name, tensor in total.tensors.items():
                place = stage, name
                if place not in self._sums:
                    self._sums[place] = torch.empty_like(tensor)
                sums.append(self._sums[place])
            if sums:
                torch._foreach_copy_(sums, [*total.tensors.values()])
        return [[*total.tensors] for total in totals]

    @torch.no_grad()
    def _replay_losses(
        self, captured: _CapturedStep, inputs: Values, targets: Tensor
    ) -> None:
        """Replay a step up to its losses."""
        for memory, tensor in zip(captured.inputs, inputs, strict=True):
            memory.copy_(tensor)
        captured.targets.copy_(targets)
        captured.replay_forward()
        if captured.replay_losses is None:
            self._call_loss(captured)
        else:
            captured.replay_losses()

    @torch.no_grad()
    def _results(
        self, captured: _CapturedStep, step: int
    ) -> tuple[StepResult, list[GradientSum]]:
        """Copy what a replay has left, since others may keep it beyond the next replay."""
        totals = []
        for stage, names in enumerate(captured.names):
            sums = [self._sums[stage, name] for name in names]
            copies = [torch.empty_like(tensor) for tensor in sums]
            if sums:
                torch._foreach_copy_(copies, sums)
            totals.append(GradientSum(dict(zip(names, copies, strict=True))))
        counts = captured.gradients.counts
        if counts is not None:
            counts = counts.clone()
        add_counts(totals, counts)
        losses = captured.gradients.losses.clone()
        outputs = captured.outputs[0].clone()
        result = StepResult(
            step, self.grouped_pass.microbatches, losses, outputs, counts=counts
        )
        return result, totals

    @torch.enable_grad()
    def _call_loss(self, captured: _CapturedStep) -> None:
        """Call the loss on the outputs of the replayed forward; leave what the backward reads."""
        outputs = tuple(output.detach() for output in captured.outputs)
        # As in the recording: its backward reads gradients of the same outputs.
        for output, gradient in zip(
            outputs, captured.gradients.output_gradients, strict=True
        ):
            output.requires_grad_(gradient is not None)
        fresh = self.grouped_pass.loss_gradients(outputs, captured.targets)
        recorded = _tensors_of(captured.gradients)
        with torch.no_grad():
            for memory, tensor in zip(recorded, _tensors_of(fresh), strict=True):
                memory.copy_(tensor)


def _tensors_of(gradients: LossGradients) -> list[Tensor]:
    candidates: list[Any] = [
        gradients.losses,
        gradients.counts,
        *gradients.output_gradients,
    ]
    return [tensor for tensor in candidates if tensor is not None]


def _key_of_read(read: VersionRead, step: int, newest: Weights) -> Hashable:
    addresses = tuple(tensor.data_ptr() for tensor in read.weights.values())
    newest_addresses: tuple[int, ...] = ()
    if read.compensated:
        newest_addresses = tuple(tensor.data_ptr() for tensor in newest.values())
    # The delay and not the version's number, which never comes again. Micro-batches that read the
    # versions differently are cut and joined by other operations.
    return read.microbatches, step - read.version, addresses, newest_addresses
