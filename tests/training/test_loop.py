"""The loop and evaluation, on models whose answers are known."""

import pickle
from dataclasses import replace
from functools import partial
from math import exp, inf, log, nan
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from toolkit.errors import UserError
from toolkit.metric import ACCURACY, LOSS
from toolkit.model import Images, Sequences, build
from toolkit.options import TrainingOptions
from toolkit.runtime import StepOptions
from toolkit.schedule import catalog
from toolkit.training import DivergedError, evaluate, evaluation, loop, prepare
from toolkit.training.data import synthetic
from toolkit.training.evaluation import Evaluation, evaluated_at_once
from toolkit.training.loop import Epoch, Position, is_best
from toolkit.training.lr import Constant

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("scores", "targets", "top1", "top5"),
    [
        # right, fifth, sixth
        (3 * [[9.0, 8, 7, 6, 5, 4, 3]], [0, 4, 5], 1 / 3, 2 / 3),
        # with few classes every answer is among five
        ([[1.0, 0, 0], [0, 1, 0], [0, 0, 1]], [0, 2, 1], 1 / 3, 1),
        ([[nan, nan], [1.0, 0.0], [1.0, 0.0]], [0, 0, 0], nan, nan),
    ],
)
def test_shares_of_right_answers(scores, targets, top1, top5):
    scores, targets = torch.tensor(scores), torch.tensor(targets)
    found = evaluate(
        nn.Identity(), [(scores[:2], targets[:2]), (scores[2:], targets[2:])]
    )
    assert (found.top1, found.top5) == pytest.approx((top1, top5), nan_ok=True)
    assert found.loss == pytest.approx(
        float(F.cross_entropy(scores, targets)), nan_ok=True
    )


def test_every_place_of_a_sequence_is_an_answer():
    scores, targets = (
        torch.randn(4, 3, 7, dtype=torch.float64),
        torch.randint(7, (4, 3)),
    )
    found = evaluate(
        nn.Identity(), [(scores[:1], targets[:1]), (scores[1:], targets[1:])]
    )
    flat = evaluate(nn.Identity(), [(scores.flatten(0, 1), targets.flatten())])
    assert (found.top1, found.top5) == (flat.top1, flat.top5)
    assert found.loss == pytest.approx(flat.loss)
    assert found.loss == pytest.approx(float(F.cross_entropy(scores.mT, targets)))


@pytest.mark.parametrize(
    ("form", "batch_size", "expected"),
    [
        (Images(3, 32, 32, 10), 64, 256),
        (Images(3, 224, 224, 1000), 512, 512),
        (Sequences(1024, 256), 512, 128),
        (Sequences(1024, 50_257), 64, 1),
    ],
)
def test_a_batch_of_the_test_has_room(form, batch_size, expected):
    """Of a decoder's scores: 128 MiB, or one sequence's."""
    assert evaluated_at_once(form, batch_size) == expected


def test_the_best_epoch_is_that_of_the_measure():
    epochs = [
        Epoch(k, 1.0, loss, top1, 1.0, 0.1, 1.0)
        for k, loss, top1 in ((0, 2, 0.5), (1, 1, 0.4))
    ]
    assert is_best(epochs, LOSS)
    assert not is_best(epochs, ACCURACY)
    assert is_best(epochs[:1], ACCURACY)
    assert is_best([*epochs, epochs[0]], ACCURACY)
    lost = replace(epochs[0], top1=nan)
    assert not is_best([epochs[0], lost], ACCURACY)
    assert is_best([lost, epochs[1]], ACCURACY)
    assert (epochs[0].text(ACCURACY), epochs[0].text(LOSS)) == ("50.00%", "loss 2.000")


