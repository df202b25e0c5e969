"""Searched rank orders: known optima again, brute force, and unequal stages beside the catalogue.

Seconds of stages are those of the hardware's roofline, or measured on the device.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import torch
from omegaconf import DictConfig
from tqdm import tqdm

from toolkit.cli.check_options import check_counts
from toolkit.cost import UNIT, Costs, Hardware, StageCost, profile, simulate
from toolkit.cost.pipeline_table import pipelines
from toolkit.errors import UserError, check_choice
from toolkit.format import GIB
from toolkit.model import build, gpt, partition
from toolkit.plan import SearchSpace, best_offsets, search, search_steady
from toolkit.plan.order_problem import OrderProblem, RankOrder
from toolkit.plan.search_space import order_problem
from toolkit.schedule import Schedule
from toolkit.schedule.steady_state import steps_to_time

MODELS = ("resnet50", "decoder")
_UNIT = StageCost(1, 2, activation_bytes=1, forward_seconds=1, backward_seconds=2)
_VOCABULARY, _LENGTH = 50304, 1024  # of GPT-2, rounded up, which makes the last stage the largest


def run(config: DictConfig, device: torch.device, seed: int) -> list[dict[str, Any]]:
    """A row a problem: *least* is the optimum that is known, or the catalogue's best in the memory.

    Known optima are in forwards and activations of a stage, those of models in ms and GiB.
    """
    names = "known", "microbatches", "ranks", "stages", "batch", "sequences", "image_size"
    check_counts(config, *names, "layers", "width", "seconds", of="bench.")
    p, m = config.known
    rows = [*_known(p, m, config.seconds, seed), *_brute_force(config.brute, seed)]
    for name in config.models:
        check_choice("bench.models", name, MODELS)
    for name, ranks in tqdm([*product(config.models, config.ranks)], unit="problem", leave=False):
        rows += _unequal(name, ranks, config, device, seed)
    return rows


def _known(p: int, m: int, seconds: float, seed: int) -> Iterator[dict[str, Any]]:
    """Schedules that are optimal under their assumptions: search gets these, and no catalogue."""
    there = [*range(p)]
    for name, placement, memory, least in (
        ("1F1B", there, p, 3 * (m + p - 1)),
        ("ZB-H1", there, p, 3 * m + p - 1),
        ("ZB-V", there + there[::-1], 2 * p, 6 * m),
    ):
        begin, costs = time.perf_counter(), (_UNIT,) * len(placement)
        space = SearchSpace(
            costs, m, placement=placement, memory=memory, split_backward=name != "1F1B"
        )
        found = search(space, catalogue=False, seconds=seconds, seed=seed)
        times = least, found.seconds, found.bound
        yield _row((name, p, m, len(costs) // p), memory, "closed form", times, begin)
    begin, peaks = time.perf_counter(), best_offsets([1.0] * p, p)
    held = p * (p + 1) / 2, peaks.peak, peaks.bound
    yield _row(("cyclic, activations", p, p, None), None, "closed form", held, begin)


def _brute_force(n: int, seed: int) -> Iterator[dict[str, Any]]:
    """``n`` stages and micro-batches: all orders; in halves, those in order of micro-batches."""
    for split in (False, True):
        costs = [replace(_UNIT, forward_seconds=1 + j % 2) for j in range(n)]
        given = order_problem(costs, n, range(n), UNIT, split, [float(n)] * n)
        all_orders = given if split else _unrolled(given)
        words = [_words(all_orders, rank) for rank in range(n)]
        if not split:  # the forwards of rank 0 number the micro-batches
            words[0] = [w for w in words[0] if (f := [c for c in w if c % 2 == 0]) == sorted(f)]
        least = min(map(all_orders.period, product(*words)))
        begin = time.perf_counter()
        space = SearchSpace(costs, n, memory=float(n), split_backward=split)
        found = search(space, catalogue=False, seconds=10, seed=seed)
        name = "halves" if split else "whole backwards"
        tried = prod(map(len, words))
        times = least, found.seconds, found.bound
        yield _row((name, n, n, 1), n, f"{tried} orders", times, begin)


def _unrolled(given: OrderProblem) -> OrderProblem:
    """The problem with a chain for each op: orders need not run micro-batches in order."""
    m, size = given.n_microbatches, len(given.seconds)
    needs = [
        tuple((d + k * size, lag) for d, lag in needed) for k in range(m) for needed in given.needs
    ]
    return OrderProblem(
        given.placement * m, 1, given.kinds, given.seconds * m, tuple(needs), given.kept_bytes * m,
        given.workspace_bytes * m, given.waiting_bytes * m, given.room, given.update_seconds * m,
    )  # fmt: skip


def _words(given: OrderProblem, rank: int) -> list[RankOrder]:
    """All orders of a rank that fit and run what an op needs before it."""
    chains, m = given.chains_of_rank[rank], given.n_microbatches
    found: list[RankOrder] = [[]]
    for _ in range(len(chains) * m):
        found = [[*word, c] for word in found for c in chains if _may_follow(given, word, c)]
    return [word for word in found if given.fits(rank, word)]


def _may_follow(given: OrderProblem, word: RankOrder, c: int) -> bool:
    k, own = word.count(c), given.placement[c // len(given.kinds)]
    needed = [d for d, _ in given.needs[c] if given.placement[d // len(given.kinds)] == own]
    return k < given.n_microbatches and all(word.count(d) > k for d in needed)


def _unequal(
    name: str, p: int, config: DictConfig, device: torch.device, seed: int
) -> Iterator[dict[str, Any]]:
    """A model's stages, each row in the memory of a method of the catalogue.

    These are its fastest flush, 1F1B, and its fastest with late weights, of those that keep each
    stage on one rank, as the search does.
    """
    hardware, m = Hardware.preset(config.hardware), p * config.microbatches
    costs = {
        n: _costs(name, n, config, device) for n in {p, 2 * p, *(p * n for n in config.stages)}
    }
    made, _ = pipelines(p, m)
    timed = {
        label: _timed(schedule, costs[schedule.n_stages], hardware)
        for label, schedule in made.items()
        if all(len({*ranks}) == 1 for ranks in schedule.layout.cycles)
    }
    late = [label for label in timed if made[label].max_staleness]
    fresh = [label for label in timed if label not in late]
    limits = [min(labels, key=timed.__getitem__) for labels in (fresh, late)]
    for limit in dict.fromkeys((limits[0], "1F1B", limits[1])):
        memory, begin, attempts = timed[limit][1], time.perf_counter(), []
        alike = late if limit in late else fresh
        best = min(
            (label for label in alike if timed[label][1] <= memory * (1 + 1e-9)),
            key=timed.__getitem__,
        )
        for n in config.stages:
            find = search_steady if limit in late else search
            try:
                space = SearchSpace(
                    costs[n * p],
                    m,
                    ranks=p,
                    memory=memory,
                    hardware=hardware,
                    split_backward=limit not in late,
                )
                found = find(space, seconds=config.seconds, seed=seed)
            except UserError as error:  # the stages do not fit
                tqdm.write(f"{n} stages a rank: {error}")
            else:
                attempts.append((found.seconds, n, found.bound))
        if attempts:
            took, n, bound = min(attempts)
            times = timed[best][0] * 1e3, took * 1e3, bound * 1e3
            of = f"{best} in the memory of {limit}"
            yield _row((name, p, m, n), memory / GIB, of, times, begin)


def _timed(schedule: Schedule, costs: Costs, hardware: Hardware) -> tuple[float, float]:
    """Seconds of a step, and bytes of the fullest rank."""
    timeline = simulate(schedule.lower(steps_to_time(schedule)).verify(), costs, hardware)
    return timeline.step_time, max(map(timeline.peak_memory, range(schedule.n_ranks)))


def _costs(name: str, n_stages: int, config: DictConfig, device: torch.device) -> Costs:
    where = device if config.measured else torch.device("meta")
    with where:
        if name == "resnet50":
            model: torch.nn.Module = build(name, 1000, config.image_size)
            example = torch.zeros(config.batch, 3, config.image_size, config.image_size)
        else:
            model = gpt(_VOCABULARY, _LENGTH, config.layers, config.width, config.width // 64)
            example = torch.zeros(config.sequences, _LENGTH, dtype=torch.long)
    return profile(partition(model, n_stages, example, "flops"), example)


def _row(
    sizes: tuple[str, int, int, int | None],
    memory: float | None,
    of: str,
    times: tuple[float, float, float],
    begin: float,
) -> dict[str, Any]:
    least, found, bound = times
    return {
        **dict(zip(("problem", "ranks", "micro-batches", "stages a rank"), sizes, strict=True)),
        "memory": memory and round(memory, 3),
        "of": of,
        "least": round(least, 3),
        "found": round(found, 3),
        "bound": round(bound, 3),
        "proven": found <= bound * (1 + 1e-3),
        "gain": f"{1 - found / least:z.1%}",
        "seconds": round(time.perf_counter() - begin, 1),
    }
