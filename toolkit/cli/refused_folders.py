"""Folders of refused commands: a new one is removed, and an older one is put back as it was.

Hydra makes the folder of a run and writes its options there before any of this project's code
runs, so also for a run that is refused.
"""

import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from toolkit.cli.hydra_args import unquoted, values_of
from toolkit.cli.sweeps import Sweep, alone_in
from toolkit.errors import UserError
from toolkit.files import check_regular
from toolkit.results.run_files import OPTIONS_FILE, STATUS
from toolkit.torchrun import is_rank_zero

_WRITTEN_BEFORE_A_RUN = {".hydra", STATUS, OPTIONS_FILE}
"""What a folder holds in which no run has begun: the options of a comparison too."""
_FILES_OF_SWEEPS = {"sweep.json", "multirun.yaml", "optimization_results.yaml"}


@dataclass(frozen=True)
class EarlierFolder:
    """The folder that a command line names for its run, before Hydra writes to it.

    Attributes:
        path: the folder; None: the run gets a new one.
        files: contents of its option and status files, by path.
    """

    path: Path | None = None
    files: dict[Path, bytes] = field(default_factory=dict)


def snapshot(arguments: Sequence[str]) -> EarlierFolder:
    """Read the option and status files that Hydra may replace."""
    run_folder = values_of(arguments).get("hydra.run.dir")
    if run_folder is None or not is_rank_zero():
        return EarlierFolder()
    folder = Path(unquoted(run_folder))
    if not folder.is_dir():
        return EarlierFolder()
    files = {}
    for path in _option_files(folder):
        with suppress(OSError):
            # Raises it for a device, which would be read without end.
            check_regular(path)
            # The contents, since Hydra overwrites these files before anything is refused.
            files[path] = path.read_bytes()
    return EarlierFolder(folder, files)


def restore(earlier: EarlierFolder) -> None:
    """Put the option and status files back, after the run was refused."""
    for path, content in earlier.files.items():
        with suppress(OSError):
            path.write_bytes(content)
    if earlier.path is None:
        return
    # New files may be those of another process, which has begun a run there meanwhile.
    with suppress(OSError, UserError), alone_in(earlier.path):
        for path in _option_files(earlier.path):
            if path not in earlier.files:
                path.unlink()
        (earlier.path / ".hydra").rmdir()  # raises OSError if it holds anything


def discard(folder: Path) -> None:
    """Remove the folder of a run that was refused before it began."""
    # A folder with anything else holds results, and stays.
    if _is_unused(folder):
        # Another process may have begun a run in the same folder.
        with suppress(OSError, UserError), alone_in(folder):
            shutil.rmtree(folder, ignore_errors=True)
        _remove_empty(folder.parent)


def discard_sweep() -> None:
    """Remove the folder of this process's sweep if all of its runs were refused."""
    if Sweep.folder is None or not sweep_refused():
        return
    for path in Sweep.folder.iterdir():
        if path.is_dir():
            discard(path)
    # discard() may have removed the folder itself, as an empty one.
    if (
        Sweep.folder.is_dir()
        and {path.name for path in Sweep.folder.iterdir()} <= _FILES_OF_SWEEPS
    ):
        shutil.rmtree(Sweep.folder, ignore_errors=True)
        _remove_empty(Sweep.folder.parent)


def sweep_refused() -> bool:
    """Return whether this process has made a sweep's folder in which no run has begun."""
    if Sweep.folder is None or not Sweep.is_new or not Sweep.folder.is_dir():
        return False
    folders = [path for path in Sweep.folder.iterdir() if path.is_dir()]
    return all(map(_is_unused, folders))


def _option_files(folder: Path) -> list[Path]:
    return [*folder.glob(".hydra/*.yaml"), *folder.glob(STATUS)]


def _is_unused(folder: Path) -> bool:
    if not is_rank_zero() or not folder.is_dir():
        return False
    return {path.name for path in folder.iterdir()} <= _WRITTEN_BEFORE_A_RUN


def _remove_empty(folder: Path) -> None:
    """Remove ``folder`` and then its parents while they are empty, up to the current folder."""
    folder = folder.resolve()
    with suppress(OSError):
        while folder.is_relative_to(Path.cwd()) and folder != Path.cwd():
            folder.rmdir()  # raises OSError if it holds anything
            folder = folder.parent
