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
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from tqdm import tqdm

from benchmarks import faults
from benchmarks.faults import Job
from toolkit.errors import UserError
from toolkit.files import write_csv

BREAKS = {"killed": faults.kill, "stopped": faults.stop, "cut": faults.cut}
FAULTS = (*BREAKS, "no_port")
TRAIN = Path(__file__).parents[1] / "train.py"
UNDER_WAY = 2  # the training step to which all ranks have come before the fault
_PATIENCE = 120.0  # seconds in which training has to begin
_END = 40.0  # seconds beyond the time-out for which the end is waited for


@dataclass
class Round:
    """What a fault has led to. Seconds count from the fault."""

    fault: str
    round: int
    rank: int
    delay: float  # seconds from the moment when training was under way
    place: str = ""  # where the rank was, by its own word
    ranks_seconds: float | None = None  # to the end of all ranks
    seconds: float | None = None  # to the end of all processes
    status: int | None = None
    left: int = 0  # processes that had to be killed
    messages: list[str] = field(default_factory=list)
    n_lines: int = 0  # that begin with "error:"
    problems: list[str] = field(default_factory=list)


def run(config: DictConfig, device: torch.device, seed: int) -> list[dict[str, Any]]:
    """A row a fault: how many rounds passed, seconds from the fault to the end, a message."""
    _check(config)
    folder = Path(HydraConfig.get().runtime.output_dir)
    rounds: list[Round] = []
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with tqdm(total=config.rounds * len(config.faults), unit="round", leave=False) as bar:
            for number in range(config.rounds):
                for fault in config.faults:
                    bar.set_description_str(fault)
                    done = one_round(config, device, seed, fault, number, folder)
                    rounds.append(done)
                    write_csv(folder / "rounds.csv", [_record(each) for each in rounds])
                    if done.problems:
                        bar.write(f"{_name(done)} fails: {'; '.join(done.problems)}")
                        bar.write(f"its output is {folder / _name(done)}.log")
                    bar.update()
    finally:
        signal.signal(signal.SIGTERM, before)
    return [
        summary([done for done in rounds if done.fault == fault], config.timeout)
        for fault in config.faults
    ]


def one_round(
    config: DictConfig, device: torch.device, seed: int, fault: str, number: int, folder: Path
) -> Round:
    """Start a job and break it; the output of one that does not pass is kept in ``folder``."""
    chance = random.Random(f"{seed} {fault} {number}")
    alone = fault not in BREAKS
    rank = chance.randrange(1 if alone else 0, config.ranks)  # rank 0 alone would listen itself
    done = Round(fault, number, rank, round(chance.uniform(0.3, 2), 3))
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "output.log"
        (_alone if alone else _broken)(done, config, device, output)
        text = output.read_bytes().decode(errors="replace")  # with its carriage returns
        done.messages = re.findall(r"(?:^|\])error: (.*)", text, re.MULTILINE)  # or behind a bar
        done.n_lines = len(re.findall(r"^error: ", text, re.MULTILINE))
        done.problems += problems(done, config.timeout + config.margin)
        if done.problems:
            shutil.copy(output, folder / f"{_name(done)}.log")
    return done


def _broken(done: Round, config: DictConfig, device: torch.device, output: Path) -> None:
    """Training under torchrun, until the fault and its end."""
    port = faults.free_port()
    torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={config.ranks}"]
    command = [*torchrun, f"--master-port={port}", *_training(config, device, output.parent)]
    with _start(command, {}, output) as job:
        ranks = faults.ranks_at_work(job, port, config.ranks, UNDER_WAY, _PATIENCE)
        if not ranks:
            done.problems.append("training did not begin")
            return
        job.running()  # so that all are known
        time.sleep(done.delay)
        if any(rank.process.gone for rank in ranks):
            done.problems.append("training ended before the fault")
            return
        victim = ranks[done.rank]
        BREAKS[done.fault](victim, port)
        start = time.monotonic()
        _await_end(done, job, [rank.process for rank in ranks], start, _patience(config))
        done.place = victim.place


