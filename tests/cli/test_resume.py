"""A resumed run has the options of the run that it resumes."""

import json
import re
import shlex
import shutil

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from tests.experiments.command import TINY, refused, rows, run, succeeded
from toolkit.cli.hydra_args import flags_first, quoted, shell_option, unquoted
from toolkit.cli.resume import resume_arguments, resuming
from toolkit.cli.sweeps import alone_in
from toolkit.errors import UserError

pytestmark = pytest.mark.usefixtures("analysed_once")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a=1", "a=1"),
        ("seed=0,1 -m epochs=1", "-m seed=0,1 epochs=1"),
        ("a=1 --config-dir=mine b=2", "--config-dir=mine a=1 b=2"),
        (
            "a=1 --config-dir mine b=2 --multirun",
            "--config-dir mine --multirun a=1 b=2",
        ),
        ("a=1 --cfg job ~b", "--cfg job a=1 ~b"),
        ("", ""),
    ],
)
def test_flags_may_stand_anywhere(given, expected):
    assert flags_first(given.split()) == expected.split()


@pytest.mark.parametrize(
    "text",
    ["/a/b", "/a=b,(c)/[d]{e}~#ü", "it's", "a\\", "a\\'b", "x y", "", "'q'", '"q"'],
)
def test_what_is_quoted_is_read_as_it_is(text):
    assert unquoted(quoted(text)) == text
    read = OverridesParser.create().parse_override(f"resume={quoted(text)}").value()
    assert str(read) == text


@pytest.mark.parametrize(
    "text", ["/a/b", "x y", "it's", 'say "x"', "$HOME", "`a`", "a\\", "a!", "ü"]
)
def test_an_option_can_be_pasted(text):
    (word,) = shlex.split(shell_option("data.root", text))
    read = OverridesParser.create().parse_override(word)
    assert (read.key_or_group, read.value()) == ("data.root", text)


def test_the_command_of_another_experiment_can_be_pasted(tmp_path):
    folder = tmp_path / "a b"
    folder.mkdir()
    write_options(folder, [], "compare")
    with pytest.raises(UserError) as error:
        resume_arguments([f"resume={folder}"], "train")
    assert shlex.split(str(error.value))[-3:] == [
        "cyclic-dp",
        "compare",
        f"resume={folder}",
    ]


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
    with pytest.raises(
        UserError, match=re.escape(f"cyclic-dp compare resume={folder}")
    ):
        resume_arguments([f"resume={folder}"], "train")
    assert resume_arguments([f"resume={folder}"], "compare")[0] == "schedule=dp"


HOSTILE = r"""
--config-dir=evil
hydra.callbacks.x._target_=os.system
hydra.searchpath=[evil]
hydra.output_subdir=../..
hydra/launcher=../evil
+hydra.launcher._target_=os.system
schedule@hydra.callbacks=dp
model.target=os.system
++optimizer._target_=os.system
+optimizer._target_=torch.optim.lr_scheduler.sys.exit
'optimizer.betas=[{_target_: os.system}]'
+data={_target_:toolkit.files.write_text}
optimizer=[../../evil]
optimizer=evil
data.root=${oc.env:HOME}
+qwerty=1
"""


@pytest.mark.parametrize(
    "option", [pytest.param(o, id=o) for o in HOSTILE.split("\n")[1:-1]]
)
def test_options_that_could_run_code_need_trust(folder, option):
    """They come with the folder, which anybody may have written."""
    (option,) = shlex.split(option)
    write_options(folder, ["schedule=dp", option])
    with pytest.raises(UserError, match="trust=true"):
        resume_arguments([f"resume={folder}"], "train")
    assert option in resume_arguments([f"resume={folder}", "trust=true"], "train")
    (folder / "sweep.json").write_text(
        json.dumps({"options": ["-m", "seed=0,1", option]})
    )
    with pytest.raises(UserError, match="trust=true"):
        resume_arguments(["-m", f"resume={folder}"], "train")


def test_the_command_that_continues_a_run_of_ones_own_model_trusts_it(folder):
    assert shlex.split(resuming(folder, "train")) == [f"resume={folder}"]
    write_options(folder, ["schedule=dp", "model.target=my_net.mlp"])
    arguments = shlex.split(resuming(folder, "train"))
    assert arguments == [f"resume={folder}", "trust=true"]
    assert "model.target=my_net.mlp" in resume_arguments(arguments, "train")


@pytest.mark.parametrize("name", ["checkpoints", ".hydra/config.yaml", "0/status.json"])
def test_links_that_lead_out_need_trust(folder, tmp_path_factory, name):
    """The run would write through them."""
    outside = tmp_path_factory.mktemp("outside")
    (folder / "0").mkdir()
    (folder / name).symlink_to(outside)
    with pytest.raises(UserError, match=f"{name} is a link to {outside}.* trust=true"):
        resume_arguments([f"resume={folder}"], "train")
    assert resume_arguments([f"resume={folder}", "trust=true"], "train")


