"""Run on one GPU what only a GPU shows, in slices of minutes, the most valuable jobs first.

    make gpu                      # the next 9 minutes of the jobs that have not ended
    make gpu data=/data/cifar10 imagenette=/data/imagenette   # with the trainings on these sets
    python experiments/gpu.py --list

Speed comes first, then the tests, memory and accuracy. A slice stops in time; the next call
continues. Results are kept as jobs end: the folder of a job in experiments/results gets its
result.json, tables and figures.
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

from toolkit.files import started_by
from toolkit.results.run_files import OPTIONS_FILE, TUNING_FOLDER

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments" / "results"
_GRACE = 60  # seconds that a comparison gets to save a checkpoint and end
_LEAST = 30  # seconds left in which a job is worth starting
_LARGEST = 2**20  # bytes of a file that is kept


@dataclass(frozen=True)
class Job:
    """A command, whose outputs and kept results are in folders called ``name``.

    Attributes:
        name: name of the folders.
        command: arguments of Python.
        minutes: expected duration on an H100, from its first slice to its end.
        resume_command: arguments of Python once the command has begun; empty: it starts anew.
        n_processes: ranks, which share the GPU; torchrun starts them if there are several.
    """

    name: str
    command: tuple[str, ...]
    minutes: float
    resume_command: tuple[str, ...] = ()
    n_processes: int = 1


def jobs(cifar10: str | None, imagenette: str | None) -> Iterator[Job]:
    """Yield all jobs, the most valuable first.

    Args:
        cifar10: folder with CIFAR-10; None: no trainings on it.
        imagenette: folder with ``train`` and ``val``; None: no trainings on it.
    """
    yield from _speed()
    yield Job(
        "gpu_tests", ("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"), 2
    )
    yield _bench("bench_peak", "peak", 2, "device=cuda")
    if cifar10 is not None:
        # The paper's recipe, in 30 of its 100 epochs.
        short = "epochs=30", "lr.every_epochs=10"
        yield from _cifar10_corrections(
            "cifar10_resnet18_corrections_30", cifar10, 14, 22, *short
        )
    if imagenette is not None:
        yield from _imagenette_corrections(imagenette, tuning_minutes=12, minutes=18)
    if cifar10 is not None:
        yield from _cifar10_corrections("cifar10_resnet18_corrections", cifar10, 14, 75)
        yield from _cifar10(cifar10)


def _speed() -> Iterator[Job]:
    """Yield the benchmarks of order "grouped", and the gaps between its kernels."""
    fast = "bench.precision=bf16", "bench.channels_last=true", "device=cuda"
    small = "bench.batch=64", "bench.rounds=3", "bench.steps=5"
    large = (
        "bench.model=resnet50",
        "bench.image_size=224",
        "bench.batch=32",
        "bench.rounds=3",
        "bench.steps=5",
    )
    for compile, minutes_small, minutes_large in (
        ("none", 0.25, 0.35),
        ("default", 0.6, 0.8),
    ):
        for capture in ("off", "auto"):
            options = *fast, f"bench.capture={capture}", f"bench.compile={compile}"
            suffix = f"_capture_{capture}_compile_{compile}"
            # These are the settings of the kept results, whose folders have the shorter names.
            plain = capture == "off" and compile == "none"
            yield _bench(
                "bench_grouped_gpu" if plain else f"bench_grouped_gpu_resnet18{suffix}",
                "grouped",
                minutes_small,
                *options,
                *small,
            )
            yield _bench(
                "bench_grouped_gpu_resnet50" + ("" if plain else suffix),
                "grouped",
                minutes_large,
                *options,
                *large,
            )
    yield _bench("bench_gaps_gpu", "gaps", 0.5, *fast, "bench.batch=64")
    yield _bench("bench_loader_gpu", "loader", 0.5, *fast, "bench.batch=64")


def _cifar10_corrections(
    name: str, root: str, tuning_minutes: float, minutes: float, *options: str
) -> Iterator[Job]:
    """Yield a comparison of plain and corrected rules by the paper's recipe, seed by seed."""
    further = "margin=0.5", *options
    yield from _corrections(
        name, "paper/cifar10_resnet18", root, tuning_minutes, minutes, *further
    )


