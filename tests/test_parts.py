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


def test_no_module_waits_for_itself():
    """But for annotations."""
    modules = {name_of(path): path for path in ROOT.rglob("*.py")}
    needed = {name: {*needs(path)} & {*modules} - {name} for name, path in modules.items()}
    TopologicalSorter(needed).prepare()  # which raises a CycleError


def name_of(path):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def needs(path):
    """Modules that a file imports, in functions, too: a package only for what is none of these."""
    tree = ast.parse(path.read_text())
    unneeded = {
        node
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING"
        for node in ast.walk(branch)
    }
    for node in {*ast.walk(tree)} - unneeded:
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            below = node.module.replace(".", "/")
            for name in node.names:
                own = ROOT.parent / below / name.name
                found = own.is_dir() or own.with_suffix(".py").exists()
                yield f"{node.module}.{name.name}" if found else node.module
