"""A report in W&B: its text and tables, beside panels of the runs that were tracked there.

Figures are not uploaded; in their place are panels with the curves and images that training logs.
"""

import json
import netrc
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unicodedata import category
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import urlopen

from toolkit.errors import UserError
from toolkit.metric import ACCURACY, LOSS
from toolkit.results import metric_names
from toolkit.results.report_blocks import Block, Command, Figure, Page, Report, Table, Text
from toolkit.results.run_record import Run
from toolkit.results.wandb_journal import JOURNAL

_TIMEOUT = 10  # seconds until W&B's server counts as out of reach
_LONGEST_TITLE = 128
_CLIENT = {
    "WANDB_SILENT": "true",
    "WANDB__GRAPHQL_TIMEOUT_SECONDS": "20",
    "WANDB__GRAPHQL_RETRY_MAX": "2",
    "WANDB__GRAPHQL_RETRY_WAIT_MAX_SECONDS": "2",
}
_SPECIAL = re.compile(r"([\\`*_{}\[\]()#+!|~$-])")


def publish(report: Report, runs: Sequence[Run], entity: str, project: str) -> tuple[str, str]:
    """Save ``report`` and a workspace with its panels; returns their addresses.

    Args:
        report: what it says.
        runs: what it is on; the panels show those that were tracked in the project.
        entity: user or team.
        project: it is made if there is none.

    Raises:
        ValueError: no package, no key, no network, or W&B refuses.
    """
    _require_package()
    with _quiet():
        key, server = _key_and_server()
        _reach(server)
        try:
            made = wandb_report(report, runs, entity, project)
            space = wandb_workspace(report, runs, entity, project)
            return str(made.save().url), str(space.save().url)
        except Exception as error:  # whatever the client, its service or the server may raise
            why = " ".join(str(error).split()) or type(error).__name__
            why = why.replace(key, "...") if key else why
            raise UserError(
                f"publish=wandb: {server} has refused it ({why}): check the key, entity={entity}"
                f" and project={project}"
            ) from None


def wandb_report(report: Report, runs: Sequence[Run], entity: str, project: str) -> Any:
    """The report as wandb_workspaces describes one; nothing is sent."""
    wr = _reports()

    blocks: list[Any] = [wr.TableOfContents()]
    for section in report.sections:
        blocks.append(wr.H1(text=section.title))
        blocks += [_block(block) for block in section.blocks]
        if panels := _panels(section.title, runs):
            blocks.append(wr.PanelGrid(runsets=_run_sets(runs), panels=panels))
    return wr.Report(
        entity=entity,
        project=project,
        title=report.title[:_LONGEST_TITLE],
        description="Made by experiments/report.py.",
        blocks=blocks,
        width="fluid",
    )


def wandb_workspace(report: Report, runs: Sequence[Run], entity: str, project: str) -> Any:
    """A workspace whose sections have the report's panels; nothing is sent."""
    ws = _workspaces()

    sections = [
        ws.Section(name=section.title, panels=panels, is_open=True)
        for section in report.sections
        if (panels := _panels(section.title, runs))
    ]
    # A workspace's name has no symbols.
    name = "".join(" " if category(c)[0] in "SC" else c for c in report.title).strip() or "Runs"
    return ws.Workspace(entity=entity, project=project, name=name, sections=sections)


def _panels(section: str, runs: Sequence[Run]) -> list[Any]:
    """What was logged that belongs to a section; bars are of what the runs are judged by."""
    wr = _reports()

    def curve(key: str) -> Any:
        return wr.LinePlot(title=key, x=metric_names.STEP, y=[key])

    def image(key: str) -> Any:
        return wr.MediaBrowser(title=key, media_keys=[key])

    def bars(key: str) -> Any:
        return wr.BarPlot(title=key, metrics=[key])

    def table(key: str) -> Any:
        return wr.WeavePanelSummaryTable(table_name=key)

    judges = dict.fromkeys(run.judged_by for run in runs if run.trains) or [ACCURACY]
    panels = {
        "Accuracy": lambda: [
            *map(curve, (metric_names.of_epoch(by.key) for by in (ACCURACY, LOSS))),
            curve(metric_names.TRAIN_LOSS),
            *(bars(metric_names.final(by.key)) for by in judges),
            wr.LinePlot(
                title="delay",
                x=metric_names.STEP,
                metric_regex=metric_names.of_delay("cosine", ".*"),
            ),
            *map(curve, (metric_names.LEARNING_RATE, metric_names.SPEED)),
        ],
        "Memory": lambda: [
            image(metric_names.GRID),
            table(metric_names.ACTIVATIONS),
            table(metric_names.MEASURED_MEMORY),
        ],
        "Communication": lambda: [
            image(metric_names.TIMELINE),
            table(metric_names.TRAFFIC),
            table(metric_names.MEASURED_RANKS),
        ],
    }
    return panels[section]() if section in panels else []


