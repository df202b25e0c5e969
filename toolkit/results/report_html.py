"""A report as one HTML file: no network, no script, readable on a phone and on paper."""

import re
from base64 import b64encode
from html import escape
from io import BytesIO
from itertools import groupby
from pathlib import Path

from toolkit.files import write_text
from toolkit.results.report_blocks import Block, Command, Figure, Page, Report, Section, Table, Text
from toolkit.results.report_format import NONE

_PIXELS = 91  # of the page an inch of a figure takes, at most
_NUMBER = re.compile(rf"(± )?[-+]?[\d.,]+(e[-+]?\d+)?( %)?|{NONE}")
_SHORT = 22  # characters that stay on one line

_STYLE = """
:root { color-scheme: light dark; --text: #1c2024; --quiet: #59636e; --back: #ffffff;
  --card: #f5f7f9; --line: #d5dbe1; --link: #0062a3; }
@media (prefers-color-scheme: dark) { :root { --text: #e3e7eb; --quiet: #9aa5b1;
  --back: #14181c; --card: #1e242a; --line: #3a434c; --link: #7cc4f5; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--back); color: var(--text);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main, header, footer { max-width: 1120px; margin: 0 auto; padding: 0 16px; }
header { padding-top: 28px; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 12px; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 44px 0 12px; padding-bottom: 6px;
  border-bottom: 1px solid var(--line); }
p { margin: 12px 0; max-width: 75ch; overflow-wrap: anywhere; }
a { color: var(--link); }
nav ul { display: flex; flex-wrap: wrap; gap: 4px 18px; list-style: none; margin: 0; padding: 0; }
nav a { display: inline-block; padding: 4px 0; }
.table { margin: 18px 0; }
.scroll { overflow-x: auto; max-width: 100%; border: 1px solid var(--line); border-radius: 6px; }
.scroll:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
table { border-collapse: collapse; width: 100%; font-size: 0.875rem;
  font-variant-numeric: tabular-nums; }
th, td { padding: 6px 8px; text-align: left; vertical-align: top; }
td { max-width: 26rem; overflow-wrap: break-word; }
td:first-child { min-width: 9.5rem; }
.long { min-width: 13rem; }
.short { white-space: nowrap; }
th { background: var(--card); font-weight: 600; white-space: nowrap; }
tbody tr { border-top: 1px solid var(--line); }
.number { text-align: right; white-space: nowrap; }
.about, figcaption { color: var(--quiet); font-size: 0.875rem; line-height: 1.45;
  margin: 0 0 8px; max-width: 75ch; overflow-wrap: anywhere; }
.figures { display: flex; flex-wrap: wrap; gap: 20px; align-items: flex-start; margin: 18px 0; }
figure { margin: 0; min-width: 0; max-width: 100%; }
figure .scroll { background: #ffffff; padding: 8px; }
figure img { display: block; width: 100%; height: auto; }
figcaption { margin: 8px 0 0; }
.page { margin: 18px 0; }
.page summary { cursor: pointer; color: var(--link); }
.page .scroll { background: #ffffff; color: #111111; padding: 12px; margin-top: 8px; }
.page .cdp-panes { min-width: 640px; }
.command { margin: 18px 0; }
pre { margin: 0 0 6px; padding: 12px 14px; background: var(--card); border: 1px solid var(--line);
  border-radius: 6px; white-space: pre-wrap; overflow-wrap: anywhere; font-size: 0.8125rem;
  font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
footer { color: var(--quiet); font-size: 0.8125rem; margin-top: 48px; padding-bottom: 32px; }
@media print {
  :root { color-scheme: light; --text: #000000; --quiet: #444444; --back: #ffffff;
    --card: #f2f2f2; --line: #bbbbbb; --link: #000000; }
  body { font-size: 10pt; }
  nav { display: none; }
  .scroll { overflow: visible; }
  table { font-size: 7.5pt; }
  th, td { padding: 3px 6px; white-space: normal !important; min-width: 0 !important; }
  td { overflow-wrap: anywhere; }
  figure { width: calc(50% - 10px) !important; }
  figure, tr, pre { break-inside: avoid; }
  h2, .about { break-after: avoid; }
}
"""


