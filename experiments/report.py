"""Runs side by side in a report that can be passed on: one HTML file, or a page in W&B.

    cyclic-dp report runs=outputs/train
    cyclic-dp report 'runs=[outputs/compare,experiments/results/digits]' title=Digits
    cyclic-dp report 'runs=outputs/train/2026-*' publish=wandb entity=me project=cdp

It covers all runs below these folders, finished or not. Publishing needs a key of W&B (wandb login)
and pip install 'cyclic-dp[reports]'.
"""

from datetime import UTC, datetime
from glob import glob
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from toolkit.cli import entry_point, output_folder
from toolkit.errors import UserError
from toolkit.files import write_csv, write_text
from toolkit.format import count
from toolkit.terminal import show

_MAX_NAMED = 10


@entry_point("report")
def main(config: DictConfig) -> None:
    if config.publish not in (None, "wandb"):
        raise UserError(
            f"unknown publish {config.publish!r}: choose wandb, or leave it out"
        )
    if config.publish and not (config.entity and config.project):
        raise UserError("publish=wandb needs entity=... and project=... of the runs")
    folders = expanded(config.runs)

    from toolkit import __version__
    from toolkit.results.collect import frame
    from toolkit.results.report import build_report
    from toolkit.results.report_page import to_html
    from toolkit.results.runs import read_runs
    from toolkit.results.wandb_report import publish

    runs = read_runs(folders)
    report = build_report(runs, config.title, config.margin)
    folder = output_folder()
    origin = f"cyclic-dp {__version__}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    write_text(folder / "report.html", to_html(report, origin))
    table = frame(runs).astype(object)
    write_csv(
        folder / "report.csv", table.where(table.notna(), None).to_dict("records")
    )
    unfinished = [run for run in runs if run.state != "finished"]
    show(f"{count(len(runs), 'run')}, {len(runs) - len(unfinished)} finished")
    for run in unfinished[:_MAX_NAMED]:
        # All runs of a comparison are in one folder, which does not say which run it is.
        shares_folder = run.kind == "compare" and run.seed is not None
        name = f" ({run.schedule}, seed {run.seed})" if shares_folder else ""
        show(f"  {run.state}: {run.folder}{name}: {run.message}")
    show(f"written to {folder / 'report.html'}, with the runs in report.csv")
    if config.publish == "wandb":
        page, workspace = publish(report, runs, config.entity, config.project)
        show(f"report: {page}\nworkspace: {workspace}")


def expanded(runs: Any) -> list[str]:
    """Return the folders that ``runs`` names: a folder, a glob of folders, or a list of both."""
    names = list(runs) if OmegaConf.is_list(runs) else [runs]
    if not names or not all(isinstance(name, str) and name for name in names):
        raise UserError(f"runs=... needs output folders or a glob of them: got {runs}")
    folders = []
    for name in names:
        if Path(name).is_dir():  # also if its name has characters of a glob
            folders.append(name)
            continue
        matches = [
            path for path in sorted(glob(name, recursive=True)) if Path(path).is_dir()
        ]
        is_glob = any(character in name for character in "*?[")
        if is_glob and not matches:
            raise UserError(f"runs={name} matches no folder")
        # A name that is no glob stays, and read_runs says what is wrong with it.
        folders += matches or [name]
    return folders


if __name__ == "__main__":
    main()
