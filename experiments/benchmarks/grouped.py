"""One training step of CDP-v2, order "grouped", against plain PyTorch on the same global batch."""

import copy
from statistics import median
from typing import Any

import torch
from omegaconf import DictConfig
from torch.nn import functional as F

from benchmarks.timing import alternate, ratios
from toolkit.model import build, partition
from toolkit.runtime import SingleProcess
from toolkit.schedule import catalog


def run(config: DictConfig, device: torch.device, seed: int) -> list[dict[str, Any]]:
    """A row a method: median seconds, images/s, and its ratio to plain PyTorch round by round."""
    for name in ("image_size", "batch", "rounds"):
        if config[name] < 1:
            raise ValueError(f"bench.{name} is 1 or more: got {config[name]}")
    torch.manual_seed(seed)
    n_images = config.microbatches * config.batch
    model = build(config.model, 10, config.image_size).to(device)
    inputs = torch.randn(n_images, 3, config.image_size, config.image_size, device=device)
    targets = torch.randint(10, (n_images,), device=device)

    plain = copy.deepcopy(model).train()
    plain_optimizer = _sgd(plain.parameters())

    def plain_step() -> None:
        plain_optimizer.zero_grad()
        F.cross_entropy(plain(inputs), targets).backward()
        plain_optimizer.step()

    schedule = catalog.cyclic(config.microbatches, n_stages=config.stages)
    stages = partition(model, config.stages, inputs[: config.batch])
    runtime = SingleProcess(stages, schedule, _sgd, F.cross_entropy, order="grouped")
    methods = {
        "plain PyTorch": plain_step,
        f"{schedule.name} grouped": lambda: runtime.step(inputs, targets),
    }
    seconds = alternate(methods, config.rounds, device)
    rows = []
    for name, taken in seconds.items():
        low, middle, high = ratios(taken, seconds["plain PyTorch"])
        rows.append(
            {
                "method": name,
                "seconds": round(median(taken), 5),
                "images/s": round(n_images / median(taken), 1),
                "ratio": round(middle, 3),
                "ratio_min": round(low, 3),
                "ratio_max": round(high, 3),
            }
        )
    return rows


def _sgd(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=5e-4)
