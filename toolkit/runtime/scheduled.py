"""Order "scheduled": every rank's program, slot by slot, in one process.

Messages are handed over in memory, so the activations alive are those of the schedule, and any
placement runs without starting processes.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from toolkit.runtime.grouped import Loss
from toolkit.runtime.result import StepResult
from toolkit.runtime.stage import StageWorker, Sum, Values, Weights, gradients, leaves
from toolkit.schedule import Action, Buffer, Instruction, Program, Schedule
from toolkit.schedule.replay import replay

Gradients = tuple[Tensor | None, ...]


@dataclass
class _Kept:
    """What a forward leaves for its backward."""

    weights: Weights
    inputs: Values
    outputs: Values
    output_gradients: Gradients = ()


@dataclass
class _Rank:
    """The memory of one rank; each dictionary entry is one buffer of the program."""

    weights: dict[tuple, Weights] = field(default_factory=dict)
    kept: dict[tuple, _Kept] = field(default_factory=dict)
    boundaries: dict[tuple, Gradients] = field(default_factory=dict)
    sums: defaultdict[tuple, Sum] = field(default_factory=lambda: defaultdict(Sum))


class _Batch:
    """The micro-batches of one training step, and what comes of them."""

    def __init__(self, inputs: Values, targets: Tensor, n_microbatches: int) -> None:
        parts = (tensor.chunk(n_microbatches) for tensor in inputs)
        self.inputs: list[Values] = list(zip(*parts, strict=True))
        self.targets = targets.chunk(n_microbatches)
        self.losses: dict[int, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}

    def result(self, step: int) -> StepResult | None:
        """The step's result, once every micro-batch has met the loss."""
        if len(self.losses) < len(self.targets):
            return None
        order = range(len(self.targets))
        losses = torch.stack([self.losses[m] for m in order])
        return StepResult(step, losses, torch.cat([self.outputs[m] for m in order]))


class Scheduled:
    """Interprets verified programs."""

    def __init__(self, workers: Sequence[StageWorker], schedule: Schedule, loss: Loss) -> None:
        self.workers = workers
        self.schedule = schedule
        self.loss = loss
        self.updaters = {(schedule.owners[j], j): worker for j, worker in enumerate(workers)}

    def run(
        self,
        program: Program,
        versions: list[dict[int, Weights]],
        next_batch: Callable[[], tuple[Values, Tensor]],
    ) -> Iterator[StepResult]:
        """Execute ``program``; ``versions[stage]`` follows the newest weights."""
        run = _Run(self, program, versions, next_batch)
        for rank, instruction in replay(program):
            run.execute(rank, instruction)
            if instruction.action == Action.FORWARD:
                yield from run.finished()

    def updater(self, rank: int, stage: int) -> StageWorker:
        """The worker with which ``rank`` updates ``stage``: the stage's own, or a replica."""
        if (rank, stage) not in self.updaters:
            self.updaters[rank, stage] = self.workers[stage].replica()
        return self.updaters[rank, stage]

    def forget_replicas(self) -> None:
        """Make new replicas when next needed: the stages' own state has been replaced."""
        self.updaters = {(self.schedule.owners[j], j): w for j, w in enumerate(self.workers)}


