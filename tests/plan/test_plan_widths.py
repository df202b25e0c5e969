"""Plans whose ranks may be several devices."""

from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
import torch

from tests.thorough import thorough
from toolkit.cost import Hardware, StageCost, simulate
from toolkit.cost.cost_file import FileCosts
from toolkit.cost.tensor_width import Width, profile_width
from toolkit.cost.worker_forms import BUCKETS
from toolkit.errors import UserError
from toolkit.model import Sequences, gpt, partition
from toolkit.model.tensor_parallel import tensor_parallel
from toolkit.plan import Limits, PlanOptions, plan, plan_costs
from toolkit.plan.candidates import Candidate, candidates
from toolkit.plan.plan_table import plan_cells, terminal_cells
from toolkit.plan.predictions import Prediction, Predictor, front, stage_costs
from toolkit.schedule import ScheduleSpec
from toolkit.schedule.steady_state import steps_to_time

TOKENS, WORDS = 8, 32
FORM = Sequences(TOKENS, WORDS)
MACHINES = Hardware(
    "machines of 2",
    flops=1e12,
    memory_bandwidth=1e12,
    link_bandwidth=1e9,
    ranks_per_machine=2,
    local_bandwidth=1e11,
)


def decoder(heads=4):
    with torch.device("meta"):
        return gpt(WORDS, TOKENS, layers=1, width=16, heads=heads)


@pytest.fixture(scope="module")
def decoder_plan():
    return plan(
        decoder(),
        FORM,
        MACHINES,
        2,
        batch=2,
        options=PlanOptions(jobs=1, widths=[1, 2]),
    )


@thorough
def test_width_is_a_dimension_of_candidates(decoder_plan):
    widths = {prediction.candidate.width for prediction in decoder_plan.predictions}
    assert widths == {1, 2}
    for prediction in decoder_plan.predictions:
        assert prediction.devices == prediction.ranks * prediction.candidate.width <= 2
    baseline = decoder_plan.baseline
    assert (baseline.candidate.width, baseline.candidate.partition) == (1, BUCKETS)


def test_predictions_are_those_of_the_simulator(decoder_plan):
    """Of a device, on links that the devices of a rank share."""
    prediction = next(
        each for each in decoder_plan.predictions if each.candidate.width == 2
    )
    candidate = replace(prediction.candidate, checkpoint="none")
    assert candidate == prediction.candidate
    example = FORM.example(candidate.batch, "meta")
    model = decoder()
    stages = partition(model, candidate.schedule.n_stages, example, candidate.partition)
    width = Width(2, MACHINES)
    costs = profile_width(
        stages, example, tensor_parallel(model, 2, share_loss=True), width
    )
    program = candidate.schedule.lower(steps_to_time(candidate.schedule)).verify()
    state_bytes = [cost.parameter_bytes for cost in costs]
    timeline = simulate(program, costs, width.hardware_of_ranks, state_bytes)
    assert prediction.seconds == pytest.approx(timeline.step_time, rel=1e-9)
    assert prediction.memory == timeline.peak_memory(0)


def test_a_slower_rate_of_small_products_takes_longer():
    """Where arithmetic takes all the time."""
    slow = replace(MACHINES, flops=1e3, memory_bandwidth=1e30)
    candidate = Candidate(ScheduleSpec("gpipe", 2, 2), 1, width=2)
    seconds = []
    for efficiency in (1.0, 0.5):
        predictor = Predictor(slow, Limits(), 1.0, efficiency)
        (costs,) = stage_costs(decoder(), FORM, "fp32", [candidate], predictor)
        (prediction,) = predictor.predict([candidate], [costs])
        seconds.append(prediction.seconds)
    assert seconds[1] == pytest.approx(2 * seconds[0], rel=0.01)