def _imagenette_corrections(
    root: str, tuning_minutes: float, minutes: float
) -> Iterator[Job]:
    """Yield the same comparison on ten classes of ImageNet, in a third of the paper's epochs."""
    yield from _corrections(
        "imagenette_resnet18_corrections",
        "paper/imagenet_resnet18",
        root,
        tuning_minutes,
        minutes,
        "data=image_folder",
        "data.image_size=224",
        "epochs=30",
        "lr.every_epochs=10",
        "lr.warmup_epochs=2",
        "margin=1",
    )


def _corrections(
    name: str,
    preset: str,
    root: str,
    tuning_minutes: float,
    minutes: float,
    *options: str,
) -> Iterator[Job]:
    """Yield a comparison of plain and corrected rules, each at its own rate, seed by seed.

    DP has nothing to predict: predicted, it would be DP with Nesterov momentum, which is another
    rule already.
    """
    # A job for each number of seeds, so that whatever a slice ends with is a whole comparison.
    for n_seeds in range(1, 4):
        yield _compare(
            name,
            preset,
            root,
            n_seeds,
            minutes + (tuning_minutes if n_seeds == 1 else 0),
            "study=corrections",
            "~rules.dp_predicted",
            "~own.dp_predicted",
            "precision=bf16",
            "channels_last=true",
            *options,
        )


def _cifar10(root: str) -> Iterator[Job]:
    """Yield the other trainings on CIFAR-10."""
    bf16 = "precision=bf16", "channels_last=true"
    for n_seeds in range(1, 4):
        yield _compare(
            "cifar10_paper", "paper/cifar10_resnet18", root, n_seeds, 27, *bf16
        )
    corrections = (
        "study=corrections",
        "optimizer.nesterov=false",
        "epochs=24",
        "margin=0.5",
    )
    for n_seeds in range(1, 6):
        yield _compare(
            "cifar10_corrections_24", "cifar10_convnet", root, n_seeds, 15, *corrections
        )
    for n_seeds in range(1, 11):
        yield _compare("cifar10_short", "cifar10_short", root, n_seeds, 5, "parallel=8")
    # The kept comparison of this name was put together by hand: this makes it anew.
    for n_seeds in range(1, 6):
        yield _compare(
            "cifar10_corrections",
            "cifar10_convnet",
            root,
            n_seeds,
            4,
            "study=corrections",
            "optimizer.nesterov=false",
            "margin=0.5",
            "tune.rates=[0.125,0.25,0.5,1,2]",
            "tune.epochs=4",
            "~rules.dp_predicted",
            "~own.dp_predicted",
            "parallel=8",
        )
    for n_seeds in range(1, 4):
        yield _compression(root, n_seeds)


def _compression(root: str, n_seeds: int) -> Job:
    """Return a comparison of compressed messages, local steps and late weights, on 4 ranks."""
    # CDP-v1 trains well with prediction only.
    forms = ("", "_bf16", "_int8", "_int4", "_topk", "_low_rank")
    predictions = [f"rules.cdp_v1{form}.correction=extrapolate" for form in forms]
    return _compare(
        "cifar10_compression",
        "cifar10_convnet",
        root,
        n_seeds,
        100,
        "study=compression",
        "microbatches=4",
        "channels_last=false",  # PowerSGD takes weights in the usual layout alone
        "batch=128",
        "margin=0.5",
        "tune.rates=[0.25,0.5,1,2,4,8]",
        "tune.epochs=4",
        "threads=1",
        *predictions,
        n_processes=4,
    )


def _bench(name: str, bench: str, minutes: float, *options: str) -> Job:
    return Job(name, ("experiments/bench.py", f"bench={bench}", *options), minutes)


def _compare(
    name: str,
    preset: str,
    root: str,
    n_seeds: int,
    minutes: float,
    *options: str,
    n_processes: int = 1,
) -> Job:
    """Return a comparison that grows to ``n_seeds`` seeds."""
    command = (
        "experiments/compare.py",
        f"experiment={preset}",
        *options,
        f"data.root={root}",
        "device=cuda",
        "cudnn_benchmark=true",
        "stability=false",
        f"seeds={n_seeds}",
    )
    resume_command = (
        "experiments/compare.py",
        f"resume={_folder(name)}",
        f"seeds={n_seeds}",
    )
    return Job(name, command, minutes, resume_command, n_processes)


