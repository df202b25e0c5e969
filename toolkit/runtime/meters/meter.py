"""Measures a rank while it runs its program."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from toolkit.model.kernel_work import storage_of
from toolkit.runtime.meters.running_costs import Stopwatch
from toolkit.runtime.rank import Rank
from toolkit.runtime.stage import Values
from toolkit.runtime.streams import finish_stream
from toolkit.runtime.updater import Weights
from toolkit.schedule import Instruction, Program


class Event(NamedTuple):
    """An instruction as it was executed.

    Attributes:
        instruction: the instruction.
        tick: tick of the schedule, from the start of the record, over all of its programs.
        start: seconds since all ranks started together.
        end: likewise.
        bytes: bytes that were sent or received.
        activations: bytes of activations that the rank has afterwards.
        weights: likewise, of weights.
        gradients: likewise, of sums of gradients.
    """

    instruction: Instruction
    tick: int
    start: float
    end: float
    bytes: int
    activations: int
    weights: int
    gradients: int


@dataclass
class RankRecord:
    """The measurements of a rank.

    Attributes:
        rank: number of the rank.
        events: its instructions, in the order of its program.
        first_weights: bytes of weights before the first event.
        programs: number of training steps, and the first, of each program.
        device_peak: peak bytes that CUDA had allocated; None on the CPU.
        optimizer_state: bytes of the optimizers' state, counters left out; None: not known.
    """

    rank: int
    events: list[Event] = field(default_factory=list)
    first_weights: int = 0
    programs: list[tuple[int, int]] = field(default_factory=list)
    device_peak: int | None = None
    optimizer_state: int | None = None


class Meter:
    """Measures a rank.

    Activations are what autograd saves in the forward of a stage, shared storage once: neither
    weights, nor buffers, nor the stage's inputs.

    Args:
        rank: number of the rank.
        device: where it computes.
        origin: performance counter's time, in seconds, at which time 0 is.
    """

    def __init__(self, rank: int, device: torch.device, origin: float) -> None:
        self.record = RankRecord(rank)
        self.activations = SavedActivations()
        self.stopwatch: Stopwatch | None = None  # takes the times, too
        self._device = device
        self._origin = origin
        self._first_tick = 0  # of the program
        self._n_earlier_events = 0  # of the programs before
        if device.type == "cuda":
            # CUDA's peak is that of the process; what ran before is not part of this record.
            torch.cuda.reset_peak_memory_stats(device)

    def begin(self, rank: Rank) -> None:
        """Start to measure a program."""
        if not self.record.events:
            self.record.first_weights = _weight_bytes(rank.weights)
        self._n_earlier_events = len(self.record.events)

    def perform(
        self, rank: Rank, i: Instruction, do: Callable[[Instruction], int]
    ) -> None:
        """Execute an instruction by ``do``, which returns its bytes, and record it."""
        finish_stream(self._device)
        # On a GPU instructions are only queued: without the waits these would be times of queueing.
        start = self.now()
        n_bytes = do(i)
        finish_stream(self._device)
        self.note(rank, i, start, n_bytes)

    def note(self, rank: Rank, i: Instruction, start: float, n_bytes: int) -> None:
        """Record an instruction that started at ``start`` and ends now. Any thread may call it."""
        end = self.now()
        event = Event(
            instruction=i,
            tick=self._first_tick + i.tick,
            start=start,
            end=end,
            bytes=n_bytes,
            activations=self.activations.live_bytes,
            weights=_weight_bytes(rank.weights),
            gradients=_gradient_bytes(rank),
        )
        # Without a lock: in Python, to append to a list is one step.
        self.record.events.append(event)
        if self.stopwatch is not None:
            self.stopwatch.add(i, end - start)

    def note_optimizers(self, optimizers: Iterable[Optimizer | None]) -> None:
        """Record the memory of what the ``optimizers`` of this rank keep."""
        n_bytes = 0
        for optimizer in optimizers:
            if optimizer is not None:
                n_bytes += sum(optimizer_bytes_by_weight(optimizer).values())
        self.record.optimizer_state = n_bytes

    def finish(self, program: Program) -> None:
        """Finish ``program``, and sort its events into its order."""
        self.record.programs.append((program.n_steps, program.first_step))
        position_of = {
            i: position for position, i in enumerate(program.ranks[self.record.rank])
        }
        events = self.record.events[self._n_earlier_events :]
        # Several threads have recorded them, each as it ended.
        events.sort(key=lambda event: position_of[event.instruction])
        self.record.events[self._n_earlier_events :] = events
        # Ticks of a program begin at 0; those of the record continue.
        self._first_tick += (
            program.n_slots + 1
        ) * program.schedule.timing.ticks_per_slot
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
            self.record.device_peak = max(peak, self.record.device_peak or 0)

    def now(self) -> float:
        """Return the seconds since all ranks started together."""
        return time.perf_counter() - self._origin


class SavedActivations:
    """Bytes that autograd keeps of the watched forwards.

    Attributes:
        live_bytes: bytes that it keeps now.
        peak_bytes: most bytes that it has kept.
    """

    def __init__(self) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0
        self._n_holders: Counter[int] = Counter()  # of each storage

    @contextmanager
    def watch(
        self, weights: Weights, inputs: Values, buffers: list[Tensor]
    ) -> Iterator[None]:
        """Count what autograd saves within, except these tensors."""
        excluded_storages = {
            storage_of(tensor) for tensor in (*weights.values(), *inputs, *buffers)
        }

        def keep(tensor: Tensor) -> "Tensor | _Holder":
            # Detached, or a result kept by its own node would hold on to itself.
            detached = tensor.detach()
            if storage_of(local_tensor(tensor)) in excluded_storages:
                return detached
            return _Holder(detached, self)

        def give(saved: "Tensor | _Holder") -> Tensor:
            if isinstance(saved, _Holder):
                return saved.tensor
            return saved

        with torch.autograd.graph.saved_tensors_hooks(keep, give):
            yield

    def count(self, tensor: Tensor, change: int) -> None:
        """Add to, or take from, those that keep the storage of ``tensor``."""
        local = local_tensor(tensor)
        storage = storage_of(local)
        n_before = self._n_holders[storage]
        n_after = n_before + change
        self._n_holders[storage] = n_after
        # Shared storage counts once: with its first holder it comes, with its last it goes.
        if n_before == 0 or n_after == 0:
            self.live_bytes += change * local.untyped_storage().nbytes()
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        if n_after == 0:
            del self._n_holders[storage]


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the tensor that has the memory of ``tensor``: of a DTensor this device's shard.

    A DTensor itself has a storage of the whole tensor's size without memory, a new one each time.
    """
    # By name, since to import torch's DTensors takes a second. A shard that a collective has made
    # is itself a wrapper until something waits for it.
    shard = getattr(tensor, "_local_tensor", tensor)
    return cast(Tensor, getattr(shard, "elem", shard))


