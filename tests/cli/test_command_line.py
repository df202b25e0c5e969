"""A user's mistake ends with one clear message and status 2, never with a traceback."""

import os
import re
import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from tests.experiments.command import EXPERIMENTS, TINY, cases, refused, run

pytestmark = pytest.mark.usefixtures("analysed_once")

GROUPS = ("model", "data", "optimizer", "lr", "runtime", "schedule", "experiment")


TRAIN_REFUSES = r"""
sed=1 | sed: .* seed
optimizer.momentom=1 | optimizer.momentom: .* optimizer.momentum
qwerty=1 | option qwerty
dat.root=x | option dat.root: .* data.root
data.root=x | data.root
+seed=2 | seed=2
schedule=cdp_v3 | schedule=cdp_v3 .* cdp_v2
schedule=null | schedule=null
model=resnt18 | model=resnt18 .* resnet18
model.name=resnt18 | 'resnt18': .* resnet18
experiment=paper/cifar_resnet18 | experiment=paper/cifar_resnet18 .* paper/cifar10_resnet18
experiment=paper/cifar10_resnet18 lr=cosine | lr.every_epochs
seed=abc | seed=abc: .*'abc'
epochs= | epochs=
stages=null | stages=null
optimizer.lr=fast | optimizer.lr=fast
tracking=offline | tracking=offline: .* tracking.mode
model.arguments=3 | model.arguments=3: .* \+model.arguments.NAME=
epochs | 'epochs'
=3 | '=3'
seed=[1 | 'seed=\[1'
data.root=/ü | 'ü' .* "data.root='/ü'"
tracking.name=grün | 'ü' .* "tracking.name='grün'"
sëed=1 | 'ë'$
rules.ä.delay=[1 | OPTION=VALUE
seed=1,2 | seed=1,2
model.target=torchvision.models.mobilenet_v3_small data=synthetic | \[4, 10\]
workers=0 | workers .* got 0
threads=0 | threads .* got 0
threads=100000 | threads .* got 100000
workers=3 microbatches=5 | workers=3 and microbatches=5
seed=99999999999999999999 | seed.* 99999999999999999999
stages=100 | got 100
batch=1000 | batch or microbatches
partition=3 | measure 3: .* flops
partition=[fc] | 4 stages .* got 1
runtime.order=fast | 'fast'
optimizer.lr=nan | lr .* got nan
optimizer=adamw optimizer.betas=[0.9] | optimizer cannot be made
optimizer.lr=-1 | optimizer.lr .* got -1
optimizer.momentum=2 | optimizer.momentum .* got 2
optimizer=muon optimizer.momentum=1 | momentum .* got 1
optimizer.weight_decay=-1 | -1.0; .* optimizer.weight_decay$
optimizer=adamw optimizer.betas=[0.9,3] | beta .* optimizer.betas$
optimizer=muon optimizer.adamw=fc | adamw=fc
profile=-1 | profile .* got -1
model.width=0 | width .* got 0
model=vit_b_16 model.width=8 | model.width: got 8
+optimizer.foo=1 | SGD.*'foo'
+epoch=3 | \+epoch: .* epochs
+save.step=3 | \+save.step: .* save.steps
+rules.mine=dp | \+rules
data.n_test=0 | n_test .* got 0
device=gpu | device=gpu
device=meta | device=meta
schedule.placement=foo | placement 'foo'
schedule.delay=late | delay.*'late'
schedule.delay=1000000000000 | delay .* 1000 .* got 1000000000000
schedule.delay=[1,1] | 4 stages.* got \(1, 1\)
'schedule.delay={sed: 1}' | 'sed'.*seed
'schedule.delay={distribution: normal}' | distribution .*'normal'
'schedule.delay={most: 2, p: 0.5}' | distribution=geometric
schedule=gpipe schedule.accumulate=2 | schedule.accumulate is not .* schedule
schedule.file=x.csv workers=4 stages=2 | workers=4 stages=2
schedule.file=x.csv schedule=interleaved_1f1b schedule.n_ranks=2 | schedule.n_ranks=2
schedule.file=x.csv schedule.accumulate=2 | schedule.accumulate=2
schedule.file= | schedule.file .* null
schedule.period=8 | schedule.period=8
model=vit_b_16 | vit_b_16 .* got 8
model=resnet18 batch=1 | \[1, 3, 8, 8\]
optimizer.lr=1e30 | optimizer.lr
batch=1000000000000 | out of memory: \d+ bytes .* batch
data=cifar10 | data=cifar10
data=imagenet | data=image_folder
data=tokens | data=tokens
data=text | model=resnet8
model=gpt | model=gpt
model=gpt data=text model.heads=3 | model.heads=3: got 128
data=cifar10 data.root=/no/such | data.root=/no/such
-m schedule=dp,foo | schedule=foo
-m hydra/launcher=slum | hydra/launcher=slum .* slurm
-m hydra/sweeper=bsic | hydra/sweeper=bsic .* basic
-m seed=1,abc | seed=abc
--help sed=1 | sed: .* seed
--foo | --foo
--cfg=foo | --cfg
runtime=[1] | runtime=\[1\]
+runtime.pacing=false | \+runtime.pacing: .*
workers.x=1 | workers.x=1
switch.candidates=0 | switch.candidates=0
switch.candidates.x= | item of a list .*'x'
experiment=null | experiment=null
data=text data.root=/dev/zero | data.root=/dev/zero .* regular
"""


