"""Checkpoints are whole or not read, and the latest and the best are kept."""

import os
import random
import shutil
from dataclasses import dataclass, field

import pytest
import torch
from torch.utils._pytree import tree_map_only

from tests.thorough import more
from toolkit.errors import UserError
from toolkit.training.checkpoint import Checkpoints, DamagedCheckpointError, read, write


@dataclass
class Saved:
    """A runtime that is alone and has two stages."""

    steps_done: int = 0
    rank = 0
    world = None
    own: tuple = (0, 1)
    stages: dict = field(default_factory=dict)

    def part(self):
        generator = torch.Generator().manual_seed(self.steps_done)
        weights = [{f"w{j}": torch.randn(5, 3, generator=generator)} for j in range(2)]
        return {
            "steps_done": self.steps_done,
            "fixed": {"n": torch.tensor(self.steps_done)},
            "versions": {j: {self.steps_done: weights[j]} for j in range(2)},
            "stages": {j: {"betas": (0.5, None), 0: weights[j]["w" + str(j)]} for j in range(2)},
        }

    def state_dict(self):
        part = self.part()
        weights = [part["versions"][j][self.steps_done] for j in range(2)]
        return {
            "steps_done": self.steps_done,
            "model": part["fixed"] | weights[0] | weights[1],
            "versions": [*part["versions"].values()],
            "stages": [*part["stages"].values()],
        }


def save(checkpoints, step, **options):
    checkpoints.save(Saved(step), {"position": [step, 1.5], "name": "run"}, step, **options)


def same(found, step):
    expected = {"runtime": Saved(step).state_dict(), "position": [step, 1.5], "name": "run"}
    assert tree_map_only(torch.Tensor, torch.Tensor.tolist, found) == tree_map_only(
        torch.Tensor, torch.Tensor.tolist, expected
    )


@pytest.fixture(params=[False, True], ids=["file", "sharded"])
def checkpoints(request, tmp_path):
    return Checkpoints(tmp_path, keep=2, sharded=request.param)


def mutated(content, chance):
    """A byte flipped, the end cut off, something put in, or a part taken out."""
    at = chance.randrange(len(content))
    kind = chance.randrange(4)
    if kind == 0:
        return content[:at] + bytes([content[at] ^ (1 << chance.randrange(8))]) + content[at + 1 :]
    if kind == 1:
        return content[:at]
    if kind == 2:
        return content[:at] + chance.randbytes(1 + chance.randrange(40)) + content[at:]
    return content[:at] + content[at + 1 + chance.randrange(40) :]


def test_uses_the_one_before_a_damaged_checkpoint(checkpoints):
    """Mutations of the files of the latest checkpoint."""
    save(checkpoints, 1)
    save(checkpoints, 2)
    latest = checkpoints.paths()[-1]
    files = sorted(latest.iterdir()) if latest.is_dir() else [latest]
    chance = random.Random(0)
    for k in range(more(80, 300)):
        file = files[k % len(files)]
        whole = file.read_bytes()
        file.write_bytes(mutated(whole, chance))
        found, damaged = checkpoints.load(Saved())
        same(found, 1)
        (sentence,) = damaged
        assert str(latest) in sentence
        assert "\n" not in sentence
        file.write_bytes(whole)
    found, damaged = checkpoints.load(Saved())
    same(found, 2)
    assert damaged == []


def test_the_latest_and_the_best_stay(checkpoints, tmp_path):
    """The latest can be passed over, but not all of them."""
    for step in range(1, 7):
        save(checkpoints, step, best=step in (2, 3))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["best.ckpt", *(f"step_00000000{k}.ckpt" for k in (3, 5, 6))]
    assert (tmp_path / "best.ckpt").samefile(tmp_path / "step_000000003.ckpt")
    for skip, step in ((0, 6), (1, 5), (2, 3), (9, 3)):
        same(checkpoints.load(Saved(), skip)[0], step)


def test_files_and_folders_side_by_side(checkpoints, tmp_path):
    other = Checkpoints(tmp_path, keep=2, sharded=not checkpoints.sharded)
    save(checkpoints, 1, best=True)
    save(other, 2, best=True)
    assert [path.is_dir() for path in other.paths()] == [checkpoints.sharded, other.sharded]
    assert (tmp_path / "best.ckpt").is_dir() == other.sharded
    same(checkpoints.load(Saved())[0], 2)
    same(checkpoints.load(Saved(), skip=1)[0], 1)


def test_saves_a_step_again_and_in_a_copied_folder(checkpoints, tmp_path):
    """A copy may hold the best itself in place of the link."""
    for step in (1, 1, 2):
        save(checkpoints, step, best=True)
    copied = Checkpoints(tmp_path / "copy", sharded=checkpoints.sharded)
    shutil.copytree(tmp_path, copied.folder, ignore=lambda *_: ["copy"])
    save(copied, 3, best=True)
    assert (copied.folder / "best.ckpt").samefile(copied.paths()[-1])
    assert [path.name[-6:] for path in copied.paths()] == ["2.ckpt", "3.ckpt"]


def test_a_failed_save_keeps_the_earlier_checkpoints(checkpoints, tmp_path, monkeypatch):
    save(checkpoints, 1)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save(checkpoints, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000000001.ckpt"]
    same(checkpoints.load(Saved())[0], 1)


def test_removes_what_a_killed_run_left_half_written(checkpoints, tmp_path):
    (tmp_path / ".step_000000001.ckpt.77").write_bytes(b"half")
    (tmp_path / ".step_000000001.ckpt.part").mkdir()
    (tmp_path / ".step_000000001.ckpt.part" / "x").write_bytes(b"half")
    save(checkpoints, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000000002.ckpt"]


def test_without_a_whole_checkpoint(tmp_path):
    with pytest.raises(UserError, match=f"{tmp_path}.*resume="):
        Checkpoints(tmp_path).load(Saved())
    (tmp_path / "step_000000001.ckpt").write_bytes(b"something else" * 9)
    (tmp_path / "step_000000002.ckpt").mkdir()
    with pytest.raises(UserError, match=f"{tmp_path} .*2.ckpt .*1.ckpt "):
        Checkpoints(tmp_path).load(Saved())


def test_runs_no_code(tmp_path):
    """Not even that of a file whose checksum is right."""

    class Malicious:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    write(tmp_path / "a.ckpt", {"x": Malicious()})
    with pytest.raises(DamagedCheckpointError, match=r"a\.ckpt"):
        read(tmp_path / "a.ckpt")
    assert not (tmp_path / "made").exists()
