"""The parts of a report, and the HTML page made of them."""

import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

_PIXELS_PER_INCH = 91  # of a drawing on the page
_WIDTH = 640  # pixels of a PNG on the page
_NUMBER = re.compile(r"[-+\d][-+\d.,e±% ]*")


@dataclass(frozen=True)
class Text:
    """A paragraph of plain text."""

    text: str


@dataclass(frozen=True)
class Table:
    """Rows of formatted cells, with the same keys, which are the headings."""

    rows: Sequence[Mapping[str, str]]
    caption: str

    @property
    def numeric(self) -> set[str]:
        """Headings of the columns of numbers."""
        return {k for k in self.rows[0] if all(_NUMBER.fullmatch(row[k]) for row in self.rows)}


@dataclass(frozen=True)
class Figure:
    """A picture: a drawing or a PNG file, its caption, and the same for those who cannot see it."""

    figure: "Drawing | Path"
    caption: str
    alt: str

    @property
    def width(self) -> int:
        """Pixels on the page."""
        if isinstance(self.figure, Path):
            return _WIDTH
        return round(_PIXELS_PER_INCH * self.figure.get_size_inches()[0])

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
class Command:
    """A command that repeats runs, and a line on where they ran."""

    command: str
    note: str


Block = Text | Table | Figure | Command


@dataclass(frozen=True)
class Report:
    """A title, and blocks by the titles of their sections, in reading order."""

    title: str
    sections: Mapping[str, Sequence[Block]]


def to_html(report: Report, footer: str = "") -> str:
    """Return the report as a page that needs no other file; all text is escaped."""
    from jinja2 import Environment, FileSystemLoader

    files = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=files, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template("report.html").render(report=report, footer=footer)
