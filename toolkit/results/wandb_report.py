"""A report in W&B: its text and tables, and panels of the runs that were tracked there.

Figures are not uploaded; panels show the curves and images that training logs.
"""

import re
import warnings
from collections.abc import Sequence
from typing import Any
from unicodedata import category

from toolkit.errors import UserError, first_line
from toolkit.extras import check_installed
from toolkit.format import table
from toolkit.metric import ACCURACY
from toolkit.results.report_page import Block, Command, Report, Table, Text
from toolkit.results.runs import Run
from toolkit.results.tracker import STEP
from toolkit.results.wandb_run import WANDB_RUN, environment, group_of, read_identity

_LONGEST_TITLE = 128
_CLIENT = {
    "WANDB_SILENT": "true",
    "WANDB__GRAPHQL_TIMEOUT_SECONDS": "20",
    "WANDB__GRAPHQL_RETRY_MAX": "2",
    "WANDB__GRAPHQL_RETRY_WAIT_MAX_SECONDS": "2",
}
# What training logs, by section of the report.
_IMAGES = {"Memory": ["schedule/grid"], "Communication": ["measured/timeline"]}
_TABLES = {
    "Memory": ["schedule/activations_by_slot", "measured/memory"],
    "Communication": ["schedule/traffic_by_slot", "measured/ranks"],
}
_BARS = {
    "Memory": [
        ["schedule/peak_activations"],
        ["measured/peak_mib_of_rank", "predicted/peak_mib_of_rank"],
    ],
    "Communication": [
        ["schedule/traffic_mean", "schedule/traffic_max"],
        ["measured/bytes_sent_a_step", "predicted/bytes_sent_a_step"],
        ["measured/step_seconds", "predicted/step_seconds"],
    ],
}
_CURVES = {  # of the accuracy, by the axis that they are drawn over
    "epoch/top1": "epoch",
    "epoch/test_loss": "epoch",
    "epoch/samples_per_second": "epoch",
    "train/loss": STEP,
    "train/lr": STEP,
}
_STALENESS = "schedule/staleness_mean"
_MARKDOWN = re.compile(r"([\\`*_{}\[\]()#+!|~$-])")


def publish(
    report: Report, runs: Sequence[Run], entity: str, project: str
) -> tuple[str, str]:
    """Save ``report`` and a workspace with panels of its ``runs``; return their addresses.

    The project of the user or team ``entity`` is created if it does not exist. UserError says that
    the package, key or network is missing, or that W&B refuses.
    """
    check_installed("wandb_workspaces", "publish=wandb")
    # Short limits: the client would otherwise repeat its requests for minutes without a network.
    with environment(**_CLIENT):
        try:
            # Everything is built before anything is sent, so that a mistake leaves nothing half
            # published.
            page, workspace = wandb_report(report, runs, entity, project)
            import wandb

            # On a terminal it would ask for a key, and wait.
            wandb.login(timeout=1, verify=True)
            return str(page.save().url), str(workspace.save().url)
        except Exception as error:  # of the client, its service or the server
            raise UserError(
                f"publish=wandb failed ({first_line(error)}):"
                f" log in with `wandb login`, and check entity={entity} and project={project}; the"
                " HTML report needs no network"
            ) from None


def wandb_report(
    report: Report, runs: Sequence[Run], entity: str, project: str
) -> tuple[Any, Any]:
    """Return report and workspace as objects of wandb_workspaces, without sending them."""
    with warnings.catch_warnings(action="ignore"):  # of what the package itself uses
        import wandb_workspaces.reports.v2 as wr
        import wandb_workspaces.workspaces as ws

    # A section of the report becomes
    #
    #     page       a heading, its texts and tables, and a grid of panels of the runs
    #     workspace  a section with the same panels
    blocks: list[Any] = [wr.TableOfContents()]
    sections = []
    for title, content in report.sections.items():
        blocks.append(wr.H1(text=title))
        blocks += [_block(wr, block) for block in content]
        panels = _panels(wr, title, runs)
        if panels:
            blocks.append(wr.PanelGrid(runsets=_run_sets(wr, runs), panels=panels))
            # Panels belong to one page; the workspace gets its own.
            panels = _panels(wr, title, runs)
            sections.append(ws.Section(name=title, panels=panels, is_open=True))
    wandb_page = wr.Report(
        entity=entity,
        project=project,
        title=report.title[:_LONGEST_TITLE],
        description="Made by experiments/report.py.",
        blocks=blocks,
        width="fluid",
    )
    # W&B refuses symbols in a workspace's name.
    name = "".join(
        " " if category(letter)[0] in "SC" else letter for letter in report.title
    )
    workspace = ws.Workspace(
        entity=entity, project=project, name=name.strip() or "Runs", sections=sections
    )
    return wandb_page, workspace


