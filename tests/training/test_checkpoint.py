"""Checkpoints are whole or not at all, and a damaged one gives way to the one before."""

import random

import pytest
import torch

from toolkit.training.checkpoint import Checkpoints, DamagedCheckpointError, read, write


def state(step=0):
    generator = torch.Generator().manual_seed(step)
    weights = {"w": torch.randn(5, 3, generator=generator), "n": torch.tensor(step)}
    return {"model": weights, "step": step, "losses": [1.5, None], "name": "run"}


def same(found, expected):
    model, other = found.pop("model"), dict(expected).pop("model")
    assert model.keys() == other.keys()
    assert all(torch.equal(model[name], other[name]) for name in other)
    assert found == {key: value for key, value in expected.items() if key != "model"}


def test_comes_back_as_it_was(tmp_path):
    write(tmp_path / "a.ckpt", state(3))
    same(read(tmp_path / "a.ckpt"), state(3))
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


def test_holds_no_code(tmp_path):
    """What is loaded cannot run anything."""

    class Evil:
        def __reduce__(self):
            return print, ("evil",)

    write(tmp_path / "a.ckpt", {"x": Evil()})
    with pytest.raises(DamagedCheckpointError, match="holds what is not tensors and plain values"):
        read(tmp_path / "a.ckpt")


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


def test_whatever_befalls_a_file_the_one_before_is_used(tmp_path):
    """300 mutations of the latest checkpoint."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state(1), 1)
    checkpoints.save(state(2), 2)
    latest = checkpoints.paths()[-1]
    whole = latest.read_bytes()
    chance = random.Random(0)
    for _ in range(300):
        latest.write_bytes(mutated(whole, chance))
        found, damaged = checkpoints.load()
        same(found, state(1))
        (sentence,) = damaged
        assert str(latest) in sentence
        assert "\n" not in sentence
    latest.write_bytes(whole)
    found, damaged = checkpoints.load()
    same(found, state(2))
    assert damaged == []


def test_the_latest_and_the_best_stay(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in range(1, 6):
        checkpoints.save(state(step), step, best=step == 2)
    assert [path.name for path in checkpoints.paths()] == [
        "step_000000004.ckpt",
        "step_000000005.ckpt",
    ]
    same(read(tmp_path / "best.ckpt"), state(2))


def test_passes_over_the_latest(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in (1, 2, 3):
        checkpoints.save(state(step), step)
    for skip, step in ((0, 3), (1, 2), (2, 1), (9, 1)):
        same(checkpoints.load(skip)[0], state(step))


def test_what_cannot_be_written_leaves_what_was(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state(1), 1)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoints.save(state(2), 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000000001.ckpt"]
    same(checkpoints.load()[0], state(1))


def test_says_that_there_is_none(tmp_path):
    with pytest.raises(ValueError, match=r"there is no checkpoint in .*: give resume="):
        Checkpoints(tmp_path).load()
    (tmp_path / "step_000000001.ckpt").write_bytes(b"something else")
    with pytest.raises(ValueError, match=r"no checkpoint in .* is whole: .* is not a checkpoint"):
        Checkpoints(tmp_path).load()
    with pytest.raises(ValueError, match=r"save.keep is 1 or more: got 0"):
        Checkpoints(tmp_path, keep=0)
