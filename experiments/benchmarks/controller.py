"""A controller beside Distributed, its starts, its ends, and trainings that lose ranks."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import cycle, islice
from math import inf
from statistics import median
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor
from torch.nn import functional as F
from tqdm.auto import tqdm

from benchmarks.step_times import mean_step
from benchmarks.training_steps import N_CLASSES, momentum_sgd, random_images
from toolkit.cli.check_options import check_counts
from toolkit.model import Stages, build, partition
from toolkit.runtime import (
    Controlled,
    Controller,
    Distributed,
    JobFailedError,
    SingleProcess,
    join,
)
from toolkit.runtime.microbatches import GlobalBatch
from toolkit.runtime.process_group.shared_status import Process
from toolkit.schedule import Schedule, catalog

ENDS = ("closed", "left", "interrupted", "a rank killed", "caller killed")
_Arguments = tuple[Stages, Schedule, Any, Any]  # of a runtime
# Seconds that are allowed.
_OVERHEAD = 0.002
_START = 1.0
_RECOVERY = 10.0
_END = 10.0  # until all processes of a controller have ended


def run(config: DictConfig, device: torch.device, seed: int) -> list[dict[str, Any]]:
    """Return a row for each question: seconds, the median and the largest, and those allowed."""
    check_counts(config, "image_size", "workers", "batch", "rounds", of="bench.")
    check_counts(config, "steps", "ends", "kills", "keep_every", of="bench.")
    options = {str(name): value for name, value in config.items()}
    chance = random.Random(seed)
    with Controller(config.workers) as controller:
        rows = [
            *_starts(controller, options, seed),
            _overhead(controller, options, seed),
        ]
        rows += [_recoveries(controller, options, seed, chance)]
    return [*rows, *_ends(options, seed)]


def _arguments(
    options: dict[str, Any], schedule: Schedule, seed: int, dtype: torch.dtype
) -> _Arguments:
    torch.manual_seed(seed)
    size = options["image_size"]
    example = torch.empty(options["batch"], 3, size, size, dtype=dtype)
    stages = partition(
        build(options["model"], N_CLASSES, size).to(dtype), schedule.n_stages, example
    )
    return stages, schedule, momentum_sgd, F.cross_entropy


def _batches(
    options: dict[str, Any], seed: int, dtype: torch.dtype
) -> list[GlobalBatch]:
    torch.manual_seed(seed)
    n_images, size = options["workers"] * options["batch"], options["image_size"]
    return [random_images(n_images, size, dtype=dtype) for _ in range(4)]


def _row(question: str, seconds: Sequence[float], allowed: float) -> dict[str, Any]:
    """Return a row of seconds; it has failed if their median is above ``allowed``."""
    middle = round(median(seconds), 4)
    return {
        "what": question,
        "rounds": len(seconds),
        "seconds": middle,
        "most": round(max(seconds), 4),
        "allowed": allowed,
        "failed": int(middle > allowed),
        "steps lost": 0,
    }


def _starts(
    controller: Controller, options: dict[str, Any], seed: int
) -> list[dict[str, Any]]:
    """Time from the call to the first result, in new processes and in the same ones."""
    seconds: list[float] = []
    batches = _batches(options, seed, torch.float32)
    schedules = cycle(
        [catalog.cyclic(options["workers"]), catalog.cyclic(options["workers"], 1)]
    )
    # The first training starts the processes. The others find them, and change the schedule.
    for schedule in islice(schedules, 1 + options["rounds"]):
        arguments = _arguments(options, schedule, seed, torch.float32)
        start = time.perf_counter()
        for result in controller.train(*arguments, batches):
            # The loop runs to the end: a controller has one training at a time.
            if result.step == 0:
                seconds.append(time.perf_counter() - start)
    first_seconds, *next_seconds = seconds
    return [
        _row("first training", [first_seconds], inf),
        _row("next training, by another schedule", next_seconds, _START),
    ]


def _overhead(
    controller: Controller, options: dict[str, Any], seed: int
) -> dict[str, Any]:
    """Time a step beyond one of Distributed, which has the batches, in the same ranks."""
    overheads: list[float] = []
    n_steps = options["steps"]
    batches = _batches(options, seed, torch.float32)
    for _ in tqdm(range(options["rounds"]), unit="round", leave=False):
        # In the same ranks and in turn, so that both find the same load of the machine.
        distributed = controller.processes.call(
            _time_distributed, options, seed, batches
        )[0]
        schedule = catalog.cyclic(options["workers"])
        arguments = _arguments(options, schedule, seed, torch.float32)
        steps = controller.train(*arguments, cycle(batches), n_steps)
        overheads.append(_step_time(steps, n_steps) - distributed)
    return _row("step, beyond Distributed's", overheads, _OVERHEAD)


def _time_distributed(
    options: dict[str, Any], seed: int, batches: list[GlobalBatch]
) -> float:
    """Return the seconds of a step of Distributed; on each rank."""
    n_steps = options["steps"]
    arguments = _arguments(
        options, catalog.cyclic(options["workers"]), seed, torch.float32
    )
    runtime = Distributed(*arguments, world=join(device="cpu"))
    return _step_time(runtime.run(cycle(batches), n_steps), n_steps)


def _step_time(steps: Iterable[Any], n_steps: int) -> float:
    return mean_step([time.perf_counter() for _ in steps], n_steps // 4)


def _recoveries(
    controller: Controller, options: dict[str, Any], seed: int, chance: random.Random
) -> dict[str, Any]:
    """Kill random ranks at random moments; compare losses and weights with a single process's."""
    n, keep_every, n_kills = options["workers"], options["keep_every"], options["kills"]
    schedules = [
        catalog.cyclic(n),
        catalog.cyclic(n, state="sharded"),
        catalog.one_f_one_b(n, n),
    ]
    recoveries = []
    n_differing = 0
    for index, schedule in enumerate(tqdm(schedules, unit="schedule", leave=False)):
        # 1. The same training twice, in float64: to 1e-10, it must not show that ranks were lost.
        single = SingleProcess(*_arguments(options, schedule, seed, torch.float64))
        arguments = _arguments(options, schedule, seed, torch.float64)
        runtime = Controlled(*arguments, controller=controller, keep_every=keep_every)
        # 2. Draw the steps after which a rank is killed. The last one of each share is left out,
        # since after the last step of a training no rank would be missed.
        # Schedules share the kills; each comes within 2 * keep_every steps of its own.
        schedule_kills = len(range(index, n_kills, len(schedules)))
        kill_steps = {
            2 * keep_every * kill + chance.randrange(2 * keep_every - 1)
            for kill in range(schedule_kills)
        }
        n_steps = 2 * keep_every * schedule_kills
        batches = [*islice(cycle(_batches(options, seed, torch.float64)), n_steps)]
        pairs = zip(runtime.run(batches), single.run(batches), strict=True)
        for result, expected in pairs:
            n_differing += not _are_close(result.losses, expected.losses)
            if result.step in kill_steps:
                # The ranks train on meanwhile, so the signal meets them anywhere in a step.
                time.sleep(chance.uniform(0, 0.02))
                os.kill(
                    controller.processes.process_ids[chance.randrange(n)],
                    signal.SIGKILL,
                )
        weights = runtime.module().state_dict().values()
        expected_weights = single.module().state_dict().values()
        n_differing += not all(map(_are_close, weights, expected_weights))
        recoveries += runtime.recoveries
    # A kept state is at most `keep_every` steps old, so no more may be repeated.
    steps_lost = max(recovery.step - recovery.restart for recovery in recoveries)
    seconds = [recovery.seconds for recovery in recoveries]
    row = _row("lost rank, until all continue", seconds, _RECOVERY)
    failures = [
        row["most"] > _RECOVERY,
        steps_lost > keep_every,
        n_differing > 0,
        len(recoveries) != n_kills,
    ]
    return row | {"failed": sum(failures), "steps lost": steps_lost}


