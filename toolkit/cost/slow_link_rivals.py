"""What people use on slow links in place of late weights, priced: compressed DDP, and local steps.

::

    codes      each rank sends 2 (n-1)/n of the gradient in int8, int4 or topk, as in a ring of that
               size; codes and errors pass over the gradient some 50 times before it (topk: 30)
    PowerSGD   a gradient of r rows and c columns travels as rank (r + c) numbers, in two
               all-reduces one after the other, and small tensors as they are in a third;
               products and errors pass over the gradient PASSES times before it
    local SGD  steps without messages, and one all-reduce of the weights every H steps

A compressed step of the simulator does all of its arithmetic before its messages.

Source: arXiv 1905.13727, algorithm 1, as torch's ``powerSGD_hook``; arXiv 1805.09767, algorithm 1.
"""

from dataclasses import dataclass, replace
from math import inf

from toolkit.cost.compression import (
    BLOCK_CODES,
    CODED_ITEM_BYTES,
    SIXTEEN_BITS,
    SUM_PASSES,
    accuracy_class,
    check_matrices,
    compressed_costs,
    low_rank_numbers,
)
from toolkit.cost.hardware import Hardware
from toolkit.cost.stage_costs import Costs, StageCost
from toolkit.cost.worker_forms import DataParallelJob, Form
from toolkit.errors import check_choice
from toolkit.model.kernel_work import Work
from toolkit.schedule import Action

DDP_COMPRESSIONS = ("none", *SIXTEEN_BITS, *BLOCK_CODES, "powersgd")
"""Compressions of DistributedDataParallel's gradients."""

LOW_RANKS = (4, 2)
"""Ranks of PowerSGD that are compared."""

PERIOD = 8
"""Steps of local SGD from one average of the weights to the next."""

_MATRIX_PRODUCTS = 3  # M Q, M^T P and P Q^T
# Times that all of a gradient is read or written: 3 for M + error, 2 for its copy, 3 for the new
# error, and one for each of the products.
_PASSES = 11
_MESSAGES = 3  # all-reduces of PowerSGD for a bucket, one after the other


@dataclass(frozen=True)
class Averaging:
    """What local steps spend on averages of the weights, as a share of each training step.

    Attributes:
        seconds: of a training step.
        sent_bytes: that a rank sends in a training step.
        peak_bytes: of a rank while it averages.
    """

    seconds: float
    sent_bytes: float
    peak_bytes: float


@dataclass(frozen=True)
class Rival:
    """What people use on slow links, simulated as the baseline is.

    Attributes:
        name: label in tables.
        accuracy: how its training differs from data parallelism.
        form: what its step takes; of local SGD, of a step without messages.
        averaging: what averages of the weights add to a step; None: there are none.
    """

    name: str
    accuracy: str
    form: Form
    averaging: Averaging | None = None

    @property
    def seconds(self) -> float:
        """Seconds of a training step, averages of the weights included."""
        if self.averaging is None:
            return self.form.seconds
        return self.form.seconds + self.averaging.seconds


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
    if compression in BLOCK_CODES:
        compressed = []
        for cost in costs:
            # A rank also encodes the means of its share, and keeps what they lost.
            n_encoded = 1 + 1 / n_ranks
            code = BLOCK_CODES[compression]
            n_bytes = code.n_bytes(round(cost.parameter_bytes / CODED_ITEM_BYTES))
            # It decodes and adds what all ranks have of its share, and decodes the means of all.
            n_passes = n_encoded * code.encode_passes_with_error
            n_passes += 2 * code.decode_passes + SUM_PASSES
            compressed_cost = replace(
                cost,
                coding=Work(flops=0, bytes=round(n_passes * cost.parameter_bytes)),
                compressed_gradient_bytes=n_bytes + cost.statistics_bytes,
                error_bytes=n_encoded * cost.parameter_bytes,
            )
            compressed.append(compressed_cost)
        return tuple(compressed), hardware
    if compression == "powersgd":
        # The simulator has one message for a bucket. Latency counts as that of three, one after the
        # other.
        in_turn = replace(
            hardware,
            link_latency=_MESSAGES * hardware.link_latency,
            local_latency=_MESSAGES * hardware.local_latency,
        )
        return tuple(_low_rank_cost(cost, low_rank) for cost in costs), in_turn
    return compressed_costs(costs, compression), hardware


