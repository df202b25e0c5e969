"""A job on many processes whose rank fails: whether it ends in time, with one error that names it.

Each round trains by torchrun and does one thing to a random rank at a random moment:

killed   SIGKILL
stopped  SIGSTOP
cut      its connections to the other ranks are shut down; that to the store stays
no_port  instead of training: a rank is started alone, and nobody listens at MASTER_PORT

A round passes if all processes have ended within the time-out and a margin, not with status 0 and
with one line "error: ..." that names the rank and, where it trained, the step and instruction.
"""

import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from omegaconf import DictConfig
from tqdm import tqdm

from benchmarks import faults
from benchmarks.faults import Job
from toolkit.cli import output_folder
from toolkit.cli.check_options import check_counts
from toolkit.errors import UserError
from toolkit.files import write_csv

FAULTS = ("killed", "stopped", "cut", "no_port")
TRAIN = Path(__file__).parents[1] / "train.py"
UNDER_WAY = 2  # training step that all ranks have reached before the fault
_PATIENCE = 120.0  # seconds in which training has to begin
_STARTS = 3  # of training, if a busy machine lets a rank stall before it begins
_END = 40.0  # seconds beyond the time-out for which the end is waited for
_LEAVE = 2.0  # seconds in which the last processes follow the command


@dataclass
class Round:
    """What a fault has led to. Seconds count from the fault."""

    fault: str
    round: int
    rank: int
    delay: float  # seconds from the moment when training was under way
    place: str = ""  # where the rank was, by its own record
    ranks_seconds: float | None = None  # to the end of all ranks
    seconds: float | None = None  # to the end of the command
    status: int | None = None
    left: int = 0  # processes that had to be killed
    messages: list[str] = field(default_factory=list)
    n_lines: int = 0  # that begin with "error:"
    problems: list[str] = field(default_factory=list)


def run(config: DictConfig, device: torch.device, seed: int) -> list[dict[str, Any]]:
    """Return a row a fault: passed rounds, seconds from the fault to the end, a message."""
    _check(config)
    folder = output_folder()
    rounds: list[Round] = []
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    todo = [(number, fault) for number in range(config.rounds) for fault in config.faults]
    try:
        for number, fault in (bar := tqdm(todo, unit="round", leave=False)):
            bar.set_description_str(fault)
            rounds.append(done := one_round(config, device, seed, fault, number, folder))
            lists = ("messages", "problems")
            rows = [asdict(r) | {n: " | ".join(getattr(r, n)) for n in lists} for r in rounds]
            write_csv(folder / "rounds.csv", rows)
            if done.problems:
                bar.write(f"{fault}_{number} fails: {'; '.join(done.problems)}")
                bar.write(f"its output is {folder}/{fault}_{number}.log")
    finally:
        signal.signal(signal.SIGTERM, before)
    return [summary([r for r in rounds if r.fault == f], config.timeout) for f in config.faults]


def one_round(
    config: DictConfig, device: torch.device, seed: int, fault: str, number: int, folder: Path
) -> Round:
    """Start a job and break it; keep the output of one that does not pass in ``folder``."""
    chance = random.Random(f"{seed} {fault} {number}")
    alone = fault == "no_port"
    rank = chance.randrange(1 if alone else 0, config.ranks)  # rank 0 alone would listen itself
    done = Round(fault, number, rank, round(chance.uniform(0.3, 2), 3))
    size = [
        f"stages={config.ranks}",
        f"microbatches={config.ranks}",
        "epochs=1000",
        "tracking.mode=disabled",
    ]
    how = ["runtime=distributed", f"runtime.timeout={config.timeout}", f"device={device.type}"]
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "output.log"
        training = [str(TRAIN), "schedule=cdp_v2", "data=digits", *size, *how]
        training.append(f"hydra.run.dir={scratch}/train")
        (_alone if alone else _broken)(done, config, training, output)
        text = output.read_bytes().decode(errors="replace")  # with its carriage returns
        done.messages = re.findall(r"(?:^|\])error: (.*)", text, re.MULTILINE)  # or behind a bar
        done.n_lines = len(re.findall(r"^error: ", text, re.MULTILINE))
        done.problems += problems(done, config.timeout + config.margin)
        if done.problems:
            shutil.copy(output, folder / f"{fault}_{number}.log")
    return done


def _broken(done: Round, config: DictConfig, training: list[str], output: Path) -> None:
    """Train under torchrun until the fault and its end."""
    port, start = faults.free_port(), output.with_name("start.py")
    start.write_text(faults.START_TOGETHER)
    torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={config.ranks}"]
    command = [*torchrun, f"--master-port={port}", str(start), *training]
    for _ in range(_STARTS):
        shutil.rmtree(start.with_name("here"), ignore_errors=True)
        with Job([sys.executable, *command], _threads(), output) as job:
            ranks = faults.ranks_at_work(job, port, config.ranks, UNDER_WAY, _PATIENCE)
            job.running()  # so that all are known
            time.sleep(done.delay)
            if ranks and not any(rank.process.gone for rank in ranks):
                victim = ranks[done.rank]
                faults.FAULTS[done.fault](victim, port)
                _await_end(done, job, [rank.process for rank in ranks], time.monotonic(), config)
                done.place = victim.place
                return
        shutil.copy(output, output_folder() / f"{done.fault}_{done.round}_start.log")
    done.problems.append("training did not begin, or ended before the fault")


