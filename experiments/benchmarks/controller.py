"""A controller beside Distributed, its starts, its ends, and trainings that lose ranks."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from functools import partial
from itertools import cycle, islice
from statistics import median
from typing import Any

import torch
from omegaconf import DictConfig
from torch.nn import functional as F
from tqdm.auto import tqdm

from toolkit.cli.check_options import check_counts
from toolkit.model import Stages, build, partition
from toolkit.runtime import Controlled, Controller, Distributed, JobFailedError, SingleProcess, join
from toolkit.runtime.microbatches import Batch
from toolkit.runtime.process_group.shared_status import Process
from toolkit.schedule import Schedule, catalog

ENDS = ("closed", "left", "interrupted", "a rank killed", "caller killed")
_Given = tuple[Stages, Schedule, Any, Any]
_OPTIMIZER = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
_OVERHEAD, _START, _RECOVERY = 0.002, 1.0, 10.0  # most seconds
_GONE = 10.0  # most seconds until all processes of a controller have ended


def run(config: DictConfig, device: torch.device, seed: int) -> list[dict[str, Any]]:
    """Return a row for each question: seconds, the median and the most, beside what is allowed."""
    counts = "image_size", "workers", "batch", "rounds", "steps", "ends", "kills", "keep_every"
    check_counts(config, *counts, of="bench.")
    options = {str(name): value for name, value in config.items()}
    chance = random.Random(seed)
    with Controller(config.workers) as controller:
        rows = [*_starts(controller, options, seed), _overhead(controller, options, seed)]
        rows += [_recoveries(controller, options, seed, chance)]
    return [*rows, *_ends(options, seed)]


def _arguments(
    options: dict[str, Any], schedule: Schedule, seed: int, dtype: torch.dtype
) -> _Given:
    torch.manual_seed(seed)
    size = options["image_size"]
    example = torch.empty(options["batch"], 3, size, size, dtype=dtype)
    stages = partition(build(options["model"], 10, size).to(dtype), schedule.n_stages, example)
    return stages, schedule, _OPTIMIZER, F.cross_entropy


def _batches(options: dict[str, Any], seed: int, dtype: torch.dtype) -> list[Batch]:
    torch.manual_seed(seed)
    n, size = options["workers"] * options["batch"], options["image_size"]
    return [(torch.randn(n, 3, size, size, dtype=dtype), torch.randint(10, (n,))) for _ in range(4)]


def _row(what: str, found: Iterable[float], bar: float, **more: Any) -> dict[str, Any]:
    """A row of seconds; it has failed if their median is above ``bar``."""
    found = list(found)
    middle, most = round(median(found), 4), round(max(found), 4)
    values = {"rounds": len(found), "seconds": middle, "most": most, "allowed": bar}
    return {"what": what} | values | {"failed": int(middle > bar), "steps lost": 0} | more


def _starts(controller: Controller, options: dict[str, Any], seed: int) -> list[dict[str, Any]]:
    """Seconds from the call to the first result, in new processes and in the same ones."""
    seconds: list[float] = []
    batches = _batches(options, seed, torch.float32)
    schedules = cycle([catalog.cyclic(options["workers"]), catalog.cyclic(options["workers"], 1)])
    for schedule in islice(schedules, 1 + options["rounds"]):
        arguments = _arguments(options, schedule, seed, torch.float32)
        start = time.perf_counter()
        for result in controller.train(*arguments, batches):
            seconds += [time.perf_counter() - start] if result.step == 0 else []
    first, *others = seconds
    what = ("first training", "next training, by another schedule")
    return [_row(what[0], [first], float("inf")), _row(what[1], others, _START)]


def _overhead(controller: Controller, options: dict[str, Any], seed: int) -> dict[str, Any]:
    """Seconds of a step beyond those of Distributed, which has the batches, in the same ranks."""
    extra: list[float] = []
    given, n = (options, catalog.cyclic(options["workers"]), seed, torch.float32), options["steps"]
    batches = _batches(options, seed, torch.float32)
    for _ in tqdm(range(options["rounds"]), unit="round", leave=False):
        alone = controller.processes.call(_by_itself, given, batches, n)[0]
        steps = controller.train(*_arguments(*given), cycle(batches), n)
        extra.append(_step_time(steps, n) - alone)
    return _row("step, beyond Distributed's", extra, _OVERHEAD)


def _by_itself(given: Any, batches: list[Batch], n_steps: int) -> float:
    """On each rank: seconds of a step of Distributed."""
    runtime = Distributed(*_arguments(*given), world=join(device="cpu"))
    return _step_time(runtime.run(cycle(batches), n_steps), n_steps)


def _step_time(steps: Iterable[Any], n_steps: int) -> float:
    marks = [time.perf_counter() for _ in steps]
    skipped = n_steps // 4
    return (marks[-1] - marks[skipped]) / (len(marks) - 1 - skipped)


def _recoveries(
    controller: Controller, options: dict[str, Any], seed: int, chance: random.Random
) -> dict[str, Any]:
    """Kill random ranks at random moments; compare losses and weights with a single process's."""
    n, every, kills = options["workers"], options["keep_every"], options["kills"]
    schedules = [catalog.cyclic(n), catalog.cyclic(n, state="sharded"), catalog.one_f_one_b(n, n)]
    lost, differing = [], 0
    for k, schedule in enumerate(tqdm(schedules, unit="schedule", leave=False)):
        arguments = _arguments(options, schedule, seed, torch.float64)
        single = SingleProcess(*_arguments(options, schedule, seed, torch.float64))
        runtime = Controlled(*arguments, controller=controller, keep_every=every)
        n_kills = len(range(k, kills, len(schedules)))
        n_steps = 2 * every * n_kills
        batches = list(islice(cycle(_batches(options, seed, torch.float64)), n_steps))
        at = {2 * every * kill + chance.randrange(2 * every - 1) for kill in range(n_kills)}
        pairs = zip(runtime.run(batches), single.run(batches), strict=True)
        for found, expected in pairs:
            differing += not torch.allclose(found.losses, expected.losses, rtol=1e-10, atol=1e-12)
            if found.step in at:
                time.sleep(chance.uniform(0, 0.02))
                os.kill(controller.processes.process_ids[chance.randrange(n)], signal.SIGKILL)
        weights = (x.module().state_dict() for x in (runtime, single))
        differing += not all(
            torch.allclose(a, b, rtol=1e-10, atol=1e-12)
            for a, b in zip(*(x.values() for x in weights), strict=True)
        )
        lost += runtime.recoveries
    steps = max(recovery.step - recovery.restart for recovery in lost)
    row = _row("lost rank, until all continue", [x.seconds for x in lost], _RECOVERY)
    failures = [row["most"] > _RECOVERY, steps > every, differing > 0, len(lost) != kills]
    return row | {"failed": sum(failures), "steps lost": steps}


