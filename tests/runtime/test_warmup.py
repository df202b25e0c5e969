"""What a rank computes once before its first message: all of it, and nothing is left of it."""

import pytest
import torch

from tests.runtime import conform, models
from toolkit.model.analysis import meta_copy
from toolkit.runtime.distributed import warm_up
from toolkit.runtime.message_layout import find_layouts
from toolkit.runtime.stage import StageRunner
from toolkit.runtime.step_options import PLAIN, StepOptions
from toolkit.schedule import catalog

CPU = torch.device("cpu")
N_STAGES = 4


@pytest.fixture
def updates(monkeypatch):
    """How many optimizer steps were made, by the number of parameters."""
    found = []
    step = torch.optim.AdamW.step
    monkeypatch.setattr(
        torch.optim.AdamW,
        "step",
        lambda self: (found.append(len(self.param_groups[0]["params"])), step(self))[1],
    )
    return found


def made(model, example, options=PLAIN):
    schedule = catalog.cyclic(N_STAGES)
    stages = (models.cut_awkward if model is models.awkward else models.cut)(model(), schedule)
    runners = [StageRunner(s, j, conform.adamw, None, 0, options) for j, s in enumerate(stages)]
    inputs = (example.to("meta"),)
    return runners, find_layouts([meta_copy(runner.compute) for runner in runners], inputs), inputs


def held(runner):
    return {name: x.clone() for name, x in runner.stage.state_dict().items()}


@pytest.mark.parametrize(
    ("model", "make_batches"),
    [(models.residual, models.make_batches), (models.awkward, models.id_batches)],
)
@pytest.mark.parametrize("options", [PLAIN, StepOptions(checkpoint="all", channels_last=True)])
@pytest.mark.parametrize("computed", [range(N_STAGES), [0, 2], [1, 2], [3]], ids=str)
def test_every_stage_runs_both_ways_and_nothing_is_left(
    monkeypatch, updates, model, make_batches, options, computed
):
    runners, layouts, inputs = made(model, make_batches(1)[0][0], options)
    own = computed[-1:]
    for j, runner in enumerate(runners):
        if j not in own:  # as where another rank updates it
            for master in runner.masters.values():
                master.data = torch.empty(0, dtype=master.dtype)
    before = [held(runner) for runner in runners]
    generator = torch.get_rng_state()
    ran, backward = [], torch.autograd.backward
    forward = StageRunner.forward
    monkeypatch.setattr(
        StageRunner,
        "forward",
        lambda self, *a: (ran.append(f"{self.index}F"), forward(self, *a))[1],
    )
    monkeypatch.setattr(
        torch.autograd,
        "backward",
        lambda ends, *a: (ran.append(f"{len(ends)}B"), backward(ends, *a)),
    )
    warm_up(runners, layouts, inputs, CPU, computed, own)
    assert [name for name in ran if name.endswith("F")] == [f"{j}F" for j in computed]
    assert len(ran) == 2 * len(computed)
    assert updates == [n for n in [len(runners[own[0]].masters)] if n]
    assert torch.equal(torch.get_rng_state(), generator)
    for runner, state in zip(runners, before, strict=True):
        models.assert_same(held(runner), state, rtol=0, atol=0)
        assert runner.optimizer is None or not runner.optimizer.state
        assert runner.take_statistics() == {}
        assert all(master.grad is None for master in runner.masters.values())
