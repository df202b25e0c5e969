"""SVG and HTML as text: faster than a plotting library by far, and it needs no script."""

from collections.abc import Iterable, Sequence
from html import escape


def element(tag: str, content: str = "", **attributes: object) -> str:
    """``<tag ...>content</tag>``; ``class_`` is class and ``aria_label`` is aria-label."""
    words = [tag, *(f'{_name(k)}="{escape(str(v))}"' for k, v in attributes.items())]
    return f"<{' '.join(words)}>{content}</{tag}>"


def text(content: str, x: float, y: float, **attributes: object) -> str:
    return element("text", escape(content), x=number(x), y=number(y), **attributes)


def drawing(content: str, width: float, height: float, label: str, **attributes: object) -> str:
    """An image with a text alternative, that grows and shrinks with those beside it."""
    return element(
        "svg",
        content,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {number(width)} {number(height)}",
        style=f"flex:{number(width)} 1 {number(width)}px",
        aria_label=label,
        **attributes,
    )


def steps(values: Sequence[float], width: float, y_of_zero: float, scale: float) -> str:
    """The path of a curve that is constant in each of equal intervals, closed at zero."""
    words = [f"M0 {number(y_of_zero)}"]
    for k, value in enumerate(values):
        words.append(f"V{number(y_of_zero - value * scale)}H{number((k + 1) * width)}")
    return "".join([*words, f"V{number(y_of_zero)}Z"])


def table(rows: Iterable[Sequence[str]], **attributes: object) -> str:
    """Rows of cells, which are HTML already."""
    return element("table", "".join(f"<tr>{''.join(cells)}</tr>" for cells in rows), **attributes)


def number(value: float) -> str:
    """Without needless digits: there are thousands of them."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _name(key: str) -> str:
    return key.rstrip("_").replace("_", "-")
