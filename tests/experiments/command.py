"""Run an experiment's command line in this process, where torch is loaded already."""

import csv
import importlib
import io
import json
import os
import re
import shlex
import sys
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
from hydra._internal.hydra import Hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode

EXPERIMENTS = Path(__file__).parents[2] / "experiments"

TINY = (
    "model=resnet8",
    "data=synthetic",
    "data.n_train=64",
    "data.n_test=16",
    "data.image_size=8",
    "epochs=1",
    "batch=4",
    "stability=false",
)


class Finished(NamedTuple):
    status: int
    out: str
    err: str


_get_mode = Hydra.get_mode


def _mode(
    hydra: Hydra, config_name: str | None, overrides: list[str]
) -> RunMode | None:
    """Hydra's, which composes once more for ``hydra.mode``, where an option may have set it."""
    if any("hydra.mode" in option or "sweep=" in option for option in overrides):
        return _get_mode(hydra, config_name, overrides)
    return None


def run(name: str, *arguments: str) -> Finished:
    """``python experiments/<name>.py <arguments>``."""
    out, err = io.StringIO(), io.StringIO()
    status = 0
    environment = {k: v for k, v in os.environ.items() if k != "HYDRA_FULL_ERROR"}
    with ExitStack() as stack:
        stack.enter_context(
            mock.patch.object(sys, "path", [str(EXPERIMENTS), *sys.path])
        )
        stack.enter_context(
            mock.patch.object(sys, "argv", [f"experiments/{name}.py", *arguments])
        )
        stack.enter_context(mock.patch.dict(os.environ, environment, clear=True))
        stack.enter_context(mock.patch.object(Hydra, "get_mode", _mode))
        stack.enter_context(redirect_stdout(out))
        stack.enter_context(redirect_stderr(err))
        stack.callback(GlobalHydra.instance().clear)
        try:
            importlib.import_module(name).main()
        except SystemExit as exit_:
            status = int(exit_.code or 0)
    return Finished(status, out.getvalue(), err.getvalue())


def succeeded(name: str, folder: Path, *arguments: str) -> str:
    """What an experiment prints that succeeds, and writes to ``folder``."""
    finished = run(name, *arguments, f"hydra.run.dir={folder}")
    assert finished.status == 0, finished.err
    return finished.out


def complete(name: str, folder: Path, *arguments: str) -> dict:
    """The result of an experiment."""
    assert f"written to {folder}" in succeeded(name, folder, *arguments)
    return json.loads((folder / "result.json").read_text())


def assert_figures(folder: Path, *names: str) -> None:
    for name in names:
        png, svg = folder / f"{name}.png", folder / f"{name}.svg"
        assert png.read_bytes().startswith(b"\x89PNG")
        assert png.stat().st_size > 10_000
        assert svg.read_text().count("<path") > 20


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def refused(name: str, *arguments: str, match: str = "") -> str:
    """The one message of a user's mistake, which matches the pattern ``match``."""
    finished = run(name, *arguments)
    assert finished.status == 2
    assert "Traceback" not in finished.err
    message = (
        finished.err[finished.err.index("error: ") :].removeprefix("error: ").strip()
    )
    assert len(message.splitlines()) <= 2 or "rank 0" in message
    assert re.search(match, message, re.DOTALL), message
    return message


def cases(table: str) -> list:
    """Rows of a command line and a pattern of its error: the option and its value."""
    found = [row.rpartition(" | ") for row in table.strip().splitlines()]
    return [
        pytest.param(shlex.split(given), pattern, id=given)
        for given, _, pattern in found
    ]
