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
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from omegaconf import DictConfig
from tqdm import tqdm

from benchmarks.checks import check_above_zero, check_rules
from benchmarks.job import Job, Rank, cut, ranks_at_work, torchrun
from toolkit.cli import output_folder
from toolkit.cli.check_options import check_counts
from toolkit.errors import UserError
from toolkit.files import write_csv
from toolkit.runtime.process_group.shared_status import Process

SAYS_WHEN = """\
import runpy, sys, time
connections = []
def hook(event, _):
    if event == "socket.connect" and not connections:
        connections.append(print("connects", time.time(), flush=True))
sys.addaudithook(hook)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script that prints when it first connects: its imports do not count as time-out."""

START_TOGETHER = """\
import os, pathlib, runpy, sys, time
del sys.argv[0]
runpy.run_path(sys.argv[0])
ready = pathlib.Path(__file__).with_name("ready")
ready.mkdir(exist_ok=True)
(ready / os.environ["RANK"]).touch()
while len(os.listdir(ready)) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script once all ranks have imported what it needs, so that this takes no time-out."""


FAULTS = ("killed", "stopped", "cut", "no_port")
_BREAK: dict[str, Callable[[Rank, int], None]] = {
    "killed": lambda rank, port: os.kill(rank.process.pid, signal.SIGKILL),
    "stopped": lambda rank, port: os.kill(rank.process.pid, signal.SIGSTOP),
    "cut": cut,
}
TRAIN = Path(__file__).parents[1] / "train.py"
UNDER_WAY = 2  # training step that all ranks have reached before the fault
_PATIENCE = 120.0  # seconds in which training has to begin
_END = 40.0  # seconds beyond the time-out for which the end is waited for
_LEAVE = 2.0  # seconds in which the last processes follow the command


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


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
    problems: list[str] = field(default_factory=list)


def run(config: DictConfig, device: torch.device, seed: int) -> list[dict[str, Any]]:
    """Return a row a fault: passed rounds, seconds from the fault to the end, a message."""
    _check(config)
    folder = output_folder()
    rounds: list[Round] = []
    bar = tqdm(
        [*product(range(config.rounds), config.faults)], unit="round", leave=False
    )
    for number, fault in bar:
        bar.set_description_str(fault)
        outcome = one_round(config, device, seed, fault, number, folder)
        rounds.append(outcome)
        write_csv(folder / "rounds.csv", [as_row(each) for each in rounds])
        if outcome.problems:
            problems = "; ".join(outcome.problems)
            log = f"{folder}/{fault}_{number}.log"
            bar.write(f"{fault}_{number} fails: {problems}; its output is {log}")
    return [
        summary(
            [outcome for outcome in rounds if outcome.fault == fault], config.timeout
        )
        for fault in config.faults
    ]


def as_row(outcome: Round) -> dict[str, Any]:
    """Return the row of a round, whose texts are joined."""
    row = asdict(outcome)
    for column in ("messages", "problems"):
        row[column] = " | ".join(row[column])
    return row


def one_round(
    config: DictConfig,
    device: torch.device,
    seed: int,
    fault: str,
    number: int,
    folder: Path,
) -> Round:
    """Start a job and break it; keep the output of one that does not pass in ``folder``."""
    # Each round draws for itself, so that it can be repeated alone.
    chance = random.Random(f"{seed} {fault} {number}")
    alone = fault == "no_port"
    # Rank 0 alone would listen itself.
    rank = chance.randrange(1 if alone else 0, config.ranks)
    outcome = Round(fault, number, rank, round(chance.uniform(0.3, 2), 3))
    options = [f"stages={config.ranks}", f"microbatches={config.ranks}", "epochs=1000"]
    options += [
        "schedule=cdp_v2",
        "data=digits",
        "runtime=distributed",
        "tracking.mode=disabled",
    ]
    options += [f"runtime.timeout={config.timeout}", f"device={device.type}"]
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "output.log"
        training = [str(TRAIN), *options, f"hydra.run.dir={scratch}/train"]
        run_fault = _alone if alone else _broken
        run_fault(outcome, config, training, output)
        text = output.read_bytes().decode(errors="replace")  # with its carriage returns
        outcome.messages = re.findall(r"^error: (.*)", text, re.MULTILINE)
        outcome.problems += find_problems(outcome, config.timeout + config.margin)
        if outcome.problems:
            shutil.copy(output, folder / f"{fault}_{number}.log")
    return outcome


def _broken(
    outcome: Round, config: DictConfig, training: list[str], output: Path
) -> None:
    """Train under torchrun until the fault and its end."""
    # The port of torchrun's store is chosen here, so that this process can ask the store, too.
    port, start = free_port(), output.with_name("start.py")
    start.write_text(START_TOGETHER)
    command = [*torchrun(config.ranks, f"--master-port={port}"), str(start), *training]
    with Job(command, output) as job:
        # 1. Wait until training is under way, and then for a random moment of it.
        ranks = ranks_at_work(job, port, config.ranks, UNDER_WAY, _PATIENCE)
        job.running()  # so that all are known
        time.sleep(outcome.delay)
        if not ranks or any(rank.process.gone for rank in ranks):
            outcome.problems.append("training did not begin, or ended before the fault")
            return
        # 2. Break it, and wait for the end.
        victim = ranks[outcome.rank]
        _BREAK[outcome.fault](victim, port)
        _await_end(
            outcome, job, [rank.process for rank in ranks], time.monotonic(), config
        )
        # The record of the rank outlives it: it says where the rank was.
        outcome.place = victim.place


