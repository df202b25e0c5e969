"""Who is fastest on slow links: compressed messages with and without late weights, and rivals."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

from toolkit.cost.compression import COMPRESSIONS, LOW_RANK, compressed_costs
from toolkit.cost.hardware import Hardware
from toolkit.cost.slow_link_rivals import (
    DDP_COMPRESSIONS,
    LOW_RANKS,
    PERIOD,
    ddp_rival,
    local_sgd_rival,
)
from toolkit.cost.stage_costs import Costs
from toolkit.cost.worker_forms import CostsOf, Cut, DataParallelJob, fastest_cdp
from toolkit.errors import check_choice
from toolkit.schedule import FRESHEST

LOCAL_SGD = "local_sgd"
FREE_LINKS = "free_links"
"""No method: what a step takes where messages take no time, which none can undercut."""

METHODS = {
    "none": "whole",
    "fp16": "16 bits",
    "bf16": "16 bits",
    "int8": "8 bits",
    "int4": "4 bits",
    "topk": "top-k",
    "low_rank": f"rank {LOW_RANK.rank} a hop",
    "powersgd": f"rank {LOW_RANKS[0]}",
    "powersgd_2": f"rank {LOW_RANKS[1]}",
    LOCAL_SGD: f"an average every {PERIOD} steps",
    FREE_LINKS: "on free links",
}
"""What travels, by the ``method`` of a row."""

RULE_LABELS = {"ddp": "DDP", "cdp_v1": "CDP-v1", "cdp_v2": "CDP-v2"}
"""What tables call the rules of a row."""


def assess_slow_links(
    costs_of: CostsOf, hardware: Hardware, workers: int, compressions: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Simulate a model with a worker per rank, by every way to make messages small.

    CDP-v1 and CDP-v2 run in their fastest form. PowerSGD and local SGD have no form with late
    weights, and low rank at each hop none without. The last row bounds what smaller messages can
    reach.

    Args:
        costs_of: costs of the model's stages on a micro-batch.
        hardware: the machines.
        workers: ranks; as many stages, or a few more if there are few.
        compressions: of :data:`toolkit.cost.compression.COMPRESSIONS`.

    Yields:
        a row for each compression, then of PowerSGD, local SGD and free links: ``machine``,
        ``workers``; ``ratio``, M/C; ``method``; ``whole_ddp``, seconds of a step of DDP that
        compresses nothing; ``ddp``, ``cdp_v1`` and ``cdp_v2``, seconds of a step by the method,
        None where the rule has no such form.

    Raises:
        UserError: a compression is unknown.
    """
    for compression in compressions:
        check_choice("compressions", compression, COMPRESSIONS)
    job = DataParallelJob(costs_of, hardware, workers)
    machine = {
        "machine": hardware.name,
        "workers": workers,
        "ratio": job.link_ratio,
        "whole_ddp": job.form().seconds,
    }
    for compression in compressions:
        cdp_costs = partial(_compressed, costs_of, compression)
        ddp_seconds = None
        if compression in DDP_COMPRESSIONS:
            ddp_seconds = ddp_rival(job, compression).seconds
        yield machine | {
            "method": compression,
            "ddp": ddp_seconds,
            "cdp_v1": fastest_cdp(cdp_costs, hardware, workers, 1).seconds,
            "cdp_v2": fastest_cdp(cdp_costs, hardware, workers, FRESHEST).seconds,
        }
    for method, seconds in _rival_seconds(job).items():
        yield machine | {
            "method": method,
            "ddp": seconds,
            "cdp_v1": None,
            "cdp_v2": None,
        }
    free = free_links(hardware)
    yield machine | {
        "method": FREE_LINKS,
        "ddp": job.form(hardware=free).seconds,
        "cdp_v1": fastest_cdp(costs_of, free, workers, 1).seconds,
        "cdp_v2": fastest_cdp(costs_of, free, workers, FRESHEST).seconds,
    }


def _rival_seconds(job: DataParallelJob) -> dict[str, float]:
    """Return the seconds of a step by each method that has no form with late weights."""
    return {
        "powersgd": ddp_rival(job, "powersgd", LOW_RANKS[0]).seconds,
        "powersgd_2": ddp_rival(job, "powersgd", LOW_RANKS[1]).seconds,
        LOCAL_SGD: local_sgd_rival(job, PERIOD).seconds,
    }


def free_links(hardware: Hardware) -> Hardware:
    """Return ``hardware`` with a machine for each rank, and messages that take no time."""
    return replace(
        hardware,
        link_bandwidth=inf,
        link_latency=0.0,
        ranks_per_machine=1,
        local_bandwidth=inf,
        local_latency=0.0,
    )


def _compressed(costs_of: CostsOf, compression: str, n_stages: int, cut: Cut) -> Costs:
    return compressed_costs(costs_of(n_stages, cut), compression)


def slow_link_cells(row: Mapping[str, Any]) -> dict[str, str]:
    """Return a row of :func:`assess_slow_links` as cells of a printed table, by heading.

    Args:
        row: also with ``model``, ``batch`` and ``samples``. Times are divided by ``whole_ddp``.
    """
    cells = {
        "model": f"{row['model']}, {row['batch']} {row['samples']}",
        "machine": row["machine"],
        "M/C": f"{row['ratio']:.2g}",
        "messages": METHODS[row["method"]],
    }
    for rule, heading in RULE_LABELS.items():
        cells[heading] = ""
        if row[rule] is not None:
            cells[heading] = f"{row[rule] / row['whole_ddp']:.2f}"
    return cells


_ONE_COLUMN = {LOCAL_SGD: "local SGD", FREE_LINKS: "free links"}
"""Headings of methods that have one column, not one for each rule."""


def slow_link_table(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return a row for each model and machine, with a column for each method.

    Args:
        rows: as of :func:`slow_link_cells`.
    """
    table_rows: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        cells = slow_link_cells(row)
        labels = {name: cells[name] for name in ("model", "machine", "M/C")}
        table_row = table_rows.setdefault((cells["model"], cells["machine"]), labels)
        if row["method"] in _ONE_COLUMN:
            table_row[_ONE_COLUMN[row["method"]]] = cells["DDP"]
            continue
        for rule in ("DDP", "CDP-v1"):
            if cells[rule]:
                table_row[f"{rule} {cells['messages']}"] = cells[rule]
    return [*table_rows.values()]