def _alone(done: Round, config: DictConfig, training: list[str], output: Path) -> None:
    """Start a rank where no other is."""
    place = {"RANK": done.rank, "LOCAL_RANK": done.rank, "WORLD_SIZE": config.ranks}
    place |= {"MASTER_ADDR": "localhost", "MASTER_PORT": faults.free_port()}
    variables = _threads() | {name: str(value) for name, value in place.items()}
    with Job([sys.executable, "-c", faults.SAYS_WHEN, *training], variables, output) as job:
        end = time.monotonic() + _PATIENCE
        while not (said := re.search(r"^connects (\S+)\n", output.read_text(), re.MULTILINE)):
            if job.status is not None or time.monotonic() > end:
                done.problems.append("the rank did not try to connect")
                return
            time.sleep(0.02)
        start = time.monotonic() - (time.time() - float(said[1]))
        _await_end(done, job, job.running(), start, config)
        done.place = f"localhost:{place['MASTER_PORT']}"


def _threads() -> dict[str, str]:
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}


def _await_end(
    done: Round, job: Job, ranks: list[faults.Process], start: float, config: DictConfig
) -> None:
    """Wait for the end of all processes, and note when it came."""
    patience = config.timeout + max(config.margin, _END)
    while job.status is None and time.monotonic() - start < patience:
        if done.ranks_seconds is None and all(rank.gone for rank in ranks):
            done.ranks_seconds = round(time.monotonic() - start, 2)
        time.sleep(0.02)
    if (status := job.status) is not None:
        done.status, done.seconds = status, round(time.monotonic() - start, 2)
        done.ranks_seconds = done.ranks_seconds or done.seconds
    end = time.monotonic() + _LEAVE
    while job.running() and time.monotonic() < end:
        time.sleep(0.1)
    done.left = len(job.running())


def problems(done: Round, bar: float) -> list[str]:
    """Return what is wrong with a round whose processes had to end within ``bar`` seconds."""
    if done.problems:
        return []
    found = []
    if done.seconds is None:
        found.append("it does not end")
    elif done.seconds > bar:
        found.append(f"it ended after {done.seconds} s, and not within {bar:g}")
    if done.left:
        found.append(f"{done.left} processes are left")
    if done.status == 0:
        found.append("its status is 0")
    if len(done.messages) != 1:
        return [*found, f"{len(done.messages)} messages begin with error:"]
    (message,) = done.messages
    if done.n_lines != 1:
        found.append("the message does not begin a line, but follows a progress bar")
    blamed = re.findall(r"\d+", re.split(" is lost| has | cannot ", message)[0])
    if str(done.rank) not in blamed or (done.fault != "cut" and len(blamed) != 1):
        found.append(f"the message blames {', '.join(blamed)}, and not rank {done.rank}")
    # After a cut the rank continued, to a place that only the message shows.
    cut_places = len(re.findall(r"in step \d+ at \S+", message)) >= 2
    places = cut_places if done.fault == "cut" else done.place in message
    if not places:
        found.append(f"the message does not say where rank {done.rank} was: {done.place}")
    return found


def summary(rounds: list[Round], timeout: float) -> dict[str, Any]:
    """Return the row of a fault."""
    passed = [done for done in rounds if not done.problems]
    seconds = [done.seconds for done in rounds if done.seconds is not None]
    of_ranks = [done.ranks_seconds for done in rounds if done.ranks_seconds is not None]
    messages = [done.messages[0] for done in passed or rounds if done.messages]
    return {
        "fault": rounds[0].fault,
        "rounds": len(rounds),
        "failed": len(rounds) - len(passed),
        "ranks' end (s)": round(median(of_ranks), 2) if of_ranks else None,
        "end (s)": round(median(seconds), 2) if seconds else None,
        "beyond time-out (s)": round(median(seconds) - timeout, 2) if seconds else None,
        "at most (s)": round(max(seconds) - timeout, 2) if seconds else None,
        "left": sum(done.left for done in rounds),
        "message": next(iter(messages), ""),
    }


def _check(config: DictConfig) -> None:
    if sys.platform != "linux":
        raise UserError(f"bench=failure looks into /proc, on Linux: this is {sys.platform}")
    check_counts(config, "rounds", of="bench.")
    if config.ranks < 2:
        raise UserError(f"bench.ranks is 2 or more: got {config.ranks}")
    for name in ("timeout", "margin"):
        if not config[name] > 0:
            raise UserError(f"bench.{name} is a number of seconds above 0: got {config[name]}")
    unknown = set(config.faults) - set(FAULTS)
    if unknown or not config.faults:
        raise UserError(f"bench.faults are some of {', '.join(FAULTS)}: got {config.faults}")
