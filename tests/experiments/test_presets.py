"""Every preset and every study trains, though narrow models on a few samples."""

import json
import os
import subprocess
import sys

import pytest

from tests.cli.test_presets import CONF, PRESETS, composed
from tests.experiments.command import EXPERIMENTS, TINY, complete
from tests.thorough import thorough
from tests.training.test_data import TEN, write_idx, write_images
from toolkit.cli.help import choices

pytestmark = pytest.mark.usefixtures("analysed_once")


def folders(root, test):
    write_images(root / "train", TEN, n=4)
    write_images(root / test, TEN, n=1, seed=1)
    return "batch=2", "model.width=8", f"data.root={root}"


def cifar10(root):
    return folders(root, "test")


def fashion_mnist(root):
    write_idx(root)
    return "batch=3", "model.width=8", f"data.root={root}"


def image_folder(root):
    return *folders(root, "val"), "data.image_size=32", "data.num_workers=0"


def digits(root):
    return "batch=150", "model.width=8"


def text(root):
    root.mkdir()
    (root / "some.txt").write_bytes(bytes(k * k % 251 for k in range(300)))
    return (
        "batch=4",
        "model.width=8",
        "model.heads=2",
        f"data.root={root}",
        "data.length=8",
    )


SETS = (cifar10, fashion_mnist, image_folder, digits, text)
DATA = {function.__name__: function for function in SETS}
"""By the function of toolkit.training.data: writes a small set, and gives the options for it."""
ON_RANKS = ("compression",)
"""Studies whose rules train on several processes."""


@thorough
@pytest.mark.parametrize(
    "chosen",
    [
        *(f"experiment={preset}" for preset in PRESETS),
        *(
            f"study={study}"
            for study in choices([CONF], "study")
            if study not in ON_RANKS
        ),
    ],
)
def test_every_preset_and_study_trains(chosen, tmp_path):
    config, small = composed("compare", chosen), TINY
    if chosen.startswith("experiment="):
        small = DATA[config.data._target_.rpartition(".")[2]](tmp_path / "data")
    tuned = ["tune.rates=[1]", "tune.epochs=1"] if config.tune.rates else []
    few = ["epochs=1", "seeds=1", "stability=false", *tuned]
    result = complete("compare", tmp_path / "run", chosen, *small, *few)
    found = [(row["rule"], row["diverged"]) for row in result["metrics"]]
    assert found == [(rule, 0) for rule in config.rules]


@thorough
@pytest.mark.parametrize("study", ON_RANKS)
def test_every_study_that_needs_ranks_trains_on_four(study, tmp_path):
    chosen = f"study={study}"
    few = ["epochs=1", "seeds=1", "tune.rates=null", "device=cpu"]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=4",
    ]
    command += [str(EXPERIMENTS / "compare.py"), chosen, *TINY, *few]
    finished = subprocess.run(
        [*command, f"hydra.run.dir={tmp_path / 'run'}"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert finished.returncode == 0, finished.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    found = [(row["rule"], row["diverged"]) for row in result["metrics"]]
    assert found == [(rule, 0) for rule in composed("compare", chosen).rules]
