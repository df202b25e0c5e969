"""toolkit.schedule needs nothing but the standard library, and toolkit nothing before its use."""

import subprocess
import sys

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
    assert all(name.startswith("toolkit.schedule") for name in own.split())


def test_lowering_and_verifying_need_no_more():
    code = FOREIGN.replace(
        "roots =", "toolkit.schedule.catalog.cyclic(3).lower(2).verify().traffic()\nroots ="
    )
    assert python(code)[0] == ""


def test_toolkit_loads_nothing_before_it_is_used():
    code = FOREIGN.replace("import toolkit.schedule", "import toolkit")
    assert python(code) == ["", ""]
