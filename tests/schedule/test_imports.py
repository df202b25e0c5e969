"""toolkit.schedule needs nothing but the standard library, and toolkit nothing before its use."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

from toolkit import schedule

FOREIGN = """
import sys
before = set(sys.modules)
import toolkit.schedule
roots = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(roots - sys.stdlib_module_names - {"toolkit"}))
print(*sorted(name for name in sys.modules if name.startswith("toolkit.")))
"""


def python(code):
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return found.stdout.splitlines()


def test_schedule_imports_the_standard_library_only():
    foreign, own = python(FOREIGN)
    assert foreign == ""
    assert all(name.startswith(("toolkit.schedule", "toolkit.errors")) for name in own.split())


def test_lowering_and_verifying_need_no_more():
    code = FOREIGN.replace(
        "roots =", "toolkit.schedule.catalog.cyclic(3).lower(2).verify().traffic()\nroots ="
    )
    assert python(code)[0] == ""


def test_its_modules_depend_on_each_other_one_way():
    folder = Path(schedule.__file__).parent
    needs = {path.stem: {*needed(path)} for path in folder.glob("*.py") if path.stem != "__init__"}
    assert len(needs) > 15
    assert {*TopologicalSorter(needs).static_order()} == needs.keys()  # or it raises CycleError


def needed(path):
    """Modules of toolkit.schedule that a file imports, in functions, too, but for annotations."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "toolkit.schedule":
                yield from (name.name for name in node.names)
            elif node.module.startswith("toolkit.schedule."):
                yield node.module.split(".")[2]


def test_toolkit_loads_nothing_before_it_is_used():
    code = FOREIGN.replace("import toolkit.schedule", "import toolkit")
    assert python(code) == ["", ""]
