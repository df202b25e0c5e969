"""From runs to a report: summary, accuracy, memory, communication, how to repeat it."""

from collections.abc import Sequence

from toolkit.report.accuracy import accuracy_blocks
from toolkit.report.costs import communication_blocks, memory_blocks, schedules_of
from toolkit.report.description import Report, Section
from toolkit.report.groups import group_runs
from toolkit.report.reproduce import reproduce_blocks
from toolkit.report.summary import summary_blocks
from toolkit.tracking.run import Run

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