class Modes(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen, self.norm = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
        self.frozen.eval()
        self.seen = set()

    def forward(self, x):
        self.seen |= {module.training for module in self.modules()}
        assert not torch.is_grad_enabled()
        return self.norm(x)


def test_evaluation_restores_each_mode_and_moves_no_statistics():
    model = Modes()
    evaluate(model, [(torch.randn(4, 2), torch.zeros(4, dtype=torch.long))])
    assert model.seen == {False}
    assert (model.training, model.frozen.training, model.norm.training) == (
        True,
        False,
        True,
    )
    assert model.norm.num_batches_tracked == 0


def prepared(images, lr=0.05, epochs=2, schedule=None, guard="stop"):
    return prepare(
        TrainingOptions(batch=4, epochs=epochs, device="cpu", guard=guard),
        model=lambda: build("resnet8", **images.form.arguments),
        samples=images,
        schedule=schedule or catalog.cyclic(4),
        optimizer=partial(torch.optim.SGD, lr=lr),
        lr=Rising(),
    )


class Rising(Constant):
    """A rate that names the step."""

    def factor(self, step, steps_per_epoch, epochs, batch):
        return 1 + step / 1000


@pytest.fixture(scope="module")
def images():
    return synthetic(n_train=128, n_test=64, n_classes=4, image_size=8)


@pytest.mark.parametrize("schedule", [catalog.data_parallel(4), catalog.cyclic(4)])
def test_learns(images, schedule):
    history = prepared(images, epochs=4, schedule=schedule).run()
    assert [epoch.epoch for epoch in history] == [0, 1, 2, 3]
    assert history[-1].train_loss < history[0].train_loss
    assert history[-1].top1 > 0.9
    assert history[-1].top5 == 1


def test_reports_epochs_and_steps(images):
    epochs, steps, position = [], [], Position()
    history = prepared(images, lr=0.5).run(epochs.append, steps.append, position)
    assert epochs == history
    assert position.first_loss == pytest.approx(
        float(steps[0].result.losses.double().mean())
    )
    assert [(step.step, step.n_steps) for step in steps] == 2 * [
        (k, 8) for k in range(1, 9)
    ]
    assert [step.result.step for step in steps] == [*range(16)]
    assert {step.samples for step in steps} == {16}
    rates = [0.5 * (1 + k / 1000) for k in range(16)]
    assert [step.learning_rate for step in steps] == rates
    for epoch, done in zip(history, (steps[:8], steps[8:]), strict=True):
        losses = torch.cat([step.result.losses for step in done])
        assert epoch.train_loss == pytest.approx(float(losses.double().mean()))
    assert [epoch.learning_rate for epoch in history] == [rates[0], rates[8]]
    assert all(epoch.samples_per_second > 0 for epoch in history)


def test_a_first_epoch_that_has_become_too_short_is_refused(images):
    with pytest.raises(UserError, match=r"after 9 steps.* 8:"):
        prepared(images).run(
            position=Position(step=9, steps_done=9, loss=1.0, n_losses=1)
        )


@pytest.mark.parametrize("guard", ["off", "stop", "rollback"])
@pytest.mark.parametrize("loss", [9.5, 10.5, nan, inf])
def test_a_loss_far_above_the_first_is_a_divergence(guard, loss):
    run = SimpleNamespace(options=TrainingOptions(guard=guard, guard_factor=10))
    position = Position(first_loss=1.0, steps_done=7)
    loop._check(run, 1e9, position, "test")
    if guard == "off" or loss == 9.5:
        loop._check(run, loss, position, "training")
    else:
        with pytest.raises(
            DivergedError, match=r"training loss of epoch 0 is .*, after step 7:"
        ):
            loop._check(run, loss, position, "training")


def test_weights_that_only_the_test_finds_lost(images, monkeypatch):
    """As after a last update that is not finite. No epoch is reported, and no accuracy."""
    found = Evaluation(nan, nan, nan)
    monkeypatch.setattr(evaluation, "evaluate", lambda *arguments, **options: found)
    epochs = []
    with pytest.raises(
        FloatingPointError, match="the test loss of epoch 0 is nan, after step 8"
    ):
        prepared(images).run(epochs.append)
    assert epochs == []


def test_tests_compute_in_the_precision_of_training():
    model = nn.Linear(2, 2, bias=False)
    model.weight.data = torch.tensor([[1.0, 0.0], [0.0, 1 + 2**-12]])
    batches = [(torch.ones(1, 2), torch.tensor([0]))]
    in_full = evaluate(model, batches)
    in_16_bits = evaluate(model, batches, options=StepOptions(precision="bf16"))
    assert in_full.top1 == 0
    assert in_16_bits.top1 == 1  # both scores are 1, and the first of them counts
    assert in_16_bits.loss == pytest.approx(log(2), rel=1e-6)
    assert in_full.loss > in_16_bits.loss


def test_averages_are_tested_like_the_weights(images):
    run = prepared(images, lr=0.01, epochs=1)
    weights = dict(run.runtime.module().named_parameters())
    zero = {name: torch.zeros_like(p) for name, p in weights.items()}
    (bias,) = [name for name, p in weights.items() if p.shape == (4,)]
    zero[bias][1] = 1.0  # class 1 for every image
    run.runtime.averages = lambda: zero
    (epoch,) = run.run()
    labels = torch.cat([labels for _, labels in images.test(64, CPU)])
    share = float((labels == 1).double().mean())
    assert epoch.ema_top1 == pytest.approx(share)
    assert epoch.top1 != epoch.ema_top1
    assert epoch.ema_loss == pytest.approx(log(exp(1) + 3) - share, rel=1e-5)


def test_a_resumed_epoch_counts_its_own_steps_per_second(images, monkeypatch):
    times = iter([10.0, 10.5, 12.0])  # the epoch's start, that of its steps, its end
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    (epoch,) = prepared(images, epochs=1).run(position=Position(step=6, steps_done=6))
    assert epoch.samples_per_second == 2 * 16 / 2


def test_a_divergence_says_the_same_in_another_process():
    error = DivergedError(
        "the loss is nan", [Epoch(0, *range(6))], more=", or save.steps=10"
    )
    copied = pickle.loads(pickle.dumps(error))
    assert str(copied) == str(error)
    assert str(copied).count("optimizer.lr") == 1
    assert (copied.reason, copied.epochs) == (error.reason, error.epochs)
