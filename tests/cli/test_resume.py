"""A resumed run has the options of the run that it resumes."""

import re
import shutil

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from tests.experiments.command import TINY, refused, rows, run, succeeded
from toolkit.cli.hydra_args import flags_first, quoted, unquoted
from toolkit.cli.resume import resume_arguments
from toolkit.cli.sweeps import alone_in
from toolkit.errors import UserError

pytestmark = pytest.mark.usefixtures("analysed_once")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a=1", "a=1"),
        ("seed=0,1 -m epochs=1", "-m seed=0,1 epochs=1"),
        ("a=1 --config-dir=mine b=2", "--config-dir=mine a=1 b=2"),
        ("a=1 --config-dir mine b=2 --multirun", "--config-dir mine --multirun a=1 b=2"),
        ("a=1 --cfg job ~b", "--cfg job a=1 ~b"),
        ("", ""),
    ],
)
def test_flags_may_stand_anywhere(given, expected):
    assert flags_first(given.split()) == expected.split()


@pytest.mark.parametrize(
    "text", ["/a/b", "/a=b,(c)/[d]{e}~#ü", "it's", "a\\", "a\\'b", "x y", "", "'q'", '"q"']
)
def test_what_is_quoted_is_read_as_it_is(text):
    assert unquoted(quoted(text)) == text
    read = OverridesParser.create().parse_override(f"resume={quoted(text)}").value()
    assert str(read) == text


def test_other_values_are_no_quotes():
    assert [*map(unquoted, ["a", "'a", "'a'b", "a'"])] == ["a", "'a", "'a'b", "a'"]


def write_options(folder, before, experiment="train"):
    """Write the file with which Hydra says how a run was started."""
    hydra = {"job": {"name": experiment}, "overrides": {"task": [*before]}}
    hydra["runtime"] = {"config_sources": []}
    (folder / ".hydra").mkdir(exist_ok=True)
    (folder / ".hydra" / "hydra.yaml").write_text(yaml.safe_dump({"hydra": hydra}))


USUAL = "schedule=dp +model.arguments.a=1 epochs=3 resume=x hydra.run.dir=y"


@pytest.fixture
def folder(tmp_path):
    write_options(tmp_path, USUAL.split())
    return tmp_path


def test_without_resume_nothing_changes():
    given = ["schedule=dp", "resume=null"]
    assert resume_arguments(given, "train") == given
    assert resume_arguments([], "train") == []


def test_a_folder_may_be_called_anything(folder):
    """However it is given, Hydra reads it."""
    odd = folder / "lr=0.1, (it's) [ü]"
    shutil.copytree(folder / ".hydra", odd / ".hydra")
    for given in (str(odd), quoted(str(odd)), f'"{odd}"'):
        *_, resume, where = resume_arguments([f"resume={given}"], "train")
        assert unquoted(resume.removeprefix("resume=")) == str(odd)
        assert unquoted(where.removeprefix("hydra.run.dir=")) == str(odd)


def test_a_folder_of_another_experiment_is_refused(folder):
    write_options(folder, USUAL.split(), "compare")
    with pytest.raises(UserError, match=re.escape(f"experiments/compare.py resume={folder}")):
        resume_arguments([f"resume={folder}"], "train")
    assert resume_arguments([f"resume={folder}"], "compare")[0] == "schedule=dp"


METHOD = "schedule=cdp_v2 schedule.delay=1 data=cifar10 data.root=x workers=4"


@pytest.mark.parametrize(
    ("before", "given", "kept"),
    [
        (USUAL, "", "schedule=dp +model.arguments.a=1 epochs=3"),
        (USUAL, "epochs=9 seed=1", "schedule=dp +model.arguments.a=1"),
        ("~rules.cdp_v1 seeds=2", "schedule@rules.cdp_v1=cdp_v1", "seeds=2"),  # it comes back
        (METHOD, "schedule=dp", "data=cifar10 data.root=x workers=4"),
        (METHOD, "schedule=dp schedule.delay=2", "data=cifar10 data.root=x workers=4"),
        (METHOD, "schedule=cdp_v2 data=cifar10", "schedule.delay=1 data.root=x workers=4"),
        (METHOD, "microbatches=2", "schedule=cdp_v2 schedule.delay=1 data=cifar10 data.root=x"),
        (METHOD, "workers=2", "schedule=cdp_v2 schedule.delay=1 data=cifar10 data.root=x"),
    ],
)
def test_options_given_anew_replace_those_of_before(folder, before, given, kept):
    """Options of a choice go with it: they may mean something else to the new one, or nothing."""
    write_options(folder, before.split())
    end = [f"resume={folder}", f"hydra.run.dir={folder}"]
    found = resume_arguments([*given.split(), end[0], "hydra.run.dir=elsewhere"], "train")
    assert found == [*kept.split(), *given.split(), *end]