def _ends(options: dict[str, Any], seed: int) -> list[dict[str, Any]]:
    """End controllers in mid-training in every way; count those that leave a process."""
    seconds: dict[str, list[float]] = {how: [] for how in ENDS}
    left = dict.fromkeys(ENDS, 0)
    for how in tqdm([*islice(cycle(ENDS), options["ends"])], unit="controller", leave=False):
        found = (_kill_caller if how == "caller killed" else partial(_end, how))(options, seed)
        start = time.perf_counter()
        while not all(process.gone for process in found) and time.perf_counter() - start < _GONE:
            time.sleep(0.01)
        seconds[how].append(time.perf_counter() - start)
        left[how] += not found or not all(process.gone for process in found)
        for process in found:
            process.kill()
    return [
        _row(f"end: {how}", values, _GONE, failed=left[how])
        for how, values in seconds.items()
        if values
    ]


def _begin(controller: Controller, options: dict[str, Any], seed: int) -> tuple[Any, list[Process]]:
    """Train for one step; return the further ones, and all processes."""
    arguments = _arguments(options, catalog.cyclic(options["workers"]), seed, torch.float32)
    steps = controller.train(*arguments, cycle(_batches(options, seed, torch.float32)), 10_000)
    next(steps)
    processes = [Process(pid) for pid in controller.processes.process_ids.values()]
    parents = {_parent(process.pid) for process in processes}
    return steps, [*processes, *map(Process, parents)]


def _parent(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def _end(how: str, options: dict[str, Any], seed: int) -> list[Process]:
    """End a controller; return what its processes were."""
    controller = Controller(options["workers"])
    steps, processes = _begin(controller, options, seed)
    if how == "interrupted":
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    elif how == "a rank killed":
        processes[0].kill()
    try:
        for _ in steps if how in ("interrupted", "a rank killed") else ():
            pass
    except (KeyboardInterrupt, JobFailedError):
        pass
    if how == "left":
        steps.close()
    controller.close()
    return processes


def _kill_caller(options: dict[str, Any], seed: int) -> list[Process]:
    """Kill the process of a controller; return what its other processes were."""
    script = (
        "import sys; from benchmarks.controller import be_killed; be_killed(*eval(sys.argv[1]))"
    )
    command = [sys.executable, "-c", script, repr((options, seed))]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) as caller:
        assert caller.stdout is not None
        found = [Process(int(pid)) for pid in caller.stdout.readline().split()]
        caller.kill()
    return found


def be_killed(options: dict[str, Any], seed: int) -> None:
    """Train, and print the processes that are to end with this one."""
    steps, processes = _begin(Controller(options["workers"]), options, seed)
    print(*(process.pid for process in processes), flush=True)
    for _ in steps:
        pass
