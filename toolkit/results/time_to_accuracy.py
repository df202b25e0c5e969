"""Step times and accuracies of compressed messages in one table: what reaches which accuracy when.

Step times are simulated, one for each model and machine. Accuracies come from a comparison, which
trains all methods for equal epochs. So a method's time of training is its step time.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.cost.slow_link_rivals import LOW_RANKS
from toolkit.cost.slow_links import LOCAL_SGD, METHODS, RULE_LABELS
from toolkit.errors import UserError
from toolkit.results.record import read_result
from toolkit.schedule import FRESHEST

_DELAYS = {"cdp_v1": 1, "cdp_v2": FRESHEST}
_POWERSGD_OF_RANK = {LOW_RANKS[0]: "powersgd", LOW_RANKS[1]: "powersgd_2"}


@dataclass(frozen=True)
class TrainedMethod:
    """What a comparison shows of a rule with a kind of messages.

    Attributes:
        rule: ``ddp``, ``cdp_v1`` or ``cdp_v2``.
        method: key of :data:`toolkit.cost.slow_links.METHODS`.
        accuracy: mean over seeds after the last epoch, in percent.
        accuracy_sd: its standard deviation over seeds, in points; None with one seed.
        verdict: whether it is equivalent to the comparison's first rule.
    """

    rule: str
    method: str
    accuracy: float
    accuracy_sd: float | None
    verdict: str

    @property
    def label(self) -> str:
        """What tables and figures call it."""
        return f"{RULE_LABELS[self.rule]} {METHODS[self.method]}"


def trained_methods(folders: Iterable[str | Path]) -> list[TrainedMethod]:
    """Return the methods that comparisons have trained, and that have a simulated step time.

    Args:
        folders: of comparisons of the same model, data and epochs, such as
            ``compare study=compression`` writes them. Of a method that several have trained the
            first counts.

    Raises:
        UserError: a folder has no comparison of accuracies, or none of such methods.
    """
    methods: dict[tuple[str, str], TrainedMethod] = {}
    for folder in folders:
        for each in _methods_of(folder):
            methods.setdefault((each.rule, each.method), each)
    return [*methods.values()]


def _methods_of(folder: str | Path) -> list[TrainedMethod]:
    """Return the methods of one comparison."""
    result = read_result(Path(folder))
    config = result["provenance"].get("config", {})
    methods = []
    for row in result["metrics"]:
        if not (isinstance(row, dict) and {"rule", "accuracy"} <= row.keys()):
            raise UserError(f"accuracies={folder}: it has no comparison of accuracies")
        place = _rule_and_method(config, row["rule"])
        if place is not None and row["accuracy"] is not None:
            rule, method = place
            methods.append(
                TrainedMethod(
                    rule,
                    method,
                    row["accuracy"],
                    row["accuracy_sd"],
                    row["verdict"],
                )
            )
    if not methods:
        raise UserError(
            f"accuracies={folder}: it trained no method of this table; use a comparison by"
            " study=compression"
        )
    return methods


def _rule_and_method(config: Mapping[str, Any], name: str) -> tuple[str, str] | None:
    """Return the rule and the method of a comparison's rule; None if tables have none such."""
    schedule = config["rules"][name]
    own_runtime = config.get("own", {}).get(name, {}).get("runtime", {})
    runtime = config["runtime"] | own_runtime
    method = runtime.get("compression", "none")
    if method == "powersgd":
        method = _POWERSGD_OF_RANK.get(runtime["low_rank"], "")
    if runtime["_target_"].endswith(".LocalSGD"):
        method = LOCAL_SGD
    if method not in METHODS:
        return None
    if schedule["_target_"].endswith(".data_parallel"):
        return "ddp", method
    if schedule["_target_"].endswith(".cyclic"):
        for rule, delay in _DELAYS.items():
            if schedule["delay"] == delay:
                return rule, method
    return None


def time_to_accuracy(
    trained: Iterable[TrainedMethod], rows: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return a row for each trained method, model and machine.

    Args:
        trained: of one comparison.
        rows: of :func:`toolkit.cost.slow_links.assess_slow_links`, also with ``model``, ``batch``
            and ``samples``.

    Returns:
        Rows with ``model``, ``batch``, ``samples``, ``machine``, ``ratio`` (M/C), ``name``,
        ``rule``, ``time`` (of a step, by that of DDP with whole messages), ``accuracy``,
        ``accuracy_sd``, ``verdict``, and ``front``: whether no method is at least as fast and at
        least as accurate, and better in one.
    """
    trained = [*trained]
    points_of_machine: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        place = {
            name: row[name]
            for name in ("model", "batch", "samples", "machine", "ratio")
        }
        points = points_of_machine.setdefault(tuple(place.values()), [])
        for each in trained:
            if each.method == row["method"] and row[each.rule] is not None:
                points.append(
                    {
                        **place,
                        "name": each.label,
                        "rule": each.rule,
                        "time": row[each.rule] / row["whole_ddp"],
                        "accuracy": each.accuracy,
                        "accuracy_sd": each.accuracy_sd,
                        "verdict": each.verdict,
                    }
                )
    all_points = []
    for points in points_of_machine.values():
        for point in points:
            point["front"] = not any(_beats(rival, point) for rival in points)
        all_points += sorted(points, key=lambda point: point["time"])
    return all_points


def _beats(rival: Mapping[str, Any], point: Mapping[str, Any]) -> bool:
    """Whether ``rival`` is at least as fast and accurate as ``point``, and better in one."""
    no_worse = rival["time"] <= point["time"] and rival["accuracy"] >= point["accuracy"]
    return no_worse and (
        rival["time"] < point["time"] or rival["accuracy"] > point["accuracy"]
    )


def accuracy_table(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return a row for each method, with a column for each model and machine.

    Args:
        rows: of :func:`time_to_accuracy`.

    Returns:
        Cells by heading. Those of times end in ``*`` for methods on the front.
    """
    table_rows: dict[str, dict[str, str]] = {}
    for row in rows:
        cells = accuracy_cells(row)
        labels = {name: cells[name] for name in ("method", "accuracy (%)", "verdict")}
        table_row = table_rows.setdefault(row["name"], labels)
        mark = ""
        if row["front"]:
            mark = " *"
        table_row[f"{cells['model']}, M = {cells['M/C']} C"] = f"{cells['time']}{mark}"
    return [*table_rows.values()]


def accuracy_cells(row: Mapping[str, Any]) -> dict[str, str]:
    """Return a row of :func:`time_to_accuracy` as cells of a printed table, by heading."""
    accuracy = f"{row['accuracy']:.2f}"
    if row["accuracy_sd"] is not None:
        accuracy += f" ± {row['accuracy_sd']:.2f}"
    return {
        "model": f"{row['model']}, {row['batch']} {row['samples']}",
        "machine": row["machine"],
        "M/C": f"{row['ratio']:.2g}",
        "method": row["name"],
        "time": f"{row['time']:.3f}",
        "accuracy (%)": accuracy,
        "verdict": row["verdict"],
        "on the front": "yes" if row["front"] else "",
    }
