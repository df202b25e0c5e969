"""Warnings before training: when, with which numbers, and never an error."""

import logging

import pytest
import torch
from torch import nn

from toolkit.options import TrainingOptions
from toolkit.plan import rate_check
from toolkit.plan.rate_check import check_rate, first_curvature, stage_shares
from toolkit.plan.stability import coupling_of, largest_stable_rate
from toolkit.schedule import RandomDelay, after, catalog
from toolkit.training import prepare
from toolkit.training.data import synthetic
from toolkit.training.lr import Constant

FAR = 1000.0  # a learning rate


class Net(nn.Sequential):
    def __init__(self, factor=1.0):
        hidden = [m for _ in range(3) for m in (nn.Linear(16, 16), nn.ReLU())]
        super().__init__(nn.Flatten(), nn.Linear(192, 16), *hidden, nn.Linear(16, 10))
        self.factor = factor

    def forward(self, x):
        return super().forward(x) * self.factor


def make(lr, schedule=None, model=Net, rate=None, make=torch.optim.SGD, **options):
    options = {"momentum": 0.9} | options if make is torch.optim.SGD else options
    return prepare(
        TrainingOptions(batch=4, epochs=1, device="cpu"),
        model=model,
        samples=synthetic(n_train=32, n_test=8, image_size=8),
        schedule=schedule or catalog.cyclic(4),
        optimizer=lambda parameters: make(parameters, lr=lr, **options),
        lr=rate,
    )


def test_names_rate_limit_rule_and_ways_out():
    run = make(FAR)
    warning = check_rate(run)
    found = first_curvature(run, 4, tolerance=0.1)
    shares = stage_shares(run, found)
    assert sum(shares) == pytest.approx(1)
    own = largest_stable_rate(run.schedule, momentum=0.9, coupling=coupling_of(shares))
    assert "CDP-v2: the learning rate 1e+03 is far above" in warning
    assert f"{own.rate(found.value):.2g}, the largest" in warning
    assert f"({own.limit:.3g} / curvature {found.value:.3g})" in warning
    for way in (
        "optimizer.nesterov=true",
        "correction=extrapolate",
        "optimizer.lr=",
        "{schedule: dp, epochs: 1}",
    ):
        assert way in warning
    assert "\n" not in warning


def test_offers_only_ways_that_are_left():
    fresh = check_rate(make(FAR, catalog.data_parallel(4)))
    assert "optimizer.lr=" in fresh
    assert "nesterov" not in fresh
    assert "schedule" not in fresh
    rule = catalog.cyclic(4, correction="extrapolate")
    corrected = check_rate(make(FAR, rule, nesterov=True))
    assert "nesterov" not in corrected
    assert "correction" not in corrected


def test_names_what_it_does():
    activities = []
    check_rate(make(FAR, catalog.data_parallel(4)), activities.append)
    assert len(activities) == 3
    assert "4 micro-batches" in activities[1]


@pytest.mark.parametrize(
    "run",
    [
        lambda: make(1e-4),
        lambda: make(FAR, dampening=0.5),
        lambda: make(FAR, make=torch.optim.AdamW),
        lambda: make(FAR, catalog.data_parallel(4, delay=RandomDelay(most=900))),
    ],
    ids=["low rate", "dampening", "AdamW", "long delays"],
)
def test_keeps_quiet(run):
    assert check_rate(run()) is None


def test_the_peak_of_the_schedule_counts():
    class Late(Constant):
        def factor(self, step, *of_run):
            return 1.0 if step == 1 else 1e-6

    assert check_rate(make(FAR, rate=Late()))


def test_the_first_of_several_schedules_counts():
    late = catalog.cyclic(4, 1)
    start = after([(catalog.data_parallel(4), 1)], late)
    assert check_rate(make(FAR, start)).startswith("DP: ")
    assert check_rate(make(8.0, late)).startswith("CDP-v1: ")
    assert check_rate(make(8.0, start)) is None


def test_training_does_not_depend_on_it():
    plain, checked = make(0.1), make(0.1)
    first_curvature(checked, 4, tolerance=0.1)
    assert check_rate(checked) is None
    assert plain.run_to_end()[0].train_loss == checked.run_to_end()[0].train_loss


def test_what_cannot_be_measured_is_logged_and_never_raised(monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(rate_check._log, "disabled", False)  # as Hydra leaves it
    assert check_rate(make(FAR, model=lambda: Net(float("nan")))) is None
    assert "Hessian of Net is not finite" in caplog.text

    def broken(run, on_activity):
        raise MemoryError("no memory left")

    monkeypatch.setattr(rate_check, "_check", broken)
    assert check_rate(make(FAR)) is None
    assert "no memory left" in caplog.text
