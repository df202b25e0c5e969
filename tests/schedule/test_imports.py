"""toolkit.schedule needs nothing but the standard library, and toolkit nothing before its use."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from toolkit import schedule

FOREIGN = """
import sys
before = set(sys.modules)
{code}
roots = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(*sorted(roots - sys.stdlib_module_names - {{"toolkit"}}))
print(*sorted(name for name in sys.modules if name.startswith("toolkit.")))
"""
USE = "from toolkit.schedule import catalog; catalog.cyclic(3).lower(2).verify().traffic()"


@pytest.mark.parametrize(
    ("code", "allowed"),
    [(USE, ("toolkit.schedule", "toolkit.errors")), ("import toolkit", ())],
)
def test_imports_the_standard_library_only(code, allowed):
    command = [sys.executable, "-c", FOREIGN.format(code=code)]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    foreign, own = found.stdout.splitlines()
    assert foreign == ""
    assert all(name.startswith(allowed) for name in own.split())


def test_its_modules_depend_on_each_other_one_way():
    folder = Path(schedule.__file__).parent
    needs = {
        path.stem: {*needed(path)}
        for path in folder.glob("*.py")
        if path.stem != "__init__"
    }
    assert len(needs) > 15
    # Or it raises CycleError.
    assert {*TopologicalSorter(needs).static_order()} == needs.keys()


def needed(path):
    """Modules of toolkit.schedule that a file imports, except for annotations."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "toolkit.schedule":
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith(
            "toolkit.schedule."
        ):
            yield node.module.split(".")[2]