def _alone(done: Round, config: DictConfig, device: torch.device, output: Path) -> None:
    """A rank where no other is."""
    place = {"RANK": done.rank, "LOCAL_RANK": done.rank, "WORLD_SIZE": config.ranks}
    place |= {"MASTER_ADDR": "localhost", "MASTER_PORT": faults.free_port()}
    command = ["-c", faults.SAYS_WHEN, *_training(config, device, output.parent)]
    with _start(command, {name: str(value) for name, value in place.items()}, output) as job:
        end = time.monotonic() + _PATIENCE
        while not (said := re.search(r"^connects (\S+)\n", output.read_text(), re.MULTILINE)):
            if job.status is not None or time.monotonic() > end:
                done.problems.append("the rank did not try to connect")
                return
            time.sleep(0.02)
        start = time.monotonic() - (time.time() - float(said[1]))
        _await_end(done, job, job.running(), start, _patience(config))
        done.place = f"localhost:{place['MASTER_PORT']}"


def _await_end(
    done: Round, job: Job, ranks: list[faults.Process], start: float, patience: float
) -> None:
    """Wait for the end of all processes, and note when it came."""
    while (now := time.monotonic() - start) < patience:
        if done.ranks_seconds is None and all(rank.gone for rank in ranks):
            done.ranks_seconds = round(now, 2)
        if job.status is not None:
            done.seconds = round(now, 2)
            break
        time.sleep(0.02)
    done.status, done.left = job.status, len(job.running())


def _patience(config: DictConfig) -> float:
    return config.timeout + max(config.margin, _END)


def problems(done: Round, bar: float) -> list[str]:
    """What is wrong with a round, whose processes had to end within ``bar`` seconds."""
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
    message = done.messages[0]
    if done.n_lines != 1:
        found.append("the message does not begin a line, but follows a progress bar")
    blamed = re.findall(r"\d+", re.split(" is lost| has | cannot ", message)[0])
    if str(done.rank) not in blamed or (done.fault != "cut" and len(blamed) != 1):
        found.append(f"the message blames {', '.join(blamed)}, and not rank {done.rank}")
    if done.fault == "cut":  # it went on to a place that only the message tells
        told = len(re.findall(r"in step \d+ at \S+", message)) >= 2
    else:
        told = done.place in message
    if not told:
        found.append(f"the message does not say where rank {done.rank} was: {done.place}")
    return found


def summary(rounds: list[Round], timeout: float) -> dict[str, Any]:
    """The row of a fault."""
    passed = [done for done in rounds if not done.problems]
    of_all = [done.seconds for done in rounds if done.seconds is not None]
    of_ranks = [done.ranks_seconds for done in rounds if done.ranks_seconds is not None]
    told = [done.messages[0] for done in passed or rounds if done.messages]
    return {
        "fault": rounds[0].fault,
        "rounds": len(rounds),
        "failed": len(rounds) - len(passed),
        "ranks' end (s)": round(median(of_ranks), 2) if of_ranks else None,
        "end (s)": round(median(of_all), 2) if of_all else None,
        "beyond time-out (s)": round(median(of_all) - timeout, 2) if of_all else None,
        "at most (s)": round(max(of_all) - timeout, 2) if of_all else None,
        "left": sum(done.left for done in rounds),
        "message": told[0] if told else "",
    }


def _start(command: list[str], environment: dict[str, str], output: Path) -> Job:
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    return Job([sys.executable, *command], threads | environment, output)


def _training(config: DictConfig, device: torch.device, scratch: Path) -> list[str]:
    size = [f"stages={config.ranks}", f"microbatches={config.ranks}", "epochs=1000"]
    how = ["runtime=distributed", f"runtime.timeout={config.timeout}", f"device={device.type}"]
    where = f"hydra.run.dir={scratch / 'train'}"
    return [str(TRAIN), "schedule=cdp_v2", "data=digits", *size, *how, where]


def _record(done: Round) -> dict[str, Any]:
    lists = {name: " | ".join(getattr(done, name)) for name in ("messages", "problems")}
    return asdict(done) | lists


def _name(done: Round) -> str:
    return f"{done.fault}_{done.round}"


def _check(config: DictConfig) -> None:
    if sys.platform != "linux":
        raise UserError(f"bench=failure looks into /proc, on Linux: this is {sys.platform}")
    for name, least in (("ranks", 2), ("rounds", 1)):
        if config[name] < least:
            raise UserError(f"bench.{name} is {least} or more: got {config[name]}")
    for name in ("timeout", "margin"):
        if not config[name] > 0:
            raise UserError(f"bench.{name} is a number of seconds above 0: got {config[name]}")
    unknown = set(config.faults) - set(FAULTS)
    if unknown or not config.faults:
        raise UserError(f"bench.faults are some of {', '.join(FAULTS)}: got {config.faults}")
