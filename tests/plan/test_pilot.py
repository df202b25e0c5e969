"""The pilot on small models, end to end."""

import copy
from dataclasses import replace
from functools import partial
from importlib import import_module

import numpy as np
import pytest
import torch
from torch import nn

from toolkit.cost import Hardware
from toolkit.errors import UserError
from toolkit.model import Images, gpt
from toolkit.plan import (
    Limits,
    PilotOptions,
    Plan,
    Prediction,
    largest_stable_rate,
    pilot,
)
from toolkit.plan.candidates import Candidate
from toolkit.plan.pilot import _corrected
from toolkit.plan.runtime_overhead import RuntimeOverhead
from toolkit.schedule import ScheduleSpec
from toolkit.training.data import Datasets, Tokens, synthetic

LINK = Hardware("link", 1e12, 5e10, 1e5)
IMAGES = torch.randn(40, 3, 6, 6)
CLASSES = torch.arange(40) % 4


def pairs(images, classes, n_classes=4):
    """The first 8 are for the test."""
    samples = [*zip(images, classes.tolist(), strict=True)]
    return Datasets(samples[8:], samples[:8], n_classes)


PAIR = pairs(IMAGES, CLASSES)


def net(n_classes=4):
    parts = [nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU()]
    parts += [nn.Conv2d(6, 6, 3, padding=1), nn.ReLU()]
    parts += [nn.Flatten(), nn.Linear(6 * 36, 16), nn.ReLU(), nn.Linear(16, n_classes)]
    return nn.Sequential(*parts)


