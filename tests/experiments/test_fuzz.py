"""Command lines and folders of runs that attack their readers, in forked processes."""

import hashlib
import importlib
import json
import os
import pickle
import shutil
import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.experiments.command import EXPERIMENTS, complete
from tests.thorough import THOROUGH, more, thorough
from toolkit.training.checkpoint import _MAGIC


@pytest.fixture(scope="module")
def fuzz():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXPERIMENTS))
        from benchmarks import fuzz

        for module in ("train", "report", *fuzz.PRELOADED):
            importlib.import_module(module)
        patch.setattr(fuzz, "_MAX_SECONDS", 300)
        yield fuzz


def test_bench_fuzz(tmp_path):
    options = "bench=fuzz", "device=cpu", f"bench.command_lines={more(1, 10)}"
    (row,) = complete("bench", tmp_path, *options)["metrics"]
    assert row["attack"] == "command_lines"
    assert row["examples"] == more(1, 10)
    assert not row["failed"]


def test_bench_fuzz_reports_the_shortest_failure(fuzz):
    def check(number):
        assert number < 7, "too large"
        return "ran"

    row = fuzz.attack("numbers", st.integers(0, 100), check, 200, 0)
    assert row["failed"] == 1
    assert row["message"].startswith("too large")
    assert "example=7" in row["message"]


@pytest.mark.parametrize(
    ("status", "output", "outcome"),
    [
        (0, "written", "ran"),
        (2, "error: a=1: choose b", "refused"),
        (None, "3%| epochs", "long"),
        (None, "", None),
        (1, "Traceback", None),
        (2, "usage", None),
        (-11, "error: a", None),
        (2, "error: a\nb\nc\nd", None),
        (2, f"error: {'x' * 4000}", None),
    ],
)
def test_bench_fuzz_judges_a_command_line(fuzz, status, output, outcome):
    if outcome:
        assert fuzz.judge(status, output) == outcome
    else:
        with pytest.raises(AssertionError):
            fuzz.judge(status, output)


# Folders

CHECKPOINT = "checkpoints/step_000000008.ckpt"
FILES = (
    "result.json",
    "status.json",
    "epochs.csv",
    ".hydra/config.yaml",
    ".hydra/hydra.yaml",
)
CALL = {"_target_": "os.system", "command": "touch OUTSIDE/called"}
OPTIONS = (
    "+hydra.callbacks.x._target_=subprocess.Popen",
    "hydra.searchpath=[OUTSIDE]",
    "hydra.output_subdir=OUTSIDE",
    "+hydra.job_logging.x=1",
    "model.target=os.system",
    "++optimizer._target_=os.system",
    "++data._target_=toolkit.files.write_text",
    "+lr.x={_target_:os.system}",
    "optimizer=[OUTSIDE/evil]",
    "seed=${oc.env:HOME}",
    "--config-dir=OUTSIDE",
)
ALIASES = "\n".join(
    ["a0: &a0 [x]"]
    + [f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 9)}]" for k in range(1, 10)]
)
SWEEP = ["-m", "seed=0,1", "hydra.callbacks.x._target_=os.system('touch OUTSIDE/ran')"]
HEADER = "epoch,top1,train_loss\n"
TEXTS = {
    "a sweep": ("sweep.json", json.dumps({"options": SWEEP})),
    "deep JSON": ("result.json", "[" * 100_000),
    "an alias bomb": (".hydra/config.yaml", ALIASES),
    "an alias bomb of Hydra's": (".hydra/hydra.yaml", ALIASES),
    "a long table": ("epochs.csv", HEADER + "1,0.5,2.0\n" * 300_000),
    "many epochs": (
        "epochs.csv",
        HEADER + "".join(f"{k},0.5,2.0\n" for k in range(100_000)),
    ),
}
VALUES = {
    "a schedule that calls": (
        "result.json",
        {"provenance": {"config": {"schedule": CALL}}},
    ),
    "delays that call": ("result.json", {"delays": [CALL], "ranks": [CALL]}),
    "many notes": (
        "result.json",
        {"notes": [f"{k} {'x' * 300}" for k in range(100_000)]},
    ),
    "lone surrogates": ("result.json", {"notes": ["\ud800"], "schedule": "\udfff"}),
    "a message of surrogates": (
        "status.json",
        {"message": "\ud800", "state": "failed"},
    ),
    "HTML": ("result.json", {"schedule": "<script>alert(1)</script>"}),
}
KINDS = ("pipe", "endless", "noise", "sparse")


