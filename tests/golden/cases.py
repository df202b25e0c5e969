"""What must not change, computed from public names only.

``python -m tests.golden.cases`` rewrites ``golden.json``; do that only where the mathematics
changed, and say in the commit why.
"""

import json
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from toolkit.cost import UNIT, profile, simulate
from toolkit.model import partition
from toolkit.runtime import Distributed, SingleProcess, join
from toolkit.runtime.baselines import DDP, FSDP, DelayedAllReduce, TorchPipelining
from toolkit.schedule import RandomDelay, Schedule, catalog

PATH = Path(__file__).with_name("golden.json")
STEPS = 3

PROGRAMS = {
    "dp": catalog.data_parallel(4),
    "dp_one": catalog.data_parallel(4, "one"),
    "dp_model_parallel": catalog.data_parallel(3, "per_stage_and_microbatch"),
    "dp_delay_1": catalog.data_parallel(2, delay=1),
    "dp_random": catalog.data_parallel(
        2, delay=RandomDelay(most=2, seed=3), accumulate=2
    ),
    "zero_dp": catalog.data_parallel(4, state="sharded"),
    "cdp_v1": catalog.cyclic(4, 1),
    "cdp_v2": catalog.cyclic(4),
    "cdp_v2_one": catalog.cyclic(4, placement="one"),
    "cdp_v2_per_stage": catalog.cyclic(4, placement="per_stage"),
    "cdp_v1_model_parallel": catalog.cyclic(3, 1, "per_stage_and_microbatch"),
    "cdp_v2_model_parallel": catalog.cyclic(3, placement="per_stage_and_microbatch"),
    "cdp_delay_2": catalog.cyclic(2, 2),
    "cdp_v1_rotated": catalog.cyclic(4, 1, chains="rotated"),
    "cdp_v1_predicted": catalog.cyclic(4, 1, correction="extrapolate"),
    "cdp_v2_accumulated": catalog.cyclic(2, accumulate=2),
    "cdp_v2_three_on_two_stages": catalog.cyclic(3, n_stages=2),
    "zero_cdp_v1": catalog.cyclic(4, 1, state="sharded"),
    "zero_cdp_v2": catalog.cyclic(4, state="sharded"),
    "published": catalog.published(4),
    "published_8": catalog.published(8),
    "gradient_accumulation": catalog.gradient_accumulation(2, 3),
    "gpipe": catalog.gpipe(2, 3),
    "one_f_one_b": catalog.one_f_one_b(3, 5),
    "interleaved_1f1b": catalog.interleaved_1f1b(4, 2, 2),
    "zero_bubble": catalog.zero_bubble(3, 4),
    "zb_v": catalog.zb_v(4, 4),
    "v_half": catalog.v_half(4, 4),
    "v_min": catalog.v_min(4, 4),
    "pipedream_2bw": catalog.pipedream_2bw(2, 3),
    "pipedream": catalog.pipedream(3, 2),
    "eager_1f1b": catalog.eager_1f1b(3, 6),
    "looped_bfs": catalog.looped_bfs(4, 3, 2),
    "zb_h2": catalog.zb_h2(3, 6),
    "one_f_one_b_v": catalog.one_f_one_b_v(6, 4),
    "hanayo": catalog.hanayo(8, 4, 2),
    "chimera": catalog.chimera(4, 4),
    "dualpipe": catalog.dualpipe(4, 8),
    "dualpipe_v": catalog.dualpipe_v(4, 4),
    "rank_orders": Schedule.from_rank_orders(
        ("0F0 1F0 1B0 0B0 0F1 0B1", "1F1 1B1"), name="orders"
    ),
}

