"""This machine as two of its processes find it: their link, and the memory's bandwidth."""

import time
from statistics import median

import torch
import torch.distributed as dist

from toolkit.cost import Hardware
from toolkit.runtime import World

_MESSAGES = 1 << 12, 1 << 22  # bytes
_REPEATS = 15


def measure_hardware(world: World) -> Hardware:
    """Time messages between the two ranks, and copies in memory."""
    messages = [torch.zeros(n_bytes // 4) for n_bytes in _MESSAGES]
    seconds_of_message: list[list[float]] = [[] for _ in messages]
    for _ in range(_REPEATS):
        # In turn: other work of the machine slows both.
        for message, seconds in zip(messages, seconds_of_message, strict=True):
            world.barrier()
            begin = time.perf_counter()
            for sender in (0, 1):  # there and back
                send_or_receive = dist.send if world.rank == sender else dist.recv
                send_or_receive(message, 1 - world.rank)
            seconds.append((time.perf_counter() - begin) / 2)
    # The slower rank decides, since a message needs both.
    small, large = (
        max(world.gather(median(seconds))) for seconds in seconds_of_message
    )
    bandwidth, latency = link_of(small, large)

    source = torch.zeros(1 << 22)
    target = torch.zeros(1 << 22)
    memory_rates = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        target.copy_(source)
        # A copy reads and writes each byte.
        memory_rates.append(2 * source.nbytes / (time.perf_counter() - begin))
    memory_bandwidth = min(world.gather(median(memory_rates)))
    # The rate of operations plays no part: all stages are timed.
    return Hardware("this machine", 1e11, memory_bandwidth, bandwidth, latency)


def link_of(small_seconds: float, large_seconds: float) -> tuple[float, float]:
    """Return bandwidth (bytes/s) and latency (s) from the times of both sizes of messages."""
    latency = small_seconds
    # Other work of the machine may slow small messages more than large ones. Then the latency is
    # unknown, and all of a large message's time counts as that of its bytes.
    if large_seconds <= small_seconds:
        latency = 0.0
    return (_MESSAGES[1] - _MESSAGES[0]) / (large_seconds - latency), latency