class Dynamic(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class Recurrent(nn.Module):
    """One layer again and again: there is no place to cut it at."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(108, 108)

    def forward(self, x):
        return self.layer(self.layer(x.flatten(1)).relu())


@pytest.fixture(scope="module")
def found():
    torch.manual_seed(0)
    images = synthetic(200, 80, 4, 6, 3)
    said, model = [], net()
    before = copy.deepcopy(model.state_dict())
    drawn = torch.get_rng_state()
    result = pilot(
        model,
        images,
        options=PilotOptions(batch=4, hardware=LINK, steps=30, seeds=2),
        on_progress=lambda what, share: said.append((what, share)),
    )
    assert torch.equal(drawn, torch.get_rng_state())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(0 <= share <= 1 for _, share in said)
    return result


def test_findings(found):
    assert (found.n_workers, found.n_stages, found.form) == (4, 4, Images(3, 6, 6, 4))
    dp, v1, v2 = (found.of(rule) for rule in ("DP", "CDP-v1", "CDP-v2"))
    assert dp.ratio == (1, 1, 1)
    assert v1.activations == v2.activations < dp.activations
    assert v2.cuda_peak is None
    assert dp.waiting > 0.9  # links of 0.1 MB/s
    assert v2.predicted.seconds > 10 * v2.without_links
    assert v2.speed[0] <= v2.speed[1] <= v2.speed[2]
    trained = found.training
    assert (trained.n_steps, trained.seeds, trained.n_tested) == (30, (0, 1), 80)
    assert trained.learned
    assert trained.diverged == ()
    assert 0.5 < trained.cosine < 1
    assert 0.5 < trained.loss_ratio < 2
    assert (
        trained.accuracy["DP"] != trained.accuracy["CDP-v2"] or trained.loss_ratio != 1
    )


def test_the_rule_that_gains_is_trained():
    layers = [x for _ in range(6) for x in (nn.Linear(108, 108), nn.ReLU())]
    model = nn.Sequential(nn.Flatten(), *layers, nn.Linear(108, 4))
    slow = Hardware("links as slow as the stages", 1e9, 1e9, 5e7)
    options = PilotOptions(batch=4, hardware=slow, compute="roofline", steps=2, seeds=2)
    found = pilot(model, PAIR, 2, options=options)
    v1, v2 = found.of("CDP-v1"), found.of("CDP-v2")
    assert v1.speed[2] < 0.95 < v2.speed[2]
    assert found.late == v1
    assert [*found.training.accuracy] == ["DP", "CDP-v1"]
    assert found.advice.choice == "CDP-v1 on trial"
    assert "rules.cdp_v1.correction=extrapolate" in found.advice.command
    assert "optimizer=nesterov optimizer.lr=0.05" in found.advice.command
    assert "schedule.correction=extrapolate" in str(found)


@pytest.mark.parametrize("name", ["dp", "cdp_v1", "cdp_v2", "zero_cdp_v1"])
def test_late_weights_have_the_correction_that_bears_the_larger_rate(name):
    made = _corrected(Candidate(ScheduleSpec(name, 4, 4), 1)).schedule
    rates = [
        largest_stable_rate(replaced.build(), momentum=0.9, nesterov=True).limit
        for replaced in (
            ScheduleSpec(name, 4, 4),
            ScheduleSpec("cdp_v1", 4, 4, correction="extrapolate"),
        )
    ]
    extrapolated = name == "cdp_v1"
    assert made.corrected.kind == ("extrapolate" if extrapolated else "none")
    if name in ("cdp_v1", "cdp_v2"):
        assert (rates[1] > rates[0]) == extrapolated


def test_an_optimizer_of_the_user_stays_without_corrections():
    plain = partial(torch.optim.SGD, lr=0.01)
    options = PilotOptions(batch=4, steps=0, optimizer=plain, placement="per_stage")
    found = pilot(net(), PAIR, 2, options=options)
    assert {rule.predicted.schedule.corrected.kind for rule in found.rules} == {"none"}
    assert "nesterov" not in str(found)
    assert found.of("DP").predicted.schedule.name == "GPipe"


ROTATED = ScheduleSpec("cdp_v1", 4, 2, chains="rotated", accumulate=2)
FRESHER = ScheduleSpec(
    "cdp_v1", 4, 4, delay=[[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]]
)


@pytest.mark.parametrize(
    ("best", "correction"),
    [
        (Candidate(ROTATED, 2, "parameters", "all"), "extrapolate"),
        (Candidate(FRESHER, 2, within=0.1), None),
        (Candidate(ScheduleSpec("pipedream_2bw", 2, 4), 2), "extrapolate"),
        (Candidate(ScheduleSpec("zero_cdp_v2", 4, 4), 2), "none"),
        (
            Candidate(
                ScheduleSpec("cdp_v1", 2, 2, placement="per_stage_and_microbatch"), 4
            ),
            "extrapolate",
        ),
    ],
    ids=lambda value: value.label if isinstance(value, Candidate) else "",
)
def test_the_best_of_a_plan_is_measured(best, correction):
    schedule = best.schedule
    given = "model=resnet8 data=digits hardware=ethernet_10"
    base, mine = (
        Prediction(one, seconds, 1e6, one.schedule.n_ranks, one.schedule.mean_staleness)
        for one, seconds in ((Candidate(ScheduleSpec("dp", 8, 2), 4), 1.0), (best, 0.5))
    )
    planned = Plan((), (), base, mine, Limits(memory=1e9), LINK, given, 2)
    options = PilotOptions(steps=2, seeds=1, compute="roofline")
    found = planned.pilot(net(), PAIR, options=options)
    dp, late = found.rules
    assert (late.predicted.staleness, dp.predicted.staleness) == (
        schedule.mean_staleness,
        0,
    )
    for rule in (dp, late):
        own = rule.predicted.candidate
        assert own.schedule.n_microbatches * own.batch == 8
        assert own.schedule.n_stages == schedule.n_stages
        assert (own.partition, own.checkpoint) == (best.partition, best.checkpoint)
    assert correction in (None, late.predicted.schedule.corrected.kind)
    assert found.room == "954 MiB"
    assert [*found.training.accuracy] == ["DP", late.rule]
    assert given in found.advice.command


def test_a_pipeline_without_late_weights_needs_no_training():
    made = Prediction(Candidate(ScheduleSpec("one_f_one_b", 2, 8), 1), 0.5, 1e6, 2, 0.0)
    planned = Plan((), (), made, made, Limits(), LINK, "model=resnet8", 1)
    options = PilotOptions(compute="roofline")
    rules = planned.pilot(net(), PAIR, options=options).rules
    limits = Limits(memory=sum(rule.predicted.memory for rule in rules) / 2)
    found = replace(planned, limits=limits).pilot(net(), PAIR, options=options)
    assert [rule.rule for rule in found.rules] == ["DP", "1F1B"]
    assert [rule.predicted.schedule.name for rule in found.rules] == ["GPipe", "1F1B"]
    assert found.of("1F1B").activations < found.of("DP").activations
    assert [rule.predicted.fits for rule in found.rules] == [False, True]
    advice = found.advice
    assert (advice.choice, advice.watch, advice.roll_back) == ("1F1B", (), ())
    assert "1F1B reads no weight late" in advice.text()
    assert "schedule=one_f_one_b stages=2 microbatches=8" in advice.command
    assert "guard" not in advice.command


@pytest.mark.parametrize(
    ("choice", "sizes"),
    [
        (ScheduleSpec("dp", 8, 2), (2, 4, "per_microbatch")),
        (
            ScheduleSpec("dp", 2, 2, placement="per_stage_and_microbatch"),
            (2, 4, "per_stage_and_microbatch"),
        ),
        (ScheduleSpec("gradient_accumulation", 8, 2), (2, 4, "one")),
        (ScheduleSpec("zb_v", 4, 2), (2, 4, "per_stage")),
    ],
)
def test_the_usual_rules_are_measured_beside_data_parallelism(choice, sizes):
    base = Prediction(Candidate(choice, 4), 1.0, 1e6, choice.build().n_ranks, 0.0)
    found = Plan((base,), (), base, None, Limits(), LINK, "", 1).pilot(
        net(), PAIR, options=PilotOptions(steps=0, compute="roofline")
    )
    assert [rule.rule for rule in found.rules] == ["DP", "CDP-v1", "CDP-v2"]
    assert (found.n_workers, found.batch, found.placement) == sizes


def test_workers_that_share_a_device_have_stages_that_keep_equally_much():
    # Whose FLOPs are in two layers, and what is kept in all.
    images = torch.randn(40, 3, 24, 24)
    parts = [x for n in (3, 8, 8, 8) for x in (nn.Conv2d(n, 8, 1), nn.ReLU())]
    parts += [x for _ in range(2) for x in (nn.Conv2d(8, 8, 7, padding=3), nn.ReLU())]
    model = nn.Sequential(*parts, nn.Flatten(), nn.Linear(8 * 24 * 24, 4))
    options = PilotOptions(batch=4, hardware=LINK, steps=0, seeds=1)
    apart, together = (
        pilot(
            model,
            pairs(images, CLASSES),
            2,
            options=replace(options, placement=placement),
        )
        for placement in ("per_microbatch", "one")
    )
    assert apart.of("DP").waiting > together.of("DP").waiting == 0
    assert together.of("DP").predicted.ranks == 1
    assert together.of("CDP-v2").activations < apart.of("CDP-v2").activations
    assert together.of("DP").activations == apart.of("DP").activations
    assert "partition=activations" in together.advice.command
    assert "partition=flops" in apart.advice.command


def test_a_function_makes_the_model():
    workers = np.int64(2)
    options = PilotOptions(batch=4, steps=2, seeds=1, compute="roofline")
    found = pilot(net, PAIR, workers, options=options)
    assert f"model.target={net.__module__}.net " in found.advice.command
    assert found.compute == "roofline"
    assert found.training.n_tested == 8
    assert not found.training.learned


def test_a_decoder_and_its_text():
    tokens = np.arange(600) ** 2 % 11
    words = Tokens(tokens[:500], tokens[500:], 8, 11)
    decoder = partial(gpt, **words.form.arguments, layers=2, width=8, heads=2)
    options = PilotOptions(batch=4, steps=4, seeds=1, optimizer=torch.optim.AdamW)
    found = pilot(decoder, words, 2, options=options)
    text = str(found)
    assert "2 micro-batches of 4 sequences of shape [8], 2 stages" in text
    assert "Accuracy: of 96 tokens after 4 training steps" in text
    assert found.training.n_tested == 12 * 8
    assert "data=tokens data.root=MY_TOKENS data.length=8 data.vocabulary=11" in text
    small = partial(gpt, 10, 8, layers=2, width=8, heads=2)
    with pytest.raises(UserError, match=r"\[4, 8, 10\].* 11"):
        pilot(small, words, 2, options=PilotOptions(batch=4, steps=4))
    flat = nn.Sequential(nn.Embedding(11, 4), nn.Flatten(), nn.Linear(32, 11))
    with pytest.raises(UserError, match=r"\[4, 11\].*\[4, 8, 11\]"):
        pilot(flat, words, 2, options=PilotOptions(batch=4))


def test_without_training_steps_progress_ends_with_the_prediction():
    said = []
    options = PilotOptions(batch=4, steps=0)
    found = pilot(
        net(), PAIR, 2, options=options, on_progress=lambda *what: said.append(what)
    )
    assert said[-1] == ("predicting", 1.0)
    assert found.training is None
    assert found.untrained == "steps=0"


@pytest.mark.parametrize("compute", ["measured", "roofline"])
def test_measured_predictions_include_the_time_of_the_runtime(monkeypatch, compute):
    overhead = RuntimeOverhead(op=1.0, tensor=0.0, message=0.0, byte=0.0, update=0.0)
    module = import_module("toolkit.plan.pilot")  # the package's pilot is the function
    monkeypatch.setattr(module, "runtime_overhead", lambda: overhead)
    options = PilotOptions(batch=4, steps=0, compute=compute, overhead=True)
    found = pilot(net(), PAIR, 2, options=options)
    assert found.overhead == (overhead if compute == "measured" else None)
    n_ops = (
        4 if found.overhead else 0
    )  # a worker's forwards and backwards of two stages
    for rule in found.rules:
        assert rule.without_links == pytest.approx(n_ops, abs=0.5)


def test_divergence_is_reported():
    """In the types of a model in 64 bits."""
    wild = partial(torch.optim.SGD, lr=1e6)
    options = PilotOptions(batch=4, steps=6, seeds=1, optimizer=wild)
    found = pilot(net().double(), PAIR, 2, options=options)
    assert found.training.diverged == ("DP", "CDP-v2")
    assert found.advice.choice == "undecided"


def test_a_training_whose_loss_is_0():
    """If all answers are alike, 32 bits round the loss to 0."""
    alike = torch.zeros(40, dtype=torch.long)
    options = PilotOptions(batch=4, steps=6, seeds=1)
    trained = pilot(net(1), pairs(IMAGES, alike, 1), 2, options=options).training
    assert (trained.loss_ratio, trained.highest, trained.diverged) == (1, 1, ())


def test_a_model_that_cannot_be_cut():
    found = pilot(Recurrent(), PAIR, 2, options=PilotOptions(batch=4))
    assert (found.n_stages, found.rules, found.training) == (1, (), None)
    assert found.advice.choice == "DP"
    assert "cannot be cut" in str(found)
    assert "cannot be cut" in found._repr_html_()


def pilot_with(model, images, said, n_workers=4, **options):
    pilot(
        model,
        images,
        n_workers,
        options=PilotOptions(**options),
        on_progress=lambda what, share: said.append(what),
    )


UNTRACEABLE = nn.Sequential(nn.Flatten(), nn.Linear(108, 4), Dynamic())


@pytest.mark.parametrize(
    ("model", "images", "options", "message"),
    [
        (net(), PAIR, {"n_workers": 0}, "n_workers .*got 0"),
        (net(), PAIR, {"batch": 0}, "batch .*got 0"),
        (net(), PAIR, {"batch": 11}, "44 .*32"),
        (net(), PAIR, {"seeds": 0}, "seeds .*got 0"),
        (net(), PAIR, {"steps": -1}, "steps .*got -1"),
        (net(), PAIR, {"budget": 0}, "budget .*got 0"),
        (net(), PAIR, {"placement": "x"}, "placement 'x'"),
        (net(), PAIR, {"compute": "x"}, "compute 'x'"),
        (net(), PAIR, {"hardware": "a100"}, "hardware .*got 'a100'"),
        (net(3), PAIR, {}, r"of 4 classes has shape \[8, 3\]"),
        (net(), (IMAGES, CLASSES), {}, "samples .*Datasets.*got a tuple"),
        (nn.Flatten(), PAIR, {}, "Flatten has no parameter"),
        (UNTRACEABLE, PAIR, {}, "torch.fx cannot trace Sequential"),
        (7, PAIR, {}, "model is a torch.nn.Module.*got 7"),
        (lambda: 7, PAIR, {}, r"model\(\) returns .*got 7"),
    ],
)
def test_a_mistake_is_one_sentence_before_anything_is_measured(
    model, images, options, message
):
    said = []
    with pytest.raises(UserError, match=message) as refused:
        pilot_with(model, images, said, **options)
    assert "\n" not in str(refused.value)
    assert {*said} <= {"cutting the model"}
