"""What a rank computes once before its first message: all of it, and nothing is left of it."""

import pytest
import torch

from tests.runtime import conform, models
from toolkit.model.node_costs import meta_copy
from toolkit.runtime import message_layout
from toolkit.runtime.boundary_codes import BoundaryCodes
from toolkit.runtime.quantization import quantize
from toolkit.runtime.stage import StageRunner
from toolkit.runtime.stage_layouts import find_layouts
from toolkit.runtime.step_options import PLAIN, StepOptions
from toolkit.runtime.warmup import warm_up
from toolkit.schedule import catalog

CPU = torch.device("cpu")
N_STAGES = 4


def made(model, example, options=PLAIN):
    schedule = catalog.cyclic(N_STAGES)
    stages = (models.cut_awkward if model is models.awkward else models.cut)(
        model(), schedule
    )
    runners = [
        StageRunner(s, j, conform.adamw, None, 0, options) for j, s in enumerate(stages)
    ]
    inputs = (example.to("meta"),)
    return (
        runners,
        find_layouts([meta_copy(runner.compute) for runner in runners], inputs),
        inputs,
    )


def held(runner):
    return {name: x.clone() for name, x in runner.stage.state_dict().items()}


@pytest.mark.parametrize(
    ("model", "make_batches"),
    [(models.residual, models.make_batches), (models.awkward, models.id_batches)],
)
@pytest.mark.parametrize(
    "options", [PLAIN, StepOptions(checkpoint="all", channels_last=True)]
)
@pytest.mark.parametrize("computed", [range(N_STAGES), [0, 2], [1, 2], [3]], ids=str)
def test_every_stage_runs_both_ways_and_nothing_is_left(
    monkeypatch, model, make_batches, options, computed
):
    ran = []

    def noting(kind, name, text):
        method = getattr(kind, name)

        def noted(first, *others):
            ran.append(text(first))
            return method(first, *others)

        monkeypatch.setattr(kind, name, noted)

    noting(StageRunner, "forward", lambda runner: f"{runner.index}F")
    noting(torch.autograd, "backward", lambda ends: "B")
    noting(torch.optim.AdamW, "step", lambda optimizer: "updates")
    runners, layouts, inputs = made(model, make_batches(1)[0][0], options)
    own = computed[-1:]
    for j, runner in enumerate(runners):
        if j not in own:  # as where another rank updates it
            for master in runner.masters.values():
                master.data = torch.empty(0, dtype=master.dtype)
    before = [held(runner) for runner in runners]
    generator = torch.get_rng_state()
    warm_up(runners, layouts, inputs, CPU, computed, own)
    both_ways = [name for j in computed for name in (f"{j}F", "B")]
    assert ran == [*both_ways, *["updates"] * bool(runners[own[0]].masters)]
    assert torch.equal(torch.get_rng_state(), generator)
    for runner, state in zip(runners, before, strict=True):
        models.assert_same(held(runner), state, rtol=0, atol=0)
        assert runner.optimizer is None or not runner.optimizer.state
        assert runner.take_statistics() == {}
        assert all(master.grad is None for master in runner.masters.values())


def test_codes_of_what_is_sent_are_computed_too(monkeypatch):
    """Stages 0 and 2 run here, and send to others; the rank also reads what stage 1 sends."""
    runners, layouts, inputs = made(models.residual, models.make_batches(1)[0][0])
    stages = models.cut(models.residual(), catalog.cyclic(N_STAGES))
    codes = BoundaryCodes.of(stages, "int8")
    n_numbers = []

    def quantized(numbers, code):
        n_numbers.append(len(numbers))
        return quantize(numbers, code)

    monkeypatch.setattr(message_layout, "quantize", quantized)
    warm_up(runners, codes.layouts(layouts), inputs, CPU, [0, 2], [])
    sent = [layouts.activations[stage].n_bytes // 8 for stage in (0, 2)]
    assert n_numbers == sent
