"""Whether runs that are killed at random moments and resumed end with the very same weights."""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor
from tqdm import tqdm

from benchmarks.faults import free_port

_TRAIN = Path(__file__).parents[1] / "train.py"
_RUNTIMES = ("single_process", "distributed")


def run(config: DictConfig, device: torch.device, seed: int) -> list[dict[str, Any]]:
    """A row a runtime and rule: runs that were killed, how often, and those that ended alike."""
    for name in ("runs", "kills", "ranks", "epochs"):
        if config[name] < 1:
            raise ValueError(f"bench.{name} is 1 or more: got {config[name]}")
    if unknown := [name for name in config.runtimes if name not in _RUNTIMES]:
        raise ValueError(f"bench.runtimes are of {', '.join(_RUNTIMES)}: got {unknown[0]}")
    cases = [*product(config.runtimes, config.rules)]
    rows = []
    with (
        tempfile.TemporaryDirectory() as scratch,
        tqdm(total=len(cases) * (config.runs + 1), unit="run", leave=False) as bar,
    ):
        for runtime, rule in cases:
            bar.set_description_str(f"{runtime}, {rule}")
            chance = random.Random(f"{seed} {runtime} {rule}")
            folder = Path(scratch) / f"{runtime}_{rule}"
            options = [f"schedule={rule}", f"runtime={runtime}", f"device={device}", f"seed={seed}"]
            start = time.monotonic()
            _train(config, options, folder)
            length = time.monotonic() - start
            expected = _weights(folder)
            bar.update()
            n_kills = n_alike = 0
            for _ in range(config.runs):
                again = folder.with_name(f"{folder.name}_again")
                for _ in range(config.kills):
                    # A run that is through its imports trains in the second half of its time.
                    n_kills += _killed(config, options, again, chance.uniform(0.3, 1) * length)
                _train(config, options, again)
                n_alike += _alike(_weights(again), expected)
                shutil.rmtree(again)
                bar.update()
            rows.append(
                {
                    "runtime": runtime,
                    "rule": rule,
                    "runs": config.runs,
                    "kills": n_kills,
                    "bit-identical": n_alike,
                    "failed": int(n_alike < config.runs or n_kills == 0),
                }
            )
    return rows


def _command(config: DictConfig, options: list[str], folder: Path) -> list[str]:
    """Begins, or goes on where there is a checkpoint."""
    python = [sys.executable]
    if "runtime=distributed" in options:
        launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={config.ranks}"]
        python += [*launcher, f"--master-port={free_port()}"]
    if any((folder / "checkpoints").glob("step_*.ckpt")):
        return [*python, str(_TRAIN), f"resume={folder}"]
    sizes = [f"workers={config.ranks}", f"stages={config.ranks}", f"epochs={config.epochs}"]
    more = ["threads=1", "save.steps=3", *sizes, *config.options, f"hydra.run.dir={folder}"]
    return [*python, str(_TRAIN), *options, *more]


def _start(config: DictConfig, options: list[str], folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        _command(config, options, folder),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def _train(config: DictConfig, options: list[str], folder: Path) -> None:
    """To the end."""
    process = _start(config, options, folder)
    _, said = process.communicate()
    if process.returncode:
        last = said.decode(errors="replace").strip().splitlines()[-3:]
        raise RuntimeError(f"training ended with status {process.returncode}: {' / '.join(last)}")


def _killed(config: DictConfig, options: list[str], folder: Path, seconds: float) -> bool:
    """Train for so long, then kill every process; whether there was something to kill."""
    process = _start(config, options, folder)
    try:
        process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return True
    return False


def _weights(folder: Path) -> Mapping[str, Tensor]:
    found: Mapping[str, Tensor] = torch.load(folder / "model.pt", weights_only=True)
    return found


def _alike(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], tensor) for name, tensor in expected.items()
    )