@pytest.mark.parametrize(("arguments", "pattern"), cases(TRAIN_REFUSES))
def test_train_refuses(tmp_path, arguments, pattern):
    given = {argument.partition("=")[0] for argument in arguments}
    own_data = [argument for argument in arguments if argument.startswith("data=")]
    tiny = [a for a in TINY if a.partition("=")[0] not in given]
    tiny = [a for a in tiny if not (own_data and a.startswith("data"))]
    dirs = f"hydra.run.dir={tmp_path}", f"hydra.sweep.dir={tmp_path}"
    refused("train", *arguments, *tiny, *dirs, match=pattern)


BEFORE_DATA = r"""
optimizer.lr=-1 | optimizer.lr .* got -1
optimizer.momentum=1.5 | optimizer.momentum .* got 1.5
optimizer.weight_decay=-1 | optimizer.weight_decay$
optimizer=adamw optimizer.betas=[0.9,3] | optimizer.betas$
lr.warmup_epochs=-1 | lr.warmup_epochs .* got -1
epochs=0 | epochs .* got 0
batch=0 | batch .* got 0
clip=0 | clip: got 0
ema=2 | ema: got 2
precision=half | precision .*'half'
label_smoothing=1 | label_smoothing .* got 1
save.keep=0 | save.keep .* got 0
tracking.every=0 | tracking.every .* got 0
seed=-1 | seed .* got -1
"""


@pytest.mark.parametrize("name", ["train", "compare"])
@pytest.mark.parametrize(("arguments", "pattern"), cases(BEFORE_DATA))
def test_plain_mistakes_are_refused_before_data_are_loaded(
    monkeypatch, tmp_path, name, arguments, pattern
):
    monkeypatch.delattr("toolkit.training.data.synthetic")
    given = {argument.partition("=")[0] for argument in arguments}
    tiny = [argument for argument in TINY if argument.partition("=")[0] not in given]
    refused(name, *arguments, *tiny, f"hydra.run.dir={tmp_path}", match=pattern)


@pytest.mark.parametrize("option", ["optimizer.momentum=2", "clip=0"])
def test_mistakes_in_the_options_of_a_rule_are_refused_before_data_are_loaded(
    monkeypatch, tmp_path, option
):
    monkeypatch.delattr("toolkit.training.data.synthetic")
    where = f"hydra.run.dir={tmp_path}"
    refused("compare", f"+own.cdp_v1.{option}", *TINY, where, match="momentum|clip")


