"""How well a plan predicts: candidates of a plan run on two ranks, against their simulation.

Stages are timed on the ranks, links by messages of two sizes, the memory by copies. Nothing is
fitted to the runs that are compared.
"""

import random
import time
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch.nn import functional as F
from tqdm import tqdm

from toolkit.cli.check_options import check_counts
from toolkit.cost import Costs, Hardware, Timeline, profile, recomputing, simulate
from toolkit.cost.timeline import ACTIVATIONS
from toolkit.errors import UserError
from toolkit.format import MB
from toolkit.model import build, partition
from toolkit.plan.candidates import Candidate, candidates
from toolkit.runtime import Distributed, StepOptions, World, join, launch
from toolkit.schedule.instruction import Action
from toolkit.schedule.steady_state import steps_to_time

_RANKS = 2
_RECORDED = 6  # training steps whose memory is measured, before those that are timed
_MESSAGES = 1 << 12, 1 << 22  # bytes
_REPEATS = 15
_SUM = Action.BACKWARD, Action.BACKWARD_WEIGHT


def run(config: DictConfig, device: torch.device, seed: int) -> list[dict[str, Any]]:
    """A row a candidate: step time and memory of the fullest rank, predicted and measured.

    Memory is that of weights, gradient sums and activations: at most that of all the weights that
    messages can bring, activations, and one sum a stage.
    """
    if device.type != "cpu":
        raise UserError(f"bench=predictions runs on the CPU: got device={device}")
    check_counts(config, "image_size", "batch", "steps", "configurations", of="bench.")
    return launch(measure, _RANKS, dict(config), seed)[0]


def chosen(options: dict[str, Any], seed: int) -> list[tuple[str, Candidate]]:
    """Models and candidates, drawn from all that use the ranks."""
    tried = [c for c in candidates(_RANKS, options["batch"]) if c.schedule.n_ranks == _RANKS]
    pairs = [(name, candidate) for name in options["models"] for candidate in tried]
    return random.Random(seed).sample(pairs, min(options["configurations"], len(pairs)))


def measure(options: dict[str, Any], seed: int) -> list[dict[str, Any]]:
    """On each rank: all candidates, one after another."""
    world, size = join(device="cpu"), options["image_size"]
    hardware = links(world)
    x, y = torch.randn(options["batch"], 3, size, size), torch.randint(10, (options["batch"],))
    rows = []
    for name, candidate in tqdm(chosen(options, seed), disable=world.rank > 0):
        torch.manual_seed(seed)
        schedule, example = candidate.schedule, x[: candidate.batch]
        try:
            stages = partition(
                build(name, 10, size),
                schedule.n_stages,
                example,
                candidate.partition,
                check=False,
            )
        except UserError:  # the model has fewer stages
            continue
        costs = recomputing(_both(world, profile(stages, example)), candidate.checkpoint)
        runtime = Distributed(
            stages,
            schedule,
            lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
            F.cross_entropy,
            options=StepOptions(checkpoint=candidate.checkpoint),
            world=world,
            record=_RECORDED,
        )
        list(runtime.run([(x, y)] * _RECORDED))
        measured = runtime.measurements()
        found = measured.timeline()
        world.barrier()
        late = 1 + schedule.max_staleness  # steps at the ends are others' as well
        n_steps = max(options["steps"], 2 * late + 1)
        marks = [time.perf_counter()]
        marks += [time.perf_counter() for _ in runtime.run([(x, y)] * n_steps)]
        seconds = (marks[-1 - late] - marks[late]) / (n_steps - 2 * late)
        seconds = max(world.gather(seconds))
        state = [cost.parameter_bytes for cost in costs]
        program = schedule.lower(steps_to_time(schedule, 8)).verify()
        predicted = simulate(program, costs, hardware, state)
        kinds = {change.kind for change in found.changes}
        same = [change for change in predicted.changes if change.kind in kinds]
        peaks = [max(_peaks(timeline)) for timeline in (replace(predicted, changes=same), found)]
        kept = [change for change in same if change.kind == ACTIVATIONS]
        summed = [{i.stage for i in order if i.action in _SUM} for order in program.ranks]
        each = (
            _peaks(replace(predicted, changes=kept)),
            measured.most_weights(),
            [sum(costs[stage].gradient_bytes for stage in stages) for stages in summed],
        )
        most = max(map(sum, zip(*each, strict=True)))
        rows.append({
            "model": name, "schedule": candidate.label,
            "predicted ms": round(predicted.step_time * 1e3, 2),
            "measured ms": round(seconds * 1e3, 2),
            "error (%)": round(100 * (predicted.step_time / seconds - 1), 1),
            "predicted MB": round(peaks[0] / MB, 3), "measured MB": round(peaks[1] / MB, 3),
            "at most MB": round(most / MB, 3),
            "memory error (%)": round(100 * (peaks[0] / peaks[1] - 1), 1),
        })  # fmt: skip
    return rows


def links(world: World) -> Hardware:
    """Time messages between the two ranks, and copies in memory."""
    messages = [torch.zeros(n_bytes // 4) for n_bytes in _MESSAGES]
    taken: list[list[float]] = [[], []]
    for _ in range(_REPEATS):
        for message, seconds in zip(messages, taken, strict=True):  # in turn: other work slows both
            world.barrier()
            begin = time.perf_counter()
            for sender in (0, 1):  # there and back
                (dist.send if world.rank == sender else dist.recv)(message, 1 - world.rank)
            seconds.append((time.perf_counter() - begin) / 2)
    few, many = (max(world.gather(median(seconds))) for seconds in taken)
    bandwidth = (_MESSAGES[1] - _MESSAGES[0]) / (many - few)
    source, target, rates = torch.zeros(1 << 22), torch.zeros(1 << 22), []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        target.copy_(source)
        rates.append(2 * source.nbytes / (time.perf_counter() - begin))
    copies = min(world.gather(median(rates)))
    return Hardware("this machine", 1e11, copies, bandwidth, few)


def _both(world: World, costs: Costs) -> Costs:
    """Costs with the mean of the seconds that the ranks measured."""
    own = [(cost.forward_seconds, cost.backward_seconds) for cost in costs]
    found = zip(*world.gather(own), strict=True)
    pairs = [[sum(values) / len(values) for values in zip(*stage, strict=True)] for stage in found]
    return [
        replace(cost, forward_seconds=forward, backward_seconds=backward)
        for cost, (forward, backward) in zip(costs, pairs, strict=True)
    ]


def _peaks(timeline: Timeline) -> list[float]:
    return [timeline.peak_memory(rank) for rank in range(timeline.n_ranks)]
