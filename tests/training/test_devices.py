"""A training run whose ranks are several devices: its weights, its files, and who stops."""

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.cli.test_presets import composed
from tests.training.test_run_with_checkpoints import weights
from toolkit.cli.runs import build_run
from toolkit.errors import UserError
from toolkit.model import gpt
from toolkit.options import SaveOptions
from toolkit.runtime import Distributed, join, launch
from toolkit.training import run_with_checkpoints
from toolkit.training.devices import options_of_width

TEXT = "the cat sat on the mat, and the dog on the log. " * 12
MODEL = ("model=gpt", "model.layers=2", "model.width=8", "model.heads=2")
RUN = (
    "data=text",
    "data.length=16",
    "schedule=one_f_one_b",
    "stages=2",
    "microbatches=4",
)
DEVICES = ("runtime=distributed", "runtime.width=2", "runtime.backend=gloo")


def built(folder, *more):
    text = f"data.root={Path(folder) / 'text.txt'}"
    return build_run(
        composed("train", *MODEL, *RUN, text, "batch=2", "device=cpu", *more)
    )


def on_devices(folder):
    """Weights after an epoch. Only the first process's folder counts."""
    join()
    is_first = os.environ["RANK"] == "0"
    run_folder = Path(folder) / ("run" if is_first else "elsewhere")
    return weights(
        run_with_checkpoints(built(folder, "epochs=1", *DEVICES), run_folder)
    )


def test_devices_train_as_one_process_and_it_resumes(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    found = launch(on_devices, 4, str(tmp_path))
    first = run_with_checkpoints(built(tmp_path, "epochs=1"), tmp_path / "first")
    for name, tensor in weights(first).items():
        for state in found:
            torch.testing.assert_close(state[name], tensor, rtol=1e-4, atol=1e-6)
    assert not (tmp_path / "elsewhere").exists()
    # Both learning rates follow the same curve from here on.
    folders = (tmp_path / "run", tmp_path / "first")
    resumed, expected = (
        weights(run_with_checkpoints(built(tmp_path, "epochs=2"), folder, resume=True))
        for folder in folders
    )
    for name, tensor in expected.items():
        torch.testing.assert_close(resumed[name], tensor, rtol=1e-4, atol=1e-6)


def test_a_plan_is_given_with_a_width():
    model = gpt(7, 4, layers=1, width=8, heads=2)
    assert options_of_width(Distributed, model, SaveOptions()) == {}
    runtime = partial(Distributed, width=2)
    assert [*options_of_width(runtime, model, SaveOptions())] == ["parallelize"]
    with pytest.raises(UserError, match=r"save\.sharded"):
        options_of_width(runtime, model, SaveOptions(sharded=True))
    with pytest.raises(UserError, match="Linear"):
        options_of_width(runtime, nn.Linear(2, 2), SaveOptions())
