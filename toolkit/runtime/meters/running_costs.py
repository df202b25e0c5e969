"""Costs of stages and links, measured while ranks train, to choose the next schedule by."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from math import inf
from statistics import median

import torch
import torch.distributed as dist

from toolkit.cost import Costs, Hardware, StageCost
from toolkit.runtime.message_layout import Layouts
from toolkit.runtime.process_group.world import World
from toolkit.runtime.rank import Rank
from toolkit.runtime.streams import finish_stream
from toolkit.schedule import Action, Instruction
from toolkit.schedule.instruction import LETTERS

_LETTERS = f"{LETTERS}U"  # of Action.FORWARD to UPDATE
# A shorter message takes little more than the latency; a longer one takes long on slow links.
_LEAST, _MOST = 2**16, 2**22  # bytes of a message that measures bandwidth

Seconds = Mapping[tuple[int, str], float]
"""Median seconds by stage and letter of an op, F, B, I or W; U is an update."""


class Stopwatch:
    """Times the ops and updates of this rank before training step ``end``.

    Unlike a Meter it watches no memory and keeps no events, so that it can run all the time.
    """

    def __init__(self, device: torch.device, end: int) -> None:
        self._device = device
        self._end = end
        self._seconds: defaultdict[tuple[int, str], list[float]] = defaultdict(list)

    def now(self) -> float:
        """Return the time, in seconds."""
        return time.perf_counter()

    def perform(
        self, rank: Rank, i: Instruction, do: Callable[[Instruction], int]
    ) -> None:
        """Execute an instruction by ``do``; time it if it is an op or an update."""
        if not self._times(i):
            do(i)
            return
        finish_stream(self._device)
        start = self.now()
        do(i)
        finish_stream(self._device)
        self.add(i, self.now() - start)

    def add(self, i: Instruction, seconds: float) -> None:
        """Take the ``seconds`` of an instruction, if it is to be timed."""
        if self._times(i):
            self._seconds[i.stage, _LETTERS[i.action]].append(seconds)

    def _times(self, i: Instruction) -> bool:
        return i.action <= Action.UPDATE and i.step is not None and i.step < self._end

    def note(self, rank: Rank, i: Instruction, start: float, n_bytes: int) -> None:
        """Leave out a message: its time holds the wait for its sender."""

    def medians(self) -> Seconds:
        """Return the median seconds of what was timed."""
        return {key: median(seconds) for key, seconds in self._seconds.items()}


def running_costs(
    measured: Sequence[Seconds], layouts: Layouts, latency: float, bandwidth: float
) -> tuple[Costs, Hardware]:
    """Return stage costs and hardware for :func:`toolkit.cost.simulate`.

    Args:
        measured: of each rank. A stage takes the median of its ranks; the speed of a rank is the
            median, over its ops, of their medians by its own seconds.
        layouts: bytes of messages.
        latency: seconds of a message of no bytes.
        bandwidth: bytes per second of a message.
    """
    seconds_of_ranks: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
    for rank_seconds in measured:
        for op, seconds in rank_seconds.items():
            seconds_of_ranks[op].append(seconds)
    median_seconds = {op: median(seconds) for op, seconds in seconds_of_ranks.items()}

    costs = []
    for stage in range(len(layouts.weights)):
        costs.append(_stage_cost(stage, median_seconds, layouts))

    # Updates are limited by memory: their bytes by their seconds are its bandwidth.
    rates = []
    for (stage, letter), seconds in median_seconds.items():
        if letter == "U" and seconds > 0 and costs[stage].parameter_bytes:
            rates.append(costs[stage].update_bytes() / seconds)
    memory_bandwidth = median(rates or [inf])

    # A rank of speed 2 takes half the usual seconds for the same ops.
    speeds = []
    for rank_seconds in measured:
        ratios = []
        for op, seconds in rank_seconds.items():
            if seconds > 0:
                ratios.append(median_seconds[op] / seconds)
        speeds.append(median(ratios or [1.0]))
    hardware = Hardware(
        "measured", inf, memory_bandwidth, bandwidth, latency, speeds=speeds
    )
    return tuple(costs), hardware


def _stage_cost(stage: int, seconds_of_op: Seconds, layouts: Layouts) -> StageCost:
    """Return the cost of a stage, by measured seconds and the bytes of its messages."""
    backward_parts = [seconds_of_op.get((stage, letter), 0.0) for letter in "BIW"]
    backward_seconds = sum(backward_parts)
    weight_share = None
    if (stage, "I") in seconds_of_op and backward_seconds:
        weight_share = backward_parts[2] / backward_seconds

    # A message of gradients has the norms' statistics, too. If it is compressed, its sender keeps
    # what rounding lost, and the owner its exact weights: each takes the bytes of the weights.
    weight_bytes = layouts.weights[stage].n_bytes
    gradient_bytes = layouts.gradients[stage].n_bytes
    compressed_gradient_bytes = None
    compressed_weight_bytes = None
    exact_bytes = 0.0
    statistics_bytes = gradient_bytes - weight_bytes
    if layouts.compressed:
        compressed_gradient_bytes = float(gradient_bytes)
        compressed_weight_bytes = float(layouts.sent_weights[stage].n_bytes)
        exact_bytes = float(weight_bytes)
        statistics_bytes = gradient_bytes - layouts.compressed[stage].n_bytes
    return StageCost(
        0.0,
        0.0,
        input_bytes=layouts.activation_gradients[stage].whole_bytes,
        output_bytes=layouts.activations[stage].whole_bytes,
        compressed_input_gradient_bytes=layouts.activation_gradients[stage].n_bytes,
        compressed_output_bytes=layouts.activations[stage].n_bytes,
        parameter_bytes=weight_bytes,
        statistics_bytes=max(0, statistics_bytes),
        compressed_gradient_bytes=compressed_gradient_bytes,
        compressed_weight_bytes=compressed_weight_bytes,
        error_bytes=exact_bytes,
        exact_weight_bytes=exact_bytes,
        forward_seconds=seconds_of_op.get((stage, "F"), 0.0),
        backward_seconds=backward_seconds,
        weight_share=weight_share,
    )


def probe_links(world: World, n_bytes: float) -> tuple[float, float]:
    """Return latency (seconds) and bandwidth (bytes per second) of messages around all ranks.

    Every rank calls it while no message is under way, and sends to the next rank at once, which
    times links in both directions, also those that the present schedule does not use. Messages of
    training would show the time that ranks wait for each other instead.

    Args:
        world: the ranks.
        n_bytes: size of a usual message.

    Returns:
        the median latency of all ranks, and the lowest bandwidth.
    """
    if world.size == 1:
        return 0.0, inf
    size = round(min(max(n_bytes, _LEAST), _MOST))
    ahead = (world.rank + 1) % world.size
    behind = (world.rank - 1) % world.size

    def exchange(message_bytes: int, times: int) -> float:
        """Return the least seconds of a message, without the first."""
        sent = torch.zeros(
            message_bytes, dtype=torch.uint8, device=world.message_device
        )
        received = torch.zeros_like(sent)
        durations = []
        for _ in range(1 + times):
            start = time.perf_counter()
            # Both at once: if each rank sent first and received then, all would wait for their
            # receivers.
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, sent, ahead, group=world.group),
                    dist.P2POp(dist.irecv, received, behind, group=world.group),
                ]
            )
            for work in works:
                work.wait()
            finish_stream(world.message_device)
            durations.append(time.perf_counter() - start)
        # The first brings ranks into step, and uses up what a switch lets pass at once.
        return min(durations[1:])

    with world.watch.waiting("a measurement of links", [ahead, behind]):
        small = exchange(1, 3)
        large = exchange(size, 2)
    rank_times = world.gather((small, large))
    latency = median(small for small, _ in rank_times)
    slowest = max(large for _, large in rank_times)
    # At least half of it: a rank that waited for a core may have had a long latency.
    return latency, size / max(slowest - latency, slowest / 2)
