"""Examples of training loops run, on two processes, and learn.

The pairs of scripts are in test_ddp_scripts.py.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.thorough import more, thorough
from tests.warm_python import run_ranks

EXAMPLES = Path(__file__).parents[2] / "experiments/examples"
NEEDED = {"accelerate_loop": "accelerate", "fabric_loop": "lightning_fabric"}


@pytest.mark.parametrize("name", more(["fabric_loop"], NEEDED))
def test_learns_the_digits(name, tmp_path):
    pytest.importorskip(NEEDED[name])
    output = run_ranks(2, [EXAMPLES / f"{name}.py"], cwd=tmp_path, env=dict(os.environ))
    found = [float(share) for share in re.findall(r"accuracy ([\d.]+)%", output)]
    assert found[-1] > 88


@thorough
def test_one_is_started_as_its_users_start_it(tmp_path):
    """By torchrun; its checkpoint has the names of weights that DDP's has."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = [str(EXAMPLES / "imagenet_cdp.py"), "--epochs", "2"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", *script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = re.findall(r"validation.* loss [\d.]+ \(([\d.]+)\)", done.stdout)
    first, second = map(float, losses)
    assert second < first
    saved = torch.load(tmp_path / "checkpoint.pth.tar")
    assert saved["epoch"] == 2
    assert all(name.startswith("module.") for name in saved["state_dict"])
