"""Whether runs that are killed at random moments and resumed end with the very same weights."""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from tqdm import tqdm

from toolkit.cli.check_options import check_counts
from toolkit.errors import UserError

_TRAIN = Path(__file__).parents[1] / "train.py"
_RUNTIMES = ("single_process", "distributed", "restarted")


def run(config: DictConfig, device: torch.device, seed: int) -> list[dict[str, Any]]:
    """A row a runtime and rule: runs that were killed, how often, and those that ended alike.

    ``restarted`` is runtime=distributed. One of its ranks is killed; torchrun starts all again.
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
            whole, again = Path(scratch) / f"{runtime}_{rule}", Path(scratch) / "again"
            taken = "distributed" if runtime == "restarted" else runtime
            options = [f"schedule={rule}", f"runtime={taken}", f"device={device}", f"seed={seed}"]
            _train(config, options, whole)
            bar.update()
            n_kills = n_alike = 0
            for _ in range(config.runs):
                if runtime == "restarted":
                    n_kills += _restarted(config, options, again, chance)
                else:
                    for _ in range(config.kills):
                        n_kills += _killed(config, options, again, _saved(whole)[-1], chance)
                    _train(config, options, again)
                n_alike += _same_weights(whole, again)
                shutil.rmtree(again)
                bar.update()
            failed = int(n_alike < config.runs or n_kills == 0)
            row = {"runtime": runtime, "rule": rule, "runs": config.runs, "kills": n_kills}
            rows.append(row | {"bit-identical": n_alike, "failed": failed})
    return rows


def _start(
    config: DictConfig, options: list[str], folder: Path, *torchrun: str
) -> subprocess.Popen[bytes]:
    """Start training, or resume it where there is a checkpoint."""
    command = [sys.executable]
    if "runtime=distributed" in options:
        here = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={config.ranks}"]
        command += ["-m", "torch.distributed.run", *here, *torchrun]
    if _saved(folder):
        command += [str(_TRAIN), f"resume={folder}"]
    else:
        sizes = [f"workers={config.ranks}", f"stages={config.ranks}", f"epochs={config.epochs}"]
        sizes += ["threads=1", "save.steps=3", *config.options, f"hydra.run.dir={folder}"]
        command += [str(_TRAIN), *options, *sizes]
    return subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def _train(config: DictConfig, options: list[str], folder: Path) -> None:
    """Train to the end."""
    process = _start(config, options, folder)
    _, printed = process.communicate()
    if process.returncode:
        lines = printed.decode(errors="replace").strip().splitlines()
        errors = [line for line in lines if line.startswith("error: ")] or lines[-60:]
        ended = f"training ended with status {process.returncode}"
        raise RuntimeError("\n  ".join([ended, *errors]))


def _killed(
    config: DictConfig, options: list[str], folder: Path, n_steps: int, chance: random.Random
) -> bool:
    """Train, and kill every process on the way; return whether one was alive."""
    step = chance.uniform(max(_saved(folder), default=0), n_steps - 1)
    process = _start(config, options, folder)
    while process.poll() is None and max(_saved(folder), default=0) < step:
        time.sleep(0.01)
    time.sleep(chance.uniform(0, 0.1))
    alive = process.poll() is None
    for pid in (process.pid, *_children(process.pid)) if alive else ():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.communicate()
    return alive


def _restarted(config: DictConfig, options: list[str], folder: Path, chance: random.Random) -> bool:
    """Train to the end under torchrun, with one rank killed on the way."""
    process = _start(config, options, folder, "--max-restarts=3")
    wanted = min(2, chance.randrange(1, 4))
    while process.poll() is None and len(_saved(folder)) < wanted:
        time.sleep(0.02)
    time.sleep(chance.uniform(0, 0.3))
    ranks = _children(process.pid)
    if ranks and process.poll() is None:
        os.kill(chance.choice(ranks), signal.SIGKILL)
    process.communicate()
    return bool(ranks)


def _saved(folder: Path) -> list[int]:
    """The training steps of the checkpoints."""
    return sorted(int(path.stem[5:]) for path in folder.glob("checkpoints/step_*.ckpt"))


def _children(pid: int) -> list[int]:
    """Ranks of torchrun, which have sessions of their own; empty if it has ended."""
    with suppress(FileNotFoundError):
        return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    return []


def _same_weights(whole: Path, again: Path) -> bool:
    expected, found = (torch.load(f / "model.pt", weights_only=True) for f in (whole, again))
    same = (torch.equal(found[name], tensor) for name, tensor in expected.items())
    return found.keys() == expected.keys() and all(same)
