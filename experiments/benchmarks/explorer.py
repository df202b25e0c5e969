"""How soon the explorer has redrawn itself: from a control's change to the drawing's HTML."""

import time
from statistics import median
from typing import Any

import torch
from omegaconf import DictConfig
from tqdm import tqdm

from toolkit.cli.check_options import check_counts
from toolkit.figures import Explorer
from toolkit.figures.explorer import choice, inspection, page

_BOUND = 0.3  # seconds
_PLACED = {
    "dp": ["one", "per_stage_and_microbatch"],
    "cdp_v2": ["one", "per_stage", "per_stage_and_microbatch"],
    "zero_cdp_v2": ["per_stage_and_microbatch"],
}


def run(config: DictConfig, device: torch.device, seed: int) -> list[dict[str, Any]]:
    """A row a schedule and placement: median and longest milliseconds, with empty caches."""
    del device, seed
    check_counts(config, "size", "rounds", of="bench.")
    cases: list[tuple[str, str | None]] = [(name, None) for name in choice.METHODS]
    cases += [(name, placement) for name, placed in _PLACED.items() for placement in placed]
    explorers = [Explorer(name, config.size, config.size, placement=p) for name, p in cases]
    rounds = tqdm(range(config.rounds), unit="round", leave=False)
    seconds = [[_redrawn(explorer) for explorer in explorers] for _ in rounds]
    return [
        {
            "schedule": name,
            "placement": placement or "",
            "median ms": round(1e3 * median(taken)),
            "longest ms": round(1e3 * max(taken)),
            "bound ms": round(1e3 * _BOUND),
            "failed": int(median(taken) > _BOUND),
        }
        for (name, placement), taken in zip(cases, zip(*seconds, strict=True), strict=True)
    ]


def _redrawn(explorer: Explorer) -> float:
    explorer.n_steps.value = 2
    for module in (choice, inspection, page):
        for function in vars(module).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()
    begin = time.perf_counter()
    explorer.n_steps.value = 3
    taken = time.perf_counter() - begin
    explorer.to_html()  # raises if the schedule is impossible
    return taken
