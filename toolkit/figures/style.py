"""One style for all figures: colour-blind safe, and legible at 100 mm."""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's palette (jfly.uni-koeln.de/color).
BLACK = "#000000"
ORANGE = "#E69F00"
SKY = "#56B4E9"
GREEN = "#009E73"
YELLOW = "#F0E442"
BLUE = "#0072B2"
VERMILION = "#D55E00"
PURPLE = "#CC79A7"
SERIES = (BLUE, ORANGE, GREEN, PURPLE, VERMILION, SKY, BLACK)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

_STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": cycler(color=SERIES),
    "legend.frameon": False,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "figure.dpi": 110,
    "savefig.dpi": 220,
    "svg.hashsalt": "toolkit",
}
_NUMBERED = 16  # rows, at most


class Drawing(Figure):
    """A figure that notebooks show without %matplotlib inline."""

    def _repr_png_(self) -> bytes:
        png = io.BytesIO()
        self.savefig(png, dpi=_STYLE["figure.dpi"], bbox_inches="tight")
        return png.getvalue()


@contextmanager
def style() -> Iterator[None]:
    """Apply the common style to figures made within the context."""
    with mpl.rc_context(_STYLE):
        yield


@contextmanager
def drawing(size: tuple[float, float]) -> Iterator[Figure]:
    """Yield an empty figure of ``size``, width and height in inches, in the common style."""
    with style():
        yield Drawing(figsize=size, layout="constrained")


def save(figure: Figure, path: str | Path) -> list[Path]:
    """Write a figure as PNG and as SVG, and return both paths.

    Args:
        figure: the figure.
        path: path of the files, with or without an ending ``.png`` or ``.svg``.
    """
    path = Path(path)
    name = path.stem if path.suffix in (".png", ".svg") else path.name
    png = path.with_name(f"{name}.png")
    svg = path.with_name(f"{name}.svg")
    with style():
        figure.savefig(png, bbox_inches="tight")
        # Without a date, and with a fixed salt of its ids, equal figures are equal files.
        figure.savefig(svg, bbox_inches="tight", metadata={"Date": None})
    return [png, svg]


def align(panels: Sequence[Axes], rows: Sequence[tuple[str, int]]) -> None:
    """Scale all panels to the largest number of rows, and label the rows where they differ.

    Args:
        panels: from left to right, the first row on top at 0.
        rows: what a row of each panel is, and how many there are.
    """
    max_rows = max(n_rows for _, n_rows in rows)
    for column, (axes, (name, n_rows)) in enumerate(zip(panels, rows, strict=True)):
        # The first row is on top, as in the grid of a schedule.
        axes.set_ylim(max_rows - 0.5, -0.5)
        axes.set_yticks(range(0, n_rows, -(-max_rows // _NUMBERED)))
        # The axis ends with the rows of its own panel, which may be fewer than those of the
        # tallest.
        axes.spines["left"].set_bounds(-0.5, n_rows - 0.5)
        if column and rows[column - 1] == (name, n_rows):
            axes.tick_params(labelleft=False)
        else:
            axes.set_ylabel(name, y=1 - n_rows / max_rows / 2)


def series(k: int, n_colours: int = len(SERIES)) -> dict[str, Any]:
    """Return the style of the k-th line of a panel: a colour, and dashes after ``n_colours``."""
    dashes = ("-", "--", "-.")[k // n_colours % 3]
    return {"color": SERIES[k % n_colours], "linestyle": dashes}


def legend_right(axes: Axes) -> None:
    """Put the legend to the right of the axes."""
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
