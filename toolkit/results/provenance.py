"""Where a result comes from: command, configuration, code, versions, device and time."""

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from toolkit.files import CONSOLE, EXPERIMENTS, ROOT, started_by

_PACKAGES = (CONSOLE, "torch", "torchvision", "hydra-core", "numpy")
_PLACES = ("hydra.run.dir", "hydra.sweep.dir", "resume")  # of a run on its own machine


def provenance(
    config: Mapping[str, Any], device: str, seconds: float
) -> dict[str, Any]:
    """Return what a reader needs to repeat a result.

    Args:
        config: the options; nested mappings and lists become dicts and lists.
        device: the device in words (see :func:`describe`).
        seconds: wall time.
    """
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {
        "command": " ".join([_starter(), shlex.join(_redacted(sys.argv[1:]))]).strip(),
        "config": _redacted(config),
        "commit": commit(),
        "versions": versions,
        "device": device,
        "seed": config.get("seed"),
        "started": (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat(
            timespec="seconds"
        ),
        "seconds": round(seconds, 3),
    }


def _redacted(content: Any) -> Any:
    """Return ``content`` as plain dicts and lists, without W&B's key: results are shared."""
    if isinstance(content, Mapping):
        return {name: _redacted(value) for name, value in content.items()}
    if isinstance(content, str):
        # "\0" occurs in no option, so without a key nothing is replaced.
        return content.replace(os.environ.get("WANDB_API_KEY") or "\0", "WANDB_API_KEY")
    if isinstance(content, Sequence):
        return [*map(_redacted, content)]
    return content


def strip_folders(command: str) -> str:
    """Return ``command`` without its output folder and the run that it resumed."""
    try:
        words = shlex.split(command)
    except ValueError:  # not a shell command
        return command
    return shlex.join(word for word in words if word.partition("=")[0] not in _PLACES)


def describe(device: Any) -> str:
    """Return a device in words, for the provenance of a result.

    Args:
        device: a torch.device.

    Returns:
        the name of the GPU; or that of the processor, with the number of threads that torch uses.
    """
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{describe_cpu()}, {torch.get_num_threads()} threads"


def describe_cpu() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(
            line.split(":", 1)[1].strip() for line in lines if "model name" in line
        )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def commit() -> str | None:
    """Return the git commit of the code, with ``+`` if it has been changed since.

    None outside git, and where the code is installed within another repository.
    """
    if not (ROOT / ".git").exists():
        return None
    # No tag matches: the commit itself, in full.
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    try:
        process = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return process.stdout.strip()


def _starter() -> str:
    """Return the words that start this program in a shell."""
    path = Path(sys.argv[0]).resolve()
    if path.parent != EXPERIMENTS:
        return f"python {shlex.quote(path.name)}"
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    # Without torchrun's agent, as under Slurm, all ranks count as those of one machine.
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return started_by(path.stem, local_size, world_size // local_size)


def resume_command(folder: Path) -> str:
    """Return the command that resumes this experiment from ``folder``."""
    return f"{_starter()} {shlex.quote(f'resume={folder}')}"