class _Holder:
    """A tensor that autograd keeps; it counts as long as autograd keeps this object."""

    def __init__(self, tensor: Tensor, saved: SavedActivations) -> None:
        self.tensor = tensor
        self.saved = saved
        saved.count(tensor, 1)

    def __del__(self) -> None:
        self.saved.count(self.tensor, -1)


def optimizer_bytes_by_weight(optimizer: Optimizer) -> dict[Tensor, int]:
    """Return the bytes of an optimizer's state of each weight, of DTensors those of this device.

    A single number, such as a count of steps, does not count.
    """
    n_bytes = {}
    for group in optimizer.param_groups:
        for weight in group["params"]:
            n_bytes[weight] = sum(
                local_tensor(value).nbytes
                for value in optimizer.state.get(weight, {}).values()
                if isinstance(value, Tensor) and value.ndim
            )
    return n_bytes


# Lists below, since other threads put in and take out meanwhile.


def _weight_bytes(versions: dict[tuple, Weights]) -> int:
    n_bytes = 0
    for weights in list(versions.values()):
        n_bytes += sum(tensor.nbytes for tensor in weights.values())
    return n_bytes


def _gradient_bytes(rank: Rank) -> int:
    n_bytes = 0
    for total in list(rank.sums.values()):
        n_bytes += sum(tensor.nbytes for tensor in list(total.tensors.values()))
    return n_bytes
