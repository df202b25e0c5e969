"""One question, asked of every tool that predicts: the answers are the same.

ResNet-50 on eight A100s with 10 Gbit/s Ethernet, one worker each, 32 images a worker.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.experiments.command import complete
from tests.thorough import thorough
from toolkit.cost import Hardware
from toolkit.cost.situations import assess_model
from toolkit.cost.worker_forms import BUCKETS, ModelCosts, best_rule
from toolkit.figures import Explorer
from toolkit.model import Images, build
from toolkit.model.node_costs import meta_copy
from toolkit.plan.candidates import Candidate
from toolkit.plan.predictions import Limits, Predictor, stage_costs
from toolkit.runtime.loop_arguments import choose_rule
from toolkit.schedule import ScheduleSpec

RESULTS = Path(__file__).parents[1] / "experiments" / "results"
N = 8
IMAGES = Images(3, 224, 224, 1000)
ETHERNET = Hardware.preset("ethernet_10")
TOLERANCE = {"rel": 5e-3}


@pytest.fixture(scope="module")
def model():
    with torch.device("meta"):
        return build("resnet50", **IMAGES.arguments)


@pytest.fixture(scope="module")
def situation(model):
    """Step seconds of DDP, CDP-v1 and CDP-v2 in the table of situations."""
    row = assess_model(ModelCosts(model, IMAGES.example(32, "meta")), ETHERNET, N)
    return {
        "DDP": row["ddp"],
        "CDP-v1": row["cdp_v1_time"] * row["ddp"],
        "CDP-v2": row["cdp_v2_time"] * row["ddp"],
    }


@thorough
def test_simulate(situation, tmp_path):
    options = (
        "model=resnet50",
        "batch=32",
        "stages=8",
        "microbatches=8",
        "hardware=ethernet_10",
    )
    schedules = "schedule=cdp_v1", "+schedule@also.v2=cdp_v2"
    rows = complete("simulate", tmp_path, *options, *schedules, "steps=2")["metrics"]
    assert [row["schedule"] for row in rows] == [*situation]
    for row in rows:
        assert row["ms a step"] / 1e3 == pytest.approx(
            situation[row["schedule"]], **TOLERANCE
        )
        ratio = situation[row["schedule"]] / situation["DDP"]
        assert float(row["by DDP's time"]) == pytest.approx(ratio, abs=0.006)


@thorough
def test_explorer(situation):
    explorer = Explorer("cdp_v1", N, N, compare="cdp_v2", hardware=ETHERNET)
    explorer.costs.value = "resnet50"
    assert explorer.batch.value == 32
    analyses = [analysis for analysis, _ in explorer._results]
    for analysis, name in zip(analyses, ("CDP-v1", "CDP-v2"), strict=True):
        assert analysis.ddp_seconds == pytest.approx(situation["DDP"], **TOLERANCE)
        assert analysis.form.seconds == pytest.approx(situation[name], **TOLERANCE)


@thorough
def test_plan(situation, model):
    """Candidates as the plan enumerates them, predicted as it confirms them."""
    predictor = Predictor(ETHERNET, Limits(), 1.0)
    late = ScheduleSpec("cdp_v1", N, N)
    candidates = {
        "DDP": [Candidate(ScheduleSpec("dp", 5, N), 32, BUCKETS)],
        "CDP-v1": [
            Candidate(replace(late, chains=chains), 32, cut)
            for chains in ("in_order", "rotated")
            for cut in ("flops", "parameters")
        ],
        "CDP-v2": [
            Candidate(ScheduleSpec("cdp_v2", N, N), 32, cut)
            for cut in ("flops", "parameters")
        ],
    }
    for name, forms in candidates.items():
        costs = stage_costs(meta_copy(model), IMAGES, "fp32", forms)
        seconds = [
            predictor.predict([form], [cost], timed=16)[0].seconds
            for form, cost in zip(forms, costs, strict=True)
        ]
        assert min(seconds) == pytest.approx(situation[name], **TOLERANCE)


@thorough
def test_the_wrapper_takes_what_a_plan_would(situation, model):
    """A step of staleness counts as a tenth of the time: DP here."""
    schedule, cut = choose_rule(model, IMAGES.example(32, "meta"), "ethernet_10", N, 1)
    costs_of = ModelCosts(model, IMAGES.example(32, "meta"))
    form = best_rule(costs_of, ETHERNET, N)
    assert (schedule, cut) == (form.schedule, form.partition)
    assert schedule.max_staleness == 0
    assert form.seconds == pytest.approx(situation["DDP"], rel=0.02)


def test_the_table_of_the_first_page_has_these_numbers(situation):
    rows = json.loads((RESULTS / "situations" / "result.json").read_text())["models"]
    (row,) = (
        row
        for row in rows
        if (row["model"], row["batch"], row["machine"])
        == ("resnet50", 32, ETHERNET.name)
    )
    assert row["ddp"] == pytest.approx(situation["DDP"], **TOLERANCE)
    for name, key in (("CDP-v1", "cdp_v1_time"), ("CDP-v2", "cdp_v2_time")):
        assert row[key] * row["ddp"] == pytest.approx(situation[name], **TOLERANCE)
