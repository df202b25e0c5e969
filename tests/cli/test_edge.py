"""Everything outside toolkit.cli takes plain values and objects."""

import traceback
from pathlib import Path

import pytest
import torch

import toolkit
from tests.experiments.command import TINY, run
from toolkit.model import build
from toolkit.options import SaveOptions, TrainingOptions
from toolkit.schedule import catalog
from toolkit.training import prepare
from toolkit.training.data import synthetic

PROJECT = Path(toolkit.__file__).parents[1]
OWN = tuple(f"{PROJECT / name}/" for name in ("toolkit", "experiments"))


def test_training_takes_plain_values():
    """Also a module that is there already, of which a copy is trained."""
    options = TrainingOptions(batch=4, epochs=1, device="cpu")
    samples = synthetic(n_train=32, n_test=8, image_size=8)
    torch.manual_seed(options.seed)
    model = build("resnet8", 10, 8)
    before = [parameter.clone() for parameter in model.parameters()]
    found = []
    for given in (model, lambda: build("resnet8", 10, 8)):
        run = prepare(
            options,
            model=given,
            samples=samples,
            schedule=catalog.cyclic(2),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        )
        (epoch,) = run.run()
        found.append(epoch.train_loss)
        assert run.recorded_options["batch"] == 4
    assert found[0] == found[1]
    assert all(
        torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True)
    )


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *(
            (TrainingOptions, {name: 0})
            for name in ("batch", "epochs", "guard_factor", "guard")
        ),
        *((SaveOptions, {name: 0}) for name in ("keep", "steps", "minutes")),
    ],
)
def test_refuses_options_out_of_range(kind, options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}.* 0"):
        kind(**options)


@pytest.mark.parametrize("order", ["grouped", "scheduled"])
def test_at_most_ten_frames_from_main_to_backward(monkeypatch, tmp_path, order):
    frames = []
    engine = torch.autograd._engine_run_backward

    def watched(*arguments, **options):
        stack = traceback.extract_stack()
        own = [f for f in stack if f.filename.startswith(OWN)]
        if not frames and any("runtime" in frame.filename for frame in own):
            main = next(k for k, f in enumerate(own) if f.name == "main")
            frames.extend(f"{Path(f.filename).name}: {f.name}" for f in own[main + 1 :])
        return engine(*arguments, **options)

    monkeypatch.setattr("torch.autograd._engine_run_backward", watched)
    monkeypatch.setattr("torch.autograd.graph._engine_run_backward", watched)
    options = (
        f"runtime.order={order}",
        "tracking.mode=disabled",
        f"hydra.run.dir={tmp_path}",
    )
    assert run("train", *TINY, *options).status == 0
    assert 0 < len(frames) <= 10, frames
