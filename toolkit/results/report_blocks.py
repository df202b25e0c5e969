"""What a report says, whatever it is written as."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing


@dataclass(frozen=True)
class Text:
    """A paragraph, plain."""

    text: str


@dataclass(frozen=True)
class Table:
    """Rows of cells as they are to be read, their keys as headings."""

    rows: Sequence[Mapping[str, str]]
    caption: str


@dataclass(frozen=True)
class Figure:
    """A picture.

    Attributes:
        figure: of matplotlib.
        caption: what it shows, and how to read it.
        alt: the same for who cannot see it, in a line.
    """

    figure: "Drawing"
    caption: str
    alt: str


@dataclass(frozen=True)
class Page:
    """HTML to explore, where there is HTML.

    Attributes:
        html: a part of a page, without script.
        caption: what it shows.
    """

    html: str
    caption: str


@dataclass(frozen=True)
class Command:
    """What one types to do it again, and a line on where it ran."""

    command: str
    note: str


Block = Text | Table | Figure | Page | Command


@dataclass(frozen=True)
class Section:
    """A part of a report, under a heading of its own."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Report:
    """All that is said of some runs, in the order in which it is read."""

    title: str
    sections: Sequence[Section]
