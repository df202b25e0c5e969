"""Searched rank orders: known optima again, brute force, and unequal stages beside the catalogue.

Seconds of stages are those of the hardware's roofline, or measured on the device.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

import torch
from omegaconf import DictConfig
from tqdm import tqdm

from toolkit.cli.check_options import check_counts
from toolkit.cost import UNIT, Costs, Hardware, StageCost, profile
from toolkit.cost.pipeline_table import pipelines
from toolkit.cost.steady_steps import simulate_steady_steps
from toolkit.errors import UserError, check_choice
from toolkit.format import GIB
from toolkit.model import build, gpt, partition
from toolkit.plan import SearchSpace, best_offsets, search, search_steady
from toolkit.plan.order_problem import OrderProblem, RankOrder
from toolkit.plan.search_space import order_problem
from toolkit.schedule import Schedule

MODELS = ("resnet50", "decoder")
_UNIT = StageCost(1, 2, activation_bytes=1, forward_seconds=1, backward_seconds=2)
# Of GPT-2, rounded up, which makes the last stage the largest.
_VOCABULARY, _LENGTH = 50304, 1024

Row = dict[str, Any]


def run(config: DictConfig, device: torch.device, seed: int) -> list[Row]:
    """Return a row for each problem.

    *least* is the optimum that is known, or the catalogue's best in the memory. Known optima are in
    forwards and activations of a stage, those of models in ms and GiB.
    """
    check_counts(
        config, "known", "microbatches", "ranks", "stages", "batch", of="bench."
    )
    check_counts(
        config, "sequences", "image_size", "layers", "width", "seconds", of="bench."
    )
    n_ranks, n_microbatches = config.known
    rows = [*_known(n_ranks, n_microbatches, config.seconds, seed)]
    rows += _brute_force(config.brute, seed)
    for name in config.models:
        check_choice("bench.models", name, MODELS)
    for name, ranks in tqdm(
        [*product(config.models, config.ranks)], unit="problem", leave=False
    ):
        rows += _unequal(name, ranks, config, device, seed)
    return rows


def _known(p: int, m: int, seconds: float, seed: int) -> Iterator[Row]:
    """Search for schedules that are optimal under their assumptions, without a catalogue."""
    one_way = [*range(p)]
    # In forwards; a backward takes two. A rank with one stage computes for 3 m, and waits
    # while the pipeline fills and drains. With two it computes for 6 m, and ZB-V never waits.
    for name, placement, memory, optimum in (
        ("1F1B", one_way, p, 3 * (m + p - 1)),
        ("ZB-H1", one_way, p, 3 * m + p - 1),
        ("ZB-V", one_way + one_way[::-1], 2 * p, 6 * m),
    ):
        begin = time.perf_counter()
        space = SearchSpace(
            (_UNIT,) * len(placement),
            m,
            placement=placement,
            memory=memory,
            split_backward=name != "1F1B",
        )
        result = search(space, catalogue=False, seconds=seconds, seed=seed)
        yield _row(
            _Problem(name, p, m, len(placement) // p, memory, "closed form"),
            optimum,
            result.seconds,
            result.bound,
            begin,
        )
    begin = time.perf_counter()
    offsets = best_offsets([1.0] * p, p)
    problem = _Problem("cyclic, activations", p, p, None, None, "closed form")
    yield _row(problem, p * (p + 1) / 2, offsets.peak, offsets.bound, begin)


def _brute_force(n: int, seed: int) -> Iterator[Row]:
    """Try all orders of ``n`` stages and micro-batches; halves in order of micro-batches."""
    for split in (False, True):
        # Stages of unequal times, for which no closed form is known.
        costs = [replace(_UNIT, forward_seconds=1 + stage % 2) for stage in range(n)]
        problem = order_problem(costs, n, range(n), UNIT, split, [float(n)] * n)
        if not split:
            problem = _unrolled(problem)
        rank_orders = [_rank_orders(problem, rank) for rank in range(n)]
        if not split:
            # The forwards of rank 0, which have even numbers, number the micro-batches.
            rank_orders[0] = [
                order for order in rank_orders[0] if _has_sorted_forwards(order)
            ]
        # Some of these orders make ranks wait for each other: their period is infinite.
        optimum = min(map(problem.period, product(*rank_orders)))
        begin = time.perf_counter()
        space = SearchSpace(costs, n, memory=float(n), split_backward=split)
        result = search(space, catalogue=False, seconds=10, seed=seed)
        name = "halves" if split else "whole backwards"
        n_orders = prod(map(len, rank_orders))
        yield _row(
            _Problem(name, n, n, 1, n, f"{n_orders} orders"),
            optimum,
            result.seconds,
            result.bound,
            begin,
        )


def _unrolled(problem: OrderProblem) -> OrderProblem:
    """Return the problem with a chain for each op, so that micro-batches need no order."""
    m, n_chains = problem.n_microbatches, len(problem.seconds)
    needs = []
    for microbatch in range(m):
        for chain_needs in problem.needs:
            shifted = [
                (chain + microbatch * n_chains, lag) for chain, lag in chain_needs
            ]
            needs.append(tuple(shifted))
    return OrderProblem(
        problem.placement * m,
        1,
        problem.kinds,
        problem.seconds * m,
        tuple(needs),
        problem.kept_bytes * m,
        problem.workspace_bytes * m,
        problem.waiting_bytes * m,
        problem.room,
        problem.update_seconds * m,
    )


def _has_sorted_forwards(order: RankOrder) -> bool:
    forwards = [chain for chain in order if chain % 2 == 0]
    return forwards == sorted(forwards)


def _rank_orders(problem: OrderProblem, rank: int) -> list[RankOrder]:
    """Return all orders of a rank that fit and run what an op needs before it."""
    chains = problem.chains_of_rank[rank]
    orders: list[RankOrder] = [[]]
    for _ in range(len(chains) * problem.n_microbatches):
        orders = [
            [*order, chain]
            for order in orders
            for chain in chains
            if _may_follow(problem, order, chain)
        ]
    return [order for order in orders if problem.fits(rank, order)]


def _may_follow(problem: OrderProblem, order: RankOrder, chain: int) -> bool:
    """Return whether the next op of ``chain`` may come after ``order``, on the same rank."""
    n_before = order.count(chain)
    if n_before == problem.n_microbatches:
        return False
    n_kinds = len(problem.kinds)
    rank = problem.placement[chain // n_kinds]
    return all(
        order.count(needed_chain) > n_before
        for needed_chain, _ in problem.needs[chain]
        if problem.placement[needed_chain // n_kinds] == rank
    )


def _unequal(
    name: str, p: int, config: DictConfig, device: torch.device, seed: int
) -> Iterator[Row]:
    """Search for orders of a model's stages, each in the memory of a method of the catalogue.

    These methods are its fastest flush, 1F1B, and its fastest with late weights, of those that keep
    each stage on one rank, as the search does.
    """
    hardware = Hardware.preset(config.hardware)
    m = p * config.microbatches
    # The catalogue has p stages, or 2 p in a V.
    stage_counts = {p, 2 * p, *(p * stages for stages in config.stages)}
    costs_of = {
        n_stages: _costs(name, n_stages, config, device) for n_stages in stage_counts
    }
    schedules, _ = pipelines(p, m)
    timed: dict[str, tuple[float, float]] = {}  # seconds and bytes
    for method, schedule in schedules.items():
        if all(len({*ranks}) == 1 for ranks in schedule.layout.cycles):
            timed[method] = _timed(schedule, costs_of[schedule.n_stages], hardware)
    delayed_methods = [method for method in timed if schedules[method].max_staleness]
    flushed = [method for method in timed if method not in delayed_methods]
    fastest_flush = min(flushed, key=timed.__getitem__)
    fastest_late = min(delayed_methods, key=timed.__getitem__)
    # Each method sets a limit of memory. The search has to beat all of the catalogue that fits it,
    # whose weights are as fresh or late.
    for method in dict.fromkeys((fastest_flush, "1F1B", fastest_late)):
        begin = time.perf_counter()
        memory = timed[method][1]
        is_late = method in delayed_methods
        fitting = [
            rival
            for rival in (delayed_methods if is_late else flushed)
            # The method itself fits, whatever rounding does.
            if timed[rival][1] <= memory * (1 + 1e-9)
        ]
        best = min(fitting, key=timed.__getitem__)
        results = []
        for stages in config.stages:
            find_order = search_steady if is_late else search
            try:
                space = SearchSpace(
                    costs_of[stages * p],
                    m,
                    ranks=p,
                    memory=memory,
                    hardware=hardware,
                    split_backward=not is_late,
                )
                result = find_order(space, seconds=config.seconds, seed=seed)
            except UserError as error:  # the stages do not fit
                tqdm.write(f"{stages} stages per rank: {error}")
            else:
                results.append((result.seconds, stages, result.bound))
        if results:
            seconds, stages, bound = min(results)
            origin = f"{best} in the memory of {method}"
            problem = _Problem(name, p, m, stages, memory / GIB, origin)
            yield _row(problem, timed[best][0] * 1e3, seconds * 1e3, bound * 1e3, begin)


def _timed(schedule: Schedule, costs: Costs, hardware: Hardware) -> tuple[float, float]:
    """Return the seconds of a step, and the bytes of the fullest rank."""
    timeline = simulate_steady_steps(schedule, costs, hardware)
    return timeline.step_time, max(map(timeline.peak_memory, range(schedule.n_ranks)))


def _costs(name: str, n_stages: int, config: DictConfig, device: torch.device) -> Costs:
    with device if config.measured else torch.device("meta"):
        if name == "resnet50":
            model: torch.nn.Module = build(name, 1000, config.image_size)
            example = torch.zeros(config.batch, 3, config.image_size, config.image_size)
        else:
            model = gpt(
                _VOCABULARY, _LENGTH, config.layers, config.width, config.width // 64
            )
            example = torch.zeros(config.sequences, _LENGTH, dtype=torch.long)
    return profile(partition(model, n_stages, example, "flops"), example)


@dataclass(frozen=True)
class _Problem:
    """What is searched for."""

    name: str
    n_ranks: int
    n_microbatches: int
    stages_per_rank: int | None
    memory: float | None  # of a rank
    origin: str  # of the least value


def _row(
    problem: _Problem,
    least_value: float,
    found_value: float,
    bound: float,
    begin: float,
) -> Row:
    return {
        "problem": problem.name,
        "ranks": problem.n_ranks,
        "micro-batches": problem.n_microbatches,
        "stages a rank": problem.stages_per_rank,
        "memory": problem.memory and round(problem.memory, 3),
        "of": problem.origin,
        "least": round(least_value, 3),
        "found": round(found_value, 3),
        "bound": round(bound, 3),
        "proven": found_value <= bound * (1 + 1e-3),
        "gain": f"{1 - found_value / least_value:z.1%}",
        "seconds": round(time.perf_counter() - begin, 1),
    }
