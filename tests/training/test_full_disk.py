"""A disk that is full from the first, or fills up within a run: the run ends with a note."""

import subprocess

import pytest

from tests.experiments.command import TINY
from tests.experiments.command import run as command
from tests.thorough import more
from tests.training.test_run_with_checkpoints import built
from toolkit.training import run_with_checkpoints
from toolkit.training.checkpoint import Checkpoints


@pytest.fixture
def disk(tmp_path):
    """A small file system, and a function that mounts it again with other options."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(*options):
        command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "none", str(folder)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    if not mount("size=2m"):
        pytest.skip("mounting a file system is not permitted here")
    yield folder, mount
    subprocess.run(["umount", str(folder)], check=True)


# On Python 3.13 torch's writer warns of files that it could not close.
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <torch:pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize("sharded", more(["true"], ["false", "true"]))
def test_a_full_disk(disk, capsys, sharded):
    folder, _ = disk
    options = ("save.steps=4", f"save.sharded={sharded}")

    def fill(step):
        if (folder / "checkpoints" / "step_000000004.ckpt").exists():
            try:
                with (folder / "full").open("ab") as file:
                    while True:
                        file.write(bytes(4096))
                        file.flush()
            except OSError:
                pass

    outcome = run_with_checkpoints(built(*options), folder, on_step=fill)
    assert len(outcome.epochs) == 3
    (note,) = outcome.notes
    assert note.startswith("not written (")
    assert "the checkpoint of step 8: " in note
    assert "the weights, " in note
    assert "space left" in note or "is the disk full?" in note
    assert capsys.readouterr().err.count("training continues") == 1
    run = built()
    state, damaged = Checkpoints(folder / "checkpoints").load(run.runtime)
    run.runtime.load_state_dict(state["runtime"])
    assert (damaged, run.runtime.steps_done) == ([], 4)


def test_a_disk_that_is_full_from_the_first_shows_the_result(disk):
    """Only the small files of Hydra fit."""
    folder, mount = disk
    assert mount("remount", "size=48k")
    finished = command("train", *TINY, f"hydra.run.dir={folder}")
    assert finished.status == int(not (folder / "result.json").exists())
    assert "Traceback" not in finished.err
    assert "top1" in finished.out
    assert "not written" in finished.out
