"""The notebooks as they are stored; and, with NOTEBOOKS=1, as they run from top to bottom."""

import ast
import importlib
import os
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "notebooks"
NAMES = (
    "1_schedules",
    "2_memory",
    "3_communication",
    "4_accuracy",
    "5_plan",
    "6_tracking",
)
_LONGEST_FUNCTION = 6  # lines
_LONGEST_CELL = 16


def test_these_are_all():
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == list(NAMES)


@pytest.fixture(params=NAMES)
def path(request):
    return FOLDER / f"{request.param}.ipynb"


def read(path):
    import nbformat  # which takes seconds, and most workers do without

    return nbformat.read(path, as_version=nbformat.NO_CONVERT)


def code(notebook):
    """The source of every code cell, without the lines that only IPython knows."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            lines = cell.source.splitlines()
            yield "\n".join(line for line in lines if not line.startswith(("%", "!")))


def test_stored_clean(path):
    import nbformat

    notebook = read(path)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert notebook.metadata.kernelspec.name == "python3"
    ids = [cell.id for cell in notebook.cells]
    assert all(ids)
    assert len(set(ids)) == len(ids)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


def test_thin(path):
    """Logic is the toolkit's: cells are short, and functions a few lines."""
    for source in code(read(path)):
        tree = ast.parse(source)
        first = min(
            (node.lineno for node in tree.body if not is_import(node)), default=1
        )
        assert len(source.splitlines()) - first < _LONGEST_CELL, source
        for node in ast.walk(tree):
            assert not isinstance(node, ast.ClassDef), source
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno - node.lineno < _LONGEST_FUNCTION, source


def is_import(node):
    return isinstance(node, ast.Import | ast.ImportFrom)


def test_imports_resolve(path):
    for source in code(read(path)):
        for node in filter(is_import, ast.walk(ast.parse(source))):
            if isinstance(node, ast.Import):
                for name in node.names:
                    importlib.import_module(name.name)
                continue
            module = importlib.import_module(node.module)
            for name in node.names:
                if not hasattr(module, name.name):
                    importlib.import_module(f"{node.module}.{name.name}")


@pytest.mark.skipif(
    "NOTEBOOKS" not in os.environ, reason="dear: NOTEBOOKS=1, or make notebooks"
)
def test_runs(path, site):
    """Sphinx executes it in the folder notebooks, as ``jupyter lab notebooks/`` does."""
    executed = site.notebooks / path.name
    assert executed.exists(), site.messages
    # Of an error, or of a cell that has taken too long, which leaves no other trace.
    failure = site.pages / "reports" / "notebooks" / f"{path.stem}.err.log"
    assert not failure.exists(), failure.read_text()
    notebook = read(executed)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.source for cell in cells] == [
        cell.source for cell in read(path).cells if cell.cell_type == "code"
    ]
    assert all(cell.execution_count for cell in cells)
    outputs = [output for cell in cells for output in cell.outputs]
    assert outputs
    assert not [output for output in outputs if output.output_type == "error"]
    warned = [output.text for output in outputs if output.get("name") == "stderr"]
    assert not warned
