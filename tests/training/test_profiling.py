"""A trace of the steps that were asked for, and of no others."""

import json
from types import SimpleNamespace

import pytest
import torch

from toolkit.errors import UserError
from toolkit.training.profiling import WARM_UP, Profile


def train(profile, n_steps, then=None):
    """Each step is a product of matrices one larger than the step's before it."""
    with profile:
        for k in range(n_steps):
            torch.mm(torch.ones(k + 1, k + 1), torch.ones(k + 1, k + 1))
            profile.step()
        if then:
            raise then


def traced(path):
    """The products in the trace."""
    events = json.loads(path.read_text())["traceEvents"]
    return sum(event.get("name") == "aten::mm" for event in events)


@pytest.mark.parametrize(
    ("n_steps", "run", "found"),
    [(1, WARM_UP + 5, 1), (3, WARM_UP + 7, 3), (10, WARM_UP + 2, 2)],
    ids=["one", "some", "a run that ends before"],
)
def test_traces_steps_after_a_warm_up(tmp_path, capfd, n_steps, run, found):
    """Silently: the terminal belongs to the progress bar."""
    profile = Profile(n_steps, tmp_path / "profile.json")
    train(profile, run)
    assert profile.written
    assert traced(profile.path) == found
    assert capfd.readouterr() == ("", "")


def test_an_error_ends_the_trace(tmp_path):
    profile = Profile(10, tmp_path / "profile.json")
    with pytest.raises(KeyError):
        train(profile, WARM_UP + 1, then=KeyError)
    train(Profile(1, tmp_path / "again.json"), WARM_UP + 1)
    assert traced(tmp_path / "again.json") == 1


@pytest.mark.parametrize(
    ("n_steps", "here", "run"), [(0, True, 9), (2, False, 9), (2, True, WARM_UP - 1)]
)
def test_no_trace(tmp_path, n_steps, here, run):
    """None is asked for, another rank writes it, or the run is over before the warm-up is."""
    profile = Profile(n_steps, tmp_path / "profile.json", here)
    train(profile, run)
    assert not profile.written
    assert not [*tmp_path.iterdir()]


def test_a_trace_ends_without_waiting_for_messages_under_way(tmp_path, monkeypatch):
    """Which may wait for this rank: on a GPU torch's profiler waits for all streams as it stops."""
    waited = []

    def stream(device):
        return SimpleNamespace(synchronize=lambda: waited.append("ops"))

    def synchronize(device=None):
        waited.append("everything")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    leave = torch.autograd.profiler.profile.__exit__

    def as_on_a_gpu(self, *error):
        torch.cuda.synchronize()
        return leave(self, *error)

    monkeypatch.setattr(torch.autograd.profiler.profile, "__exit__", as_on_a_gpu)
    train(Profile(2, tmp_path / "profile.json"), WARM_UP + 4)
    train(Profile(2, tmp_path / "again.json"), WARM_UP + 1)
    assert waited == ["ops"] * 2
    assert torch.cuda.synchronize is synchronize


@pytest.mark.parametrize("here", [True, False])
def test_refuses(tmp_path, here):
    with pytest.raises(UserError, match=r"profile.*-1"):
        Profile(-1, tmp_path / "profile.json", here)
