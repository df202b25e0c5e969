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
from toolkit.model import build, gpt
from toolkit.model.gathered_weights import shard_parameters
from toolkit.options import SaveOptions
from toolkit.runtime import Distributed, join, launch
from toolkit.training import run_with_checkpoints
from toolkit.training.devices import options_of_width

TEXT = "the cat sat on the mat, and the dog on the log. " * 12
TASKS = {
    # Devices share heads and hidden units, and the classes of the loss.
    "decoder": (
        "model=gpt",
        "model.layers=2",
        "model.width=8",
        "model.heads=2",
        "data=text",
        "data.length=16",
        "schedule=one_f_one_b",
        "stages=2",
        "microbatches=4",
    ),
    # Devices share weights.
    "resnet": (
        "model=resnet8",
        "model.width=4",
        "data=synthetic",
        "data.image_size=8",
        "data.n_train=32",
        "data.n_test=8",
        "optimizer.nesterov=true",
        "schedule=cdp_v2",
        "stages=2",
        "microbatches=2",
    ),
}
DEVICES = ("runtime=distributed", "runtime.width=2", "runtime.backend=gloo")


def built(folder, *more, task="decoder"):
    overrides = [*TASKS[task], "batch=2", "device=cpu"]
    if task == "decoder":
        overrides.append(f"data.root={Path(folder) / 'text.txt'}")
    return build_run(composed("train", *overrides, *more))


def on_devices(folder, task, n_epochs=1):
    """Weights after an epoch, or more of a resumed run. Only the first process's folder counts."""
    join()
    is_first = os.environ["RANK"] == "0"
    run_folder = Path(folder) / ("run" if is_first else "elsewhere")
    run = built(folder, f"epochs={n_epochs}", *DEVICES, task=task)
    return weights(run_with_checkpoints(run, run_folder, resume=n_epochs > 1))


def assert_close(found, expected):
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("task", TASKS)
def test_devices_train_as_one_process_and_both_resume(tmp_path, task):
    """An epoch on devices, one in a process, and one on devices again."""
    (tmp_path / "text.txt").write_text(TEXT)
    alone = tmp_path / "alone"
    found = launch(on_devices, 4, str(tmp_path), task)
    first = run_with_checkpoints(built(tmp_path, "epochs=1", task=task), alone)
    for state in found:
        assert_close(state, weights(first))
    assert not (tmp_path / "elsewhere").exists()
    # Both learning rates follow the same curve from here on.
    resumed, expected = (
        weights(
            run_with_checkpoints(
                built(tmp_path, "epochs=2", task=task), folder, resume=True
            )
        )
        for folder in (tmp_path / "run", alone)
    )
    assert_close(resumed, expected)
    last = run_with_checkpoints(
        built(tmp_path, "epochs=3", task=task), alone, resume=True
    )
    for state in launch(on_devices, 4, str(tmp_path), task, 3):
        assert_close(state, weights(last))


def test_a_plan_is_given_with_a_width():
    model = gpt(7, 4, layers=1, width=8, heads=2)
    assert options_of_width(Distributed, model, SaveOptions()) == {}
    runtime = partial(Distributed, width=2)
    assert [*options_of_width(runtime, model, SaveOptions())] == ["parallelize"]
    with pytest.raises(UserError, match=r"save\.sharded"):
        options_of_width(runtime, model, SaveOptions(sharded=True))
    with pytest.raises(UserError, match="BatchNorm1d"):
        options_of_width(runtime, nn.BatchNorm1d(2), SaveOptions())


def test_devices_share_the_weights_of_a_model_without_a_plan():
    runtime = partial(Distributed, width=2)
    options = options_of_width(runtime, build("resnet8", 10, 8, 1), SaveOptions())
    assert options == {"parallelize": shard_parameters}