BASELINES = {
    "ddp": (DDP, catalog.data_parallel(2)),
    "fsdp": (FSDP, catalog.data_parallel(2, state="sharded")),
    "delayed_allreduce": (DelayedAllReduce, catalog.cyclic(2, 1)),
    "torch_pipelining": (TorchPipelining, catalog.gpipe(2, 2)),
}
ON_TWO_RANKS = {
    "dp": catalog.data_parallel(2),
    "zero_dp": catalog.data_parallel(2, state="sharded"),
    "cdp_v1": catalog.cyclic(2, 1),
    "cdp_v2": catalog.cyclic(2),
    "zero_cdp_v1": catalog.cyclic(2, 1, state="sharded"),
    "zero_cdp_v2": catalog.cyclic(2, state="sharded"),
    "cdp_v2_per_stage": catalog.cyclic(2, placement="per_stage"),
    "pipedream_2bw": catalog.pipedream_2bw(2, 3),
    "zb_v": catalog.zb_v(4, 4),
}


def counts(schedule: Schedule) -> dict[str, object]:
    """Instructions by kind, peaks, traffic and simulated time of two steps of ``schedule``."""
    program = schedule.lower(2)
    kinds: dict[str, int] = {}
    for instructions in program.ranks:
        for instruction in instructions:
            kind = instruction.action.name
            kinds[kind] = kinds.get(kind, 0) + 1
    stages, example = (
        _stages(schedule),
        torch.empty(2, 2, dtype=torch.float64, device="meta"),
    )
    timeline = simulate(program, profile(stages, example), UNIT)
    traffic = [rank for slot in program.traffic() for rank in slot]
    return {
        "staleness": [list(row) for row in schedule.staleness]
        if schedule.n_stages < 8
        else [],
        "ranks": schedule.n_ranks,
        "instructions": dict(sorted(kinds.items())),
        "peak_activations": list(program.peak_activations()),
        "messages": sum(sent.messages for sent in traffic),
        "units": float(sum(sent.units for sent in traffic)),
        "bytes": list(timeline.bytes_sent()),
        "seconds": max(span.end for span in timeline.spans),
    }


def trajectory(runtime: object, schedule: Schedule) -> list[float]:
    """Every weight, in order, after :data:`STEPS` steps of ``runtime``."""
    list(runtime.run(_batches(schedule)))
    state = runtime.module().state_dict()
    return [float(x) for name in sorted(state) for x in state[name].flatten()]


def in_one_process(schedule: Schedule, order: str) -> list[float]:
    """Trajectory of a :class:`SingleProcess`."""
    return trajectory(
        SingleProcess(_stages(schedule), schedule, _sgd, F.cross_entropy, order=order),
        schedule,
    )


def on_two_ranks() -> dict[str, list[float]]:
    """Trajectories of the runtimes that take a process a rank. Every rank calls it."""
    world = join(device="cpu")
    made = {
        f"distributed {name}": (Distributed, s) for name, s in ON_TWO_RANKS.items()
    } | BASELINES
    return {
        name: trajectory(make(_stages(s), s, _sgd, F.cross_entropy, world=world), s)
        for name, (make, s) in made.items()
    }


def _stages(schedule: Schedule):
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(8))
    ).double()
    example = torch.zeros(2, 2, dtype=torch.float64)
    return partition(model, schedule.n_stages, example, "parameters")


def _batches(schedule: Schedule):
    generator = torch.Generator().manual_seed(1)
    size = 2 * schedule.n_microbatches
    return [
        (
            torch.randn(size, 2, generator=generator, dtype=torch.float64),
            torch.randint(2, (size,), generator=generator),
        )
        for _ in range(STEPS)
    ]


def _sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9, weight_decay=5e-3)


if __name__ == "__main__":
    from toolkit.runtime import launch

    found = {
        "programs": {name: counts(schedule) for name, schedule in PROGRAMS.items()},
        "trajectories": {
            name: in_one_process(s, "grouped") for name, s in PROGRAMS.items()
        },
        "two_ranks": launch(on_two_ranks, 2)[0],
    }
    PATH.write_text(json.dumps(found, indent=0))