def _low_rank_cost(cost: StageCost, low_rank: int) -> StageCost:
    check_matrices(cost, "powersgd")
    n_numbers = sum(n_rows * n_columns for n_rows, n_columns in cost.matrices)
    n_sent = low_rank_numbers(cost.matrices, low_rank)
    item_bytes = cost.parameter_bytes / n_numbers if n_numbers else 0.0
    work = Work(
        flops=2 * _MATRIX_PRODUCTS * low_rank * n_numbers,
        bytes=round(_PASSES * cost.parameter_bytes),
    )
    return replace(
        cost,
        coding=work,
        compressed_gradient_bytes=n_sent * item_bytes + cost.statistics_bytes,
        error_bytes=cost.parameter_bytes,
    )


def ddp_rival(job: DataParallelJob, compression: str, low_rank: int = 2) -> Rival:
    """Simulate DistributedDataParallel with compressed messages.

    Args:
        job: what trains where.
        compression: one of ``DDP_COMPRESSIONS``.
        low_rank: of ``powersgd``.

    Raises:
        UserError: see :func:`ddp_costs`.
    """
    costs, links = ddp_costs(
        job.bucket_costs, job.hardware, job.n_workers, compression, low_rank=low_rank
    )
    form = job.form(costs, links)
    name = f"{form.schedule.name} {compression}"
    accuracy = accuracy_class(compression, is_late=False)
    if compression == "powersgd":
        name += f" rank {low_rank}"
        accuracy = accuracy.replace("low rank", f"rank {low_rank}")
    return Rival(name, accuracy, form)


def local_sgd_rival(job: DataParallelJob, period: int = PERIOD) -> Rival:
    """Return what a step of local SGD takes, on average over a period.

    Args:
        job: what trains where.
        period: steps from one average of the weights to the next.
    """
    # A step sends nothing: its messages have no bytes, and links that take no time.
    costs = [replace(cost, compressed_gradient_bytes=0.0) for cost in job.bucket_costs]
    no_links = replace(
        job.hardware,
        link_bandwidth=inf,
        link_latency=0.0,
        local_bandwidth=inf,
        local_latency=0.0,
        ranks_per_machine=1,
    )
    form = job.form(costs, no_links)
    n_workers = job.n_workers
    weight_bytes = sum(cost.parameter_bytes for cost in costs)
    average_seconds = job.hardware.collective(
        Action.ALL_REDUCE, weight_bytes, range(n_workers)
    )
    ring_bytes = 2 * (n_workers - 1) / n_workers * weight_bytes
    averaging = Averaging(
        seconds=average_seconds / period,
        sent_bytes=ring_bytes / period,
        # No activations are alive then: weights, optimizer, gradients, and two copies.
        peak_bytes=(4 + job.optimizer_words) * weight_bytes,
    )
    return Rival(f"local SGD every {period}", "local steps", form, averaging)


def rivals_on_slow_links(job: DataParallelJob, compression: str) -> list[Rival]:
    """Return DDP with the same compression and by PowerSGD, where they exist, and local SGD.

    Args:
        job: what trains where.
        compression: of the messages that the rivals are compared with.
    """
    rivals = []
    if compression != "none" and compression in DDP_COMPRESSIONS:
        rivals.append(ddp_rival(job, compression))
    has_shapes = all(
        cost.matrices or not cost.parameter_bytes for cost in job.bucket_costs
    )
    if has_shapes:
        for low_rank in LOW_RANKS:
            rivals.append(ddp_rival(job, "powersgd", low_rank))
    rivals.append(local_sgd_rival(job))
    return rivals
