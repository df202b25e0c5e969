"""Reports on runs: what they say, and the forms in which they are written."""

from toolkit.report.build import SECTIONS, build_report
from toolkit.report.description import Command, Figure, Page, Report, Section, Table, Text
from toolkit.report.html import to_html, write_html
from toolkit.report.publish import publish

__all__ = [
    "SECTIONS",
    "Command",
    "Figure",
    "Page",
    "Report",
    "Section",
    "Table",
    "Text",
    "build_report",
    "publish",
    "to_html",
    "write_html",
]
