"""Build the site once, for the tests of its pages and those of the notebooks that it executes."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
_TIMEOUT = 180  # seconds for a cell


@dataclass(frozen=True)
class Site:
    """A build by Sphinx.

    Attributes:
        pages: folder of the pages
        notebooks: folder of the executed notebooks
        messages: what Sphinx printed
        succeeded: if it built without errors and warnings
    """

    pages: Path
    notebooks: Path
    messages: str
    succeeded: bool


def build_site(outputs: Path, *, execute: bool) -> Site:
    """Build the site as ``make docs`` does, in the folder ``outputs``, from nothing.

    Sphinx reads pages again only if they have changed. Notebooks must run again if the toolkit has
    changed, too, so that no earlier build may be left.
    """
    pages = outputs / "site"
    # MyST-NB writes them next to the site.
    executed = outputs / "jupyter_execute"
    for folder in (pages, executed):
        shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going"]
    command += ["--quiet", "-D", f"nb_execution_timeout={_TIMEOUT}"]
    command += ["-c", "docs", ".", str(pages)]
    build = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | ({} if execute else {"EXECUTE": "off"}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return Site(
        pages=pages,
        notebooks=executed / "notebooks",
        messages=build.stdout,
        succeeded=build.returncode == 0,
    )
