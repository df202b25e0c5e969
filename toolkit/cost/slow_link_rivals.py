"""What people use on slow links in place of late weights, priced: compressed DDP, and local steps.

::

    int8       each rank sends 2 (n-1)/n of the quantised gradient, as in a ring of that size
    PowerSGD   a gradient of r rows and c columns travels as rank (r + c) numbers, in two
               all-reduces one after the other, and small tensors as they are in a third;
               products and errors pass over the gradient PASSES times before it
    local SGD  steps without messages, and one all-reduce of the weights every H steps

A PowerSGD step of the simulator does all of its arithmetic before its messages.

Source: arXiv 1905.13727, algorithm 1, as torch's ``powerSGD_hook``; arXiv 1805.09767, algorithm 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

from toolkit.cost.compression import (
    GRADIENT_BITS,
    SIXTEEN_BITS,
    accuracy_class,
    compressed_costs,
    quantized_bytes,
)
from toolkit.cost.hardware import Hardware
from toolkit.cost.stage_costs import Costs, StageCost
from toolkit.cost.timeline import ACTIVATIONS, INPUTS, Timeline
from toolkit.cost.worker_forms import BUCKETS, CostsOf, ddp_schedule, steady_timeline
from toolkit.errors import UserError, check_choice
from toolkit.format import GIB, MB
from toolkit.model.kernel_work import Work
from toolkit.schedule import Action

DDP_COMPRESSIONS = ("none", *SIXTEEN_BITS, "int8", "powersgd")
"""Compressions of DistributedDataParallel's gradients."""

LOW_RANKS = (4, 2)
"""Ranks of PowerSGD that are compared."""

PERIOD = 8
"""Steps of local SGD from one average of the weights to the next."""

_MATRIX_PRODUCTS = 3  # M Q, M^T P and P Q^T
_PASSES = (
    11  # read or write all of a gradient: 3 for M + error, 2 for its copy, 3 for the new error
)
_MESSAGES = 3  # all-reduces of PowerSGD for a bucket, one after the other
_LEAST_RATE = 2  # torch's: a matrix that would shrink by less travels as it is


@dataclass(frozen=True)
class Rival:
    """What a step of a rival takes.

    Attributes:
        name: label in tables.
        accuracy: how its training differs from data parallelism.
        seconds: of a training step.
        memory: peak bytes of a rank.
        traffic: bytes that a rank sends in a step.
        timeline: of the simulator; of local SGD, of a step without messages.
    """

    name: str
    accuracy: str
    seconds: float
    memory: float
    traffic: float
    timeline: Timeline

    def cells(self, baseline: float, n_samples: int, hardware: Hardware) -> dict[str, Any]:
        """Return a row of the table of ``simulate``.

        Args:
            baseline: step seconds of plain DistributedDataParallel.
            n_samples: of a training step.
            hardware: the machines.
        """
        timeline = self.timeline
        busy_seconds = (1 - timeline.idle_share) * timeline.step_time
        fullest = max(range(timeline.n_ranks), key=timeline.peak_memory)
        bytes_of_kind = timeline.at_peak(fullest)
        activation_bytes = bytes_of_kind[ACTIVATIONS] + bytes_of_kind[INPUTS]
        return {
            "schedule": self.name,
            "by DDP's time": f"{self.seconds / baseline:.2f}",
            "ranks": timeline.n_ranks,
            "ms a step": round(self.seconds * 1e3, 3),
            "samples/s": round(n_samples / self.seconds, 1),
            "idle": f"{1 - busy_seconds / self.seconds:z.1%}",
            "GiB, fullest rank": round(self.memory / GIB, 3),
            "of it activations": round(activation_bytes / GIB, 3),
            "fits": "yes" if self.memory <= hardware.memory else "no",
            "MB a step, busiest rank": round(self.traffic / MB, 2),
            "devices": timeline.n_ranks,
            "mean staleness": 0.0,
            "form": "buckets of 25 MB",
            "accuracy": self.accuracy,
        }


def low_rank_numbers(matrices: Sequence[tuple[int, int]], low_rank: int) -> int:
    """Return the numbers that PowerSGD sends for gradients of so many rows and columns."""
    n_sent = 0
    for n_rows, n_columns in matrices:
        rank = min(n_rows, n_columns, low_rank)
        n_compressed = rank * (n_rows + n_columns)
        if n_compressed * _LEAST_RATE < n_rows * n_columns:
            n_sent += n_compressed
        else:
            n_sent += n_rows * n_columns
    return n_sent


def ddp_costs(
    costs: Costs, hardware: Hardware, n_ranks: int, compression: str, low_rank: int = 2
) -> tuple[Costs, Hardware]:
    """Return costs of the buckets of DDP with compressed messages, and links that carry them.

    Args:
        costs: one entry per bucket.
        hardware: the machines.
        n_ranks: that average the gradients.
        compression: one of ``DDP_COMPRESSIONS``.
        low_rank: of ``powersgd``.

    Raises:
        UserError: the compression is unknown, or needs the shapes of the parameters.
    """
    check_choice("compression of DDP", compression, DDP_COMPRESSIONS)
    if compression == "int8":
        compressed = []
        for cost in costs:
            # A rank also keeps what the means of its share lost.
            error_bytes = cost.parameter_bytes * (1 + 1 / n_ranks)
            n_bytes = quantized_bytes(round(cost.parameter_bytes / 4), GRADIENT_BITS["int8"])
            sent_bytes = n_bytes + cost.statistics_bytes
            compressed.append(
                replace(cost, compressed_gradient_bytes=sent_bytes, error_bytes=error_bytes)
            )
        return tuple(compressed), hardware
    if compression == "powersgd":
        in_turn = replace(
            hardware,
            link_latency=_MESSAGES * hardware.link_latency,
            local_latency=_MESSAGES * hardware.local_latency,
        )
        return tuple(_low_rank_cost(cost, hardware, low_rank) for cost in costs), in_turn
    return compressed_costs(costs, compression), hardware