def test_devices_that_share_weights_keep_a_limit_of_memory(decoder_plan):
    """Less memory than any rank of one device needs; DDP is the baseline all the same."""
    least = dict.fromkeys((1, 2), inf)
    for prediction in decoder_plan.predictions:
        width = prediction.candidate.width
        least[width] = min(least[width], prediction.memory)
    assert least[2] < least[1]
    limits = Limits(memory=(least[1] + least[2]) / 2)
    options = PlanOptions(jobs=1, limits=limits, widths=[2])
    wide_plan = plan(decoder(), FORM, MACHINES, 2, batch=2, options=options)
    assert wide_plan.best is not None
    assert wide_plan.best.candidate.width == 2
    assert (wide_plan.baseline.candidate.width, wide_plan.baseline.fits) == (1, False)


def test_table_and_command_name_the_width(decoder_plan):
    prediction = next(
        each for each in decoder_plan.predictions if each.candidate.width == 2
    )
    row = decoder_plan.row(prediction)
    assert (row["width"], row["devices"]) == (2, 2 * prediction.ranks)
    assert "2 devices a rank" in row["schedule"]
    assert plan_cells(row)["width"] == 2
    assert "width" not in plan_cells({key: row[key] for key in row if key != "width"})
    cells = terminal_cells(prediction, decoder_plan.baseline)
    assert cells["ranks"] == f"{prediction.ranks} x 2"
    command = decoder_plan.command(prediction)
    assert "runtime=distributed runtime.width=2" in command
    assert f"--nproc-per-node {2 * prediction.ranks} " in command


def test_fewer_devices_dominate():
    spec = ScheduleSpec("dp", 2, 2)
    pair = Prediction(Candidate(spec, 1, width=2), 1.0, 1.0, 2, 0.0)
    single = replace(pair, candidate=Candidate(spec, 1))
    assert (pair.devices, single.devices) == (4, 2)
    assert front([pair, single]) == [single]


def test_candidates_of_a_width_have_no_baseline():
    wide = candidates(2, 4, width=2)
    assert {candidate.width for candidate in wide} == {2}
    assert not any(candidate.partition == BUCKETS for candidate in wide)


@pytest.mark.parametrize(
    ("widths", "hardware", "words"),
    [
        ([4], MACHINES, r"widths=4 .* ranks=2"),
        ([0], MACHINES, "widths"),
        ([], MACHINES, "widths"),
        ([2], replace(MACHINES, ranks_per_machine=3), "width=2 .* 3 "),
        ([2], replace(MACHINES, speeds=[1.0, 0.5]), "speeds"),
    ],
    ids=["too few devices", "none", "empty", "no divisor of a machine", "unlike"],
)
def test_refuses_widths_that_machines_cannot_have(widths, hardware, words):
    with pytest.raises(UserError, match=words):
        plan(
            decoder(),
            FORM,
            hardware,
            2,
            batch=4,
            options=PlanOptions(jobs=1, widths=widths),
        )


class Scaling(torch.nn.Module):
    """Its weight is a vector, which devices do not share."""

    def __init__(self):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(WORDS))

    def forward(self, tokens):
        return tokens[..., None] * self.gain


def test_refuses_widths_that_models_cannot_have():
    options = PlanOptions(jobs=1, widths=[1, 2])
    with pytest.raises(UserError, match=r"width=2 .*heads, 1"):
        plan(decoder(heads=1), FORM, MACHINES, 2, batch=2, options=options)
    with pytest.raises(UserError, match=r"width=2: .*Scaling"):
        plan(Scaling(), FORM, MACHINES, 2, batch=2, options=options)
    costs = FileCosts(Path("mine.csv"), (StageCost(1.0, 1.0),), batch=2)
    with pytest.raises(UserError, match=r"mine.csv .*widths=\[1, 2\]"):
        plan_costs(costs, MACHINES, 2, batch=2, options=options)


def test_a_pilot_measures_ranks_of_one_device(decoder_plan):
    wide = next(each for each in decoder_plan.predictions if each.candidate.width == 2)
    with pytest.raises(UserError, match=r"widths=\[1\]"):
        replace(decoder_plan, best=wide).pilot(decoder, [])
