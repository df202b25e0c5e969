"""Cyclic data parallelism on links of limited bandwidth, against DDP and its relatives.

Ranks are processes of this machine in network namespaces, their links limited by token buckets. C
is the time of a training step without any message, M that in which all parameters go from one rank
to another: links are set to ratios of M to C. In every round all methods train on each link, in
random order; medians over rounds are quoted, and ratios to DDP. Linux, as root.

Stages sleep for the time that a device would compute, so that a few cores carry many ranks, and the
simulator predicts each step time; or a network is computed. A run given the ``hydra.run.dir`` of an
earlier one continues it.
"""

import json
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from math import inf, isnan
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from benchmarks import network, slept
from benchmarks.network import Array, Traffic
from toolkit.cli import output_folder
from toolkit.cli.check_options import check_counts
from toolkit.cost import Hardware
from toolkit.errors import UserError
from toolkit.figures import link_times, save
from toolkit.files import write_csv
from toolkit.format import table as format_table
from toolkit.model import build, partition
from toolkit.runtime import Distributed, World, join, launch, report
from toolkit.runtime.baselines import DDP, DelayedAllReduce
from toolkit.schedule import Schedule, catalog

Task = SimpleNamespace
"""What every method trains: the options of the benchmark, and ``workers`` and ``seed``."""
Train = Callable[[int], Iterator[object]]
"""Trains a number of steps, and yields at the end of each."""
Times = list[list[float]]
"""Of each rank when its steps ended, by time.monotonic(), which a machine's processes share."""

_COMPUTES = 3  # runs without messages; their median counts
_SENDS = 3  # of all parameters; their median counts
_HALF = {"compression": "bf16"}
_PACED = {"pacing": True, "chunk_mb": 0.25}
METHODS: dict[str, tuple[Callable[..., Any], Any, dict[str, Any]]] = {
    "DDP": (DDP, 0, {}),
    "DDP tuned": (DDP, 0, {"bucket_mb": 4.0, "bucket_view": True}),
    "DDP 16-bit": (DDP, 0, _HALF),
    "delayed all-reduce": (DelayedAllReduce, 1, {}),
    "delayed all-reduce 16-bit": (DelayedAllReduce, 1, _HALF),
    **{
        f"{name}{suffix}": (Distributed, delay, options)
        for name, delay in (("CDP-v1", 1), ("CDP-v2", "freshest"))
        for suffix, options in (
            ("", {}),
            (" 16-bit", _HALF),
            (" paced", _PACED),
            (" 16-bit paced", _HALF | _PACED),
        )
    },
}
"""Of each method the runtime, the delay of its weights, and the runtime's options."""
COMPUTE = "compute"
"""The same computation without any message: a lower bound, not a method."""
ALL = (COMPUTE, *METHODS)
SLEPT = ("DDP", "delayed all-reduce", "CDP-v1", "CDP-v2")
"""What is compared, unless given, if stages sleep."""
_BUCKETS = 4  # of DDP if stages sleep: ResNet-50 has 100 MB, and a bucket of torch 25 MB


@dataclass(frozen=True)
class Link:
    """One setting of the links."""

    workers: int
    ratio: float  # of M to C that was asked for; 0: no limit
    mbit: float | None  # a second, of the limit
    compute: float  # C: seconds of a step without messages
    one_way: float  # M: seconds in which all parameters go from one rank to another
    latency: float = 0.0  # seconds of a message of a byte

    @property
    def name(self) -> str:
        return link_name(self.ratio)


def link_name(ratio: float) -> str:
    return "unshaped" if ratio == 0 else f"M = {'' if ratio == 1 else f'{ratio:g} '}C"


def images_of(task: Task) -> tuple[Tensor, Tensor]:
    """Random images of all workers, and their classes."""
    torch.manual_seed(task.seed)
    n, size = task.workers * task.batch, task.image_size
    classes = torch.randint(10, (n,))
    if task.sleep:
        return torch.randn(n, slept.FEATURES), classes
    return torch.randn(n, 3, size, size), classes


def fresh_model(task: Task) -> nn.Module:
    torch.manual_seed(task.seed)
    if task.sleep:
        return slept.model(task.stages, task.megabytes, task.sleep)
    return build(task.model, 10, task.image_size)


def methods_of(task: Task) -> tuple[str, ...]:
    return tuple(task.methods) or (SLEPT if task.sleep else ALL)


def schedule_of(task: Task, method: str) -> Schedule:
    runtime, delay, _ = METHODS[method]
    if delay == 0:
        return catalog.data_parallel(task.workers, n_stages=task.stages)
    chains = "rotated" if runtime is Distributed and delay == 1 else "in_order"
    return catalog.cyclic(task.workers, delay, n_stages=task.stages, chains=chains)


