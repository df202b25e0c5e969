"""A report in W&B: its text and tables, and panels of the runs that were tracked there.

Figures are not uploaded; panels show the curves and images that training logs.
"""

import re
import warnings
from collections.abc import Sequence
from typing import Any
from unicodedata import category

from toolkit.errors import UserError
from toolkit.metric import ACCURACY, LOSS
from toolkit.results import training_log
from toolkit.results.report_page import Block, Command, Page, Report, Table, Text
from toolkit.results.run_record import Run
from toolkit.results.training_log import one_line
from toolkit.results.wandb_run import WANDB_RUN, environment, read_identity

_LONGEST_TITLE = 128
_CLIENT = {
    "WANDB_SILENT": "true",
    "WANDB__GRAPHQL_TIMEOUT_SECONDS": "20",
    "WANDB__GRAPHQL_RETRY_MAX": "2",
    "WANDB__GRAPHQL_RETRY_WAIT_MAX_SECONDS": "2",
}
_MARKDOWN = re.compile(r"([\\`*_{}\[\]()#+!|~$-])")


def publish(report: Report, runs: Sequence[Run], entity: str, project: str) -> tuple[str, str]:
    """Save ``report`` and a workspace with its panels; return their addresses.

    Args:
        report: what to publish.
        runs: its runs; the panels show those that were tracked in the project.
        entity: user or team.
        project: created if it does not exist.

    Raises:
        ValueError: the package, key or network is missing, or W&B refuses.
    """
    try:
        _reports(), _workspaces()
    except ImportError as error:
        raise UserError(
            f"publish=wandb needs wandb-workspaces ({error}): pip install 'cdp-toolkit[reports]'"
        ) from None
    import wandb

    with environment(**_CLIENT):
        try:
            wandb.login(timeout=1, verify=True)  # on a terminal it would ask for a key, and wait
            page = wandb_report(report, runs, entity, project).save()
            space = wandb_workspace(report, runs, entity, project).save()
            return str(page.url), str(space.url)
        except Exception as error:  # of the client, its service or the server
            raise UserError(
                f"publish=wandb failed ({one_line(error)}): log in with `wandb login`, and check"
                f" entity={entity} and project={project}; the HTML report needs no network"
            ) from None


def wandb_report(report: Report, runs: Sequence[Run], entity: str, project: str) -> Any:
    """Return the report as an object of wandb_workspaces, without sending it."""
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
    """Return a workspace with the report's panels, without sending it."""
    ws = _workspaces()
    sections = [
        ws.Section(name=section.title, panels=panels, is_open=True)
        for section in report.sections
        if (panels := _panels(section.title, runs))
    ]
    # W&B refuses symbols in a workspace's name.
    name = "".join(" " if category(c)[0] in "SC" else c for c in report.title).strip() or "Runs"
    return ws.Workspace(entity=entity, project=project, name=name, sections=sections)


def _panels(section: str, runs: Sequence[Run]) -> list[Any]:
    """Panels of what was logged for a section, with bars of the runs' own metric."""
    wr = _reports()
    names = training_log

    def curve(key: str) -> Any:
        return wr.LinePlot(title=key, x=names.STEP, y=[key])

    def image(key: str) -> Any:
        return wr.MediaBrowser(title=key, media_keys=[key])

    def table(key: str) -> Any:
        return wr.WeavePanelSummaryTable(table_name=key)

    if section == "Memory":
        return [image(names.GRID), table(names.ACTIVATIONS), table(names.MEASURED_MEMORY)]
    if section == "Communication":
        return [image(names.TIMELINE), table(names.TRAFFIC), table(names.MEASURED_RANKS)]
    if section != "Accuracy":
        return []
    judges = dict.fromkeys(run.judged_by for run in runs if run.trains) or [ACCURACY]
    keys = [names.final(by.key) for by in judges]
    delay = names.of_delay("cosine", ".*")
    return [
        *(curve(names.of_epoch(by.key)) for by in (ACCURACY, LOSS)),
        curve(names.TRAIN_LOSS),
        *(wr.BarPlot(title=key, metrics=[key]) for key in keys),
        wr.LinePlot(title="delay", x=names.STEP, metric_regex=delay),
        curve(names.LEARNING_RATE),
        curve(names.of_epoch("samples_per_second")),
    ]


def _run_sets(runs: Sequence[Run]) -> list[Any]:
    """The runs' groups, and the runs without a group; all runs of the project if unknown."""
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
    """A run's id and group in W&B, where known."""
    options = run.config.get("tracking")
    if run.kind == "compare" and isinstance(options, dict):
        return None, str(options.get("group") or training_log.group_of(run.folder))
    known = read_identity(run.folder / WANDB_RUN)
    return known.get("id"), known.get("group")


def _block(block: Block) -> Any:
    wr = _reports()
    if isinstance(block, Command):
        return wr.CodeBlock(code=f"{block.command}\n# {block.note}", language=None)
    if isinstance(block, Text):
        text = _escaped(block.text)
    elif isinstance(block, Table):
        text = f"{_escaped(block.caption)}\n\n{_markdown(block)}"
    elif isinstance(block, Page):
        text = f"*{_escaped(block.caption)}: in report.html*"
    else:
        text = f"*{_escaped(f'Figure: {block.caption} {block.alt}')}*"
    return wr.MarkdownBlock(text=text)


def _markdown(table: Table) -> str:
    lines = [[*table.rows[0]], *([*row.values()] for row in table.rows)]
    rows = [[_escaped(cell) for cell in line] for line in lines]
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _escaped(text: str) -> str:
    """Text that Markdown shows unchanged, on one line."""
    plain = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKDOWN.sub(r"\\\1", plain)


def _reports() -> Any:
    with warnings.catch_warnings(action="ignore"):  # of what the package itself uses
        import wandb_workspaces.reports.v2

    return wandb_workspaces.reports.v2


def _workspaces() -> Any:
    with warnings.catch_warnings(action="ignore"):
        import wandb_workspaces.workspaces

    return wandb_workspaces.workspaces
