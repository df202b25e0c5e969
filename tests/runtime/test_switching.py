"""Schedules chosen while training: decisions, replay to the bit, fall-back, and agreement."""

import copy
from math import isnan

import pytest
import torch
from torch.nn import functional as F

from tests.runtime.conform import sgd
from tests.runtime.models import assert_same, cut, make_batches, residual
from toolkit.cost import Hardware, StageCost
from toolkit.errors import UserError
from toolkit.options import SwitchOptions
from toolkit.runtime import Distributed, SingleProcess, Switching, join, launch
from toolkit.runtime.message_layout import Layouts
from toolkit.runtime.meters.running_costs import running_costs
from toolkit.runtime.switching import COSTS, LOSS_CALM, LOSS_ROSE, choose_schedule
from toolkit.schedule import after, catalog

DP, V1, V2 = catalog.data_parallel(2), catalog.cyclic(2, 1), catalog.cyclic(2)
CANDIDATES = {"dp": DP, "cdp_v1": V1, "cdp_v2": V2}


@pytest.mark.parametrize(
    ("seconds", "present", "options", "expected"),
    [
        ((1.0, 0.9, 0.9), "dp", {}, "cdp_v2"),  # the freshest of two that are as fast
        ((1.0, 0.9, 0.92), "dp", {}, "cdp_v1"),  # 2 % slower is no tie
        ((1.0, 0.96, 0.96), "dp", {}, "dp"),  # gains 4 %
        ((1.0, 0.96, 0.96), "dp", {"threshold": 0.03}, "cdp_v2"),
        ((1.0, 0.96, 0.97), "cdp_v1", {}, "cdp_v1"),
        ((1.0, 1.0, 1.0), "cdp_v1", {}, "dp"),  # fresher for nothing
        ((1.2, 1.0, 1.005), "cdp_v1", {}, "cdp_v2"),
        ((1.0, 0.8, 0.9), "dp", {"staleness_price": 0.1}, "cdp_v1"),  # 0.88, and 0.9225
        ((1.0, 0.95, 0.97), "dp", {"staleness_price": 0.1}, "dp"),
    ],
)
def test_choice(seconds, present, options, expected):
    names = [*CANDIDATES]
    found = choose_schedule(
        [*CANDIDATES.values()], seconds, names.index(present), **options
    )
    assert names[found] == expected


def in_one_process(schedule, dtype=torch.float64, *given):
    model = residual().to(dtype)
    return SingleProcess(cut(model, schedule), schedule, sgd, F.cross_entropy, *given)


def test_falls_back_when_the_loss_rises_and_returns_when_it_is_calm():
    switching = Switching(
        in_one_process(V1), CANDIDATES, SwitchOptions(every=1, loss_factor=2)
    )
    batches, losses = make_batches(2, 9), [3, 2, 2.5, 5, 4, 2.6, 2.5, 2, 9]
    found = []
    for batch, loss in zip(batches, losses, strict=True):
        switching.runtime.step(*batch)
        look = switching.decide(0.1, loss)
        found.append((look.schedule, look.reason))
    assert [*map(" ".join, found)] == [
        *["cdp_v1 "] * 3,
        f"dp {LOSS_ROSE}",
        *["dp "] * 2,
        f"cdp_v1 {LOSS_CALM}",
        "cdp_v1 ",
        f"dp {LOSS_ROSE}",
    ]
    # A list of changes, given as phases, is the same run.
    phased = in_one_process(after([(V1, 4), (DP, 3), (V1, 2)], DP))
    list(phased.run(batches))
    assert_same(
        switching.runtime.module().state_dict(), phased.module().state_dict(), 0, 0
    )


@pytest.mark.parametrize("saved", range(1, 8))
def test_resumes_across_changes(saved):
    options, losses = SwitchOptions(every=2, loss_factor=2), [1, 3, 3, 7, 5, 3, 1, 2]
    batches = make_batches(2, 8)

    def train(switching, steps):
        for step in steps:
            switching.runtime.step(*batches[step])
            switching.record_steps(1, 0.1, losses[step])
        return switching

    whole = train(Switching(in_one_process(V2), CANDIDATES, options), range(8))
    first = train(Switching(in_one_process(V2), CANDIDATES, options), range(saved))
    again = Switching(in_one_process(V2), CANDIDATES, options)
    again.resume(first.state())
    again.runtime.load_state_dict(copy.deepcopy(first.runtime.state_dict()))
    train(again, range(saved, 8))
    assert [look.reason for look in again.decisions] == ["", LOSS_ROSE, "", LOSS_CALM]
    assert [look.loss for look in again.decisions] == [2, 5, 4, 1.5]
    assert again.phases() == [("cdp_v2", 4), ("dp", 4), ("cdp_v2", 0)]
    assert again.runtime.schedule_plan == whole.runtime.schedule_plan
    assert_same(
        again.runtime.module().state_dict(), whole.runtime.module().state_dict(), 0, 0
    )


