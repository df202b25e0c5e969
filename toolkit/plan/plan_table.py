"""Rows of a plan as cells of a table: in a terminal, and on pages."""

from collections.abc import Mapping
from typing import Any

from toolkit.format import MB, digits, size
from toolkit.plan.predictions import Prediction


def terminal_cells(prediction: Prediction, baseline: Prediction) -> dict[str, Any]:
    """Return a prediction as the cells of a row that fits 80 columns, by heading."""
    candidate = prediction.candidate
    recomputes = candidate.checkpoint != "none"
    rounds = candidate.schedule.n_microbatches // max(1, candidate.schedule.n_workers)
    return {
        "schedule": candidate.name.partition(" accumulate")[0],
        "stages": candidate.stages_in_words.replace("parameters", "weights"),
        "batch": f"{candidate.batch} x {rounds}" if rounds > 1 else str(candidate.batch),
        "again": "yes" if recomputes else "",
        "by DDP": f"{prediction.seconds / baseline.seconds:.2f}",
        "memory": size(prediction.memory),
        "late": f"{prediction.staleness:.2f}",
        "ranks": _ranks_cell(prediction),
        "fits": "yes" if prediction.fits else "no",
    }


def _ranks_cell(prediction: Prediction) -> str:
    width = prediction.candidate.width
    return f"{prediction.ranks} x {width}" if width > 1 else str(prediction.ranks)


LEGEND = """\
batch: samples of a micro-batch, times the micro-batches of a worker in a step
again: forwards are recomputed; by DDP: step time by DDP's
memory: of the fullest rank; late: mean staleness in steps
ranks: times the devices of each, if several"""


def plan_cells(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of :meth:`Plan.rows` as the cells of a printed table, by heading."""
    # Results of before ranks had several devices have no width.
    width_cells = {"width": row["width"]} if "width" in row else {}
    return {
        "schedule": row["schedule"],
        "by DDP's time": f"{row['ratio']:.2f}",
        "ms a step": digits(row["seconds"] * 1e3),
        "fullest rank": size(row["memory"]),
        "ranks": row["ranks"],
        **width_cells,
        "staleness": f"{row['staleness']:.2f}",
        "MB a step": digits(row["traffic"] / MB),
        "fits": "yes" if row["fits"] else "no",
    }