def _panels(wr: Any, section: str, runs: Sequence[Run]) -> list[Any]:
    """Return the panels of a section; without measurements, only those of the schedules."""
    if section == "Accuracy":
        return _accuracy_panels(wr, runs)
    keys = [*_IMAGES.get(section, ()), *_TABLES.get(section, ())]
    # Else those panels would be empty.
    is_measured = not runs or any(run.ranks for run in runs)
    panels: list[Any] = []
    for key in keys:
        if is_measured or key.startswith("schedule/"):
            if key in _IMAGES[section]:
                panels.append(wr.MediaBrowser(title=key, media_keys=[key]))
            else:
                panels.append(wr.WeavePanelSummaryTable(table_name=key))
    for metrics in _BARS.get(section, ()):
        if is_measured or metrics[0].startswith("schedule/"):
            panels.append(wr.BarPlot(title=metrics[0], metrics=metrics))
    return panels


def _accuracy_panels(wr: Any, runs: Sequence[Run]) -> list[Any]:
    """Return curves of the training, and the runs' last metrics as bars and by staleness."""
    metrics = dict.fromkeys(run.judged_by for run in runs if run.trains) or [ACCURACY]
    final_keys = [f"final/{metric.key}" for metric in metrics]
    panels = [wr.LinePlot(title=key, x=axis, y=[key]) for key, axis in _CURVES.items()]
    panels += [wr.BarPlot(title=key, metrics=[key]) for key in final_keys]
    panels += [
        wr.ScatterPlot(title=f"{key} by staleness", x=_STALENESS, y=key)
        for key in final_keys
    ]
    panels.append(
        wr.LinePlot(title="delay", x=STEP, metric_regex="delay/cosine_stage_.*")
    )
    return panels


def _run_sets(wr: Any, runs: Sequence[Run]) -> list[Any]:
    """Return run sets of the runs' groups and of the runs without one; else of all runs."""
    # A comparison has a group of its own. A single run has one only if its options say so.
    groups = set()
    ids = set()
    for run in runs:
        identity = read_identity(run.folder / WANDB_RUN)
        tracking = run.config.get("tracking")
        if run.kind == "compare" and isinstance(tracking, dict):
            groups.add(str(tracking.get("group") or group_of(run.folder)))
        elif identity.get("group"):
            groups.add(str(identity["group"]))
        elif identity.get("id"):
            ids.add(str(identity["id"]))
    run_sets = []
    if groups:
        run_sets.append(
            wr.Runset(name="groups", filters=f"Metric('Group') in {sorted(groups)}")
        )
    if ids:
        run_sets.append(
            wr.Runset(name="single runs", filters=f"Metric('ID') in {sorted(ids)}")
        )
    return run_sets or [wr.Runset(name="runs")]


def _block(wr: Any, block: Block) -> Any:
    """Return a block of the report as a block of W&B."""
    if isinstance(block, Command):
        return wr.CodeBlock(code=f"{block.command}\n# {block.note}", language=None)
    if isinstance(block, Text):
        text = _escaped(block.text)
    elif isinstance(block, Table):
        rows = []
        for row in block.rows:
            rows.append(
                {_escaped(heading): _escaped(cell) for heading, cell in row.items()}
            )
        text = f"{_escaped(block.caption)}\n\n{table(rows, 'github')}"
    else:
        text = f"*{_escaped(f'Figure: {block.caption} {block.alt}')}*"
    return wr.MarkdownBlock(text=text)


def _escaped(text: str) -> str:
    """Return text that Markdown shows unchanged, on one line."""
    # HTML is escaped first: W&B's Markdown would render tags.
    escaped = (
        " ".join(text.split())
        .replace("&", "&amp;")
        .replace("<", "&lt;")
        .replace(">", "&gt;")
    )
    return _MARKDOWN.sub(r"\\\1", escaped)