@pytest.mark.filterwarnings("ignore")  # Optuna's own
def test_optuna_refuses(tmp_path):
    sweep = (
        "-m",
        "hydra/sweeper=optuna",
        f"hydra.sweep.dir={tmp_path}",
        "seed=interval(1,0.1)",
    )
    refused("train", *sweep, match="hydra/sweeper=optuna: .*`low` .* `high`")


def test_impossible_delay_shows_the_grid(tmp_path):
    where = f"hydra.run.dir={tmp_path}"
    message = refused(
        "train", "schedule.delay=0", *TINY, where, match="delay=1 .*freshest"
    )
    assert "rank 0 [0F0] 1F0 2F0" in message


OTHERS_REFUSE = r"""
compare sed=1 | sed: .* seed
memory length=10 | length
memory data.X=1 | option data.X: .* data.root
memory model.target=nope.nope | model.target=nope.nope .* module nope
memory model.target=tests.cli.nope | tests.cli.nope .* tests.cli has no nope
memory model.target=tests.cli.test_build.mlp +model.arguments.foo=1 | test_build.mlp .*'foo'
simulate data.root=1 | data.root .* data=CHOICE
compare workers=[] | workers=\[\]: workers .* '\[\]'
compare rules=[nope] | rules=\[nope\]: \+schedule@rules.NAME=
situations models=[nope] | models=\[nope\]: \+model@models.NAME=
train 'schedule.phases={epochs: 1}' | schedule.phases=\[\{epochs: 1\}\]
pipelines data.image_size=8 | option data.image_size
compare schedule=dp | option schedule:
memory workers=4,8 | workers=4,8 .* workers=\[4,8\]
situations ratios=1 | ratios=1: .* ratios=\[1\]
compare tracking.tags=mine | tracking.tags=mine: .* tracking.tags=\[mine\]
memory model.target=./my_net.py | model.target=./my_net.py .* model.target=my_net.NAME
memory model.target=tests.cli.test_build | model.target=tests.cli.test_build .* module
memory model.target=tests.cli.test_build.HERE | model.target=tests.cli.test_build.HERE .* str
compare rules.dpp.delay=1 | rules.dpp.delay
compare schedule@rules.mine=dp | \+schedule@rules.mine=
compare data.batch=3 | option data.batch
compare schedule.delay=2 | option schedule.delay
compare seeds=0 | seeds .* got 0
compare rules=dp | rules=dp: .* rules.NAME.OPTION
communication measured=true width=0 | width .* got 0
bench bench=foo | bench=foo
bench bench.round=1 | bench.round: .* bench.rounds
compare rules.mat=dp | option rules.mat
compare rules.dp.dealy=2 | rules.dp.dealy: .* rules.dp.delay
simulate +also.g=gpipe | \+schedule@also.gpipe
train model.arguments.n=3 | \+model.arguments.n=
memory workers=[2] schedule.file=x | ^there is no option schedule.file
plan model=resnet8 data=digits ranks=[8] batch=12 | ranks=8
plan model=resnet8 data=digits ranks=[5,8] batch=24 | ranks=\[5,8\]
simulate hardware.link_bandwidth=10 | hardware.link_bandwidth .*bytes a second.* got 10; .*1.25e9
memory hardware=machines_of_8 hardware.local_bandwidth=600 | local_bandwidth .* got 600
simulate optimizer_words=-1 | optimizer_words .* got -1
bench bench.model=foo | model 'foo'
report title=x | runs=\.\.\. .* got None
report runs=[] | runs=\.\.\. .* got \[\]
report runs=nowhere | nowhere is not a folder
report runs=nowhere* | runs=nowhere\*
report runs=conf | no runs in conf
report runs=conf publish=wandb entity=me | project=
report runs=conf publish=wanbd | publish 'wanbd'
report run=conf | option run: .* runs
simulate shape=2 | shape .* got 2
simulate shape=[a] | shape .* got \['a'\]
report runs=3 | runs=\.\.\. .* got 3
pipelines ranks=1000000 | ranks=1000000
pipelines microbatches=[1000000] | microbatches=1000000
memory workers=[1000000000000] | workers=1000000000000
bench bench=failure bench.ranks=1 | bench.ranks .* got 1
bench bench=failure bench.timeout=0 | bench.timeout .* got 0
bench bench=failure bench.faults=[burnt] | bench.faults .*'burnt'
bench bench=fuzz bench.command_lines=0 | bench.command_lines .* got 0
bench bench=peak device=cpu | device=cpu
bench bench=one_device device=cpu bench.stages=0 | bench.stages .* got 0
"""


