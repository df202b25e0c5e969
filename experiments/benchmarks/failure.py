"""A job on many processes whose rank fails: whether it ends in time, with one error that names it.

Each round trains by torchrun and does one thing to a random rank at a random moment:

killed   SIGKILL
stopped  SIGSTOP
cut      its connections to the other ranks are shut down; that to the store stays
no_port  instead of training: a rank is started alone, and nobody listens at MASTER_PORT

A round passes if all processes have ended within the time-out and a margin, not with status 0 and
with one line "error: ..." that names the rank and, where it trained, the step and instruction.
"""

import random
import re
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
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
    problems: list[str] = field(default_factory=list)


def run(config: DictConfig, device: torch.device, seed: int) -> list[dict[str, Any]]:
    """Return a row a fault: passed rounds, seconds from the fault to the end, a message."""
    _check(config)
    folder = output_folder()
    rounds: list[Round] = []
    todo = [(number, fault) for number in range(config.rounds) for fault in config.faults]
    for number, fault in (bar := tqdm(todo, unit="round", leave=False)):
        bar.set_description_str(fault)
        rounds.append(done := one_round(config, device, seed, fault, number, folder))
        lists = ("messages", "problems")
        rows = [asdict(r) | {n: " | ".join(getattr(r, n)) for n in lists} for r in rounds]
        write_csv(folder / "rounds.csv", rows)
        if done.problems:
            log = f"{folder}/{fault}_{number}.log"
            bar.write(f"{fault}_{number} fails: {'; '.join(done.problems)}; its output is {log}")
    return [summary([r for r in rounds if r.fault == f], config.timeout) for f in config.faults]


def one_round(
    config: DictConfig, device: torch.device, seed: int, fault: str, number: int, folder: Path
) -> Round:
    """Start a job and break it; keep the output of one that does not pass in ``folder``."""
    chance = random.Random(f"{seed} {fault} {number}")
    alone = fault == "no_port"
    rank = chance.randrange(1 if alone else 0, config.ranks)  # rank 0 alone would listen itself
    done = Round(fault, number, rank, round(chance.uniform(0.3, 2), 3))
    options = [f"stages={config.ranks}", f"microbatches={config.ranks}", "epochs=1000"]
    options += ["schedule=cdp_v2", "data=digits", "runtime=distributed", "tracking.mode=disabled"]
    options += [f"runtime.timeout={config.timeout}", f"device={device.type}"]
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "output.log"
        training = [str(TRAIN), *options, f"hydra.run.dir={scratch}/train"]
        (_alone if alone else _broken)(done, config, training, output)
        text = output.read_bytes().decode(errors="replace")  # with its carriage returns
        done.messages = re.findall(r"^error: (.*)", text, re.MULTILINE)
        done.problems += problems(done, config.timeout + config.margin)
        if done.problems:
            shutil.copy(output, folder / f"{fault}_{number}.log")
    return done


def _broken(done: Round, config: DictConfig, training: list[str], output: Path) -> None:
    """Train under torchrun until the fault and its end."""
    port, start = faults.free_port(), output.with_name("start.py")
    start.write_text(faults.START_TOGETHER)
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={config.ranks}"]
    with Job([*torchrun, f"--master-port={port}", str(start), *training], {}, output) as job:
        ranks = faults.ranks_at_work(job, port, config.ranks, UNDER_WAY, _PATIENCE)
        job.running()  # so that all are known
        time.sleep(done.delay)
        if not ranks or any(rank.process.gone for rank in ranks):
            done.problems.append("training did not begin, or ended before the fault")
            return
        victim = ranks[done.rank]
        faults.FAULTS[done.fault](victim, port)
        _await_end(done, job, [rank.process for rank in ranks], time.monotonic(), config)
        done.place = victim.place


def _alone(done: Round, config: DictConfig, training: list[str], output: Path) -> None:
    """Start a rank where no other is."""
    place = {"RANK": done.rank, "LOCAL_RANK": done.rank, "WORLD_SIZE": config.ranks}
    place |= {"MASTER_ADDR": "localhost", "MASTER_PORT": faults.free_port()}
    command = [sys.executable, "-c", faults.SAYS_WHEN, *training]
    with Job(command, {name: str(value) for name, value in place.items()}, output) as job:
        end = time.monotonic() + _PATIENCE
        while not (said := re.search(r"^connects (\S+)\n", output.read_text(), re.MULTILINE)):
            if job.status is not None or time.monotonic() > end:
                done.problems.append("the rank did not try to connect")
                return
            time.sleep(0.02)
        start = time.monotonic() - (time.time() - float(said[1]))
        _await_end(done, job, job.running(), start, config)
        done.place = f"localhost:{place['MASTER_PORT']}"


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
    if len(done.messages) != 1:
        return [f"{len(done.messages)} lines begin with error:"]
    (message,) = done.messages
    blamed = re.findall(r"\d+", re.split(" is lost| has | cannot ", message)[0])
    named = str(done.rank) in blamed and (done.fault == "cut" or len(blamed) == 1)
    # After a cut the rank continued, to a place that only the message shows.
    places = re.findall(r"in step \d+ at \S+", message)
    placed = len(places) >= 2 if done.fault == "cut" else done.place in message
    late = f"it ended after {done.seconds} s, and not within {bar:g}"
    found = {
        late if done.seconds else "it does not end": done.seconds is None or done.seconds > bar,
        f"{done.left} processes are left": done.left,
        "its status is 0": done.status == 0,
        f"the message blames {', '.join(blamed)}, and not rank {done.rank}": not named,
        f"the message does not say where rank {done.rank} was: {done.place}": not placed,
    }
    return [problem for problem, is_true in found.items() if is_true]


def summary(rounds: list[Round], timeout: float) -> dict[str, Any]:
    """Return the row of a fault."""
    passed = [done for done in rounds if not done.problems]
    ends = pd.DataFrame([(r.ranks_seconds, r.seconds) for r in rounds], dtype=float)
    of_ranks, end = ends.median()
    messages = [done.messages[0] for done in passed or rounds if done.messages]
    return {
        "fault": rounds[0].fault,
        "rounds": len(rounds),
        "failed": len(rounds) - len(passed),
        "ranks' end (s)": round(of_ranks, 2),
        "end (s)": round(end, 2),
        "beyond time-out (s)": round(end - timeout, 2),
        "at most (s)": round(ends[1].max() - timeout, 2),
        "left": sum(done.left for done in rounds),
        "message": next(iter(messages), ""),
    }


def _check(config: DictConfig) -> None:
    if sys.platform != "linux":
        raise UserError(f"bench=failure looks into /proc, on Linux: this is {sys.platform}")
    check_counts(config, "rounds", of="bench.")
    for name, holds, rule in (
        ("ranks", config.ranks >= 2, "is 2 or more"),
        ("timeout", config.timeout > 0, "is above 0, in seconds"),
        ("margin", config.margin > 0, "is above 0, in seconds"),
        ("faults", config.faults and {*config.faults} <= {*FAULTS}, f"are of {', '.join(FAULTS)}"),
    ):
        if not holds:
            raise UserError(f"bench.{name} {rule}: got {config[name]}")
