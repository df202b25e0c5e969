"""Rows of a plan as cells of a table: in a terminal, and on pages."""

from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.cost.compression import coarseness
from toolkit.format import MB, digits, size, table
from toolkit.plan.predictions import Prediction


def terminal_cells(prediction: Prediction, baseline: Prediction) -> dict[str, Any]:
    """Return a prediction as the cells of a row that fits 80 columns, by heading."""
    candidate = prediction.candidate
    recomputes = candidate.checkpoint != "none"
    rounds = candidate.schedule.n_microbatches // max(1, candidate.schedule.n_workers)
    return {
        "schedule": candidate.name.partition(" accumulate")[0],
        "stages": candidate.stages_in_words.replace("parameters", "weights"),
        "batch": f"{candidate.batch} x {rounds}"
        if rounds > 1
        else str(candidate.batch),
        "again": "yes" if recomputes else "",
        "by DDP": f"{prediction.seconds / baseline.seconds:.2f}",
        "memory": size(prediction.memory),
        "late": f"{prediction.staleness:.2f}",
        "ranks": _ranks_cell(prediction),
        "sent as": candidate.compression.replace("none", ""),
        "fits": "yes" if prediction.fits else "no",
    }


def _ranks_cell(prediction: Prediction) -> str:
    width = prediction.candidate.width
    return f"{prediction.ranks} x {width}" if width > 1 else str(prediction.ranks)


def terminal_table(predictions: Sequence[Prediction], baseline: Prediction) -> str:
    """Return the table of some predictions, without columns that say nothing."""
    rows = []
    for index, prediction in enumerate(predictions):
        cells = terminal_cells(prediction, baseline)
        if all(each.fits for each in predictions):
            cells.pop("fits")
        if all(each.coarseness == 0 for each in predictions):
            cells.pop("sent as")
        rows.append({"": index} | cells)
    return table(rows)


def accuracy_notes(predictions: Sequence[Prediction], baseline: Prediction) -> str:
    """Return a line for each compression of messages: its class of accuracy, and its fastest.

    Args:
        predictions: rows of a table, the fastest first.
        baseline: data parallelism.
    """
    fastest: dict[str, Prediction] = {}
    for prediction in predictions:
        fastest.setdefault(prediction.candidate.compression, prediction)
    notes = ""
    for compression in sorted(fastest.keys() - {"none"}, key=coarseness):
        prediction = fastest[compression]
        share = prediction.seconds / baseline.seconds
        notes += (
            f"\nSent as {compression}, {share:.2f} of DDP's time: {prediction.accuracy};"
            " accuracy may differ."
        )
    return notes


_LEGEND = """\
batch: samples of a micro-batch, times the micro-batches of a worker in a step
again: forwards are recomputed; by DDP: step time by DDP's
memory: of the fullest rank; late: mean staleness in steps
ranks: times the devices of each, if several"""


def legend(predictions: Sequence[Prediction]) -> str:
    """Return what the columns of :func:`terminal_table` say."""
    if all(each.coarseness == 0 for each in predictions):
        return _LEGEND
    return f"{_LEGEND}\nsent as: type of compressed messages"


def plan_cells(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of :meth:`Plan.rows` as the cells of a printed table, by heading."""
    # Results of before ranks had several devices have no width.
    width_cells = {"width": row["width"]} if "width" in row else {}
    cells = {
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
    if "accuracy" in row:  # results of before have exact messages
        cells["accuracy"] = row["accuracy"]
    return cells
