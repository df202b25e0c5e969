"""The console command, in the repository and from an installed wheel."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.thorough import thorough
from toolkit import __main__ as console

ROOT = Path(__file__).parents[1]


def test_it_lists_every_experiment_with_its_question(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["cyclic-dp"])
    monkeypatch.setenv("COLUMNS", "200")
    console.main()
    lines = capsys.readouterr().out.splitlines()
    scripts = sorted(
        {path.stem for path in ROOT.glob("experiments/*.py")} - {"gpu", "results"}
    )
    assert [line.split()[0] for line in lines[2 : 2 + len(scripts)]] == scripts
    assert "  train          Train one model by one schedule." in lines


@pytest.mark.parametrize("name", ["gpu", "results"])
def test_what_rewrites_files_of_the_repository_is_no_command(monkeypatch, name):
    monkeypatch.setattr(sys, "argv", ["cyclic-dp", name])
    with pytest.raises(SystemExit) as ended:
        console.main()
    assert ended.value.code == 2


def test_a_package_that_is_missing(monkeypatch, capsys):
    """Also one that an experiment imports before it reads its command line."""

    def run_path(*_, **__):
        raise ModuleNotFoundError("No module named 'pandas'", name="pandas.core")

    monkeypatch.setattr(console.runpy, "run_path", run_path)
    monkeypatch.setattr(sys, "argv", ["cyclic-dp", "train"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as ended:
        console.main()
    assert ended.value.code == 2
    assert "pip install pandas" in capsys.readouterr().err


def shell(command: str, folder: Path) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = command.replace("cyclic-dp", f"{sys.executable} -m toolkit")
    given = {"cwd": folder, "env": environment, "capture_output": True, "text": True}
    return subprocess.run(["bash", "-c", command], check=False, timeout=300, **given)


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("set -o pipefail; cyclic-dp --help | head -1", 0),
        ("set -o pipefail; cyclic-dp train --help | head -1", 0),
        ("cyclic-dp --help >/dev/full", 0),
        ("cyclic-dp train --help >/dev/full", 0),
        ("cyclic-dp train --resolve", 2),
        ("mkdir gone && cd gone && rmdir ../gone && cyclic-dp train", 2),
        ("mkdir gone && cd gone && rmdir ../gone && cyclic-dp --help", 0),
    ],
)
def test_odd_surroundings(tmp_path, command, status):
    ended = shell(command, tmp_path)
    assert ended.returncode == status, ended.stderr
    assert "Traceback" not in ended.stderr
    assert "Error" not in ended.stderr
    assert len(ended.stderr.splitlines()) == (status != 0)


def test_an_unknown_experiment_is_refused_with_the_nearest(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["cyclic-dp", "trian"])
    with pytest.raises(SystemExit) as ended:
        console.main()
    assert ended.value.code == 2
    assert "trian" in (message := capsys.readouterr().err)
    assert "did you mean train?" in message


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> dict[str, str]:
    """The environment variables of a process that imports the wheel and not the repository."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "-t",
        "wheel",
        "-d",
        str(folder),
    ]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("cyclic_dp-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder / "site")
    return os.environ | {"PYTHONPATH": str(folder / "site"), "OMP_NUM_THREADS": "1"}


def started(
    environment: dict[str, str], folder: Path, *words: str
) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "toolkit", *words]
    given = {"cwd": folder, "env": environment, "capture_output": True, "text": True}
    return subprocess.run(command, check=False, timeout=300, **given)


@thorough
def test_a_wheel_trains_from_any_folder(installed, tmp_path):
    sizes = (
        "model=resnet8",
        "data=synthetic",
        "data.image_size=8",
        "data.n_train=32",
        "epochs=1",
    )
    ended = started(installed, tmp_path, "train", *sizes, "batch=4", "schedule=cdp_v2")
    assert ended.returncode == 0, ended.stderr
    (result,) = tmp_path.glob("outputs/train/*/result.json")
    source = json.loads(result.read_text())["provenance"]
    assert source["command"].startswith("cyclic-dp train model=resnet8")
    assert source["commit"] is None
    unlike = started(installed, tmp_path, "compare", f"resume={result.parent}")
    assert unlike.returncode == 2
    assert f"cyclic-dp train resume={result.parent}" in unlike.stderr


@thorough
def test_a_wheel_has_help_and_benchmarks(installed, tmp_path):
    helped = started(installed, tmp_path, "plan", "--help")
    assert "cyclic-dp plan [OPTION=VALUE ...]" in helped.stdout, helped.stderr
    options = (
        "bench.stages=4",
        "bench.microbatches=4",
        "bench.cyclic=4",
        "bench.rounds=1",
    )
    bench = started(installed, tmp_path, "bench", "simulator", "device=cpu", *options)
    assert bench.returncode == 0, bench.stderr
    assert [*tmp_path.glob("outputs/bench/*/result.json")]
