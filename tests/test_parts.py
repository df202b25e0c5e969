"""Dependence runs one way: up the table of the parts in CONTRIBUTING.md."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import toolkit

ROOT = Path(toolkit.__file__).parent
TABLE = (ROOT.parent / "CONTRIBUTING.md").read_text()
PARTS = re.findall(r"^\| `toolkit\.(\w+)` \|", TABLE, re.MULTILINE)


def name_of(path):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in ROOT.rglob("*.py")}


def imported(path, annotations=True):
    """Modules that a file imports, also in functions; by default also for annotations."""
    tree = ast.parse(path.read_text())
    nodes = {*ast.walk(tree)}
    for branch in ast.walk(tree):
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING":
            nodes -= set() if annotations else {*ast.walk(branch)}
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            below = [f"{node.module}.{name.name}" for name in node.names]
            yield from (name if name in MODULES else node.module for name in below)


def wrong(paths, parts):
    names = [(str(path), name) for path in paths for name in imported(path)]
    return [(path, name) for path, name in names if [*name.split("."), ""][1] in parts]


def test_the_table_has_all_packages():
    assert sorted(PARTS) == sorted(
        path.parent.name for path in ROOT.glob("*/__init__.py")
    )


@pytest.mark.parametrize("part", PARTS)
def test_a_package_imports_only_those_above_it(part):
    assert not wrong((ROOT / part).rglob("*.py"), PARTS[PARTS.index(part) + 1 :])


def test_modules_next_to_the_packages_import_none():
    assert not wrong(ROOT.glob("*.py"), PARTS)


def test_only_cli_imports_hydra():
    paths = [path for path in MODULES.values() if ROOT / "cli" not in path.parents]
    roots = {
        (path, name.partition(".")[0]) for path in paths for name in imported(path)
    }
    assert not [path for path, name in roots if name in ("hydra", "omegaconf")]


def test_imports_have_no_cycle():
    needed = {
        name: {*imported(path, annotations=False)} & {*MODULES} - {name}
        for name, path in MODULES.items()
    }
    TopologicalSorter(needed).prepare()  # raises a CycleError
