"""Examples of training loops run, on two processes, and learn.

The pairs of scripts are in test_ddp_scripts.py.
"""

import difflib
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.warm_python import run_ranks

EXAMPLES = Path(__file__).parents[2] / "experiments/examples"
NEEDED = {"accelerate_loop": "accelerate", "fabric_loop": "lightning_fabric"}


def torchrun(script, folder):
    """Run a script on two ranks in ``folder``; return what it prints."""
    start = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    done = subprocess.run(
        [*start, script],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["ddp_original", "ddp_to_cdp", *NEEDED])
def test_learns_the_digits(name, tmp_path):
    if not find_spec(needed := NEEDED.get(name, "torch")):
        pytest.skip(f"needs {needed}")
    script = EXAMPLES / f"{name}.py"
    if name == "ddp_to_cdp":  # one is started as its users start it
        output = torchrun(script, tmp_path)
    else:
        output = run_ranks(2, [script], cwd=tmp_path, env=dict(os.environ))
    found = [float(share) for share in re.findall(r"accuracy ([\d.]+)%", output)]
    assert found[-1] > 88
    if name.startswith("ddp"):
        saved = torch.load(tmp_path / "digits.pt")
        assert saved["module.0.weight"].shape == (16, 1, 3, 3)


def test_at_most_six_lines_tell_ddp_and_cdp_apart():
    first, second = (
        (EXAMPLES / f"ddp_{name}.py").read_text() for name in ("original", "to_cdp")
    )
    changes = difflib.ndiff(first.splitlines()[4:], second.splitlines()[4:])
    assert sum(line.startswith("+ ") and len(line) > 2 for line in changes) <= 6
