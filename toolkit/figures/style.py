"""One look for all figures: colours that the colour-blind can tell apart, legible at 100 mm."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
from cycler import cycler
from matplotlib.figure import Figure

# Okabe and Ito's palette (jfly.uni-koeln.de/color).
BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILION, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
DASHES: tuple[Literal["-", "--", "-."], ...] = ("-", "--", "-.")  # of one colour
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
_ENDINGS = (".png", ".svg")


class Drawing(Figure):
    """A figure that notebooks show, whether or not they have been told to (%matplotlib inline)."""

    def _repr_png_(self) -> bytes:
        png = io.BytesIO()
        self.savefig(png, dpi=_STYLE["figure.dpi"], bbox_inches="tight")
        return png.getvalue()


def drawing(size: tuple[float, float]) -> Figure:
    """An empty figure of ``size``, width and height in inches."""
    return Drawing(figsize=size, layout="constrained")


@contextmanager
def style() -> Iterator[None]:
    """The look, for the figures made within."""
    with mpl.rc_context(_STYLE):
        yield


def save(figure: Figure, path: str | Path) -> list[Path]:
    """Write ``path``, with or without such an ending, as PNG and as SVG; return both."""
    path = Path(path)
    name = path.stem if path.suffix in _ENDINGS else path.name
    paths = [path.with_name(name + ending) for ending in _ENDINGS]
    with style():
        for target in paths:
            metadata = {"Date": None} if target.suffix == ".svg" else None
            figure.savefig(target, bbox_inches="tight", metadata=metadata)
    return paths