@pytest.mark.parametrize(("arguments", "pattern"), cases(OTHERS_REFUSE))
def test_others_refuse(tmp_path, arguments, pattern):
    refused(*arguments, f"hydra.run.dir={tmp_path}", match=pattern)


FLAGS_REFUSED = r"""
--resolve | --resolve flag .* with --cfg
-m --resolve | --resolve flag .* with --cfg
--hydra-help --resolve | --resolve flag .* with --cfg
--cfg job -m | Only one of --run, --multirun, --cfg
--run -m | Only one of --run, --multirun, --cfg
--info all --cfg job | Only one of --run, --multirun, --cfg
"""


@pytest.mark.parametrize(("flags", "pattern"), cases(FLAGS_REFUSED))
def test_flags_that_do_not_go_together_are_refused(flags, pattern):
    refused("train", *flags, match=pattern)


def test_flags_that_go_together():
    shown = run("train", "--cfg", "job", "--resolve", "--package", "optimizer").out
    assert OmegaConf.create(shown).lr == 0.1
    assert "--resolve" not in run("train", "--resolve", "--help").err


@pytest.mark.parametrize("name", ["train", "compare"])
def test_an_output_folder_without_a_name_is_refused(monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    refused(name, *TINY, "hydra.run.dir=", match="hydra.run.dir=")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("text", "pattern"),
    [("def net(:", "SyntaxError"), ("import not_there_at_all", "'not_there_at_all'")],
)
def test_an_error_in_the_users_module_is_named(monkeypatch, tmp_path, text, pattern):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    module = f"net_with_{pattern.strip(chr(39)).lower()}"
    (tmp_path / f"{module}.py").write_text(f"{text}\n")
    target = f"model.target={module}.net"
    refused("memory", target, match=f"{target} .* {module} raises .*{pattern}")


def test_a_folder_may_be_named_like_a_glob(tmp_path):
    folder = tmp_path / "a[1]"
    folder.mkdir()
    refused("report", f"runs='{folder}'", match=rf"no runs in {re.escape(str(folder))}")


def test_long_values_are_cut(tmp_path):
    message = refused(
        "train", f"optimizer.lr={'x' * 3000}", f"hydra.run.dir={tmp_path}"
    )
    assert len(message) < 1000


def test_bug_keeps_its_traceback(monkeypatch, tmp_path):
    """Only a UserError is the user's mistake."""
    monkeypatch.setattr(
        "toolkit.training.training_run.partition", lambda *_, **options: int("x")
    )
    with pytest.raises(ValueError, match="invalid literal"):
        run("train", *TINY, f"hydra.run.dir={tmp_path}")


@pytest.mark.parametrize("name", ["train", "compare"])
def test_help_lists_groups_and_options(name):
    finished = run(name, "--help", "data=imagenet", "seed=7")
    assert finished.status == 0
    assert f"cyclic-dp {name} [OPTION=VALUE ...]" in finished.out
    lines = [
        line.split()[0] for line in finished.out.splitlines() if re.match(r"  \S", line)
    ]
    assert len(lines) == len(set(lines))
    shown = "schedule@rules.NAME" if name == "compare" else "schedule"
    assert {*GROUPS[:5], shown, "experiment"} <= set(lines)
    assert {
        "seed=7",
        "stages=4",
        "epochs=10",
        "data.root=null",
        "optimizer.lr=0.1",
    } <= set(lines)


