"""How a missing package is installed, from wherever the user is."""

import shlex
import sys

import pytest

from tests.missing_packages import without_package
from toolkit import extras
from toolkit.errors import UserError


def test_the_command_is_of_the_python_that_runs(monkeypatch, tmp_path):
    pip = str(tmp_path / "pip")
    monkeypatch.setattr(extras.shutil, "which", {"pip": pip, "uv": "/bin/uv"}.get)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert extras.install_command("ray") == "pip install ray"
    # Whose pip is another one.
    monkeypatch.setattr(sys, "executable", "/my python/python")
    words = ["/my python/python", "-m", "pip", "install", "ray"]
    assert shlex.split(extras.install_command("ray")) == words
    without_package(monkeypatch, "pip")
    assert shlex.split(extras.install_command("ray"))[:2] == ["uv", "pip"]


def test_a_package_is_asked_for_by_its_own_name(monkeypatch):
    without_package(monkeypatch, "sklearn")
    assert "pip install scikit-learn" in extras.missing_message("sklearn")
    with pytest.raises(
        UserError, match=r"data=digits needs sklearn: .*install scikit-learn"
    ):
        extras.check_installed("sklearn", "data=digits")
    with pytest.raises(UserError, match="data=digits needs sklearn: build it"):
        extras.check_installed("sklearn", "data=digits", "build it")
    assert extras.check_installed("torch", "this") is None
