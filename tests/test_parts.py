"""Dependence runs one way: up the table of the parts in CONTRIBUTING.md."""

import ast
import re
from pathlib import Path

import pytest

import toolkit

ROOT = Path(toolkit.__file__).parent
TABLE = (ROOT.parent / "CONTRIBUTING.md").read_text()
PARTS = re.findall(r"^\| `toolkit\.(\w+)` \|", TABLE, re.MULTILINE)


def test_the_table_has_all_packages():
    assert sorted(PARTS) == sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))


def imported(path):
    """Names of toolkit's packages and modules that a file imports, in functions and for types, too.

    What is imported late, or for annotations alone, has to be known all the same.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{name.name}" for name in node.names]
        else:
            continue
        yield from (name.split(".")[1] for name in names if name.startswith("toolkit."))


@pytest.mark.parametrize("part", PARTS)
def test_a_package_imports_only_those_above_it(part):
    below = PARTS[PARTS.index(part) + 1 :]
    assert not wrong((ROOT / part).rglob("*.py"), below)


def test_modules_beside_the_packages_import_none():
    assert not wrong(ROOT.glob("*.py"), PARTS)


def wrong(paths, names):
    return [(str(path), name) for path in paths for name in imported(path) if name in names]