@pytest.mark.parametrize("name", ["train", "plan"])
def test_help_breaks_between_words(monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "1000")
    wide = run(name, "--help").out
    monkeypatch.setenv("COLUMNS", "80")
    narrow = run(name, "--help").out
    assert max(map(len, wide.splitlines())) > 120
    assert max(map(len, narrow.splitlines())) <= 80
    narrow_words = [word for word in narrow.split() if word != "\\"]  # of commands
    assert narrow_words == wide.split()


def test_help_explains_options_of_groups(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    shown = run("train", "--help", "optimizer=muon", "save.keep=3").out
    assert re.search(r"optimizer.ns_steps=5 +of Newton and Schulz", shown)
    assert re.search(r"save.keep=3 +number of latest", shown)
    assert re.search(r"schedule.chains=in_order +or rotated", shown)
    assert re.search(
        r"bench.stages=4 +parts into which", run("bench", "--help", "bench=grouped").out
    )


@pytest.fixture
def own(tmp_path):
    """The option that adds a folder with the user's optimizers and experiments."""
    files = {
        "optimizer/mine": "_target_: torch.optim.RMSprop\nlr: 0.001\n",
        "optimizer/nowhere": "_target_: nowhere.SGD\nlr: 0.1\n",
        "optimizer/nothing": "lr: 0.1\n",
        "optimizer/rate": "_target_: torch.optim.Adagrad\nlr: 0.1\nbeta: 1\n",
        "optimizer/broken": "lr: [1\n",
        "lr/torchs": "_target_: torch.optim.lr_scheduler.StepLR\nstep_size: 3\n",
        "lr/number": "_target_: fractions.Fraction\n",
        "schedule/number": "_target_: fractions.Fraction\n",
        "optimizer/listed": "- lr\n- 0.1\n",
        "experiment/ours": "# @package _global_\ndefaults:\n- override /optimizer: mine\nseed: 7\n"
        "workers: 8\n",
    }
    for name, text in files.items():
        path = tmp_path / "own" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return f"--config-dir={tmp_path / 'own'}"


def test_own_choices(own, tmp_path):
    options = (
        "experiment=ours",
        "microbatches=2",
        *TINY,
        f"hydra.run.dir={tmp_path}/run",
    )
    assert run("train", own, *options).status == 0
    config = OmegaConf.load(tmp_path / "run/result.json").provenance.config
    assert (config.optimizer._target_, config.seed) == ("torch.optim.RMSprop", 7)
    assert config.microbatches == 2  # though the preset has workers=8
    refused(
        "train", "epochs=2", f"resume={tmp_path}/run", match="--config-dir.* trust=true"
    )
    again = run("train", "epochs=2", f"resume={tmp_path}/run", "trust=true")
    assert (again.status, again.err.count("error")) == (0, 0)
    shown = run("train", *own.split("="), "--help", "experiment=ours").out
    assert {"seed=7", "optimizer.lr=0.001"} <= set(shown.split())
    choices = "adamw, broken, lamb, lars, listed, mine, muon, nadam, nesterov, nothing"
    assert f"{choices}, nowhere, rate, sgd" in " ".join(shown.split())


OWN_REFUSES = r"""
optimizer=mien | optimizer=mien .* mine\? .* adamw, broken, lamb
optimizer=nowhere | nowhere.SGD .*module nowhere
optimizer=nothing | optimizer has no _target_
optimizer=rate optimizer.bta=3 | option optimizer.bta
optimizer=broken | optimizer/broken.yaml line 2
optimizer=listed | ListConfig .* optimizer
optimizer=rate optimizer.lr=fast | optimizer.lr .* got 'fast'
lr=torchs | torch.optim.lr_scheduler.StepLR .* 'optimizer'
lr=number | lr: got a Fraction
schedule=number | schedule: fractions.Fraction gives a Fraction
model._target_= | _target_ cannot be imported .* Empty path
data._target_= | _target_: '' cannot be imported
runtime._target_=nowhere.Here | _target_ cannot be imported .* 'nowhere'
runtime._target_=torch.nn.Linear | torch.nn.Linear is not a runtime
"""


@pytest.mark.parametrize(("arguments", "pattern"), cases(OWN_REFUSES))
def test_own_choices_are_refused(own, arguments, pattern):
    refused("train", own, *arguments, *TINY, match=pattern)


def test_own_machine(tmp_path):
    """The example of conf/README.md, and mistakes in it."""
    page = (EXPERIMENTS.parent / "conf" / "README.md").read_text()
    where = tmp_path / "own" / "hardware" / "mine.yaml"
    where.parent.mkdir(parents=True)
    text = re.search(r"```yaml\n(_target_: toolkit.cost.*?)```", page, re.DOTALL)[1]
    where.write_text(text)
    given = (
        f"--config-dir={tmp_path}/own",
        "hardware=mine",
        f"hydra.run.dir={tmp_path}/run",
    )
    finished = run("simulate", *given, "model=resnet8", "shape=[3,8,8]", "batch=2")
    assert finished.status == 0
    assert "my machines" in finished.out
    where.write_text(text.replace("5.0e+13", "fast"))
    refused("simulate", *given, match="hardware.flops .* got 'fast'")
    where.write_text(text.replace("memory_bandwidth", "memory_bandwith"))
    refused("simulate", *given, match="'memory_bandwith'")
    where.write_text("name: my machines\n")
    refused("simulate", *given, match="hardware has no _target_")


def test_own_data(own, tmp_path, monkeypatch):
    """The example of conf/README.md, and mistakes in it."""
    page = (EXPERIMENTS.parent / "conf" / "README.md").read_text()
    (tmp_path / "my_set.py").write_text(
        re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    rest = "data=mine", "model=resnet8", "epochs=1", "batch=4"
    where = tmp_path / "own" / "data" / "mine.yaml"
    where.parent.mkdir()
    where.write_text("_target_: my_set.load\nn: 48\n")
    finished = run("train", own, *rest, f"hydra.run.dir={tmp_path}/run")
    assert finished.status == 0
    for text, pattern in [
        ("_target_: torch.utils.data.TensorDataset", "data: .* gives a TensorDataset"),
        ("_target_: builtins.list", "data: .* gives a list"),
        ("n: 3", "data has no _target_"),
    ]:
        where.write_text(text)
        refused("train", own, *rest, f"hydra.run.dir={tmp_path}/other", match=pattern)


def python(*arguments):
    environment = os.environ | {"COLUMNS": "200"}
    environment.pop("HYDRA_FULL_ERROR", None)
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=EXPERIMENTS.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_help_does_not_wait_for_torch():
    finished = python("-X", "importtime", "experiments/train.py", "--help")
    assert finished.returncode == 0
    assert "schedule" in finished.stdout
    lines = finished.stderr.splitlines()
    times = [line for line in lines if line.startswith("import time:")]
    loaded = {line.rpartition("|")[2].strip() for line in times}
    assert "hydra" in loaded
    assert not loaded & {"torch", "matplotlib", "pandas", "wandb"}
    assert times == lines


@pytest.mark.parametrize(
    ("name", "argument", "pattern"),
    [
        ("train", "seed=abc", "seed=abc"),
        ("compare", "sed=1", "option sed: .* seed"),
        ("compare", "epochs=0", "epochs .* got 0"),
        ("bench", "foo", "bench=foo .* .* controller, .*, fuzz"),
    ],
)
def test_refuses_in_a_process(name, argument, pattern):
    finished = python(f"experiments/{name}.py", argument)
    assert (finished.returncode, finished.stdout) == (2, "")
    assert re.fullmatch(f"error: .*{pattern}.*\n", finished.stderr)