def _folder(name: str) -> Path:
    return ROOT / "outputs" / "gpu" / name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder with CIFAR-10")
    parser.add_argument("--imagenette", help="folder with Imagenette: train/ and val/")
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="length of the slice"
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="print the jobs, their minutes, and which have ended",
    )
    arguments = parser.parse_args()
    all_jobs = [*jobs(arguments.data or None, arguments.imagenette or None)]
    # Before the check for a GPU: the list is printed anywhere.
    if arguments.list:
        print_list(all_jobs)
        return 0
    if not torch.cuda.is_available():
        parser.error(
            "torch sees no GPU on this machine: --list prints what would run on one"
        )
    end = time.monotonic() + 60 * arguments.minutes
    for job in all_jobs:
        if _end_mark(job).exists():
            print(_line(job), flush=True)
            continue
        # A job that is stopped may take the grace period on top, and the slice still ends in time.
        seconds_left = end - time.monotonic() - _GRACE
        if seconds_left < _LEAST:
            break
        print(f"\n{_as_typed(job)}", flush=True)
        status = run(job, seconds_left)
        if status is None:
            break
        if status:
            print(f"failed with status {status}: the next call tries it again")
            continue
        keep(job)
        _end_mark(job).touch()
    else:
        return 0
    print("\nthe time is over: call it again to continue")
    return 0


def print_list(all_jobs: list[Job]) -> None:
    """Print a line for each job, and the minutes of those that have not ended."""
    for job in all_jobs:
        print(_line(job))
    minutes_left = sum(job.minutes for job in all_jobs if not _end_mark(job).exists())
    print(f"{minutes_left:g} minutes to do")


def _line(job: Job) -> str:
    state = "ended" if _end_mark(job).exists() else "to do"
    return f"{state}, {job.minutes:g} min, {job.name}: {_as_typed(job)}"


def _as_typed(job: Job) -> str:
    """Return the command of a job, an experiment's as one types it in a shell."""
    program, *options = job.command
    if job.n_processes > 1:
        return f"torchrun --nproc-per-node={job.n_processes} {shlex.join(job.command)}"
    if not program.startswith("experiments/"):
        return shlex.join(job.command)
    return f"{started_by(Path(program).stem)} {shlex.join(options)}"


def _end_mark(job: Job) -> Path:
    """Return the file that exists once ``job`` has ended."""
    # Of ended_seeds=2.
    mark = f"ended_{job.command[-1]}" if job.resume_command else "ended"
    return _folder(job.name) / mark


def run(job: Job, seconds: float) -> int | None:
    """Run ``job``; return its exit status, or None if it was stopped after ``seconds``."""
    folder = _folder(job.name)
    # A comparison that was stopped in its trials of rates has options in their folder only.
    has_options = any(
        (place / OPTIONS_FILE).exists() for place in (folder, folder / TUNING_FOLDER)
    )
    command = job.command
    if job.resume_command and has_options:
        command = job.resume_command
    elif command[0] != "-m":
        command += (f"hydra.run.dir={folder}",)
    if job.n_processes > 1:
        n_processes = f"--nproc-per-node={job.n_processes}"
        command = ("-m", "torch.distributed.run", "--standalone", n_processes, *command)
    folder.mkdir(parents=True, exist_ok=True)
    # Appended: a comparison writes in many slices.
    with (folder / "output.txt").open("a") as output:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            # A comparison saves a checkpoint and ends; a benchmark begins anew in the next slice.
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
    return None


def keep(job: Job) -> None:
    """Copy the results of ``job`` to the kept results."""
    patterns = (
        ("output.txt",) if job.command[0] == "-m" else ("result.json", "*.csv", "*.png")
    )
    results = RESULTS / job.name
    results.mkdir(parents=True, exist_ok=True)
    for pattern in patterns:
        for path in _folder(job.name).glob(pattern):
            # Kept results are committed, so large files are left out.
            if path.stat().st_size < _LARGEST:
                shutil.copy(path, results)


if __name__ == "__main__":
    sys.exit(main())