def _are_close(tensor: Tensor, expected: Tensor) -> bool:
    return torch.allclose(tensor, expected, rtol=1e-10, atol=1e-12)


def _ends(options: dict[str, Any], seed: int) -> list[dict[str, Any]]:
    """End controllers in mid-training in every way; count those that leave a process."""
    seconds: dict[str, list[float]] = {way: [] for way in ENDS}
    n_failed = dict.fromkeys(ENDS, 0)
    for way in tqdm(
        [*islice(cycle(ENDS), options["ends"])], unit="controller", leave=False
    ):
        end = _kill_caller if way == "caller killed" else partial(_end, way)
        # Timed from the end of the controller until no process is left.
        processes = end(options, seed)
        start = time.perf_counter()
        while not all(process.gone for process in processes):
            if time.perf_counter() - start >= _END:
                break
            time.sleep(0.01)
        seconds[way].append(time.perf_counter() - start)
        # No processes: the caller ended before it could train.
        n_failed[way] += not processes or not all(process.gone for process in processes)
        for process in processes:
            # What is left would slow the next controllers.
            process.kill()
    return [
        _row(f"end: {way}", values, _END) | {"failed": n_failed[way]}
        for way, values in seconds.items()
        if values
    ]


def _begin(
    controller: Controller, options: dict[str, Any], seed: int
) -> tuple[Any, list[Process]]:
    """Train for one step; return the further ones, and all processes."""
    arguments = _arguments(
        options, catalog.cyclic(options["workers"]), seed, torch.float32
    )
    steps = controller.train(
        *arguments, cycle(_batches(options, seed, torch.float32)), 10_000
    )
    next(steps)
    processes = [Process(pid) for pid in controller.processes.process_ids.values()]
    # The parent of the ranks is the process that forks them. It has to end, too.
    parents = {_parent(process.pid) for process in processes}
    return steps, [*processes, *map(Process, parents)]


def _parent(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        # The name of the process, in parentheses, may hold spaces. After it: state, parent.
        return int(file.read().rpartition(")")[2].split()[1])


def _end(way: str, options: dict[str, Any], seed: int) -> list[Process]:
    """End a controller; return what its processes were."""
    controller = Controller(options["workers"])
    steps, processes = _begin(controller, options, seed)
    if way == "interrupted":
        # As Ctrl-C would: in this process, while it waits for the next step.
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    elif way == "a rank killed":
        processes[0].kill()
    if way in ("interrupted", "a rank killed"):
        with suppress(KeyboardInterrupt, JobFailedError):
            for _ in steps:
                pass
    if way == "left":
        steps.close()
    controller.close()
    return processes


def _kill_caller(options: dict[str, Any], seed: int) -> list[Process]:
    """Kill the process of a controller; return what its other processes were."""
    script = (
        "import sys; from benchmarks.controller import be_killed;"
        " be_killed(*eval(sys.argv[1]))"
    )
    command = [sys.executable, "-c", script, repr((options, seed))]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=variables
    ) as caller:
        assert caller.stdout is not None
        # The line comes when training is under way. The caller gets no chance to clean up.
        processes = [Process(int(pid)) for pid in caller.stdout.readline().split()]
        caller.kill()
    return processes


def be_killed(options: dict[str, Any], seed: int) -> None:
    """Train, and print the processes that are to end with this one."""
    steps, processes = _begin(Controller(options["workers"]), options, seed)
    print(*(process.pid for process in processes), flush=True)
    for _ in steps:
        pass
