"""Runs that are stopped, resumed and rolled back end as if nothing had happened."""

import copy
import functools
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from tests.experiments.command import TINY
from tests.experiments.command import run as train_command
from tests.thorough import more
from toolkit.cli import build_run, schema
from toolkit.errors import UserError
from toolkit.options import TrainingOptions
from toolkit.schedule import catalog
from toolkit.training import (
    DivergedError,
    Listeners,
    StoppedError,
    evaluate,
    loop,
    run_with_checkpoints,
)
from toolkit.training.checkpoint import Checkpoints
from toolkit.training.loop import Position
from toolkit.training.option_changes import changed_options
from toolkit.training.run_with_checkpoints import rollback_schedule, without_delay
from toolkit.training.stop_signals import Signals
from toolkit.training.training_run import TrainingRun

pytestmark = pytest.mark.usefixtures("analysed_once")

CONF = Path(__file__).parents[2] / "conf"


def configured(*options):
    return copy.deepcopy(_configured(*options))


@functools.cache
def _configured(*options):
    schema.register()
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        config = compose(
            "train", [*TINY, "epochs=3", "stages=2", "microbatches=2", *options]
        )
    OmegaConf.resolve(config)
    return config


def built(*options):
    return build_run(configured(*options))


def weights(outcome):
    return {
        name: x.clone() for name, x in outcome.run.runtime.module().state_dict().items()
    }