def _run_sets(runs: Sequence[Run]) -> list[Any]:
    """The runs' groups, and the runs that are in none; all of the project if none is known."""
    wr = _reports()

    tracked = [_tracked(run) for run in runs]
    groups = sorted({group for _, group in tracked if group})
    ids = sorted({id_ for id_, group in tracked if id_ and not group})
    sets = []
    if groups:
        sets.append(wr.Runset(name="groups", filters=f"Metric('Group') in {groups}"))
    if ids:
        sets.append(wr.Runset(name="single runs", filters=f"Metric('ID') in {ids}"))
    return sets or [wr.Runset(name="runs")]


def _tracked(run: Run) -> tuple[str | None, str | None]:
    """A run's id and group in W&B, as far as its folder tells."""
    options = run.config.get("tracking")
    if run.kind == "compare" and isinstance(options, dict):
        return None, str(options.get("group") or metric_names.group_of(run.folder))
    try:
        with (run.folder / JOURNAL).open() as file:
            head = json.loads(file.readline())
        id_, group = head.get("id"), head.get("group")
    except (OSError, ValueError, AttributeError):
        return None, None
    return (str(id_) if id_ else None), (str(group) if group else None)


def _block(block: Block) -> Any:
    wr = _reports()

    if isinstance(block, Command):
        text = f"{block.command}\n# {block.note}"
        return wr.CodeBlock(code=text, language=None)
    if isinstance(block, Text):
        return wr.MarkdownBlock(text=_escaped(block.text))
    if isinstance(block, Table):
        return wr.MarkdownBlock(text=f"{_escaped(block.caption)}\n\n{_markdown(block)}")
    if isinstance(block, Page):
        return wr.MarkdownBlock(text=f"*{_escaped(block.caption)}: in report.html*")
    return wr.MarkdownBlock(text=f"*{_escaped(f'Figure: {_figure(block)}')}*")


def _figure(figure: Figure) -> str:
    return f"{figure.caption} {figure.alt}"


def _markdown(table: Table) -> str:
    lines = [[*table.rows[0]], ["---"] * len(table.rows[0]), *(row.values() for row in table.rows)]
    return "\n".join(
        "| " + " | ".join(cell if cell == "---" else _escaped(cell) for cell in line) + " |"
        for line in lines
    )


def _escaped(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    plain = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _SPECIAL.sub(r"\\\1", plain)


def _require_package() -> None:
    try:
        _reports()
        _workspaces()
    except ImportError as error:
        raise UserError(
            f"publish=wandb needs wandb-workspaces ({error}): pip install 'cdp-toolkit[reports]'"
        ) from None


def _reports() -> Any:
    with warnings.catch_warnings(action="ignore"):  # of what the package itself uses
        import wandb_workspaces.reports.v2

    return wandb_workspaces.reports.v2


def _workspaces() -> Any:
    with warnings.catch_warnings(action="ignore"):
        import wandb_workspaces.workspaces

    return wandb_workspaces.workspaces


def _key_and_server() -> tuple[str, str]:
    """W&B's key, or nothing where a token stands in, and the server's address.

    Raises:
        ValueError: there is no key. Nobody is asked for one.
    """
    import wandb

    server = os.environ.get("WANDB_BASE_URL") or str(wandb.setup().settings.base_url)
    server = server.rstrip("/")
    if os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return "", server
    key = os.environ.get("WANDB_API_KEY") or _from_netrc(urlsplit(server).hostname or "")
    if not key:
        raise UserError(
            f"publish=wandb needs a key for {server}: log in with `wandb login`, or set"
            " WANDB_API_KEY"
        )
    return key, server


def _from_netrc(host: str) -> str:
    places = [os.environ.get("NETRC"), "~/.netrc", "~/_netrc"]
    for place in filter(None, places):
        try:
            found = netrc.netrc(Path(place).expanduser()).authenticators(host)
        except (OSError, netrc.NetrcParseError, RuntimeError):
            continue
        if found and found[2]:
            return found[2]
    return ""


def _reach(server: str) -> None:
    """Whatever the server answers, it does.

    Raises:
        ValueError: it does not.
    """
    try:
        urlopen(server, timeout=_TIMEOUT).close()
    except HTTPError:
        return
    except (URLError, OSError, ValueError) as error:
        why = getattr(error, "reason", error)
        raise UserError(
            f"publish=wandb: {server} cannot be reached ({why}): the HTML report needs no network"
        ) from None


@contextmanager
def _quiet() -> Iterator[None]:
    """W&B says nothing of its own, and gives up in time."""
    before = {name: os.environ.get(name) for name in _CLIENT}
    os.environ.update({name: value for name, value in _CLIENT.items() if before[name] is None})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
