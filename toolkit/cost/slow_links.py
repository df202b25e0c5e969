"""Who is fastest on slow links: compressed messages with and without late weights, and rivals."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.cost.compression import accuracy_class, compressed_costs
from toolkit.cost.hardware import Hardware
from toolkit.cost.slow_link_rivals import (
    LOW_RANKS,
    PERIOD,
    Rival,
    ddp_rival,
    local_sgd_rival,
)
from toolkit.cost.stage_costs import Costs
from toolkit.cost.worker_forms import (
    CostsOf,
    Cut,
    DataParallelJob,
    Form,
    fastest_form,
)
from toolkit.schedule import FRESHEST, catalog

_RULES = {"cdp_v1": 1, "cdp_v2": FRESHEST}
"""Delay of each rule with late weights, by the name of its column."""
_MIN_STAGES = 8


@dataclass(frozen=True)
class _CompressedCosts:
    """Costs of a model's stages whose messages travel compressed."""

    costs_of: CostsOf
    compression: str

    def __call__(self, n_stages: int, cut: Cut) -> Costs:
        return compressed_costs(self.costs_of(n_stages, cut), self.compression)


def assess_slow_links(
    costs_of: CostsOf, hardware: Hardware, workers: int, compressions: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Simulate a model with a worker per rank, by every way to make messages small.

    CDP-v1 and CDP-v2 run in their fastest form. PowerSGD and local SGD have no form with late
    weights here.

    Args:
        costs_of: costs of the model's stages on a micro-batch.
        hardware: the machines.
        workers: ranks; as many stages, or a few more if there are few.
        compressions: of :data:`toolkit.cost.compression.COMPRESSIONS`.

    Yields:
        a row a compression, one of PowerSGD and one of local SGD: ``machine``, ``workers``;
        ``ratio``, M/C; ``messages``, what travels; ``ddp``, ``cdp_v1`` and ``cdp_v2``, seconds of a
        step, None where there is no such method.

    Raises:
        UserError: a compression is unknown.
    """
    job = DataParallelJob(costs_of, hardware, workers)
    compute_seconds = sum(sum(cost.seconds(hardware)) for cost in job.bucket_costs)
    parameter_bytes = sum(cost.parameter_bytes for cost in job.bucket_costs)
    common = {
        "machine": hardware.name,
        "workers": workers,
        "ratio": parameter_bytes / hardware.link_bandwidth / compute_seconds,
    }
    for compression in compressions:
        row: dict[str, Any] = common | {
            "messages": accuracy_class(compression, is_late=False),
            "ddp": ddp_rival(job, compression).seconds,
        }
        if compression == "none":
            row["messages"] = "whole"
        for rule, delay in _RULES.items():
            costs = _CompressedCosts(costs_of, compression)
            row[rule] = _cdp_form(costs, hardware, workers, delay).seconds
        yield row
    for rival in _rivals(job):
        late_rules = dict.fromkeys(_RULES)
        yield common | {"messages": rival.accuracy, "ddp": rival.seconds} | late_rules


def slow_link_cells(row: Mapping[str, Any]) -> dict[str, str]:
    """Return a row of :func:`assess_slow_links` as cells of a printed table, by heading.

    Args:
        row: also with ``model``, ``batch``, ``samples``; and ``whole_ddp``, the seconds of a step
            of DDP that compresses nothing, by which times are divided.
    """
    cells = {
        "model": f"{row['model']}, {row['batch']} {row['samples']}",
        "machine": row["machine"],
        "M/C": f"{row['ratio']:.2g}",
        "messages": row["messages"],
    }
    for rule, heading in (("ddp", "DDP"), ("cdp_v1", "CDP-v1"), ("cdp_v2", "CDP-v2")):
        seconds = row[rule]
        cells[heading] = "" if seconds is None else f"{seconds / row['whole_ddp']:.2f}"
    return cells


def _cdp_form(costs_of: CostsOf, hardware: Hardware, workers: int, delay: Any) -> Form:
    n_stages = workers * -(-_MIN_STAGES // workers)
    schedule = catalog.cyclic(workers, delay, n_stages=n_stages)
    return fastest_form(schedule, costs_of, hardware)


def _rivals(job: DataParallelJob) -> list[Rival]:
    low_rank = ddp_rival(job, "powersgd", LOW_RANKS[0])
    return [low_rank, local_sgd_rival(job, PERIOD)]
