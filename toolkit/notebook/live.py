"""What is under way, live in a notebook's cell."""

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from toolkit.errors import UserError, first_line
from toolkit.runtime import JobFailedError, RankError, launch

if TYPE_CHECKING:
    from toolkit.cost import Timeline
    from toolkit.runtime.meters.measurements import Measurements

_INTERVAL = 0.25  # seconds between two refreshes
_BAR = 220  # pixels
_CURVE = (160, 22)  # pixels


@dataclass
class _Row:
    """One line: how far it is, its newest metrics, and how the first of them went."""

    share: float = 0.0
    text: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    curve: list[float] = field(default_factory=list)


class Live:
    """Rows of progress, metrics and curves that a cell shows while it runs.

    Outside notebooks nothing is shown. A user's mistake or a failed rank within ends the cell with
    one sentence instead of a traceback.

    Args:
        title: stands above the rows.
        total: how many reports in words make a whole.
    """

    def __init__(self, title: str, total: int = 1) -> None:
        self.title, self.total = title, total
        self.rows: dict[str, _Row] = {}
        self._begun = self._shown = 0.0
        self._ended: float | None = None
        self._state = "running for"
        self._handle: Any = None

    def __enter__(self) -> "Live":
        self._begun = time.monotonic()
        if in_notebook():
            from IPython.display import display

            self._handle = display(self, display_id=True)
        return self

    def __exit__(self, kind: object, error: object, where: object) -> None:
        self._ended = time.monotonic()
        self._state = "done in" if error is None else "ended after"
        self.show()
        if isinstance(error, RankError | JobFailedError | UserError):
            in_a_sentence(error)

    def say(self, what: str, share: float) -> None:
        """One thing is under way, and ``share`` of it is done."""
        self.rows = {"": _Row(share, what)}
        self.refresh()

    def report(self, rank: int, value: Any) -> None:
        """A rank reports: what it begins, in words; or a step of many, and metrics of it.

        Args:
            rank: which one.
            value: words, of which ``total`` are expected; or a mapping with ``step``, ``n_steps``
                and metrics, of which the first is drawn.
        """
        row = self.rows.setdefault(f"rank {rank}", _Row())
        if isinstance(value, Mapping):
            row.share, row.text = value["step"] / value["n_steps"], f"step {value['step']}"
            row.metrics = {k: v for k, v in value.items() if k not in ("step", "n_steps")}
            row.curve += list(row.metrics.values())[:1]
        else:
            row.share, row.text = min(1.0, row.share + 1 / self.total), str(value)
        self.refresh()

    def refresh(self) -> None:
        """Show the rows anew, if it is time."""
        if time.monotonic() >= self._shown + _INTERVAL:
            self.show()

    def show(self) -> None:
        """Show the rows as they are."""
        self._shown = time.monotonic()
        if self._handle is not None:
            self._handle.update(self)

    def __repr__(self) -> str:
        lines = [f"{self.title}, {self._seconds:.0f} s"]
        for name, row in sorted(self.rows.items(), key=_in_order):
            metrics = "".join(f", {k} {v:.3g}" for k, v in row.metrics.items())
            lines.append(f"{name} {row.share:.0%} {row.text}{metrics}".strip())
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        shown = "".join(_html(name, row) for name, row in sorted(self.rows.items(), key=_in_order))
        return (
            f"<div><b>{escape(self.title)}</b> <span style='opacity:0.6'>{self._state}"
            f" {self._seconds:.0f} s</span>"
            f"<table style='margin:4px 0'>{shown}</table></div>"
        )

    @property
    def _seconds(self) -> float:
        return (self._ended or time.monotonic()) - self._begun


def watched(
    function: Callable[..., Any],
    n_ranks: int,
    *args: Any,
    title: str = "",
    total: int = 1,
    **options: Any,
) -> list[Any]:
    """:func:`toolkit.runtime.launch`, with what the ranks report live in the cell.

    Args:
        function: what each rank calls; the other arguments are as of ``launch``.
        title: stands above the rows.
        total: how many reports in words a rank gives.
    """
    with Live(title or f"{n_ranks} processes", total) as live:
        return launch(function, n_ranks, *args, on_report=live.report, **options)


def in_a_sentence(error: Exception) -> None:
    """Have notebooks show only the first line of ``error``."""
    line = f"{type(error).__name__}: {first_line(error)}"
    error._render_traceback_ = lambda: [line]  # type: ignore[attr-defined]


def in_notebook() -> bool:
    """Whether a notebook's kernel runs this."""
    loaded = sys.modules.get("IPython")  # as a kernel has it
    return loaded is not None and hasattr(loaded.get_ipython(), "kernel")


def _in_order(item: tuple[str, _Row]) -> tuple[int, str]:
    return len(item[0]), item[0]


def _html(name: str, row: _Row) -> str:
    from toolkit.figures.style import BLUE  # ranks, who report only, need no figures

    done = round(_BAR * min(1.0, row.share))
    bar = (
        f"<div style='width:{_BAR}px;height:10px;background:rgba(128,128,128,0.25)'>"
        f"<div style='width:{done}px;height:10px;background:{BLUE}'></div></div>"
    )
    metrics = "".join(f" &nbsp; {escape(k)} {v:.3g}" for k, v in row.metrics.items())
    cells = (
        escape(name),
        bar,
        f"{row.share:.0%}",
        escape(row.text) + metrics,
        _curve(row.curve, BLUE),
    )
    style = "text-align:left;padding:1px 8px;white-space:nowrap"
    return "<tr>" + "".join(f"<td style='{style}'>{cell}</td>" for cell in cells) + "</tr>"


def _curve(values: list[float], colour: str) -> str:
    """A line of the values, as SVG."""
    if len(values) < 2:
        return ""
    width, height = _CURVE
    low, high = min(values), max(values)
    scale = (height - 2) / (high - low or 1)
    points = " ".join(
        f"{k * width / (len(values) - 1):.1f},{1 + (high - value) * scale:.1f}"
        for k, value in enumerate(values)
    )
    return (
        f"<svg width='{width}' height='{height}'><polyline points='{points}' fill='none'"
        f" stroke='{colour}' stroke-width='1.2'/></svg>"
    )


def train_on_ranks(config: DictConfig) -> "Measurements | None":
    """What each rank does: train as ``config`` has it, and report every step.

    A report has ``step`` and ``n_steps`` of the run, and the loss of the rank's micro-batches.

    Returns:
        what all ranks have measured, where the runtime measures.
    """
    from toolkit.runtime import report
    from toolkit.training import Step, prepare

    job = prepare(config)
    done = 0

    def tell(step: Step) -> None:
        nonlocal done
        done += 1
        found: dict[str, Any] = {"step": done, "n_steps": step.n_steps * config.epochs}
        if len(step.result.losses):
            found["loss"] = float(step.result.loss)
        report(found | {"lr": step.learning_rate})

    job.run(on_step=tell)
    return job.measurements()


def beside_prediction(found: "Measurements", config: DictConfig) -> tuple["Timeline", "Timeline"]:
    """What was measured, and what the simulator makes of ops and messages that take as long.

    Args:
        found: measured under ``config``.
        config: from which the stages are made again, without ranks.
    """
    from toolkit.training.data import load
    from toolkit.training.prediction import beside_prediction

    return beside_prediction(found, config, load(config.data).form)