def test_refuses_a_sweep_flag_and_missing_folders(folder, tmp_path):
    with pytest.raises(ValueError, match=r"is one run: leave out -m$"):
        resume_arguments(["-m", f"resume={folder}"], "train")
    for wrong in ("", str(tmp_path / "nowhere"), str(folder / ".hydra" / "hydra.yaml")):
        with pytest.raises(ValueError, match=rf"^resume={wrong} is not a folder: give"):
            resume_arguments([f"resume={wrong}"], "train")


@pytest.mark.parametrize("content", [None, "hydra: {}", "[1, 2]", "[", "\x00"])
def test_another_folder_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / ".hydra").mkdir()
        (tmp_path / ".hydra" / "hydra.yaml").write_text(content)
    with pytest.raises(ValueError, match=re.escape(f"resume={tmp_path}")):
        resume_arguments([f"resume={tmp_path}"], "train")


def test_a_run_is_resumed_from_the_command_line(tmp_path):
    """A finished run continues with more epochs."""
    succeeded("train", tmp_path, *TINY, "schedule=cdp_v1")
    assert "CDP-v1" in succeeded("train", tmp_path, f"resume={tmp_path}", "epochs=2")
    epochs = rows(tmp_path / "epochs.csv")
    assert len(epochs) == 2
    # The cosine spans the two epochs of the new options.
    first, second = (float(epoch["learning_rate"]) for epoch in epochs)
    assert second == pytest.approx(0.5 * first)


def test_a_refused_resume_changes_nothing(tmp_path):
    succeeded("train", tmp_path, *TINY, "schedule=dp")
    kept = [tmp_path / "status.json", tmp_path / ".hydra" / "overrides.yaml"]
    before = [path.read_bytes() for path in kept]
    message = refused("train", f"resume={tmp_path}", "model=resnet14")
    assert "the state is of another model: give the one with which it was taken" in message
    assert [path.read_bytes() for path in kept] == before


def test_mistakes(tmp_path):
    assert "is not the output directory of a run" in refused("train", f"resume={tmp_path}")
    succeeded("train", tmp_path, *TINY, "save.epochs=null")
    assert "there is no checkpoint in" in refused("train", f"resume={tmp_path}")
    assert "save.keep is 1 or more: got 0" in refused("train", *TINY, "save.keep=0")


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_refuses_a_folder_with_checkpoints(tmp_path):
    """It would take the later steps for its own."""
    where = f"hydra.run.dir={tmp_path / 'run'}"
    assert run("train", *TINY, where).status == 0
    before = contents(tmp_path)
    refused("train", *TINY, "seed=7", where, match="has the checkpoints .* resume=")
    assert contents(tmp_path) == before
    assert run("train", f"resume={tmp_path / 'run'}", "epochs=2").status == 0


def test_restarted_ranks_resume(tmp_path, monkeypatch):
    where = f"hydra.run.dir={tmp_path / 'run'}"
    assert run("train", *TINY, where).status == 0
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert run("train", *TINY, where).status == 0


def test_two_processes_cannot_use_one_folder(tmp_path):
    where = f"hydra.run.dir={tmp_path / 'run'}"
    assert run("train", *TINY, where).status == 0
    before = contents(tmp_path)
    with alone_in(tmp_path / "run"):
        for given in (where, f"resume={tmp_path / 'run'}"):
            assert "another process is at work in" in refused("train", *TINY, given)
    assert contents(tmp_path) == before