def _low_rank_cost(cost: StageCost, hardware: Hardware, low_rank: int) -> StageCost:
    if cost.parameter_bytes and not cost.matrices:
        raise UserError("powersgd needs the shapes of the parameters: give a model, not its costs")
    n_numbers = sum(n_rows * n_columns for n_rows, n_columns in cost.matrices)
    n_sent = low_rank_numbers(cost.matrices, low_rank)
    item_bytes = cost.parameter_bytes / n_numbers if n_numbers else 0.0
    work = Work(
        flops=2 * _MATRIX_PRODUCTS * low_rank * n_numbers,
        bytes=round(_PASSES * cost.parameter_bytes),
    )
    forward, backward = cost.seconds(hardware)
    return replace(
        cost,
        forward_seconds=forward,
        backward_seconds=backward + hardware.roofline(work),
        compressed_gradient_bytes=n_sent * item_bytes + cost.statistics_bytes,
        error_bytes=cost.parameter_bytes,
    )


def ddp_rival(
    costs_of: CostsOf,
    hardware: Hardware,
    n_workers: int,
    compression: str,
    *,
    low_rank: int = 2,
    accumulate: int = 1,
    optimizer_words: float = 1.0,
) -> Rival:
    """Simulate DistributedDataParallel with compressed messages.

    Args:
        costs_of: of the model.
        hardware: the machines.
        n_workers: ranks.
        compression: one of ``DDP_COMPRESSIONS``.
        low_rank: of ``powersgd``.
        accumulate: micro-batches of each worker in a step.
        optimizer_words: numbers that the optimizer keeps of each parameter.
    """
    costs, links = ddp_costs(costs_of(1, BUCKETS), hardware, n_workers, compression, low_rank)
    schedule = ddp_schedule(n_workers, len(costs), accumulate)
    timeline = steady_timeline(schedule, costs, links, optimizer_words)
    name = f"{schedule.name} {compression}"
    accuracy = accuracy_class(compression, late=False)
    if compression == "powersgd":
        name += f" rank {low_rank}"
        accuracy = accuracy.replace("low rank", f"rank {low_rank}")
    peaks = [timeline.peak_memory(rank) for rank in range(n_workers)]
    return Rival(
        name=name,
        accuracy=accuracy,
        seconds=timeline.step_time,
        memory=max(peaks),
        traffic=max(timeline.bytes_a_step()),
        timeline=timeline,
    )


def local_sgd_rival(
    costs_of: CostsOf,
    hardware: Hardware,
    n_workers: int,
    *,
    period: int = PERIOD,
    accumulate: int = 1,
    optimizer_words: float = 1.0,
) -> Rival:
    """Return what a step of local SGD takes, on average over a period.

    Args:
        costs_of: of the model.
        hardware: the machines.
        n_workers: ranks.
        period: steps from one average of the weights to the next.
        accumulate: micro-batches of each worker in a step.
        optimizer_words: numbers that the optimizer keeps of each parameter.
    """
    costs = costs_of(1, BUCKETS)
    no_links = replace(
        hardware,
        link_bandwidth=inf,
        link_latency=0.0,
        local_bandwidth=inf,
        local_latency=0.0,
        ranks_per_machine=1,
    )
    schedule = ddp_schedule(n_workers, len(costs), accumulate)
    timeline = steady_timeline(schedule, costs, no_links, optimizer_words)
    weight_bytes = sum(cost.parameter_bytes for cost in costs)
    ranks = range(n_workers)
    average_seconds = hardware.collective(Action.ALL_REDUCE, weight_bytes, ranks)
    # When ranks meet, no activations are alive: weights, optimizer, gradients, and two copies.
    meeting_bytes = (4 + optimizer_words) * weight_bytes
    step_peak = max(timeline.peak_memory(rank) for rank in ranks)
    sent_bytes = 2 * (n_workers - 1) / n_workers * weight_bytes
    return Rival(
        name=f"local SGD every {period}",
        accuracy="local steps",
        seconds=timeline.step_time + average_seconds / period,
        memory=max(step_peak, meeting_bytes),
        traffic=sent_bytes / period,
        timeline=timeline,
    )


def rivals_on_slow_links(
    costs_of: CostsOf,
    hardware: Hardware,
    n_workers: int,
    compression: str,
    *,
    accumulate: int = 1,
    optimizer_words: float = 1.0,
) -> list[Rival]:
    """Return DDP with the same compression and by PowerSGD, where they exist, and local SGD.

    Args:
        costs_of: of the model.
        hardware: the machines.
        n_workers: ranks.
        compression: of the messages that the rivals are compared with.
        accumulate: micro-batches of each worker in a step.
        optimizer_words: numbers that the optimizer keeps of each parameter.
    """
    price_ddp = partial(
        ddp_rival,
        costs_of,
        hardware,
        n_workers,
        accumulate=accumulate,
        optimizer_words=optimizer_words,
    )
    rivals = []
    if compression != "none" and compression in DDP_COMPRESSIONS:
        rivals.append(price_ddp(compression))
    has_shapes = all(cost.matrices or not cost.parameter_bytes for cost in costs_of(1, BUCKETS))
    if has_shapes:
        for low_rank in LOW_RANKS:
            rivals.append(price_ddp("powersgd", low_rank=low_rank))
    local_steps = local_sgd_rival(
        costs_of, hardware, n_workers, accumulate=accumulate, optimizer_words=optimizer_words
    )
    rivals.append(local_steps)
    return rivals