def test_refuses_what_it_cannot_decide_or_run():
    for candidates, options, named in (
        (CANDIDATES, {}, "loss_factor"),
        (
            {"dp": catalog.data_parallel(3, n_stages=2)},
            {"loss_factor": 2},
            "n_microbatches",
        ),
    ):
        with pytest.raises(UserError, match=named):
            Switching(in_one_process(V1), candidates, SwitchOptions(**options))
    for values in (
        {"every": 0},
        {"threshold": 1},
        {"staleness_price": -1},
        {"loss_factor": 1},
    ):
        with pytest.raises(UserError, match=f"switch.{next(iter(values))}"):
            SwitchOptions(**values)


def costs_at(step):
    """Fast links, slow ones from step 4 to 12, and fast ones again."""
    cost = StageCost(
        0, 0, parameter_bytes=1e6, forward_seconds=0.1, backward_seconds=0.2
    )
    slow = 4 <= step < 12
    return (cost,) * 2, Hardware(
        "made up", 1, 1e12, 1e6 if slow else 1e9, speeds=(1, 1)
    )


class Scripted(Distributed):
    """Knows its costs beforehand, on rank 0 only."""

    def costs(self):
        super().costs()  # its messages are real
        return costs_at(self.steps_done) if self.rank == 0 else (None, None)


def on_ranks():
    world, batches, found = join(device="cpu"), make_batches(2, 18), {}
    for dtype in (torch.float32, torch.float64):
        typed = [(inputs.to(dtype), targets) for inputs, targets in batches]

        def made(kind, schedule, dtype=dtype):
            stages = cut(residual().to(dtype), schedule)
            return kind(stages, schedule, sgd, F.cross_entropy, world=world)

        switching = Switching(
            made(Scripted, DP), CANDIDATES, SwitchOptions(every=2, staleness_price=0.1)
        )
        steps = [result.step for result in switching.run(typed)]
        schedule_plan = switching.runtime.schedule_plan
        replayed = made(Distributed, after(schedule_plan.phases, schedule_plan.final))
        list(replayed.run(typed))
        found[dtype] = (
            steps,
            switching.decisions,
            switching.runtime.module().state_dict(),
            replayed.module().state_dict(),
        )
    stages = cut(residual().double(), V2)
    runtime = Distributed(stages, V2, sgd, F.cross_entropy, world=world, record=2)
    runtime.time_costs(2)  # those that are recorded
    list(runtime.run(typed[:4]))
    return found, runtime.costs(), [p.nbytes for p in residual().parameters()]


@pytest.fixture(scope="module")
def ranks():
    return launch(on_ranks, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ranks_switch_together_and_their_changes_replay_to_the_bit(ranks, dtype):
    for found, *_ in ranks:
        steps, looks, switched, replayed = found[dtype]
        assert steps == [*range(18)]
        changes = [
            (look.step, look.schedule, look.reason) for look in looks if look.reason
        ]
        assert changes == [(10, "cdp_v1", COSTS), (12, "dp", COSTS)]
        # After a decision that changes nothing, the next one is four times as far away.
        assert [look.step for look in looks] == [2, 10, 12, 14, 18]
        assert not any(isnan(look.loss) or look.seconds <= 0 for look in looks)
        assert_same(switched, replayed, rtol=0, atol=0)
        assert repr(looks) == repr(ranks[0][0][dtype][1])  # all ranks know the same


def test_costs_are_measured_while_ranks_train(ranks):
    for _, (costs, hardware), n_bytes in ranks:
        assert sum(cost.parameter_bytes for cost in costs) == sum(n_bytes)
        assert all(min(cost.seconds(hardware)) > 0 for cost in costs)
        assert 0 < hardware.link_latency < 1
        assert 0 < hardware.link_bandwidth < 1e12
        assert len(hardware.speeds) == 2
    assert ranks[0][1] == ranks[1][1]


def test_a_slow_rank_is_one_of_lower_speed():
    # Of 32 bytes that travel as 8, where it is compressed.
    layout = type("Sized", (), {"n_bytes": 8, "whole_bytes": 32})()
    layouts = Layouts(
        (layout,) * 2, (layout,) * 2, (1, 1), (layout,) * 2, (layout,) * 2
    )
    fast = {
        (0, "F"): 1.0,
        (0, "I"): 1.0,
        (0, "W"): 0.5,
        (1, "F"): 3.0,
        (1, "B"): 4.0,
        (0, "U"): 2,
    }
    measured = [fast, fast, {key: 2 * seconds for key, seconds in fast.items()}]
    costs, hardware = running_costs(measured, layouts, 0.25, 1e3)
    assert [cost.seconds(hardware) for cost in costs] == [(1.0, 1.5), (3.0, 4.0)]
    assert (costs[0].output_bytes, costs[0].sent_output_bytes) == (32, 8)
    assert (costs[1].input_bytes, costs[1].sent_input_gradient_bytes) == (32, 8)
    assert hardware.speeds == [1.0, 1.0, 0.5]
    assert hardware.message(500) == 0.75
    assert hardware.memory_bandwidth == costs[0].update_bytes() / 2
