"""A run's learning rates, smoothed loss and optimizer options, also after it is resumed."""

import shutil
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.thorough import more
from tests.training.test_run_with_checkpoints import built, stopped, weights
from toolkit.errors import UserError
from toolkit.options import TrainingOptions
from toolkit.runtime.updater import Updater
from toolkit.schedule import catalog
from toolkit.training import evaluate, prepare, run_with_checkpoints
from toolkit.training.data import synthetic

pytestmark = pytest.mark.usefixtures("analysed_once")


@pytest.mark.parametrize("order", ["grouped", "scheduled"])
def test_a_step_has_the_rate_of_its_update(monkeypatch, order):
    """Also where its result comes before the update."""
    options = (
        "schedule=cdp_v1",
        f"runtime.order={order}",
        "lr=cosine",
        "lr.warmup_epochs=0.5",
    )
    run = built(*options, "lr.reference_batch=4", "epochs=2")
    first, reported, made = run.runtime._updaters[0], [], []
    update = Updater.update

    def noted(self, *total, **how):
        if self is first:
            made.append(self.optimizer.param_groups[0]["lr"])
        update(self, *total, **how)

    monkeypatch.setattr(Updater, "update", noted)
    epochs = run.run(on_step=lambda step: reported.append(step.learning_rate))
    assert reported == pytest.approx(made, rel=1e-12)
    assert len(reported) == 16
    assert len(set(reported)) > 12
    assert [epoch.learning_rate for epoch in epochs] == [reported[0], reported[8]]


@pytest.mark.parametrize("wanted", [True, False])
def test_cudnn_benchmarks_convolutions_if_asked(monkeypatch, wanted):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", not wanted)
    built(f"cudnn_benchmark={wanted}")
    assert torch.backends.cudnn.benchmark is wanted


CHANGES = [
    ("sgd", ["optimizer.weight_decay=0.5"]),
    ("sgd", ["optimizer.momentum=0.1", "optimizer.nesterov=true"]),
    ("adamw", ["optimizer.betas=[0.5,0.6]"]),
    ("muon", ["optimizer.weight_decay=0.5", "optimizer.betas=[0.5,0.6]"]),
]


@pytest.mark.parametrize(
    ("optimizer", "changed"), more(CHANGES[1:2], CHANGES), ids=lambda x: "".join(x)
)
def test_options_given_anew_are_those_of_the_updates(tmp_path, optimizer, changed):
    stopped(tmp_path, 8, f"optimizer={optimizer}")
    found = []
    for options in ([], changed):
        run = built(f"optimizer={optimizer}", *options)
        folder = shutil.copytree(
            tmp_path, tmp_path.with_name(f"{tmp_path.name}{len(found)}")
        )
        outcome = run_with_checkpoints(run, folder, resume=True)
        groups = [g for u in run.runtime._updaters for g in u.optimizer.param_groups]
        for option in options:
            name, _, value = option.removeprefix("optimizer.").partition("=")
            values = {str(group[name]) for group in groups}
            assert len(values) == 1
            assert values.pop().replace(" ", "").strip("()[]").lower() == value.strip(
                "[]"
            )
        found.append(weights(outcome))
    plain, other = found
    assert any(not torch.equal(plain[name], other[name]) for name in plain)


def test_an_epoch_of_another_length_is_refused(tmp_path):
    """Also after its last step: rates go by epochs."""
    run_with_checkpoints(built("epochs=1", "schedule=dp"), tmp_path)
    with pytest.raises(UserError, match="after 8 steps"):
        run_with_checkpoints(
            built("epochs=2", "schedule=dp", "batch=8"), tmp_path, resume=True
        )


def test_the_training_loss_is_smoothed_and_the_test_loss_is_not():
    runs = [
        built("epochs=1", f"label_smoothing={k}", "optimizer.lr=0") for k in (0, 0.25)
    ]
    (plain,), (smoothed,) = (run.run() for run in runs)
    assert smoothed.train_loss != plain.train_loss
    assert smoothed.test_loss == plain.test_loss
    tested = evaluate(
        runs[1].runtime.module(), runs[1].samples.test(16, torch.device("cpu"))
    )
    assert tested.loss == pytest.approx(smoothed.test_loss)
    outputs, targets = torch.randn(4, 5), torch.tensor([0, 4, 2, 1])
    uniform = -F.log_softmax(outputs, 1).mean()
    expected = 0.75 * F.cross_entropy(outputs, targets) + 0.25 * uniform
    losses = runs[1].runtime._engine.grouped_pass.losses((outputs,), targets, 2)
    torch.testing.assert_close(losses.value.mean(), expected)


@pytest.mark.parametrize("value", [-0.1, 1, 1.5])
def test_label_smoothing_out_of_range_is_refused(value):
    with pytest.raises(UserError, match=f"label_smoothing.*{float(value)}"):
        built(f"label_smoothing={value}")


class Centred(nn.Module):
    """Subtracts the mean of the batch."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(192, 8), nn.Linear(8, 4)

    def forward(self, x):
        x = self.first(x.flatten(1))
        return self.last(x - x.mean(0))


def test_a_model_that_mixes_samples_is_refused():
    with pytest.raises(
        UserError, match=r"Centred mixes .* return self.last\(x - x.mean\(0\)\)"
    ):
        prepare(
            TrainingOptions(batch=4, device="cpu"),
            model=Centred(),
            samples=synthetic(n_train=16, n_test=8, n_classes=4, image_size=8),
            schedule=catalog.cyclic(2),
            optimizer=partial(torch.optim.SGD, lr=0.1),
        )