class RunsCommand:
    """Runs a command when it is unpickled."""

    def __init__(self, outside):
        self.command = f"touch {outside}/unpickled"

    def __reduce__(self):
        return os.system, (self.command,)


PAYLOADS = {
    "a pickle": lambda outside: pickle.dumps(RunsCommand(outside)),
    "an empty checkpoint": lambda outside: b"",
    "junk": lambda outside: b"junk",
}
ATTACKS = (
    *OPTIONS,
    *TEXTS,
    *VALUES,
    *PAYLOADS,
    "a link to a folder",
    "a linked option file",
    *(f"{kind} {name}" for name in (*FILES, CHECKPOINT) for kind in KINDS),
)


def damage(attack, folder, outside):
    """Change the run in ``folder`` so that it attacks who reads it."""
    if attack in OPTIONS:
        path = folder / ".hydra" / "hydra.yaml"
        content = yaml.safe_load(path.read_text())
        content["hydra"]["overrides"]["task"].append(
            attack.replace("OUTSIDE", str(outside))
        )
        path.write_text(yaml.safe_dump(content))
    elif attack in TEXTS:
        name, text = TEXTS[attack]
        (folder / name).write_text(text.replace("OUTSIDE", str(outside)))
    elif attack in VALUES:
        name, values = VALUES[attack]
        content = json.loads((folder / name).read_text()) | values
        (folder / name).write_text(json.dumps(content).replace("OUTSIDE", str(outside)))
    elif attack in PAYLOADS:
        payload = PAYLOADS[attack](outside)
        digest = hashlib.sha256(payload).hexdigest().encode()
        (folder / CHECKPOINT).write_bytes(_MAGIC + digest + b"\n" + payload)
    elif attack == "a link to a folder":
        shutil.rmtree(folder / "checkpoints")
        (folder / "checkpoints").symlink_to(outside)
    elif attack == "a linked option file":
        (folder / ".hydra" / "config.yaml").unlink()
        (folder / ".hydra" / "config.yaml").symlink_to(outside / "kept")
    else:
        become(*attack.split(), folder)


def become(kind, name, folder):
    path = folder / name
    size = path.stat().st_size
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    elif kind == "sparse":
        path.touch()
        os.truncate(path, 20 * 2**30)
    else:
        path.write_bytes(os.urandom(size))


@pytest.fixture(scope="module")
def original(fuzz, tmp_path_factory):
    """A run of two epochs."""
    folder = tmp_path_factory.mktemp("original")
    options = [
        *fuzz.TINY.split(),
        "device=cpu",
        "epochs=2",
        f"hydra.run.dir={folder}/run",
    ]
    status, output = fuzz.run_command(folder, "train", *options)
    assert status == 0, output
    return folder / "run"


@thorough
@given(st.sampled_from(ATTACKS), st.booleans() if THOROUGH else st.just(True))
@settings(
    deadline=None,
    max_examples=more(2, 12),
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
def test_hostile_folders_run_no_code(fuzz, original, attack, resumed):
    """Resumed or reported on: no process, and no file outside of the folder."""
    with tempfile.TemporaryDirectory() as scratch:
        run, outside = Path(scratch, "in", "run"), Path(scratch, "outside")
        shutil.copytree(original, run)
        outside.mkdir()
        (outside / "kept").write_text("kept")
        damage(attack, run, outside)

        report = run.parent / "report"
        command = ["report", f"runs={run}", f"hydra.run.dir={report}"]
        if resumed:
            command = ["train", f"resume={run}", "epochs=3"]
        status, output = fuzz.run_command(run.parent, *command)
        fuzz.judge(status, output)
        assert "AUDIT" not in output
        assert {path.name: path.read_text() for path in outside.iterdir()} == {
            "kept": "kept"
        }
        for page in report.glob("report.html"):
            assert page.stat().st_size < 5_000_000
