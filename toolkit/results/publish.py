"""A report in W&B: its text and tables, and panels of the runs that were tracked there.

Figures are not uploaded; panels show the curves and images that training logs.
"""

import re
import warnings
from collections.abc import Sequence
from typing import Any
from unicodedata import category

from toolkit.errors import UserError, first_line
from toolkit.format import table
from toolkit.metric import ACCURACY
from toolkit.results.report import Block, Command, Report, Table, Text
from toolkit.results.runs import Run
from toolkit.results.wandb_run import STEP, WANDB_RUN, environment, group_of, read_identity

_LONGEST_TITLE = 128
_CLIENT = {
    "WANDB_SILENT": "true",
    "WANDB__GRAPHQL_TIMEOUT_SECONDS": "20",
    "WANDB__GRAPHQL_RETRY_MAX": "2",
    "WANDB__GRAPHQL_RETRY_WAIT_MAX_SECONDS": "2",
}
# Images and tables that training logs, by section; and curves.
_LOGGED = {
    "Memory": (["schedule/grid"], ["schedule/activations_by_slot", "measured/memory"]),
    "Communication": (["measured/timeline"], ["schedule/traffic_by_slot", "measured/ranks"]),
}
_SCALARS = {  # bars of the runs, by section
    "Memory": (["schedule/peak_activations"], ["measured/peak_mib_of_rank"]),
    "Communication": (
        ["schedule/traffic_mean", "schedule/traffic_max"],
        ["measured/bytes_sent_a_step"],
        ["measured/step_seconds", "predicted/step_seconds"],
    ),
}
_CURVES = (
    *("epoch/top1", "epoch/test_loss", "epoch/samples_per_second"),
    *("train/loss", "train/lr"),
)
_MARKDOWN = re.compile(r"([\\`*_{}\[\]()#+!|~$-])")


def publish(report: Report, runs: Sequence[Run], entity: str, project: str) -> tuple[str, str]:
    """Save ``report`` and a workspace with panels of its ``runs``; return their addresses.

    The project of the user or team ``entity`` is created if it does not exist. UserError says that
    the package, key or network is missing, or that W&B refuses.
    """
    with environment(**_CLIENT):
        try:
            page, space = wandb_report(report, runs, entity, project)
            import wandb

            wandb.login(timeout=1, verify=True)  # on a terminal it would ask for a key, and wait
            return str(page.save().url), str(space.save().url)
        except Exception as error:  # of the client, its service or the server
            raise UserError(
                f"publish=wandb failed ({first_line(error)}): pip install 'cyclic-dp[reports]',"
                f" log in with `wandb login`, and check entity={entity} and project={project}; the"
                " HTML report needs no network"
            ) from None


def wandb_report(report: Report, runs: Sequence[Run], entity: str, project: str) -> tuple[Any, Any]:
    """Return report and workspace as objects of wandb_workspaces, without sending them."""
    with warnings.catch_warnings(action="ignore"):  # of what the package itself uses
        import wandb_workspaces.reports.v2 as wr
        import wandb_workspaces.workspaces as ws

    blocks: list[Any] = [wr.TableOfContents()]
    sections = []
    for title, content in report.sections.items():
        blocks += [wr.H1(text=title), *(_block(wr, block) for block in content)]
        of_report, of_workspace = _panels(wr, title, runs), _panels(wr, title, runs)
        if of_report:
            blocks.append(wr.PanelGrid(runsets=_run_sets(wr, runs), panels=of_report))
            sections.append(ws.Section(name=title, panels=of_workspace, is_open=True))
    # W&B refuses symbols in a workspace's name.
    name = "".join(" " if category(c)[0] in "SC" else c for c in report.title).strip() or "Runs"
    page = wr.Report(
        entity=entity,
        project=project,
        title=report.title[:_LONGEST_TITLE],
        description="Made by experiments/report.py.",
        blocks=blocks,
        width="fluid",
    )
    return page, ws.Workspace(entity=entity, project=project, name=name, sections=sections)


def _panels(wr: Any, section: str, runs: Sequence[Run]) -> list[Any]:
    """Panels of what was logged for a section, with bars of the runs' own metric."""
    measured = not runs or any(run.ranks for run in runs)  # else these panels would be empty

    def logged(keys: Sequence[str]) -> list[str]:
        return [key for key in keys if measured or key.startswith("schedule/")]

    images, tables = map(logged, _LOGGED.get(section, ([], [])))
    panels = [wr.MediaBrowser(title=key, media_keys=[key]) for key in images]
    panels += [wr.WeavePanelSummaryTable(table_name=key) for key in tables]
    scalars = filter(None, map(logged, _SCALARS.get(section, ())))
    panels += [wr.BarPlot(title=keys[0], metrics=keys) for keys in scalars]
    if section == "Accuracy":
        judges = dict.fromkeys(run.judged_by for run in runs if run.trains) or [ACCURACY]
        finals = [f"final/{by.key}" for by in judges]
        panels += [wr.LinePlot(title=k, x=k.partition("/")[0].replace("train", STEP), y=[k])
                   for k in _CURVES]  # fmt: skip
        panels += [wr.BarPlot(title=key, metrics=[key]) for key in finals]
        late = "schedule/staleness_mean"
        panels += [wr.ScatterPlot(title=f"{key} by staleness", x=late, y=key) for key in finals]
        panels.append(wr.LinePlot(title="delay", x=STEP, metric_regex="delay/cosine_stage_.*"))
    return panels


def _run_sets(wr: Any, runs: Sequence[Run]) -> list[Any]:
    """The runs' groups, and the runs without a group; all runs of the project if unknown."""
    groups, ids = set(), set()
    for run in runs:
        known = read_identity(run.folder / WANDB_RUN)
        if run.kind == "compare" and isinstance(options := run.config.get("tracking"), dict):
            groups.add(str(options.get("group") or group_of(run.folder)))
        elif known.get("group"):
            groups.add(str(known["group"]))
        elif known.get("id"):
            ids.add(str(known["id"]))
    sets = [
        wr.Runset(name=name, filters=f"Metric('{column}') in {sorted(values)}")
        for name, column, values in (("groups", "Group", groups), ("single runs", "ID", ids))
        if values
    ]
    return sets or [wr.Runset(name="runs")]


def _block(wr: Any, block: Block) -> Any:
    if isinstance(block, Command):
        return wr.CodeBlock(code=f"{block.command}\n# {block.note}", language=None)
    if isinstance(block, Text):
        text = _escaped(block.text)
    elif isinstance(block, Table):
        rows = [{_escaped(k): _escaped(cell) for k, cell in row.items()} for row in block.rows]
        text = f"{_escaped(block.caption)}\n\n{table(rows, 'github')}"
    else:
        text = f"*{_escaped(f'Figure: {block.caption} {block.alt}')}*"
    return wr.MarkdownBlock(text=text)


def _escaped(text: str) -> str:
    """Text that Markdown shows unchanged, on one line."""
    plain = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKDOWN.sub(r"\\\1", plain)
