"""From runs to a report: summary, accuracy, memory, communication, commands."""

from collections import Counter
from collections.abc import Iterator, Sequence

from toolkit.format import DASH, count
from toolkit.results.collect import flat_options
from toolkit.results.provenance import strip_folders
from toolkit.results.report_accuracy import accuracy_blocks
from toolkit.results.report_costs import communication_blocks, memory_blocks, schedules_of
from toolkit.results.report_groups import Group, group_runs
from toolkit.results.report_page import Block, Command, Report, Section, Table, Text
from toolkit.results.run_record import STATES, Run

SECTIONS = ("Summary", "Accuracy", "Memory", "Communication", "Reproduce")

_SHOWN = {
    "stages": "stages",
    "microbatches": "micro-batches",
    "batch": "batch",
    "epochs": "epochs",
    "optimizer.lr": "lr",
    "precision": "precision",
    "runtime": "runtime",
}
_MOST_ROWS = 60  # of unfinished runs, and of notes
_MOST_VALUES = 4  # of an option


def build_report(runs: Sequence[Run], title: str) -> Report:
    """Return the report on ``runs``, with the sections :data:`SECTIONS`.

    What cannot be shown is named and left out.

    Args:
        runs: as :func:`toolkit.results.runs.read_runs` returns them.
        title: heading of the page.
    """
    groups = group_runs(runs)
    schedules = schedules_of(groups)
    blocks = (
        _summary(runs, groups),
        accuracy_blocks(groups),
        memory_blocks(groups, schedules),
        communication_blocks(groups, schedules),
        _commands(runs),
    )
    sections = [Section(name, [*found]) for name, found in zip(SECTIONS, blocks, strict=True)]
    return Report(title, sections)


def _summary(runs: Sequence[Run], groups: Sequence[Group]) -> Iterator[Block]:
    """Comparisons, other results, and the runs that are unfinished or left out."""
    yield Text(f"{count(len(runs), 'run')}: {_states(runs)}.")
    if groups:
        names = dict.fromkeys(group.comparison for group in groups)
        rows = [_comparison([g for g in groups if g.comparison == name]) for name in names]
        yield Table(rows, "What was trained.")
    others = [run for run in runs if not run.trains and run.state == "finished"]
    if others:
        rows = [{"folder": str(run.folder), "experiment": run.kind} for run in others]
        yield Table(rows, "Other results. Their figures are in their folders.")
    unfinished = [_row(run) for run in runs if run.state != "finished"]
    if unfinished:
        yield _first(unfinished, "Not finished, and why.")
    out = [run for run in runs if run.trains and run.state == "finished" and not run.counts]
    if out:
        yield Table([_row(run) for run in out], "Finished, and left out of tables and figures.")
    notes = dict.fromkeys((str(run.folder), note) for run in runs for note in run.notes)
    if notes:
        yield _first([{"folder": f, "note": note} for f, note in notes], "Notes of the runs.")


def _first(rows: Sequence[dict[str, str]], caption: str) -> Table:
    more = f" The first {_MOST_ROWS} of {len(rows)}." if len(rows) > _MOST_ROWS else ""
    return Table(rows[:_MOST_ROWS], caption + more)


def _comparison(groups: Sequence[Group]) -> dict[str, str]:
    options = [flat_options(group.config) for group in groups]
    runs = [run for group in groups for run in group.runs]
    seeds = {run.seed for run in runs if run.seed is not None}
    return {
        "training": groups[0].comparison,
        "rules": ", ".join(group.label for group in groups),
        **{heading: _few([o.get(name) for o in options]) for name, heading in _SHOWN.items()},
        "seeds": str(len(seeds) or max(run.repeats for run in runs)),
        "states": _states(runs),
    }


def _few(values: Sequence[object]) -> str:
    found = dict.fromkeys(DASH if value is None else str(value) for value in values)
    return ", ".join(found) if len(found) <= _MOST_VALUES else f"{len(found)} values"


def _states(runs: Sequence[Run]) -> str:
    states = Counter(run.state for run in runs)
    return ", ".join(f"{states[state]} {state}" for state in STATES if states[state])


def _row(run: Run) -> dict[str, str]:
    return {
        "folder": str(run.folder),
        "state": run.state,
        "reason": run.message or "its result lacks the final accuracy or the schedule",
        "rule": run.schedule or run.rule or DASH,
        "seed": DASH if run.seed is None else str(run.seed),
    }


def _commands(runs: Sequence[Run]) -> Iterator[Block]:
    """Each command once, with the runs that it made and where they ran."""
    found: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        command = run.provenance.get("command")
        if isinstance(command, str):
            found.setdefault((strip_folders(command), _origin(run)), []).append(run)
    if not found:
        yield Text("No run has a command.")
    for (command, origin), same in found.items():
        folders = [*dict.fromkeys(str(run.folder) for run in same)]
        more = f" and {len(folders) - 1} more" if len(folders) > 1 else ""
        yield Command(command, f"{count(len(same), 'run')} in {folders[0]}{more}; {origin}")


def _origin(run: Run) -> str:
    """Commit, versions and device, where known."""
    found, parts = run.provenance, []
    if commit := found.get("commit"):
        changed = ", with changes" if str(commit).endswith("+") else ""
        parts.append(f"commit {str(commit).removesuffix('+')[:10]}{changed}")
    versions = found.get("versions") or {}
    known = ("python", "cdp-toolkit", "torch")
    parts += [f"{name} {versions[name]}" for name in known if name in versions]
    if device := found.get("device"):
        parts.append(str(device))
    return ", ".join(parts) or "commit, versions and device unknown"
