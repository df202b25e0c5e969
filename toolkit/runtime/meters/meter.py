"""Measure a rank while it runs its program: time, messages and memory."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.runtime.rank import Rank
from toolkit.runtime.stage import Values
from toolkit.runtime.streams import finish_stream
from toolkit.runtime.updater import Weights
from toolkit.schedule import Instruction, Program


class Event(NamedTuple):
    """An instruction as it was executed.

    ``tick`` counts from the start of the record, over all of its programs. ``start`` and ``end``
    are seconds since all ranks started together. ``bytes`` were sent or received; the bytes of
    activations, weights and gradients are those held afterwards.
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
class Record:
    """The measurements of a rank.

    Attributes:
        rank: number of the rank.
        events: its instructions, in the order of its program.
        first_weights: bytes of weights before the first event.
        device_peak: peak bytes that CUDA had allocated; None on the CPU.
    """

    rank: int
    events: list[Event] = field(default_factory=list)
    first_weights: int = 0
    device_peak: int | None = None


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
        self.record = Record(rank)
        self.activations = _Saved()
        self._device = device
        self._origin = origin
        self._tick = 0  # at which the program began
        self._n_before = 0  # events of the programs before
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def begin(self, rank: Rank) -> None:
        """Start to measure a program."""
        if not self.record.events:
            self.record.first_weights = _held(rank.weights)
        self._n_before = len(self.record.events)

    def perform(self, rank: Rank, i: Instruction, do: Callable[[Instruction], int]) -> None:
        """Execute an instruction by ``do``, which returns its bytes, and record it."""
        finish_stream(self._device)
        start = self.now()
        n_bytes = do(i)
        finish_stream(self._device)
        self.note(rank, i, start, n_bytes)

    def note(self, rank: Rank, i: Instruction, start: float, n_bytes: int) -> None:
        """Record an instruction that started at ``start`` and ends now. Any thread may call it."""
        held = (self.activations.bytes, _held(rank.weights), _summed(rank))
        self.record.events.append(Event(i, self._tick + i.tick, start, self.now(), n_bytes, *held))

    def finish(self, program: Program) -> None:
        """Finish ``program``, and sort its events into its order."""
        place = {i: position for position, i in enumerate(program.ranks[self.record.rank])}
        mine = self.record.events[self._n_before :]
        self.record.events[self._n_before :] = sorted(mine, key=lambda e: place[e.instruction])
        self._tick += (program.n_slots + 1) * program.schedule.timing.ticks_per_slot
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
            self.record.device_peak = max(peak, self.record.device_peak or 0)

    def now(self) -> float:
        """Return the seconds since all ranks started together."""
        return time.perf_counter() - self._origin


class _Saved:
    """Bytes that autograd keeps of the watched forwards."""

    def __init__(self) -> None:
        self.bytes = self.peak = 0
        self._holders: Counter[int] = Counter()  # of each storage

    @contextmanager
    def watch(self, weights: Weights, inputs: Values, buffers: list[Tensor]) -> Iterator[None]:
        """Count what autograd saves within, except these tensors."""
        known = {_storage(x) for x in (*weights.values(), *inputs, *buffers)}

        def keep(tensor: Tensor) -> "Tensor | _Holder":
            # Detached, or a result kept by its own node would hold on to itself.
            kept = tensor.detach()
            return kept if _storage(tensor) in known else _Holder(kept, self)

        def give(kept: "Tensor | _Holder") -> Tensor:
            return kept.tensor if isinstance(kept, _Holder) else kept

        with torch.autograd.graph.saved_tensors_hooks(keep, give):
            yield

    def count(self, tensor: Tensor, change: int) -> None:
        """Add to, or take from, those that keep the storage of ``tensor``."""
        storage = _storage(tensor)
        before, after = self._holders[storage], self._holders[storage] + change
        self._holders[storage] = after
        if not (before and after):
            self.bytes += change * tensor.untyped_storage().nbytes()
            self.peak = max(self.peak, self.bytes)
        if not after:
            del self._holders[storage]


class _Holder:
    """A tensor that autograd keeps; it counts as long as autograd keeps this object."""

    def __init__(self, tensor: Tensor, saved: _Saved) -> None:
        self.tensor, self.saved = tensor, saved
        saved.count(tensor, 1)

    def __del__(self) -> None:
        self.saved.count(self.tensor, -1)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _held(versions: dict[tuple, Weights]) -> int:
    # Lists, since other threads put in and take out meanwhile.
    return sum(x.nbytes for weights in list(versions.values()) for x in weights.values())


def _summed(rank: Rank) -> int:
    totals = list(rank.sums.values())
    return sum(x.nbytes for total in totals for x in list(total.tensors.values()))


def count_operations(run: Callable[[], object]) -> Counter[str]:
    """Count the operations that ``run`` dispatches, by name: on a GPU, about its kernel launches.

    Views and allocations do not count. Code compiled by torch.compile is not seen.
    """
    with _Counting() as counting:
        run()
    return counting.found


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        if not function.is_view and not name.startswith("empty"):
            self.found[name] += 1
        return function(*arguments, **(options or {}))