def write_html(path: Path, report: Report, footer: str = "") -> None:
    """:func:`to_html` as a file, whole or not at all."""
    write_text(path, to_html(report, footer))


def to_html(report: Report, footer: str = "") -> str:
    """The report as a page that needs no other file.

    Args:
        report: what it says; text of every kind is escaped.
        footer: a line at its end.
    """
    title = escape(report.title)
    contents = "".join(
        f'<li><a href="#{_anchor(k)}">{escape(section.title)}</a></li>\n'
        for k, section in enumerate(report.sections)
    )
    sections = "".join(_section(k, section) for k, section in enumerate(report.sections))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{_STYLE}</style>
</head>
<body>
<header>
<h1>{title}</h1>
<nav aria-label="Contents">
<ul>
{contents}</ul>
</nav>
</header>
<main>
{sections}</main>
<footer>{escape(footer)}</footer>
</body>
</html>
"""


def _anchor(k: int) -> str:
    return f"section-{k + 1}"


def _section(k: int, section: Section) -> str:
    """Figures that follow each other stand side by side where there is room."""
    parts = []
    for drawn, blocks in groupby(section.blocks, key=lambda block: isinstance(block, Figure)):
        inner = "".join(map(_block, blocks))
        parts.append(f'<div class="figures">\n{inner}</div>\n' if drawn else inner)
    name = _anchor(k)
    return (
        f'<section aria-labelledby="{name}">\n<h2 id="{name}">{escape(section.title)}</h2>\n'
        f"{''.join(parts)}</section>\n"
    )


def _block(block: Block) -> str:
    if isinstance(block, Text):
        return f"<p>{escape(block.text)}</p>\n"
    if isinstance(block, Command):
        return (
            f'<div class="command"><pre><code>{escape(block.command)}</code></pre>\n'
            f'<p class="about">{escape(block.note)}</p></div>\n'
        )
    if isinstance(block, Page):
        return (
            f'<details class="page"><summary>{escape(block.caption)}</summary>\n'
            f'<div class="scroll" tabindex="0">{block.html}</div></details>\n'
        )
    return _table(block) if isinstance(block, Table) else _figure(block)


def _table(table: Table) -> str:
    names = list(table.rows[0])
    kinds = {name: _kind([row[name] for row in table.rows]) for name in names}

    def cells(tag: str, row: dict[str, str]) -> str:
        scope = ' scope="col"' if tag == "th" else ""
        return "".join(
            f'<{tag}{scope} class="{kinds[name]}">{escape(text)}</{tag}>'
            for name, text in row.items()
        )

    rows = "".join(f"<tr>{cells('td', dict(row))}</tr>\n" for row in table.rows)
    caption = escape(table.caption)
    return (
        f'<div class="table"><p class="about">{caption}</p>\n'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{caption}"><table>\n'
        f"<thead><tr>{cells('th', dict(zip(names, names, strict=True)))}</tr></thead>\n"
        f"<tbody>\n{rows}</tbody>\n</table></div></div>\n"
    )


def _kind(cells: list[str]) -> str:
    """What a column holds: numbers, words or sentences."""
    if all(map(_NUMBER.fullmatch, cells)):
        return "number"
    return "short" if max(map(len, cells)) <= _SHORT else "long"


def _figure(figure: Figure) -> str:
    width, height = (_PIXELS * inches for inches in figure.figure.get_size_inches())
    source = b64encode(_svg(figure)).decode()
    return (
        f'<figure style="width: {width + 18:.0f}px"><div class="scroll">'
        f'<img src="data:image/svg+xml;base64,{source}" alt="{escape(figure.alt)}"'
        f' width="{width:.0f}" height="{height:.0f}"></div>\n'
        f"<figcaption>{escape(figure.caption)}</figcaption></figure>\n"
    )


def _svg(figure: Figure) -> bytes:
    """The picture; as an image of its own, so that its names meet no other's."""
    from toolkit.figures import style

    content = BytesIO()
    with style():
        figure.figure.savefig(content, format="svg", metadata={"Date": None})
    return content.getvalue()
