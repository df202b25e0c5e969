"""A report as a title and blocks by section, and as an HTML page."""

import re
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from toolkit.errors import shortened

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

_PIXELS_PER_INCH = 91  # of a drawing on the page
_PNG_WIDTH = 640  # pixels on the page
_MOST_ROWS = 1000  # of a table: a page has to open
_MOST_CHARACTERS = 500  # of a cell
_NUMBER = re.compile(r"[-+\d][-+\d.,e±% ]*")


@dataclass(frozen=True)
class Text:
    """A paragraph of plain text."""

    kind: ClassVar = "text"
    text: str


@dataclass(frozen=True)
class Table:
    """Rows of formatted cells, with the same keys, which are the headings.

    Only the first of very many rows are kept, and long cells are cut.
    """

    kind: ClassVar = "table"
    rows: Sequence[Mapping[str, str]]
    caption: str

    def __post_init__(self) -> None:
        if len(self.rows) > _MOST_ROWS:
            caption = f"{self.caption} The first {_MOST_ROWS} of {len(self.rows)} rows."
            object.__setattr__(self, "caption", caption)
        short_rows = []
        for row in self.rows[:_MOST_ROWS]:
            short_rows.append(
                {
                    heading: shortened(cell, _MOST_CHARACTERS)
                    for heading, cell in row.items()
                }
            )
        object.__setattr__(self, "rows", short_rows)

    @property
    def numeric(self) -> set[str]:
        """Headings of the columns of numbers."""
        headings = set(self.rows[0])
        for row in self.rows:
            headings -= {
                heading for heading, cell in row.items() if not _NUMBER.fullmatch(cell)
            }
        return headings


@dataclass(frozen=True)
class Figure:
    """A picture: a drawing or a PNG file, its caption, and the same for those who cannot see it."""

    kind: ClassVar = "figure"
    figure: "Drawing | Path"
    caption: str
    alt: str

    @property
    def width(self) -> int:
        """Pixels on the page."""
        if isinstance(self.figure, Path):
            return _PNG_WIDTH
        return round(_PIXELS_PER_INCH * self.figure.get_size_inches()[0])

    @property
    def source(self) -> str:
        """The picture as a data URL; an SVG's ids then do not clash with those of others."""
        if isinstance(self.figure, Path):
            return (
                f"data:image/png;base64,{b64encode(self.figure.read_bytes()).decode()}"
            )
        from toolkit.figures import style

        content = BytesIO()
        with style():
            self.figure.savefig(content, format="svg", metadata={"Date": None})
        return f"data:image/svg+xml;base64,{b64encode(content.getvalue()).decode()}"


@dataclass(frozen=True)
class Command:
    """A command that repeats runs, and a line on where they ran."""

    kind: ClassVar = "command"
    command: str
    note: str


Block = Text | Table | Figure | Command


@dataclass(frozen=True)
class Report:
    """A title, and blocks by the titles of their sections, in reading order."""

    title: str
    sections: Mapping[str, Sequence[Block]]


def map_texts(report: Report, change: Callable[[str], str]) -> Report:
    """Return the report with ``change`` applied to all of its text."""
    sections = {}
    for title, blocks in report.sections.items():
        sections[title] = [_map_block(block, change) for block in blocks]
    return Report(change(report.title), sections)


def _map_block(block: Block, change: Callable[[str], str]) -> Block:
    if isinstance(block, Text):
        return Text(change(block.text))
    if isinstance(block, Command):
        return Command(change(block.command), change(block.note))
    if isinstance(block, Figure):
        return Figure(block.figure, change(block.caption), change(block.alt))
    rows = []
    for row in block.rows:
        rows.append({heading: change(cell) for heading, cell in row.items()})
    return replace(block, rows=rows, caption=change(block.caption))


def to_html(report: Report, footer: str = "") -> str:
    """Return the report as a page that needs no other file; all text is escaped."""
    from jinja2 import Environment, FileSystemLoader

    files = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=files, autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("report.html").render(report=report, footer=footer)
