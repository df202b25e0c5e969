"""The parts of a report, and the HTML page made of them."""

import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.files import write_text
from toolkit.format import DASH

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

_PIXELS = 91  # of the page per inch of a figure, at most
_WIDTH = 640  # pixels of a PNG on the page, at most
_NUMBER = re.compile(rf"(± )?[-+]?[\d.,]+(e[-+]?\d+)?( %)?|{DASH}")
_SHORT = 22  # characters that stay on one line


@dataclass(frozen=True)
class Text:
    """A paragraph of plain text."""

    text: str


@dataclass(frozen=True)
class Table:
    """Rows of formatted cells, with their keys as headings."""

    rows: Sequence[Mapping[str, str]]
    caption: str

    @property
    def kinds(self) -> dict[str, str]:
        """CSS class of each column: number, short or long."""
        return {name: _kind([row[name] for row in self.rows]) for name in self.rows[0]}


@dataclass(frozen=True)
class Figure:
    """A picture.

    Attributes:
        figure: matplotlib's figure, or a PNG file.
        caption: what it shows, and how to read it.
        alt: the same for readers who cannot see it, in a line.
    """

    figure: "Drawing | Path"
    caption: str
    alt: str

    @property
    def pixels(self) -> tuple[int, int]:
        """Width and height on the page."""
        if isinstance(self.figure, Path):
            from PIL import Image

            with Image.open(self.figure) as image:
                return _WIDTH, round(_WIDTH * image.height / image.width)
        width, height = self.figure.get_size_inches()
        return round(_PIXELS * width), round(_PIXELS * height)

    @property
    def source(self) -> str:
        """The picture as a data URL; an SVG's ids then do not clash with those of others."""
        if isinstance(self.figure, Path):
            return f"data:image/png;base64,{b64encode(self.figure.read_bytes()).decode()}"
        from toolkit.figures import style

        content = BytesIO()
        with style():
            self.figure.savefig(content, format="svg", metadata={"Date": None})
        return f"data:image/svg+xml;base64,{b64encode(content.getvalue()).decode()}"


@dataclass(frozen=True)
class Page:
    """HTML to explore, without script; the only part that is not escaped."""

    html: str
    caption: str


@dataclass(frozen=True)
class Command:
    """A command that repeats runs, and a line on where they ran."""

    command: str
    note: str


Block = Text | Table | Figure | Page | Command


@dataclass(frozen=True)
class Section:
    """A part of a report, under a heading."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Report:
    """Sections in reading order."""

    title: str
    sections: Sequence[Section]


def to_html(report: Report, footer: str = "") -> str:
    """Return the report as a page that needs no other file.

    Args:
        report: text of every kind is escaped.
        footer: a line at the end of the page.
    """
    from jinja2 import Environment, FileSystemLoader

    files = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=files, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template("report.html").render(report=report, footer=footer)


def write_html(path: Path, report: Report, footer: str = "") -> None:
    """Write :func:`to_html` to a file, atomically."""
    write_text(path, to_html(report, footer))


def _kind(cells: Sequence[str]) -> str:
    if all(map(_NUMBER.fullmatch, cells)):
        return "number"
    return "short" if max(map(len, cells)) <= _SHORT else "long"
