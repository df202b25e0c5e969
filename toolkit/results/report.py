"""From runs to a report: summary, accuracy, memory, communication, how to repeat it."""

from collections.abc import Sequence

from toolkit.results.publish import publish
from toolkit.results.report_accuracy import accuracy_blocks
from toolkit.results.report_blocks import Command, Figure, Page, Report, Section, Table, Text
from toolkit.results.report_commands import reproduce_blocks
from toolkit.results.report_costs import communication_blocks, memory_blocks, schedules_of
from toolkit.results.report_groups import group_runs
from toolkit.results.report_html import to_html, write_html
from toolkit.results.report_summary import summary_blocks
from toolkit.results.run_record import Run

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

SECTIONS = ("Summary", "Accuracy", "Memory", "Communication", "Reproduce")


def build_report(runs: Sequence[Run], title: str) -> Report:
    """The report on ``runs``, its sections those of :data:`SECTIONS`.

    What cannot be shown is named and left out.
    """
    groups = group_runs(runs)
    found = schedules_of(groups)
    said = (
        summary_blocks(runs, groups),
        accuracy_blocks(groups),
        memory_blocks(groups, found),
        communication_blocks(groups, found),
        reproduce_blocks(runs),
    )
    sections = [Section(name, [*blocks]) for name, blocks in zip(SECTIONS, said, strict=True)]
    return Report(title, sections)
