"""Run an experiment's command line in this process, where torch is loaded already."""

import importlib
import io
import os
import sys
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple
from unittest import mock

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
)


class Finished(NamedTuple):
    status: int
    out: str
    err: str


_get_mode = Hydra.get_mode


def _mode(hydra: Hydra, config_name: str | None, overrides: list[str]) -> RunMode | None:
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
        stack.enter_context(mock.patch.object(sys, "path", [str(EXPERIMENTS), *sys.path]))
        stack.enter_context(mock.patch.object(sys, "argv", [f"experiments/{name}.py", *arguments]))
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


def refused(name, *arguments):
    """The message, after checks that hold for all."""
    finished = run(name, *arguments)
    assert finished.status == 2
    assert "Traceback" not in finished.err
    message = finished.err[finished.err.index("error: ") :].removeprefix("error: ").strip()
    assert len(message.splitlines()) <= 2 or "rank 0" in message
    return message
