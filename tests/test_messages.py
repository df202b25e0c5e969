"""Which errors are told in a sentence, and which keep their traceback."""

from pathlib import Path

import pytest
import torch

from toolkit.config.errors import explain
from toolkit.messages import refused_by
from toolkit.schedule import catalog

HERE = Path(__file__).parent


def fails_in_c():
    return list(zip([1], [], strict=True))


def fails_in_a_library():
    return torch.zeros(2).view(3)


def fails_by_python():
    (one,) = ()
    return one


def refuses():
    raise ValueError("no")


def refuses_what_failed():
    try:
        return int("x")
    except ValueError as error:
        raise ValueError("no number") from error


def caught(function):
    with pytest.raises((ValueError, RuntimeError)) as error:
        function()
    return error.value


@pytest.mark.parametrize("function", [fails_in_c, fails_in_a_library, fails_by_python])
def test_what_was_not_foreseen_is_no_refusal(function):
    assert not refused_by(caught(function), HERE)


@pytest.mark.parametrize("function", [refuses, refuses_what_failed])
def test_a_refusal_is_of_the_folder_that_raises_it(function):
    assert refused_by(caught(function), HERE)
    assert not refused_by(caught(function), HERE / "other")
    assert not refused_by(caught(function))


def test_the_package_refuses():
    assert refused_by(caught(lambda: catalog.cyclic(0)))
    assert not refused_by(ValueError("never raised"))


def test_a_mistake_of_ours_is_not_told_as_the_users(monkeypatch):
    conf = HERE.parent / "conf"
    assert explain(caught(lambda: catalog.cyclic(0)), "train", conf, []) is not None
    monkeypatch.setattr("toolkit.schedule.schedule.whole", lambda *_, **__: fails_in_c())
    assert explain(caught(lambda: catalog.cyclic(3)), "train", conf, []) is None