def _alone(
    outcome: Round, config: DictConfig, training: list[str], output: Path
) -> None:
    """Start a rank where no other is."""
    rank, port = str(outcome.rank), str(free_port())
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(config.ranks)}
    place |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    command = [sys.executable, "-c", SAYS_WHEN, *training]
    with Job(command, output, place) as job:
        end = time.monotonic() + _PATIENCE
        while not (
            line := re.search(r"^connects (\S+)\n", output.read_text(), re.MULTILINE)
        ):
            if job.status is not None or time.monotonic() > end:
                outcome.problems.append("the rank did not try to connect")
                return
            time.sleep(0.02)
        # The rank has printed the wall clock's time, and all others here are of the monotonic one.
        start = time.monotonic() - (time.time() - float(line[1]))
        _await_end(outcome, job, job.running(), start, config)
        outcome.place = f"localhost:{port}"


def _await_end(
    outcome: Round, job: Job, ranks: list[Process], start: float, config: DictConfig
) -> None:
    """Wait for the end of all processes, and note when it came."""
    # Longer than a round may take: a late end is then measured, and not taken for no end.
    patience = config.timeout + max(config.margin, _END)
    while job.status is None and time.monotonic() - start < patience:
        # torchrun ends later than the ranks: it looks only from time to time.
        if outcome.ranks_seconds is None and all(rank.gone for rank in ranks):
            outcome.ranks_seconds = round(time.monotonic() - start, 2)
        time.sleep(0.02)
    if (status := job.status) is not None:
        outcome.status, outcome.seconds = status, round(time.monotonic() - start, 2)
        outcome.ranks_seconds = outcome.ranks_seconds or outcome.seconds
    # Processes that end with the command may take a moment longer.
    end = time.monotonic() + _LEAVE
    while job.running() and time.monotonic() < end:
        time.sleep(0.1)
    outcome.left = len(job.running())


def find_problems(outcome: Round, bar: float) -> list[str]:
    """Return what is wrong with a round whose processes had to end within ``bar`` seconds."""
    if outcome.problems:
        return []
    if len(outcome.messages) != 1:
        return [f"{len(outcome.messages)} lines begin with error:"]
    (message,) = outcome.messages
    # Ranks in the subject of the sentence. What follows it also names those that waited. A cut
    # connection has two ends, and either may be at fault.
    blamed = re.findall(r"\d+", re.split(" is lost| has | cannot ", message)[0])
    is_named = str(outcome.rank) in blamed and (
        outcome.fault == "cut" or len(blamed) == 1
    )
    # After a cut the rank continued, to a place that only the message shows.
    places = re.findall(r"in step \d+ at \S+", message)
    is_placed = len(places) >= 2 if outcome.fault == "cut" else outcome.place in message
    problems = []
    if outcome.seconds is None:
        problems.append("it does not end")
    elif outcome.seconds > bar:
        problems.append(f"it ended after {outcome.seconds} s, and not within {bar:g}")
    if outcome.left:
        problems.append(f"{outcome.left} processes are left")
    if outcome.status == 0:
        problems.append("its status is 0")
    if not is_named:
        problems.append(
            f"the message blames {', '.join(blamed)}, and not rank {outcome.rank}"
        )
    if not is_placed:
        problems.append(
            f"the message does not say where rank {outcome.rank} was: {outcome.place}"
        )
    return problems


def summary(rounds: list[Round], timeout: float) -> dict[str, Any]:
    """Return the row of a fault."""
    passed = [outcome for outcome in rounds if not outcome.problems]
    ends = pd.DataFrame(
        [(each.ranks_seconds, each.seconds) for each in rounds], dtype=float
    )
    ranks_end, end = ends.median()
    messages = [outcome.messages[0] for outcome in passed or rounds if outcome.messages]
    return {
        "fault": rounds[0].fault,
        "rounds": len(rounds),
        "failed": len(rounds) - len(passed),
        "ranks' end (s)": round(ranks_end, 2),
        "end (s)": round(end, 2),
        "beyond time-out (s)": round(end - timeout, 2),
        "at most (s)": round(ends[1].max() - timeout, 2),
        "left": sum(outcome.left for outcome in rounds),
        "message": next(iter(messages), ""),
    }


def _check(config: DictConfig) -> None:
    if sys.platform != "linux":
        raise UserError(
            f"bench=failure looks into /proc, on Linux: this is {sys.platform}"
        )
    check_counts(config, "rounds", of="bench.")
    check_above_zero(config, "timeout", "margin")
    are_faults = config.faults and {*config.faults} <= {*FAULTS}
    check_rules(
        config,
        ("ranks", config.ranks >= 2, "is 2 or more"),
        ("faults", are_faults, f"are of {', '.join(FAULTS)}"),
    )
