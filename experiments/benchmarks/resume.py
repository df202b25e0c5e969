"""Whether runs that are killed at random moments and resumed end with the very same weights."""

import os
import random
import shutil
import signal
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

from benchmarks.job import Job, torchrun
from toolkit.cli.check_options import check_counts
from toolkit.errors import check_choice

_TRAIN = Path(__file__).parents[1] / "train.py"
_RUNTIMES = ("single_process", "distributed", "restarted")


def run(config: DictConfig, device: torch.device, seed: int) -> list[dict[str, Any]]:
    """Return a row for each runtime and rule: runs, kills, and runs that end bit-identical.

    ``restarted`` is runtime=distributed. One of its ranks is killed; torchrun starts all again.
    """
    check_counts(config, "runs", "kills", "ranks", "epochs", of="bench.")
    for name in config.runtimes:
        check_choice("bench.runtimes", name, _RUNTIMES)
    cases = [*product(config.runtimes, config.rules)]
    rows = []
    with (
        tempfile.TemporaryDirectory() as scratch,
        tqdm(total=len(cases) * (config.runs + 1), unit="run", leave=False) as bar,
    ):
        for runtime, rule in cases:
            bar.set_description_str(f"{runtime}, {rule}")
            chance = random.Random(f"{seed} {runtime} {rule}")
            reference = Path(scratch) / f"{runtime}_{rule}"  # a run that nobody kills
            folder = Path(scratch) / "killed"
            options = [
                f"schedule={rule}",
                f"runtime={'distributed' if runtime == 'restarted' else runtime}",
                f"device={device}",
                f"seed={seed}",
            ]
            # 1. A run that nobody kills has the weights to compare with, and shows the number of
            # steps.
            _train(config, options, reference)
            n_steps = _saved_steps(reference)[-1]
            bar.update()
            # 2. Kill and resume others.
            n_kills = n_identical = 0
            for _ in range(config.runs):
                if runtime == "restarted":
                    n_kills += _restarted(config, options, folder, chance)
                else:
                    for _ in range(config.kills):
                        n_kills += _killed(config, options, folder, n_steps, chance)
                    _train(config, options, folder)
                # 3. Compare, and give the next run an empty folder.
                n_identical += _has_same_weights(reference, folder)
                shutil.rmtree(folder)
                bar.update()
            rows.append(
                {
                    "runtime": runtime,
                    "rule": rule,
                    "runs": config.runs,
                    "kills": n_kills,
                    "bit-identical": n_identical,
                    # A bench in which every run ended before its kill has shown nothing.
                    "failed": int(n_identical < config.runs or n_kills == 0),
                }
            )
    return rows


def _start(
    config: DictConfig, options: list[str], folder: Path, *torchrun_options: str
) -> Job:
    """Start training, or resume it where there is a checkpoint."""
    command = [sys.executable]
    if "runtime=distributed" in options:
        local = "--standalone", "--local-addr=127.0.0.1"
        command = torchrun(config.ranks, *local, *torchrun_options)
    if _saved_steps(folder):
        command += [str(_TRAIN), f"resume={folder}"]
    else:
        sizes = [f"workers={config.ranks}", f"stages={config.ranks}"]
        sizes += [f"epochs={config.epochs}", "threads=1", "save.steps=3"]
        command += [str(_TRAIN), *options, *sizes, *config.options]
        command += [f"hydra.run.dir={folder}"]
    return Job(command, folder.with_suffix(".log"))


def _train(config: DictConfig, options: list[str], folder: Path) -> None:
    """Train to the end."""
    with _start(config, options, folder) as job:
        if status := job.wait():
            lines = folder.with_suffix(".log").read_text(errors="replace").splitlines()
            errors = [line for line in lines if line.startswith("error: ")] or lines[
                -60:
            ]
            raise RuntimeError(
                "\n  ".join([f"training ended with status {status}", *errors])
            )


def _killed(
    config: DictConfig,
    options: list[str],
    folder: Path,
    n_steps: int,
    chance: random.Random,
) -> bool:
    """Train, and kill every process on the way; return whether one was alive."""
    # Somewhere between the latest checkpoint and the last step, after which the run may have ended.
    step = chance.uniform(max(_saved_steps(folder), default=0), n_steps - 1)
    with _start(config, options, folder) as job:
        # From outside, checkpoints are the sign of how far a run is.
        while job.status is None and max(_saved_steps(folder), default=0) < step:
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.1))
        # Leaving the block is the kill: it ends all processes of the job by SIGKILL.
        return job.status is None


def _restarted(
    config: DictConfig, options: list[str], folder: Path, chance: random.Random
) -> bool:
    """Train to the end under torchrun, with one rank killed on the way."""
    # Ranks that start again continue from a checkpoint, so the kill waits for one.
    n_checkpoints = min(2, chance.randrange(1, 4))
    with _start(config, options, folder, "--max-restarts=3") as job:
        while job.status is None and len(_saved_steps(folder)) < n_checkpoints:
            time.sleep(0.02)
        time.sleep(chance.uniform(0, 0.3))
        ranks: list[int] = []
        with suppress(OSError, IndexError):  # it has ended
            # The children of torchrun are the ranks.
            children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text()
            ranks = [*map(int, children.split())]
            os.kill(chance.choice(ranks), signal.SIGKILL)
        job.wait()
        return bool(ranks)


def _saved_steps(folder: Path) -> list[int]:
    """Return the training steps of the checkpoints, ascending."""
    return sorted(int(path.stem[5:]) for path in folder.glob("checkpoints/step_*.ckpt"))


def _has_same_weights(reference: Path, folder: Path) -> bool:
    expected = torch.load(reference / "model.pt", weights_only=True)
    weights = torch.load(folder / "model.pt", weights_only=True)
    if weights.keys() != expected.keys():
        return False
    return all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