class _Run:
    """One program being executed."""

    def __init__(
        self,
        engine: Scheduled,
        program: Program,
        versions: list[dict[int, Weights]],
        next_batch: Callable[[], tuple[Values, Tensor]],
    ) -> None:
        self.engine = engine
        self.schedule = program.schedule
        self.last_stage = self.schedule.n_stages - 1
        self.versions = versions
        self.next_batch = next_batch
        self.batches: dict[int, _Batch] = {}
        self.ranks = [_Rank() for _ in program.ranks]
        self.message: object = None
        updates = {
            (rank, i.stage)
            for rank, instructions in enumerate(program.ranks)
            for i in instructions
            if i.action == Action.UPDATE
        }
        # All of them now, while they still agree on the weights.
        self.updater = {place: engine.updater(*place) for place in updates}
        for j, known in enumerate(versions):
            for rank in self.schedule.first_holders(j):
                self.ranks[rank].weights |= {(j, version): known[version] for version in known}
        self.do: dict[Action, Callable[[int, Instruction], None]] = {
            Action.FORWARD: self._forward,
            Action.BACKWARD: self._backward,
            Action.BACKWARD_INPUT: self._backward_input,
            Action.BACKWARD_WEIGHT: self._backward_weight,
            Action.UPDATE: self._update,
            Action.SEND: self._send,
            Action.RECV: self._receive,
            Action.ALL_REDUCE: self._reduce,
            Action.REDUCE: self._reduce,
            Action.BROADCAST: self._broadcast,
            Action.FREE: self._free,
        }

    def execute(self, rank: int, instruction: Instruction) -> None:
        self.do[instruction.action](rank, instruction)

    def finished(self) -> Iterator[StepResult]:
        for step, batch in list(self.batches.items()):
            if (result := batch.result(step)) is not None:
                del self.batches[step]
                yield result

    def _batch(self, step: int) -> _Batch:
        if step not in self.batches:
            self.batches[step] = _Batch(*self.next_batch(), self.schedule.n_microbatches)
        return self.batches[step]

    def _forward(self, rank: int, i: Instruction) -> None:
        here, m, step = self.ranks[rank], _int(i.microbatch), _int(i.step)
        if i.stage == 0:
            inputs = self._batch(step).inputs[m]
        else:
            received = here.boundaries.pop((Buffer.ACTIVATION, i.stage - 1, m, step))
            inputs = tuple(_leaf(tensor) for tensor in received if tensor is not None)
        weights = leaves(here.weights[i.stage, i.version])
        worker = self.engine.workers[i.stage]
        outputs = worker.forward(weights, inputs, (m,), step)
        here.sums[i.stage, step].add(worker.take_statistics())
        if i.stage == self.last_stage:
            batch = self._batch(step)
            loss = self.engine.loss(outputs[0], batch.targets[m])
            batch.losses[m], batch.outputs[m] = loss.detach(), outputs[0].detach()
            outputs = (loss / self.schedule.n_microbatches,)
        else:
            sent = tuple(tensor.detach() for tensor in outputs)
            here.boundaries[Buffer.ACTIVATION, i.stage, m, step] = sent
        here.kept[i.stage, m, step] = _Kept(weights, inputs, outputs)

    def _take_output_gradients(self, here: _Rank, i: Instruction) -> _Kept:
        kept = here.kept[i.stage, i.microbatch, i.step]
        gradients: Gradients = (None,)
        if i.stage < self.last_stage:
            later = (Buffer.ACTIVATION_GRADIENT, i.stage + 1, i.microbatch, i.step)
            gradients = here.boundaries.pop(later)
        pairs = [
            (output, gradient)
            for output, gradient in zip(kept.outputs, gradients, strict=True)
            if output.requires_grad and (gradient is not None or i.stage == self.last_stage)
        ]
        kept.outputs = tuple(output for output, _ in pairs)
        kept.output_gradients = tuple(gradient for _, gradient in pairs)
        return kept

    def _backward(self, rank: int, i: Instruction) -> None:
        here = self.ranks[rank]
        kept = self._take_output_gradients(here, i)
        torch.autograd.backward(kept.outputs, kept.output_gradients)
        here.sums[i.stage, i.step].add(gradients(kept.weights))
        if i.stage > 0:
            self._give_input_gradients(here, i, tuple(tensor.grad for tensor in kept.inputs))

    def _backward_input(self, rank: int, i: Instruction) -> None:
        here = self.ranks[rank]
        kept = self._take_output_gradients(here, i)
        wanted = [tensor for tensor in kept.inputs if tensor.requires_grad]
        if i.stage > 0:
            found = iter(_grad(kept, wanted, retain_graph=True))
            grads = tuple(next(found) if x.requires_grad else None for x in kept.inputs)
            self._give_input_gradients(here, i, grads)

    def _backward_weight(self, rank: int, i: Instruction) -> None:
        here = self.ranks[rank]
        kept = here.kept[i.stage, i.microbatch, i.step]
        found = zip(kept.weights, _grad(kept, list(kept.weights.values())), strict=True)
        here.sums[i.stage, i.step].add({k: grad for k, grad in found if grad is not None})

    def _give_input_gradients(self, here: _Rank, i: Instruction, grads: Gradients) -> None:
        here.boundaries[Buffer.ACTIVATION_GRADIENT, i.stage, i.microbatch, i.step] = grads

    def _update(self, rank: int, i: Instruction) -> None:
        here, step = self.ranks[rank], _int(i.step)
        worker = self.updater[rank, i.stage]
        total = here.sums.pop((i.stage, step))
        worker.update(total, self.schedule.n_microbatches, keep_old=True)
        here.weights[i.stage, i.version] = worker.newest()
        if rank == self.schedule.owners[i.stage]:
            known = self.versions[i.stage]
            known[step + 1] = worker.newest()
            oldest = self.schedule.oldest_version(i.stage, step + 1)
            for version in [version for version in known if version < oldest]:
                del known[version]

    def _store(self, rank: int, i: Instruction) -> tuple[dict, tuple]:
        """Where the buffer of a message lives on a rank."""
        here = self.ranks[rank]
        if i.buffer == Buffer.WEIGHTS:
            return here.weights, (i.stage, i.version)
        if i.buffer == Buffer.GRADIENT:
            return here.sums, (i.stage, i.step)
        return here.boundaries, (i.buffer, i.stage, i.microbatch, i.step)

    def _send(self, rank: int, i: Instruction) -> None:
        store, key = self._store(rank, i)
        self.message = store[key] if i.buffer == Buffer.WEIGHTS else store.pop(key)

    def _receive(self, rank: int, i: Instruction) -> None:
        store, key = self._store(rank, i)
        if isinstance(self.message, Sum):
            store[key].add(self.message.tensors)
        else:
            store[key] = self.message

    def _reduce(self, rank: int, i: Instruction) -> None:
        if rank != i.peers[0]:
            return
        key = (i.stage, i.step)
        total = self.ranks[rank].sums[key]
        for peer in i.peers[1:]:
            total.add(self.ranks[peer].sums.pop(key).tensors)
        if i.action == Action.ALL_REDUCE:
            for peer in i.peers[1:]:  # a copy each: optimizers may change gradients in place
                self.ranks[peer].sums[key].add(copy.deepcopy(total.tensors))

    def _broadcast(self, rank: int, i: Instruction) -> None:
        key = (i.stage, i.version)
        self.ranks[rank].weights[key] = self.ranks[i.peers[0]].weights[key]

    def _free(self, rank: int, i: Instruction) -> None:
        here = self.ranks[rank]
        if i.buffer == Buffer.WEIGHTS:
            del here.weights[i.stage, i.version]
        else:
            del here.kept[i.stage, i.microbatch, i.step]


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _grad(kept: _Kept, wanted: list[Tensor], *, retain_graph: bool = False) -> Gradients:
    if not wanted:
        return ()
    return torch.autograd.grad(
        kept.outputs,
        wanted,
        kept.output_gradients,
        retain_graph=retain_graph,
        allow_unused=True,
    )


def _int(value: int | None) -> int:
    assert value is not None
    return value
