"""A checkpoint of one file is whole or not at all."""

import pytest
import torch

from toolkit.training.checkpoint import DamagedCheckpointError, read, write


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
