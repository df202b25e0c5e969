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
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor
from tqdm import tqdm

from toolkit.cli.validate import check_counts
from toolkit.errors import UserError

_TRAIN = Path(__file__).parents[1] / "train.py"
_RUNTIMES = ("single_process", "distributed", "restarted")


def run(config: DictConfig, device: torch.device, seed: int) -> list[dict[str, Any]]:
    """A row a runtime and rule: runs that were killed, how often, and those that ended alike.

    ``restarted`` is runtime=distributed, of which one rank is killed and torchrun starts all again.
    """
    check_counts(config, "runs", "kills", "ranks", "epochs", of="bench.")
    if unknown := [name for name in config.runtimes if name not in _RUNTIMES]:
        raise UserError(f"bench.runtimes are of {', '.join(_RUNTIMES)}: got {unknown[0]}")
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
            taken = "distributed" if runtime == "restarted" else runtime
            options = [f"schedule={rule}", f"runtime={taken}", f"device={device}", f"seed={seed}"]
            _train(config, options, folder)
            expected, n_steps = _weights(folder), _steps_saved(folder)
            bar.update()
            n_kills = n_alike = 0
            for _ in range(config.runs):
                again = folder.with_name(f"{folder.name}_again")
                if runtime == "restarted":
                    n_kills += _restarted(config, options, again, chance)
                for _ in range(config.kills if runtime != "restarted" else 0):
                    n_kills += _killed(config, options, again, n_steps, chance)
                if runtime != "restarted":
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


def _command(config: DictConfig, options: list[str], folder: Path, *more: str) -> list[str]:
    """Begins, or goes on where there is a checkpoint."""
    python = [sys.executable]
    if "runtime=distributed" in options:
        here = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={config.ranks}"]
        python += ["-m", "torch.distributed.run", *here, *more]
    if any((folder / "checkpoints").glob("step_*.ckpt")):
        return [*python, str(_TRAIN), f"resume={folder}"]
    sizes = [f"workers={config.ranks}", f"stages={config.ranks}", f"epochs={config.epochs}"]
    sizes += ["threads=1", "save.steps=3", *config.options, f"hydra.run.dir={folder}"]
    return [*python, str(_TRAIN), *options, *sizes]


def _start(
    config: DictConfig, options: list[str], folder: Path, *more: str
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        _command(config, options, folder, *more),
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
        lines = said.decode(errors="replace").strip().splitlines()
        told = [line for line in lines if line.startswith("error: ")] or lines[-60:]
        text = "\n  ".join([f"training ended with status {process.returncode}", *told])
        raise RuntimeError(text)


def _killed(
    config: DictConfig, options: list[str], folder: Path, n_steps: int, chance: random.Random
) -> bool:
    """Train, and kill every process on the way; whether there was something to kill."""
    step = chance.uniform(_steps_saved(folder), n_steps - 1)
    process = _start(config, options, folder)
    while process.poll() is None and _steps_saved(folder) < step:
        time.sleep(0.01)
    time.sleep(chance.uniform(0, 0.1))
    alive = process.poll() is None
    if alive:
        ranks = _children(process.pid)  # which torchrun gives sessions of their own
        for pid in (process.pid, *ranks):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    process.communicate()
    return alive


def _steps_saved(folder: Path) -> int:
    """The training step of the latest checkpoint; 0 where there is none."""
    saved = [int(path.stem[5:]) for path in folder.glob("checkpoints/step_*.ckpt")]
    return max(saved, default=0)


def _restarted(config: DictConfig, options: list[str], folder: Path, chance: random.Random) -> bool:
    """Train to the end under torchrun, with one rank killed on the way."""
    process = _start(config, options, folder, "--max-restarts=3")
    wanted = chance.randrange(1, 4)
    while process.poll() is None and len([*folder.glob("checkpoints/step_*.ckpt")]) < min(
        2, wanted
    ):
        time.sleep(0.02)
    time.sleep(chance.uniform(0, 0.3))
    ranks = _children(process.pid)
    if ranks and process.poll() is None:
        os.kill(chance.choice(ranks), signal.SIGKILL)
    process.communicate()
    return bool(ranks)


def _children(pid: int) -> list[int]:
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except FileNotFoundError:  # it has ended
        return []


def _weights(folder: Path) -> Mapping[str, Tensor]:
    found: Mapping[str, Tensor] = torch.load(folder / "model.pt", weights_only=True)
    return found


def _alike(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], tensor) for name, tensor in expected.items()
    )
