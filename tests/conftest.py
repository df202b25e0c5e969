"""One thread a process: the tests' tensors are small, and idle threads would busy the cores.

Nothing is tracked unless a test asks for it. Ctrl-C works even where a shell that runs the tests in
the background has switched it off. What is loaded before the first test stays to the end, and
garbage is not looked for in it. Ranks are forked from a process that has imported torch, unless a
test asks for a new interpreter. Files of tests that take long begin first, so that no worker waits
at the end for another one.
"""

import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["WANDB_MODE"] = "disabled"
os.environ["WANDB_ERROR_REPORTING"] = "false"  # and no threads that send telemetry
signal.signal(signal.SIGINT, signal.default_int_handler)
gc.disable()

SLOW = (
    "tests/experiments",
    "tests/runtime",
    "tests/training",
    "tests/cli",
    "tests/plan",
)
STAGES = "ANALYSED_STAGES"  # see tests/stages.py


def pytest_configure(config: pytest.Config) -> None:
    if STAGES not in os.environ:  # workers have that of the process that starts them
        os.environ[STAGES] = tempfile.mkdtemp(prefix="stages_")
        config.add_cleanup(lambda: shutil.rmtree(os.environ.pop(STAGES)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        folders = [k for k, folder in enumerate(SLOW) if item.nodeid.startswith(folder)]
        return min(folders, default=len(SLOW))

    items.sort(key=place)


def pytest_collection_finish() -> None:
    if "torch" in sys.modules:
        from tests.warm_python import start_ranks_warm

        start_ranks_warm()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The site: with NOTEBOOKS=1 with executed notebooks, in outputs/site."""
    from tests.site import ROOT, build_site

    if "NOTEBOOKS" not in os.environ:
        return build_site(tmp_path_factory.mktemp("outputs"), execute=False)
    # Workers of pytest-xdist must not write to one folder.
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    return build_site(ROOT / "outputs" / worker, execute=True)


@pytest.fixture
def analysed_once(monkeypatch):
    """Runs share the analysis of models of one form."""
    from tests.stages import cut

    monkeypatch.setattr("toolkit.training.training_run.partition", cut)


@pytest.fixture
def wandb_runs(monkeypatch):
    """The runs that were begun in W&B, in order; its client does not run."""
    from tests.results.fake_wandb import replace_wandb

    return replace_wandb(monkeypatch)


@pytest.fixture
def new_interpreter(monkeypatch):
    """Ranks start as they do for users."""
    from toolkit.runtime.process_group import machines

    monkeypatch.setattr(machines, "subprocess", subprocess)