def assert_identical(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def stop_at(step, number=signal.SIGTERM):
    """As on_step: the signal comes after so many steps of the run."""
    seen = iter(range(1, 10_000))

    def on_step(_):
        if next(seen) == step:
            os.kill(os.getpid(), number)

    return on_step


def stopped(folder, step, *options, **more):
    with pytest.raises(StoppedError) as error:
        run_with_checkpoints(
            built(*options), folder, listeners=Listeners(on_step=stop_at(step)), **more
        )
    return error.value


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Final weights and metrics by the options of a run."""
    found = {}

    def run(*options):
        if options not in found:
            outcome = run_with_checkpoints(
                built(*options), tmp_path_factory.mktemp("run")
            )
            found[options] = weights(outcome), outcome.epochs
        return found[options]

    return run


def test_extrapolated_weights_are_tested_and_kept(tmp_path):
    run = built("epochs=1", "schedule=cdp_v1", "readout=extrapolated")
    outcome = run_with_checkpoints(run, tmp_path)
    runtime, extrapolated = outcome.run.runtime, outcome.run.runtime.extrapolated()
    expected = {**runtime.module().state_dict(), **extrapolated}
    assert_identical(torch.load(tmp_path / "model.pt", weights_only=True), expected)
    losses = [
        evaluate(runtime.module(), run.samples.test(16, run.device), weights=read).loss
        for read in (extrapolated, None)
    ]
    assert outcome.epochs[-1].test_loss == pytest.approx(losses[0])
    assert losses[0] != losses[1]


@pytest.mark.parametrize("rule", ["dp", "cdp_v1"])
def test_late_weights_are_tested_beside_the_newest(tmp_path, rule):
    run = built("epochs=1", f"schedule={rule}", "readout=as_published")
    outcome = run_with_checkpoints(run, tmp_path)
    runtime = outcome.run.runtime
    losses = [
        evaluate(runtime.module(), run.samples.test(16, run.device), weights=read).loss
        for read in (runtime.late_weights() or None, None)
    ]
    (epoch,) = outcome.epochs
    assert [epoch.published_loss, epoch.test_loss] == pytest.approx(losses)
    assert (epoch.published_loss == epoch.test_loss) == (rule == "dp")


@pytest.mark.parametrize(
    ("rule", "order", "step"),
    more(
        [("dp", "grouped", 3), ("cdp_v1", "grouped", 8), ("cdp_v2", "scheduled", 19)],
        [*product(("dp", "cdp_v1", "cdp_v2"), ("grouped", "scheduled"), (8, 19))],
    ),
)
def test_resumes_as_if_nothing_had_happened(tmp_path, uninterrupted, rule, order, step):
    """Stopped within an epoch (8 steps), in the last one, and at an end that was not kept whole."""
    options = f"schedule={rule}", f"runtime.order={order}", "ema=0.9", "optimizer=adamw"
    options += ("save.steps=3",)  # where it can stop
    expected, epochs = uninterrupted(*options)
    error = stopped(tmp_path, step, *options)
    assert (str(error), error.saved) == ("SIGTERM", True)
    damaged = [str(max(tmp_path.glob("checkpoints/step_*.ckpt")))] * (step == 8)
    for path in damaged:
        os.truncate(path, os.path.getsize(path) - 10)
    outcome = run_with_checkpoints(built(*options), tmp_path, resume=True)
    assert_identical(weights(outcome), expected)
    assert_identical(torch.load(tmp_path / "model.pt", weights_only=True), expected)
    assert [note.split(" is ")[0] for note in outcome.notes] == damaged
    for found, epoch in zip(outcome.epochs, epochs, strict=True):
        assert found.train_loss == pytest.approx(epoch.train_loss, rel=1e-12)
        for name in ("top1", "ema_top1", "learning_rate"):
            assert getattr(found, name) == getattr(epoch, name)


@pytest.mark.parametrize(
    ("options", "kept", "steps"),
    [
        (["save.steps=5", "save.keep=9"], True, [5, 8, 10, 15, 16, 20, 24]),
        (["save.epochs=null"], True, []),
        (["save.epochs=2"], False, [16]),
    ],
)
def test_saves_as_often_as_asked(tmp_path, options, kept, steps):
    run_with_checkpoints(built(*options), tmp_path, weights=kept)
    found = sorted(
        int(path.stem[5:]) for path in tmp_path.glob("checkpoints/step_*.ckpt")
    )
    assert found == steps
    others = {path.name for path in tmp_path.rglob("*.*")} - {
        f"step_{k:09}.ckpt" for k in found
    }
    assert others == ({"model.pt", "best.ckpt"} if kept and steps else set())


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    stopped(tmp_path, 3)
    for options, words in (
        (["stages=3"], "cut otherwise than these 3"),
        (["model=resnet14"], "the state is of another model"),
        (["data.image_size=16", "data.n_classes=7"], "does not fit this run"),
    ):
        with pytest.raises(ValueError, match=words):
            run_with_checkpoints(built(*options), tmp_path, resume=True)


def test_other_orders_in_the_same_file_are_noted(tmp_path):
    file = tmp_path / "mine.csv"
    options = f"schedule.file={file}", "save.steps=3", "lr=constant"
    file.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    stopped(tmp_path, 3, *options)
    file.write_text("0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0\n")
    outcome = run_with_checkpoints(built(*options, "epochs=1"), tmp_path, resume=True)
    (note,) = outcome.notes
    assert "orders=" in note
    assert "epochs=" not in note  # a constant rate does not depend on them


def test_other_options_are_noted_if_the_training_depends_on_them(tmp_path):
    stopped(tmp_path, 3)
    options = (
        "epochs=2",
        "optimizer.lr=0.5",
        "schedule=dp",
        "save.keep=3",
        "threads=1",
    )
    outcome = run_with_checkpoints(built(*options), tmp_path, resume=True)
    (note,) = outcome.notes
    assert note.startswith("resumed with other options than those of the checkpoint: ")
    assert "optimizer.lr=0.5 (was 0.1)" in note
    assert "schedule._target_=toolkit.schedule.catalog.data_parallel (was" in note
    assert "epochs=2 (was 3)" in note  # of a cosine
    assert not {"save", "threads"} & {*re.findall(r"(\w+)[.\w]*=", note)}


def test_changed_options():
    now = {"a": 1, "b": {"c": 2}, "n": None}
    assert (
        changed_options({"a": 1, "d": 3}, now, ()) == "b.c=2 (was None), d=None (was 3)"
    )
    many = changed_options({}, dict.fromkeys("pqrst", 1), ())
    assert many.endswith("s=1 (was None), and 1 more")
    assert (
        changed_options({"ab": 1, "a": {"b": 1}}, {"ab": 2, "a": {}}, ["a"])
        == "ab=2 (was 1)"
    )


EXACT = {"_target_": "SingleProcess", "order": "grouped", "compression": "none"}
POWERSGD = {"_target_": "DDP", "compression": "powersgd", "low_rank": 2}


@pytest.mark.parametrize(
    ("before", "now", "change"),
    [
        (EXACT, {"_target_": "FSDP", "reshard": True}, ""),
        (EXACT, {"_target_": "DDP", "compression": "none", "low_rank": 2}, ""),
        (
            EXACT,
            {**EXACT, "compression": "int8"},
            "runtime.compression=int8 (was none)",
        ),
        (
            {**EXACT, "boundary_compression": "int4"},
            EXACT,
            "runtime.boundary_compression=none (was int4)",
        ),
        (
            POWERSGD,
            {**POWERSGD, "low_rank": 4, "bucket_mb": 1.0},
            "runtime.low_rank=4 (was 2)",
        ),
        (EXACT, {"_target_": "LocalSGD", "period": 8}, "runtime.period=8 (was None)"),
    ],
)
def test_a_runtime_changes_what_its_messages_lose(before, now, change):
    """Its other options leave the results as they are, up to rounding."""
    assert changed_options({"runtime": before}, {"runtime": now}) == change


def test_a_runtime_that_is_not_free_is_compared_whole():
    sharded = {"_target_": "FSDP"}
    change = changed_options({"runtime": {}}, {"runtime": sharded}, ())
    assert change == "runtime._target_=FSDP (was None)"


def test_other_options_of_a_finished_run_are_refused(tmp_path):
    """They would only falsify its record."""
    run_with_checkpoints(built("epochs=1"), tmp_path)
    kept = {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()}
    changed = configured("epochs=1", "optimizer.lr=0.5")
    with pytest.raises(UserError, match=r"optimizer\.lr"):
        run_with_checkpoints(build_run(changed), tmp_path, resume=True)
    assert {path: path.read_bytes() for path in kept} == kept
    again = run_with_checkpoints(
        built("epochs=1", "save.keep=3"), tmp_path, resume=True
    )
    assert len(again.epochs) == 1
    run_with_checkpoints(built("epochs=2", "optimizer.lr=0.5"), tmp_path, resume=True)
    with pytest.raises(UserError, match="epochs=1"):
        run_with_checkpoints(built("epochs=1"), tmp_path, resume=True)


def test_ctrl_c_stops_too_and_a_second_one_at_once(tmp_path, monkeypatch):
    with pytest.raises(StoppedError, match="SIGINT"):
        run_with_checkpoints(
            built(), tmp_path, listeners=Listeners(on_step=stop_at(3, signal.SIGINT))
        )

    def twice(step):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(UserError, match="resume="):
        run_with_checkpoints(built(), tmp_path)
    # One signal, which torchrun sent on.
    with pytest.raises(StoppedError, match="SIGINT"):
        run_with_checkpoints(
            built(), tmp_path, resume=True, listeners=Listeners(on_step=twice)
        )
    monkeypatch.setattr(sys.modules[Signals.__module__], "ECHO", 0.0)
    with pytest.raises(KeyboardInterrupt):
        run_with_checkpoints(
            built(), tmp_path, resume=True, listeners=Listeners(on_step=twice)
        )


def test_a_folder_that_cannot_be_written(tmp_path, capsys):
    """Training continues to its end; a note says what is missing."""
    (tmp_path / "checkpoints").write_text("a file in its way")
    outcome = run_with_checkpoints(built(), tmp_path)
    assert len(outcome.epochs) == 3
    (note,) = outcome.notes
    assert note.startswith("not written (3 in all): the checkpoint of step 8: ")
    assert capsys.readouterr().err.count("training continues") == 1


def planted(run, at, n=10):
    """Multiply the learning rate by 1000 for ``n`` updates, once."""
    runners = run.runtime._runners
    seen = iter(range(10_000))
    for runner in runners:

        def wild(
            *total, update=runner.update, groups=runner.optimizer.param_groups, **how
        ):
            if at <= next(seen) // len(runners) < at + n:
                for group in groups:
                    group["lr"] *= 1000
            update(*total, **how)  # which sets the rate of the next

        runner.update = wild
    return run


def test_a_divergence_is_rolled_back(tmp_path):
    """And the run ends about as well as one that was not disturbed."""
    options = ("schedule=cdp_v2", "data.n_train=256", "optimizer.lr=0.02", "epochs=4")
    calm = run_with_checkpoints(built(*options), tmp_path / "calm")
    config = configured(*options, "guard=rollback")
    heard = []
    outcome = run_with_checkpoints(
        planted(build_run(config), at=40),
        tmp_path / "wild",
        listeners=Listeners(on_note=heard.append),
    )
    (note,) = outcome.notes
    assert heard == outcome.notes
    assert "rolled back to epoch" in note
    assert note.endswith("continued without delay")
    assert outcome.run.schedule.max_staleness == 0
    assert outcome.run.runtime.steps_done == 4 * 32
    assert outcome.epochs[-1].top1 >= calm.epochs[-1].top1 - 0.02


def test_without_a_guard_a_diverged_run_continues(tmp_path):
    options = "guard=off", "optimizer.lr=1e30", "epochs=2"
    outcome = run_with_checkpoints(built(*options), tmp_path)
    assert len(outcome.epochs) == 2
    assert all(math.isnan(epoch.test_loss) for epoch in outcome.epochs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("sharded", ["false", "true"])
def test_weights_of_every_version_go_back_to_the_gpu(monkeypatch, tmp_path, sharded):
    # Else gradients differ by rounding, and AdamW's first updates go by the signs of tiny ones.
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    options = (
        "device=cuda",
        "schedule=cdp_v1",
        "ema=0.9",
        "optimizer=adamw",
        "save.steps=3",
    )
    options += (f"save.sharded={sharded}",)
    whole = run_with_checkpoints(built(*options), tmp_path / "whole")
    stopped(tmp_path / "again", 8, *options)
    again = run_with_checkpoints(built(*options), tmp_path / "again", resume=True)
    torch.testing.assert_close(weights(again), weights(whole), rtol=1e-3, atol=1e-4)
    assert again.epochs[-1].ema_top1 is not None


def test_a_divergence_ends_a_run_that_is_not_to_be_rolled_back(tmp_path):
    words = r"(at first|is nan), after step \d+: lower optimizer.lr"
    with pytest.raises(FloatingPointError, match=words):
        run_with_checkpoints(planted(built(), at=4), tmp_path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["schedule=pipedream_2bw", "guard=rollback"], "PipeDream"),
        (["guard=maybe"], "guard.*maybe"),
        (["guard_factor=-1"], "guard_factor.*-1"),
        (["guard_factor=1"], "guard_factor.*1"),
        (["save.steps=0"], r"save\.steps.*0"),
    ],
)
def test_what_cannot_be_done_is_refused_at_once(tmp_path, options, words):
    with pytest.raises(UserError, match=words):
        run_with_checkpoints(built(*options), tmp_path)


@pytest.mark.parametrize(
    "schedule",
    [
        catalog.cyclic(4),
        catalog.cyclic(4, 1, chains="rotated"),
        catalog.cyclic(2, 1, n_stages=4, accumulate=2),
        catalog.cyclic(4, 1, "one"),
        catalog.cyclic(4, state="sharded"),
    ],
)
def test_without_delay(schedule):
    found = without_delay(schedule)
    assert found.max_staleness == 0
    for name in ("n_stages", "n_microbatches", "n_ranks", "state"):
        assert getattr(found, name) == getattr(schedule, name)


@pytest.mark.parametrize("saved", [(0, 8, 16), (0,)])
def test_a_second_divergence_ends_the_run(tmp_path, monkeypatch, saved):
    """The rollback is to the latest checkpoint, which may be that of the start."""
    starts, notes = [], []

    def run(self, on_epoch, on_step, position, callback):
        starts.append(position.steps_done if position else 0)
        if len(starts) == 1:
            for step in saved[1:]:
                callback.save(Position(steps_done=step))
        raise DivergedError("the loss is nan")

    monkeypatch.setattr(TrainingRun, "run", run)
    with pytest.raises(DivergedError, match=r"optimizer\.lr"):
        run_with_checkpoints(
            built("guard=rollback", "schedule=dp"),
            tmp_path,
            listeners=Listeners(on_note=notes.append),
        )
    assert starts == [0, saved[-1]]
    assert notes == ["the loss is nan: rolled back to epoch 0, step 0, and continued"]


def test_a_run_that_was_rolled_back_is_resumed_without_delay(tmp_path, monkeypatch):
    check, planted = loop._check, []

    def once(run, loss, position, which):
        if position.steps_done == 16 and which == "training" and not planted:
            planted.append(position)
            raise DivergedError("planted")
        check(run, loss, position, which)

    monkeypatch.setattr(loop, "_check", once)
    options = "schedule=cdp_v1", "guard=rollback"
    stopped(tmp_path, 20, *options)  # 8 of them are trained again
    outcome = run_with_checkpoints(built(*options), tmp_path, resume=True)
    assert outcome.notes == ["it had been rolled back, and continues without delay"]
    assert outcome.run.schedule.max_staleness == 0
    assert outcome.run.runtime.steps_done == 24


def test_schedules_and_runtimes_without_a_way_back_are_refused():
    with pytest.raises(UserError, match="guard=rollback"):
        without_delay(catalog.cyclic(3, placement="per_stage_and_microbatch"))
    run = SimpleNamespace(
        options=TrainingOptions(guard="rollback"),
        schedule=catalog.cyclic(2, 1),
        runtime=SimpleNamespace(can_run=lambda schedule: False),
    )
    with pytest.raises(UserError, match=r"guard=rollback .* SimpleNamespace"):
        rollback_schedule(run)


# A disk that is full from the first, or fills up


@pytest.fixture
def disk(tmp_path):
    """A small file system, and a function that mounts it again with other options."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(*options):
        command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "none", str(folder)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    if not mount("size=2m"):
        pytest.skip("mounting a file system is not permitted here")
    yield folder, mount
    subprocess.run(["umount", str(folder)], check=True)


# On Python 3.13 torch's writer warns of files that it could not close.
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <torch:pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize("sharded", more(["true"], ["false", "true"]))
def test_a_full_disk(disk, capsys, sharded):
    folder, _ = disk
    options = ("save.steps=4", f"save.sharded={sharded}")

    def fill(step):
        if (folder / "checkpoints" / "step_000000004.ckpt").exists():
            try:
                with (folder / "full").open("ab") as file:
                    while True:
                        file.write(bytes(4096))
                        file.flush()
            except OSError:
                pass

    outcome = run_with_checkpoints(
        built(*options), folder, listeners=Listeners(on_step=fill)
    )
    assert len(outcome.epochs) == 3
    (note,) = outcome.notes
    assert note.startswith("not written (")
    assert "the checkpoint of step 8: " in note
    assert "the weights, " in note
    assert "space left" in note or "is the disk full?" in note
    assert capsys.readouterr().err.count("training continues") == 1
    run = built()
    state, damaged = Checkpoints(folder / "checkpoints").load(run.runtime)
    run.runtime.load_state_dict(state["runtime"])
    assert (damaged, run.runtime.steps_done) == ([], 4)


@pytest.mark.parametrize("sharded", ["false", "true"])
def test_a_folder_that_vanishes_stays_so(tmp_path, sharded):
    folder = tmp_path / "run"

    def remove(step):
        shutil.rmtree(folder, ignore_errors=True)

    options = ("save.steps=4", f"save.sharded={sharded}")
    outcome = run_with_checkpoints(
        built(*options), folder, listeners=Listeners(on_step=remove)
    )
    (note,) = outcome.notes
    assert note.startswith("not written (")
    assert outcome.weights_lost
    assert not folder.exists()


def test_a_disk_that_is_full_from_the_first_shows_the_result(disk):
    """Only the small files of Hydra fit."""
    folder, mount = disk
    assert mount("remount", "size=48k")
    finished = train_command("train", *TINY, f"hydra.run.dir={folder}")
    assert finished.status == 1  # model.pt is lost
    assert "Traceback" not in finished.err
    assert "top-1" in finished.out
    assert "not written" in finished.out