def test_options_of_the_toolkit_need_no_trust(folder):
    own = "+sweep=workers optimizer=adamw +model.arguments.a=1 optimizer._target_=torch.optim.Adam"
    sweep = ["-m", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", *own.split()]
    (folder / "sweep.json").write_text(json.dumps({"options": sweep}))
    assert resume_arguments(["-m", f"resume={folder}"], "train")[:-1] == sweep


def test_reading_a_folder_is_bounded(folder):
    """Aliases that expand to 10**9 values."""
    lines = [
        "a0: &a0 [x]",
        *(f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 9)}]" for k in range(1, 10)),
    ]
    (folder / ".hydra" / "hydra.yaml").write_text("\n".join(lines))
    with pytest.raises(UserError, match="has no options"):
        resume_arguments([f"resume={folder}"], "train")


METHOD = "schedule=cdp_v2 schedule.delay=1 data=cifar10 data.root=x workers=4"


@pytest.mark.parametrize(
    ("before", "given", "kept"),
    [
        (USUAL, "", "schedule=dp +model.arguments.a=1 epochs=3"),
        (USUAL, "epochs=9 seed=1", "schedule=dp +model.arguments.a=1"),
        # It comes back.
        ("~rules.cdp_v1 seeds=2", "schedule@rules.cdp_v1=cdp_v1", "seeds=2"),
        (METHOD, "schedule=dp", "data=cifar10 data.root=x workers=4"),
        (METHOD, "schedule=dp schedule.delay=2", "data=cifar10 data.root=x workers=4"),
        (
            METHOD,
            "schedule=cdp_v2 data=cifar10",
            "schedule.delay=1 data.root=x workers=4",
        ),
        (
            METHOD,
            "microbatches=2",
            "schedule=cdp_v2 schedule.delay=1 data=cifar10 data.root=x",
        ),
        (
            METHOD,
            "workers=2",
            "schedule=cdp_v2 schedule.delay=1 data=cifar10 data.root=x",
        ),
    ],
)
def test_options_given_anew_replace_those_of_before(folder, before, given, kept):
    """Options of a choice go with it: they may mean something else to the new one, or nothing."""
    experiment = "compare" if "rules" in before else "train"
    write_options(folder, before.split(), experiment)
    end = [f"resume={folder}", f"hydra.run.dir={folder}"]
    found = resume_arguments(
        [*given.split(), end[0], "hydra.run.dir=elsewhere"], experiment
    )
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


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_finished_run_is_resumed_and_nothing_else_uses_its_folder(
    tmp_path, monkeypatch
):
    succeeded("train", tmp_path, *TINY, "schedule=cdp_v1")
    before = contents(tmp_path)
    where, resume = f"hydra.run.dir={tmp_path}", f"resume={tmp_path}"
    refused("train", resume, "model=resnet14", match="the state is of another model")
    # It would take the later steps for its own.
    refused("train", *TINY, "seed=7", where, match="has the checkpoints .* resume=")
    with alone_in(tmp_path):
        for given in (where, resume):
            refused("train", *TINY, given, match="another process is at work in")
    after = contents(tmp_path)
    assert {path: after[path] for path in before} == before
    assert "CDP-v1" in succeeded("train", tmp_path, resume, "epochs=2")
    # The cosine spans the two epochs of the new options.
    first, second = (
        float(epoch["learning_rate"]) for epoch in rows(tmp_path / "epochs.csv")
    )
    assert second == pytest.approx(0.5 * first)
    # Of ranks that torchrun restarts.
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert run("train", *TINY, "schedule=cdp_v1", "epochs=2", where).status == 0


def test_refuses_a_run_without_checkpoints(tmp_path):
    succeeded("train", tmp_path, *TINY, "save.epochs=null")
    refused("train", f"resume={tmp_path}", match="there is no checkpoint in")


@pytest.mark.parametrize("option", ["tracking.entity=them", "tracking.mode=online"])
def test_whose_account_is_uploaded_to_needs_trust(folder, option):
    """Unless this command line says the same."""
    write_options(folder, ["schedule=dp", "tracking.tags=[a]", option])
    with pytest.raises(UserError, match="trust=true"):
        resume_arguments([f"resume={folder}"], "train")
    assert option in resume_arguments([f"resume={folder}", option], "train")
    write_options(folder, ["schedule=dp", "tracking.tags=[a]", "tracking.mode=offline"])
    assert "tracking.mode=offline" in resume_arguments([f"resume={folder}"], "train")
