"""What one GPU shows, in slices: the tests, speed and memory, then accuracy; most valuable first.

    make gpu                      # the next 9 minutes of what is left
    make gpu data=/data/cifar10   # with the trainings on CIFAR-10
    python experiments/gpu.py --list

A slice stops in time and is continued by the next call. What ends is kept: the folder of a job in
experiments/results has its result.json, tables and figures.
"""

import argparse
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments" / "results"
_GRACE = 60  # seconds that a comparison gets to save a checkpoint and end
_LEAST = 30  # seconds left in which a job is worth starting
_LARGEST = 2**20  # bytes of a file that is kept


@dataclass(frozen=True)
class Job:
    """A command, in the folder ``name`` of the outputs and of the kept results.

    ``again``: what the command is called with, besides, once it has begun; empty if it starts anew.
    """

    name: str
    words: tuple[str, ...]
    again: tuple[str, ...] = ()


def jobs(data: str | None) -> Iterator[Job]:
    """All jobs, the most valuable first; trainings on CIFAR-10 only with its folder, ``data``."""
    yield Job("gpu_tests", ("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"))
    fast = "bench.precision=bf16", "bench.channels_last=true", "device=cuda"
    yield _bench("bench_grouped_gpu", "grouped", *fast, "bench.batch=64")
    large = "bench.model=resnet50", "bench.image_size=224", "bench.batch=32"
    yield _bench("bench_grouped_gpu_resnet50", "grouped", *fast, *large)
    yield _bench("bench_peak", "peak", "device=cuda")
    if data is None:
        return
    corrected = "study=corrections", "optimizer.nesterov=false", "epochs=24", "margin=0.5"
    for seeds in range(1, 6):
        yield _compare("cifar10_corrections_24", "cifar10_convnet", data, seeds, *corrected)
    for seeds in range(1, 11):
        yield _compare("cifar10_short", "cifar10_short", data, seeds)
    bf16 = "precision=bf16", "channels_last=true"
    for seeds in range(1, 4):
        yield _compare("cifar10_paper", "paper/cifar10_resnet18", data, seeds, *bf16)


def _bench(name: str, bench: str, *options: str) -> Job:
    return Job(name, ("experiments/bench.py", f"bench={bench}", *options))


def _compare(name: str, preset: str, data: str, seeds: int, *options: str) -> Job:
    """A comparison that has grown to ``seeds`` seeds."""
    fast = "device=cuda", "cudnn_benchmark=true", "stability=false"
    first = f"experiment={preset}", *options, f"data.root={data}", *fast, f"seeds={seeds}"
    again = "experiments/compare.py", f"resume={_folder(name)}", f"seeds={seeds}"
    return Job(name, ("experiments/compare.py", *first), again)


def _folder(name: str) -> Path:
    return ROOT / "outputs" / "gpu" / name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder with CIFAR-10")
    parser.add_argument("--minutes", type=float, default=9.0, help="length of the slice")
    parser.add_argument("--list", action="store_true", help="print the jobs, and which have ended")
    given = parser.parse_args()
    if not given.list and not torch.cuda.is_available():
        parser.error("torch sees no GPU on this machine: --list prints what would run on one")
    end = time.monotonic() + 60 * given.minutes
    todo = [*jobs(given.data or None)]
    for k, job in enumerate(todo):
        ended = _folder(job.name) / f"ended_{k}"
        if given.list or ended.exists():
            print(f"{'ended' if ended.exists() else 'to do'}: {shlex.join(job.words)}", flush=True)
            continue
        if (left := end - time.monotonic() - _GRACE) < _LEAST:
            break
        print(f"\n{shlex.join(job.words)}", flush=True)
        status = run(job, left)
        if status is None:
            break
        if status:
            print(f"failed with status {status}: it is tried again by the next call")
            continue
        keep(job)
        ended.touch()
    else:
        return 0
    print("\nthe time is over: call it again to go on")
    return 0


def run(job: Job, seconds: float) -> int | None:
    """Run ``job``; return its exit status, or None if it was stopped after ``seconds``."""
    folder = _folder(job.name)
    words = job.again if job.again and (folder / "runs.yaml").exists() else job.words
    folder.mkdir(parents=True, exist_ok=True)
    if words[0] != "-m" and words == job.words:
        words += (f"hydra.run.dir={folder}",)
    with (folder / "output.txt").open("a") as output:
        process = subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
    return None


def keep(job: Job) -> None:
    """Copy the results of ``job`` to the kept results."""
    names = ("result.json", "*.csv", "*.png") if job.words[0] != "-m" else ("output.txt",)
    kept = RESULTS / job.name
    kept.mkdir(parents=True, exist_ok=True)
    for path in (path for name in names for path in _folder(job.name).glob(name)):
        if path.stat().st_size < _LARGEST:
            shutil.copy(path, kept)


if __name__ == "__main__":
    sys.exit(main())
