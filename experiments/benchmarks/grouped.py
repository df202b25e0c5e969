"""Order "grouped" against plain PyTorch: single steps, and whole training loops.

All compute with the same precision, memory format and compilation. On a GPU plain PyTorch is also
captured in a CUDA graph, whole steps with their updates.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from statistics import median
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from toolkit.cli.check_options import check_counts
from toolkit.cost.stage_costs import synchronized_time
from toolkit.model import build, partition
from toolkit.runtime import SingleProcess, StepOptions
from toolkit.runtime.meters.measurements import count_operations
from toolkit.runtime.step_options import allow_tf32
from toolkit.schedule import Schedule, catalog
from toolkit.training.data import Batches, synthetic

_WARM_UP = 3  # weights of two versions are first read in the second step
_CAPTURED = "plain PyTorch captured, step"
_COUNTS = ("image_size", "microbatches", "stages", "batch", "rounds", "steps")

Step = Callable[[Tensor, Tensor], object]


def run(config: DictConfig, device: torch.device, seed: int) -> list[dict[str, Any]]:
    """A row a method: median seconds, images/s, and its ratio to plain PyTorch round by round.

    *to captured*: the median ratio to plain PyTorch in a CUDA graph.

    A step's images are on the device already; those of a loop of ``steps`` steps are read,
    augmented and moved there, and the loop's losses are collected. On a GPU, which works while the
    next step begins, ``steps`` steps are timed at once. *operations*: torch's, of a step.
    """
    check_counts(config, *_COUNTS, of="bench.")
    torch.manual_seed(seed)
    n_images, size = config.microbatches * config.batch, config.image_size
    model = build(config.model, 10, size).to(device)
    inputs = torch.randn(n_images, 3, size, size, device=device)
    targets = torch.randint(10, (n_images,), device=device)
    options = StepOptions(
        precision=config.precision,
        channels_last=config.channels_last,
        compile=config.compile,
        norms=config.norms,
    )
    allow_tf32(options.precision == "tf32")
    plain = Plain(copy.deepcopy(model), options, device)

    def runtime(schedule: Schedule) -> SingleProcess:
        stages = partition(copy.deepcopy(model), config.stages, inputs[: config.batch])
        return SingleProcess(
            stages, schedule, _sgd, F.cross_entropy, options=options, capture=config.capture
        )

    cyclic = runtime(catalog.cyclic(config.microbatches, n_stages=config.stages))
    parallel = runtime(catalog.data_parallel(config.microbatches, n_stages=config.stages))
    images, epochs = synthetic(n_images * config.steps, 1, 10, size), count()
    n_timed = config.steps if device.type == "cuda" else 1

    def timed(step: Step) -> Callable[[], object]:
        return lambda: [step(inputs, targets) for _ in range(n_timed)]

    def loop(train: Callable[[Batches], Iterable[Tensor]]) -> Callable[[], object]:
        def epoch() -> Tensor:
            batches = images.train(n_images, seed, next(epochs), device)
            return torch.stack(list(train(batches))).cpu()

        return epoch

    def grouped(runtime: SingleProcess) -> Callable[[], object]:
        return loop(lambda batches: (result.loss for result in runtime.run(batches)))

    single_steps: dict[str, Step] = {
        "plain PyTorch, step": plain.step,
        "DP grouped, step": parallel.step,
        "CDP-v2 grouped, step": cyclic.step,
    }
    if device.type == "cuda" and not options.in_cuda_graphs:
        captured = Plain(copy.deepcopy(model), options, device)
        single_steps[_CAPTURED] = captured.capture(inputs, targets)
    steps = {name: timed(step) for name, step in single_steps.items()}
    loops = {
        "plain PyTorch, loop": loop(lambda batches: (plain.step(*batch) for batch in batches)),
        "DP grouped, loop": grouped(parallel),
        "CDP-v2 grouped, loop": grouped(cyclic),
    }
    rows = [
        *_rows(alternate(steps, config.rounds, device, _WARM_UP), n_images, n_timed),
        *_rows(alternate(loops, config.rounds, device), n_images, config.steps),
    ]
    if config.compile == "none":
        for row, step in zip(rows, single_steps.values(), strict=False):
            row["operations"] = count_operations(lambda: step(inputs, targets)).total()  # noqa: B023
    return rows


class Plain:
    """A model under plain PyTorch, as one would write it."""

    def __init__(self, model: nn.Module, options: StepOptions, device: torch.device) -> None:
        self.options, self.device = options, device
        self.model: Any = model.train()
        if options.channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)
        self.optimizer = _sgd(self.model.parameters())
        if options.compile != "none":
            self.model = torch.compile(self.model, mode=options.compile)

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of a training step."""
        if self.options.channels_last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        self.options.begin_step()
        self.optimizer.zero_grad()
        with self.options.autocast(self.device):
            loss = F.cross_entropy(self.model(inputs), targets)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def capture(self, inputs: Tensor, targets: Tensor) -> Step:
        """Return a function that replays a training step as a CUDA graph."""
        own_inputs, own_targets = inputs.clone(), targets.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                self.step(own_inputs, own_targets)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = self.step(own_inputs, own_targets)

        def replay(inputs: Tensor, targets: Tensor) -> Tensor:
            own_inputs.copy_(inputs)
            own_targets.copy_(targets)
            graph.replay()
            return loss.clone()

        return replay


def _rows(seconds: dict[str, list[float]], n_images: int, n_steps: int) -> list[dict[str, Any]]:
    """Of methods that have run ``n_steps`` steps at a time; the first is the baseline."""
    rows = []
    for name, taken in seconds.items():
        pairs = zip(taken, next(iter(seconds.values())), strict=True)
        ratios = [mine / theirs for mine, theirs in pairs]  # round by round
        row = {"method": name, "seconds": round(median(taken) / n_steps, 5)}
        row["images/s"] = round(n_steps * n_images / median(taken), 1)
        for column, of in (("ratio", median), ("ratio_min", min), ("ratio_max", max)):
            row[column] = round(of(ratios), 3)
        if _CAPTURED in seconds:
            pairs = zip(taken, seconds[_CAPTURED], strict=True)
            row["to captured"] = round(median(mine / theirs for mine, theirs in pairs), 3)
        else:
            row["to captured"] = None
        rows.append(row | {"operations": None})
    return rows


def _sgd(parameters: Any) -> torch.optim.SGD:
    # As on a GPU by default: one operation for all weights.
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=5e-4, foreach=True)


def alternate(
    methods: Mapping[str, Callable[[], object]],
    rounds: int,
    device: torch.device,
    warm_up: int = 1,
) -> dict[str, list[float]]:
    """Seconds of each call: ``rounds`` of each method, in turn, after ``warm_up`` uncounted."""
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for k in tqdm(range(-warm_up, rounds), unit="round", leave=False):
        for name, method in methods.items():
            start = synchronized_time(device)
            method()
            if k >= 0:
                seconds[name].append(synchronized_time(device) - start)
    return seconds
