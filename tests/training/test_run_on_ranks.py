"""Ranks that stop together, and what they have saved."""

import os
import shutil
import signal
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.stages import cut
from tests.thorough import THOROUGH, thorough
from tests.training.test_run_with_checkpoints import assert_identical, built, weights
from toolkit.errors import UserError
from toolkit.runtime import join, launch
from toolkit.training import Listeners, StoppedError, run_with_checkpoints

RUNTIMES = {
    "distributed": ("schedule=cdp_v2",),
    "fsdp, sharded": ("schedule=dp", "save.sharded=true"),
}
if THOROUGH:
    RUNTIMES |= {
        "zero, sharded": ("schedule=zero_cdp_v1", "save.sharded=true"),
        "ddp": ("schedule=dp",),
        "fsdp": ("schedule=dp",),
        "delayed_allreduce": ("schedule=cdp_v1",),
        "ddp, powersgd": ("schedule=dp", "runtime.compression=powersgd"),
        "distributed, int8": ("schedule=cdp_v1", "runtime.compression=int8"),
        "diloco, sharded": ("schedule=dp", "save.sharded=true", "runtime.period=2"),
        "torch_pipelining": ("schedule=gpipe",),
    }
SHORT = ("epochs=2", "data.n_train=32")  # 8 steps
SENT = {name: (signal.SIGTERM, signal.SIGINT)[k % 2] for k, name in enumerate(RUNTIMES)}


def on_ranks(folder):
    """By runtime: what a run that is not stopped comes to, and one that is and resumed."""
    with mock.patch("toolkit.training.training_run.partition", cut):
        return {name: on_rank(Path(folder) / name, name) for name in RUNTIMES}


def on_rank(folder, name):
    join()
    runtime = {"zero": "distributed"}.get(name.split(",")[0], name.split(",")[0])
    options = (
        f"runtime={runtime}",
        "runtime.backend=gloo",
        "device=cpu",
        *RUNTIMES[name],
    )
    options += ("save.steps=3", "save.keep=9", *SHORT)
    # Rank 0's counts.
    mine = folder if int(os.environ["RANK"]) == 0 else Path("elsewhere")
    whole = run_with_checkpoints(built(*options), mine / "whole")
    expected = weights(whole)
    error = None
    run = built(*options)
    seen = iter(range(1, 100))

    def on_step(step):
        if next(seen) == 5 and run.runtime.rank == 1:
            os.kill(os.getpid(), SENT[name])
            time.sleep(0.5)  # the watch leaves it to the training

    try:
        run_with_checkpoints(run, mine / "again", listeners=Listeners(on_step=on_step))
    except StoppedError as stopped:
        error = str(stopped)
    again = run_with_checkpoints(built(*options), mine / "again", resume=True)
    ended = run_with_checkpoints(built(*options), mine / "again", resume=True)
    return expected, weights(again), error, (weights(ended), ended.run.measurements())


@pytest.fixture(scope="module")
def distributed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return folder, launch(on_ranks, 2, str(folder))


@pytest.mark.parametrize("name", RUNTIMES)
def test_ranks_stop_together_and_resume(distributed, name):
    """One of them has heard the signal."""
    folder, found = distributed
    for on_rank in found:
        expected, again, error, (ended, measured) = on_rank[name]
        assert_identical(again, expected)
        assert_identical(ended, expected)  # resumed when all was done
        assert measured is None
        assert error == SENT[name].name
    saved = [
        path.is_dir()
        for path in (folder / name / "again").glob("checkpoints/step_*.ckpt")
    ]
    assert saved == 4 * ["sharded" in name]


# Other rules of the trajectory, or a state of compressed messages: another runtime does not go on.
THEIR_OWN = {"ddp, powersgd", "diloco, sharded", "distributed, int8"}


@pytest.mark.parametrize("name", [name for name in RUNTIMES if name not in THEIR_OWN])
def test_another_runtime_resumes_what_ranks_have_saved(distributed, name):
    """From the fourth step of 8; under another rule, or other data, it would end elsewhere."""
    folder, found = distributed
    rule = RUNTIMES[name][0]
    wrong = ("schedule=dp",) if "cdp" in rule else (rule, "seed=1")
    alike = []
    for number, options in enumerate(((rule,), wrong)):
        single = folder / name / f"single{number}"
        shutil.copytree(folder / name / "whole", single)
        for later in sorted((single / "checkpoints").glob("step_*"))[2:]:
            shutil.rmtree(later) if later.is_dir() else later.unlink()
        outcome = run_with_checkpoints(built(*options, *SHORT), single, resume=True)
        assert outcome.resumed_at == 4
        mine, theirs = weights(outcome), found[0][name][0]
        alike.append(
            all(
                torch.allclose(mine[k], theirs[k], rtol=1e-3, atol=1e-4) for k in theirs
            )
        )
    assert alike == [True, False]


@thorough
def test_a_runtime_without_compression_refuses_errors_of_compressed_messages(
    distributed, tmp_path
):
    folder, _ = distributed
    shutil.copytree(folder / "distributed, int8" / "whole", tmp_path / "saved")
    run = built("schedule=cdp_v1", *SHORT)
    with pytest.raises(UserError, match="compression=int8"):
        run_with_checkpoints(run, tmp_path / "saved", resume=True)