def make(task: Task, method: str, world: World) -> Train:
    """Make a method, ready to train from the first weights on. Every rank calls it."""
    images, classes = images_of(task)
    model = fresh_model(task)
    if method == COMPUTE:
        mine = (whole.chunk(task.workers)[world.rank] for whole in (images, classes))
        return _plain(model, *mine)
    runtime, _, options = METHODS[method]
    if task.sleep:
        stages = slept.cut(model, task.stages)
    else:
        stages = partition(model, task.stages, images[: task.batch], by=task.partition)
    if task.sleep and runtime is DDP:
        # Half a stage less than a bucket's stages: the last of them fills it.
        filled = (_in_bucket(task) - 0.5) * 1e6 * task.megabytes / task.stages
        options = options | {"bucket_mb": filled / 2**20}
    schedule = schedule_of(task, method)
    made = runtime(stages, schedule, _sgd, F.cross_entropy, world=world, **options)
    return lambda n_steps: made.run([(images, classes)] * n_steps)


def _in_bucket(task: Task) -> int:
    """Stages in a bucket of DDP, if they sleep."""
    return -(-task.stages // _BUCKETS)


def predicted(task: Task, link: Link, method: str) -> float:
    """Seconds of a step by the simulator, for stages that sleep.

    Of the same steps as those measured: messages may still pile up in them.
    """
    n_bytes = 1e6 * task.megabytes
    bandwidth = n_bytes / max(link.one_way - link.latency, 1e-9)
    hardware = Hardware("measured", inf, inf, bandwidth, link.latency)
    costs = slept.costs(task.stages, task.megabytes, link.compute)
    schedule = schedule_of(task, method)
    runtime = METHODS[method][0]
    if runtime is DDP:
        costs = slept.merged(costs, _in_bucket(task))
        schedule = catalog.data_parallel(task.workers, n_stages=len(costs))
    elif runtime is DelayedAllReduce:
        schedule = catalog.data_parallel(task.workers, delay=1, n_stages=task.stages)
    return step_time(slept.predicted_times(schedule, costs, hardware, task.steps), task.skip)


def _plain(model: nn.Module, images: Tensor, classes: Tensor) -> Train:
    optimizer = _sgd(model.parameters())

    def train(n_steps: int) -> Iterator[None]:
        for _ in range(n_steps):
            optimizer.zero_grad()
            F.cross_entropy(model(images), classes).backward()
            optimizer.step()
            yield

    return train


def _sgd(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def train_all(net: network.Network, task: Task) -> None:
    """Measure the links, then train by every method in all rounds on all links, as one rank.

    Rank 0 reports the links, then of each run its link, round, method, and :data:`Times`.
    """
    rank = int(os.environ["RANK"])
    network.enter(net.ranks[rank])
    # The store of ``launch`` cannot be reached from here, so rank 0 has another.
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    os.environ |= {"MASTER_ADDR": network.address(0), "MASTER_PORT": "29500"}
    os.environ["GLOO_SOCKET_IFNAME"] = network.INTERFACE
    torch.set_num_threads(1)
    world = join(device="cpu", timeout=task.timeout)
    made: dict[str, Train] = {}

    def shape(rate: float | None) -> None:
        if rank == 0:
            net.shape(rate)
        world.barrier()

    def train(method: str) -> Times:
        if method not in made:
            made[method] = make(task, method, world)
        world.barrier()
        return world.gather([time.monotonic() for _ in made[method](task.steps)])

    def send(n_bytes: int) -> float:
        """Seconds from rank 0 to rank 1."""
        content = torch.zeros(n_bytes, dtype=torch.uint8)
        world.barrier()
        begin = time.monotonic()
        if rank < 2:
            dist.recv(content, 0) if rank else dist.send(content, 1)
        moments = world.gather(time.monotonic() if rank else begin)
        return moments[1] - moments[0]

    n_bytes = sum(4 * parameter.numel() for parameter in fresh_model(task).parameters())
    links = task.links or calibrate(task, n_bytes, shape, train, send)
    methods = methods_of(task)
    if rank == 0:
        report(links)
    for number in range(task.rounds):
        for link in links:
            shape(None if link.mbit is None else 1e6 * link.mbit)
            chance = random.Random(f"{task.seed} {number} {link.name}")
            for method in chance.sample(methods, len(methods)):
                if (link.ratio, number, method) in task.done:
                    continue
                times = train(method)
                if rank == 0:
                    report((link, number, method, times))


def calibrate(
    task: Task,
    n_bytes: int,
    shape: Callable[[float | None], object],
    train: Callable[[str], Times],
    send: Callable[[int], float],
) -> list[Link]:
    """Measure C, limit the links so that M is a multiple of it, and measure M."""
    compute = median(step_time(train(COMPUTE), task.skip) for _ in range(_COMPUTES))
    links = []
    for ratio in task.ratios:
        rate = 8 * n_bytes / (ratio * compute) if ratio else None
        shape(rate)
        one_way = median(send(n_bytes) for _ in range(_SENDS))
        # The least: the others also wait for a core.
        latency = min(send(1) for _ in range(_SENDS))
        mbit = None if rate is None else rate / 1e6
        links.append(Link(task.workers, ratio, mbit, compute, one_way, latency))
    return links


def step_time(times: Times, skip: int) -> float:
    """Seconds of a step of the slowest rank, from the end of step ``skip`` (from 0) on."""
    return max((moments[-1] - moments[skip]) / (len(moments) - 1 - skip) for moments in times)


# The network and the table, from outside

_DRAWN = ("DDP", "CDP-v1", "CDP-v1 paced")  # whose traffic is shown ...
_DRAWN_AT = (1.0, 0.0)  # ... at these ratios
_DIGITS = {
    "step (s)": 4, "min": 4, "max": 4, "M/C": 3, "/ DDP": 3, "/ tuned": 3, "least": 3, "paired": 3,
    "most": 3, "peak/mean": 2, "MB sent": 2, "predicted (s)": 4, "error (%)": 1,
}  # fmt: skip

Row = dict[str, Any]

Curves = dict[str, dict[str, Array]]
"""Mbit/s of all ranks together in each window of two training steps, by link and method."""


@dataclass(frozen=True)
class Run:
    """What one run of a method has shown."""

    workers: int
    ratio: float
    round: int
    method: str
    seconds: float  # of a step
    peak_over_mean: float  # of all ranks' traffic together
    mb_sent: float  # by a rank in a step


def run(config: DictConfig, device: torch.device, seed: int) -> list[Row]:
    """A row for each number of workers, link and method."""
    check(config, device)
    folder = output_folder()
    options: Any = OmegaConf.to_container(config)
    options["seed"] = seed
    links, runs = earlier(folder, options)
    tasks = []
    for workers in config.workers:
        here = [link for link in links if link.workers == workers]
        done = {(run.ratio, run.round, run.method) for run in runs if run.workers == workers}
        tasks.append(Task(**options | {"workers": workers, "links": here, "done": done}))
        train(tasks[-1], folder, links, runs)
    print(f"\n{format_table([{'link': link.name, **asdict(link)} for link in links])}")
    rows = table(runs, links)
    if config.sleep:
        add_predictions(rows, tasks, links)
    return rows


def earlier(folder: Path, options: dict[str, Any]) -> tuple[list[Link], list[Run]]:
    """What a run with the same ``options`` has left in ``folder``."""
    path, text = folder / "options.json", json.dumps(options, indent=1)
    if not path.exists():
        path.write_text(text)
    if path.read_text() != text:
        raise UserError(f"{folder} is of other options than these: choose another hydra.run.dir")
    return _read(Link, folder / "links.csv"), _read(Run, folder / "runs.csv")


def _read(kind: Any, path: Path) -> list[Any]:
    if not path.exists():
        return []
    found = pd.read_csv(path).astype(object)
    return [kind(**row) for row in found.where(found.notna(), None).to_dict("records")]


def add_predictions(rows: list[Row], tasks: Sequence[Task], links: Sequence[Link]) -> None:
    """Add to each row the simulator's step time and its error, and print how many are near."""
    by_size = {task.workers: task for task in tasks}
    at = {(link.workers, link.name): link for link in links}
    near = []
    for row in rows:
        if row["method"] == COMPUTE:
            continue
        place = row["workers"], row["link"]
        seconds = predicted(by_size[row["workers"]], at[place], row["method"])
        error = 100 * (seconds / row["step (s)"] - 1)
        near.append(abs(error) <= 5)
        row |= {"predicted (s)": round(seconds, 4), "error (%)": round(error, 1)}
    print(f"\npredicted within 5 % of measured: {sum(near)} of {len(near)} step times")


def train(task: Task, folder: Path, links: list[Link], runs: list[Run]) -> None:
    """Train one number of workers; add to ``links`` and ``runs``, write them and a figure."""
    curves: Curves = {}
    n_runs = task.rounds * len(task.ratios) * len(methods_of(task))
    if n_runs == len(task.done):
        return
    with (
        tqdm(total=n_runs, initial=len(task.done), unit="run", leave=False) as bar,
        network.network(task.workers) as net,
        closing(Traffic(net)) as traffic,
    ):

        def take(_: int, found: Any) -> None:
            if isinstance(found, list):
                links.extend(link for link in found if link not in links)
                write_csv(folder / "links.csv", [asdict(link) for link in links])
                return
            done, curve = measured(task, traffic, *found)
            runs.append(done)
            write_csv(folder / "runs.csv", [asdict(each) for each in runs])
            if done.round == 0 and done.method in _DRAWN and done.ratio in _DRAWN_AT:
                curves.setdefault(link_name(done.ratio), {})[done.method] = curve
            bar.update()

        launch(train_all, task.workers, net, task, on_report=take, timeout=task.timeout)
    rows = table(runs, [link for link in links if link.workers == task.workers])
    save(link_times(rows, curves, network.WINDOW), folder / f"links_{task.workers}")


def measured(
    task: Task, traffic: Traffic, link: Link, number: int, method: str, times: Times
) -> tuple[Run, Array]:
    """A run, and the traffic of two of its steps, in Mbit/s."""
    seconds = step_time(times, task.skip)
    start, end = times[0][task.skip], times[0][-1]
    moments, sent = traffic.samples(start, end)
    windows = network.in_windows(moments, sent, start, end)
    sums = np.array([np.interp((start, end), moments, of_rank) for of_rank in sent.T])
    mb_sent = float((sums[:, 1] - sums[:, 0]).mean()) / (task.steps - 1 - task.skip) / 1e6
    peak = network.peak_over_mean(windows)
    shown = windows[: round(2 * seconds / network.WINDOW)].sum(axis=1)
    done = Run(link.workers, link.ratio, number, method, seconds, peak, mb_sent)
    return done, 8e-6 * shown / network.WINDOW


def check(config: DictConfig, device: torch.device) -> None:
    """Refuse what cannot be measured, or not here."""
    if device.type != "cpu":
        raise UserError(f"bench=links computes on the CPU: got {device}; give device=cpu")
    check_counts(config, "workers", "image_size", "batch", "stages", "rounds", of="bench.")
    for name, holds, rule in (
        ("skip", config.skip >= 0, "is 0 or more"),
        ("steps", config.steps >= config.skip + 2, "is bench.skip and 2 or more"),
        ("ratios", min(config.ratios, default=-1) >= 0, "are of M to C, 0 for no limit"),
        ("methods", {*config.methods} <= {*ALL}, f"are of {', '.join(ALL)}"),
        ("sleep", 0 <= config.sleep < inf, "is the seconds of a step, or 0 to compute"),
        ("megabytes", 0 < config.megabytes < inf, "is above 0"),
        *(
            (name, len({*config[name]}) == len(config[name]), "are different")
            for name in ("workers", "ratios", "methods")
        ),
    ):
        if not holds:
            raise UserError(f"bench.{name} {rule}: got {config[name]}")
    for workers in config.workers:
        network.check(workers)


def table(runs: Sequence[Run], links: Sequence[Link]) -> list[Row]:
    """A row for each number of workers, link and method; None where there is no number."""
    rows: list[Row] = []
    every = pd.DataFrame([asdict(run) for run in runs])
    for link in links:
        here = every[(every.workers == link.workers) & (every.ratio == link.ratio)]
        seconds = here.pivot(index="round", columns="method", values="seconds")
        seconds = seconds.reindex(columns=ALL).dropna(axis="columns", how="all")
        step, paired = seconds.median(), seconds.div(seconds.get("DDP", np.nan), axis="index")
        sending = here[here.method != COMPUTE].groupby("method").median(numeric_only=True)
        sending = sending.reindex(step.index)
        columns = {
            "M/C": link.one_way / link.compute,
            "step (s)": step, "min": seconds.min(), "max": seconds.max(),
            "/ DDP": step / step.get("DDP", np.nan),
            "/ tuned": step / step.get("DDP tuned", np.nan),
            "least": paired.min(), "paired": paired.median(), "most": paired.max(),
            "peak/mean": sending.peak_over_mean, "MB sent": sending.mb_sent,
        }  # fmt: skip
        found = pd.DataFrame(columns).round(_DIGITS).to_dict("index")
        for method, numbers in found.items():
            row = {"workers": link.workers, "link": link.name, "method": method}
            rows.append(row | {k: None if isnan(v) else v for k, v in numbers.items()})
    return rows
