"""Which runs there are, and what became of them."""

from collections import Counter
from collections.abc import Iterator, Sequence

from toolkit.results.collect import flat_options
from toolkit.results.report_blocks import Block, Table, Text
from toolkit.results.report_format import NONE, count, text
from toolkit.results.report_groups import Group
from toolkit.results.run_record import STATES, Run

_SHOWN = {
    "stages": "stages",
    "microbatches": "micro-batches",
    "batch": "batch",
    "epochs": "epochs",
    "optimizer.lr": "lr",
    "precision": "precision",
    "runtime": "runtime",
}
_MOST_ROWS = 60  # of what has not finished, and of notes
_MOST_VALUES = 4  # of an option


def summary_blocks(runs: Sequence[Run], groups: Sequence[Group]) -> Iterator[Block]:
    """Runs by comparison, other results, and by name what has not finished or does not count."""
    yield Text(f"{count(len(runs), 'run')}: {_states(runs)}.")
    if groups:
        names = dict.fromkeys(group.comparison for group in groups)
        rows = [_comparison([g for g in groups if g.comparison == name]) for name in names]
        yield Table(rows, "What was trained.")
    others = [run for run in runs if not run.trains and run.state == "finished"]
    if others:
        rows = [{"folder": str(run.folder), "experiment": run.kind} for run in others]
        yield Table(rows, "Other results. Their figures are in their folders.")
    ended = [run for run in runs if run.state != "finished"]
    if ended:
        yield _first([_named(run) for run in ended], "Not finished, and why.")
    out = [run for run in runs if run.trains and run.state == "finished" and not run.counts]
    if out:
        yield Table([_named(run) for run in out], "Finished, and left out of tables and figures.")
    notes = dict.fromkeys((str(run.folder), note) for run in runs for note in run.notes)
    if notes:
        rows = [{"folder": folder, "note": note} for folder, note in notes]
        yield _first(rows, "What runs say of themselves.")


def _first(rows: Sequence[dict[str, str]], caption: str) -> Table:
    more = f" The first {_MOST_ROWS} of {len(rows)}." if len(rows) > _MOST_ROWS else ""
    return Table(rows[:_MOST_ROWS], caption + more)


def _comparison(groups: Sequence[Group]) -> dict[str, str]:
    """A row for the groups of one comparison."""
    options = [flat_options(group.config) for group in groups]
    runs = [run for group in groups for run in group.runs]
    seeds = {run.seed for run in runs if run.seed is not None}
    n_seeds = len(seeds) or max(run.repeats for run in runs)
    return {
        "training": groups[0].comparison,
        "rules": ", ".join(group.label for group in groups),
        **{
            heading: _few([text(values.get(name)) for values in options])
            for name, heading in _SHOWN.items()
        },
        "seeds": str(n_seeds),
        "states": _states(runs),
    }


def _few(values: Sequence[str]) -> str:
    """The different ones, if they are few."""
    found = [*dict.fromkeys(values)]
    return ", ".join(found) if len(found) <= _MOST_VALUES else f"{len(found)} values"


def _states(runs: Sequence[Run]) -> str:
    states = Counter(run.state for run in runs)
    return ", ".join(f"{states[state]} {state}" for state in STATES if states[state])


def _named(run: Run) -> dict[str, str]:
    unsaid = "its result has no final accuracy, or does not tell its schedule"
    return {
        "folder": str(run.folder),
        "state": run.state,
        "reason": run.message or unsaid,
        "rule": run.schedule or run.rule or NONE,
        "seed": text(run.seed),
    }
