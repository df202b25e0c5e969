"""The jobs of a machine with a GPU, in slices."""

import importlib.util
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.cli.test_presets import composed
from toolkit.cli.runs import rule_config

PATH = Path(__file__).parents[2] / "experiments" / "gpu.py"

# A comparison of as many seeds as its last option says: the second takes too long at first.
SCRIPT = """
import pathlib, sys, time
folder = pathlib.Path(next(w.split("=")[1] for w in sys.argv if w.startswith(("hydra", "resume"))))
begun = (folder / "runs.yaml").exists()
(folder / "runs.yaml").touch()
if not begun:
    time.sleep(60)
(folder / "result.json").write_text(" ".join(sys.argv[1:]))
"""


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("gpu", PATH)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(module, "_folder", (tmp_path / "outputs").joinpath)
    monkeypatch.setattr(module, "_LEAST", 0)
    monkeypatch.setattr(module, "_GRACE", 1)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    return module


def called(gpu, monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["gpu.py", *words])
    assert gpu.main() == 0
    return capsys.readouterr().out


def test_a_slice_ends_in_time_and_the_next_goes_on(gpu, monkeypatch, capsys, tmp_path):
    resume_command = (
        "-c",
        SCRIPT,
        f"resume={tmp_path / 'outputs' / 'compared'}",
        "seeds=2",
    )
    bad = gpu.Job("bad", ("-c", "raise SystemExit(3)"), minutes=0.5)
    many = gpu.Job("compared", ("-c", SCRIPT, "seeds=2"), 2, resume_command)
    monkeypatch.setattr(gpu, "jobs", lambda cifar10, imagenette: [bad, many])
    assert "2.5 minutes to do" in called(gpu, monkeypatch, capsys, "--list")
    first = called(gpu, monkeypatch, capsys, "--minutes=0.08")
    assert "failed with status 3" in first
    assert "call it again" in first
    assert not (tmp_path / "results").exists()
    second = called(gpu, monkeypatch, capsys, "--minutes=0.5")
    assert "call it again" not in second
    kept = tmp_path / "results" / "compared" / "result.json"
    assert kept.read_text() == f"{resume_command[2]} seeds=2"
    printed = called(gpu, monkeypatch, capsys, "--list")
    assert "to do, 0.5 min, bad: -c" in printed
    assert "ended, 2 min, compared: -c" in printed
    assert "0.5 minutes to do" in printed


def test_a_comparison_that_was_stopped_in_its_trials_is_resumed(gpu, tmp_path):
    """Its folder has no options then: those of the trials are in a folder of their own."""
    trials = tmp_path / "outputs" / "compared" / "tuning"
    trials.mkdir(parents=True)
    (trials / "runs.yaml").touch()
    print_command = "import sys; print(sys.argv[1:])"
    job = gpu.Job(
        "compared",
        command=("-c", print_command, "seeds=1"),
        minutes=1,
        resume_command=("-c", print_command, "resume=compared"),
    )
    assert gpu.run(job, 60) == 0
    assert (trials.parent / "output.txt").read_text() == "['resume=compared']\n"


def test_speed_comes_first_and_trainings_need_data(gpu):
    everything = [*gpu.jobs("/cifar10", "/imagenette")]
    names = [*dict.fromkeys(job.name for job in everything)]
    speed = [
        "bench_grouped_gpu",
        "bench_grouped_gpu_resnet50",
        "bench_grouped_gpu_resnet18_capture_auto_compile_none",
        "bench_grouped_gpu_resnet50_capture_auto_compile_none",
        "bench_grouped_gpu_resnet18_capture_off_compile_default",
        "bench_grouped_gpu_resnet50_capture_off_compile_default",
        "bench_grouped_gpu_resnet18_capture_auto_compile_default",
        "bench_grouped_gpu_resnet50_capture_auto_compile_default",
    ]
    cifar10 = [
        "cifar10_resnet18_corrections",
        "cifar10_paper",
        "cifar10_corrections_24",
    ]
    assert names == [
        *speed,
        *("bench_gaps_gpu", "bench_loader_gpu", "gpu_tests", "bench_peak"),
        *("cifar10_resnet18_corrections_30", "imagenette_resnet18_corrections"),
        *(*cifar10, "cifar10_short", "cifar10_corrections", "cifar10_compression"),
    ]
    assert sum(job.minutes for job in everything[: len(speed)]) <= 4
    without_data = [*gpu.jobs(None, None)]
    assert without_data == everything[: len(without_data)]
    assert without_data[-1].name == "bench_peak"
    assert {job.name for job in gpu.jobs(None, "/imagenette")} == {
        *(job.name for job in without_data),
        "imagenette_resnet18_corrections",
    }


def test_trainings_grow_by_a_seed(gpu):
    grown = {}
    for job in gpu.jobs("/cifar10", "/imagenette"):
        if job.resume_command:
            assert job.command[-1] == job.resume_command[-1]
            grown.setdefault(job.name, []).append(job.command[-1])
    assert grown == {
        name: [f"seeds={n}" for n in range(1, last + 1)]
        for name, last in (
            ("cifar10_resnet18_corrections_30", 3),
            ("imagenette_resnet18_corrections", 3),
            ("cifar10_resnet18_corrections", 3),
            ("cifar10_paper", 3),
            ("cifar10_corrections_24", 5),
            ("cifar10_short", 10),
            ("cifar10_corrections", 5),
            ("cifar10_compression", 3),
        )
    }


def test_every_command_composes(gpu):
    first_jobs = {}  # of each name: later ones differ in their number of seeds
    for job in gpu.jobs("/cifar10", "/imagenette"):
        first_jobs.setdefault(job.name, job)
    del first_jobs["gpu_tests"]
    for job in first_jobs.values():
        script, *options = job.command
        config = composed(Path(script).stem, *options)
        assert config.device == "cuda"
        if not job.resume_command:
            assert script == "experiments/bench.py"
            continue
        assert script == "experiments/compare.py"
        assert not OmegaConf.missing_keys(config)
        workers = 8 if job.n_processes == 1 else job.n_processes
        assert (config.microbatches, config.stages) == (workers, 4)
        assert config.data.root == (
            "/imagenette" if "imagenette" in job.name else "/cifar10"
        )


@pytest.mark.parametrize(
    ("name", "epochs", "rate"),
    [
        ("cifar10_resnet18_corrections", (100, 30), 0.05),
        ("imagenette_resnet18_corrections", (30, 10), 0.1),
    ],
)
def test_corrections_of_the_papers_recipe(gpu, name, epochs, rate):
    """ResNet-18 at full width: plain rules, with Nesterov momentum, and with prediction."""
    job = next(job for job in gpu.jobs("/cifar10", "/imagenette") if job.name == name)
    config = composed("compare", *job.command[1:])
    plain = ["dp", "cdp_v1", "cdp_v2"]
    with_nesterov = ["dp_nesterov", "cdp_v1_nesterov", "cdp_v2_nesterov"]
    assert [*config.rules] == [
        *plain,
        *with_nesterov,
        "cdp_v1_predicted",
        "cdp_v2_predicted",
    ]
    assert (config.model.name, config.model.width) == ("resnet18", None)
    assert (config.epochs, config.lr.every_epochs) == epochs
    assert config.optimizer.lr == rate
    assert len(config.tune.rates) == 5
    for name in config.rules:
        assert rule_config(config, name, 0).optimizer.nesterov == (name not in plain)


def test_a_machine_without_gpu_is_refused(gpu, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    with pytest.raises(SystemExit):
        gpu.main()
    assert "no GPU" in capsys.readouterr().err
