"""Packages that are missing."""

import sys
from importlib.util import find_spec

from toolkit import extras


def without_package(monkeypatch, module):
    """Let ``module`` be missing, whether it is installed or not."""
    for name in [*sys.modules]:
        if name.partition(".")[0] == module:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(
        extras, "find_spec", lambda name: None if name == module else find_spec(name)
    )
