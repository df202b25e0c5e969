"""Every preset and every choice composes; the paper's presets have the paper's settings."""

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from tests.experiments.command import EXPERIMENTS
from toolkit.cli import build_schedule, schema
from toolkit.cli.help import choices, groups
from toolkit.cli.runs import rule_config
from toolkit.errors import UserError
from toolkit.schedule import Correction, RandomDelay, after, catalog

CONF = EXPERIMENTS.parent / "conf"
PRESETS = choices([CONF], "experiment")
CHOICES = [
    (group, choice)
    for group in groups(CONF)
    if group not in ("experiment", "bench", "study", "sweep", "wandb")
    for choice in choices([CONF], group)
]


def composed(experiment, *overrides):
    schema.register()
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        config = compose(experiment, list(overrides))
    OmegaConf.resolve(config)
    return config


@pytest.mark.parametrize("experiment", ["train", "compare"])
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_composes(experiment, preset):
    config = composed(experiment, f"experiment={preset}")
    assert not OmegaConf.missing_keys(config)
    for schedule in (
        [config.schedule] if experiment == "train" else config.rules.values()
    ):
        built = build_schedule(schedule)
        assert (built.n_stages, built.n_microbatches) == (
            config.stages,
            config.microbatches,
        )
    text = (CONF / "experiment" / f"{preset}.yaml").read_text()
    assert f"cyclic-dp compare experiment={preset}" in text


@pytest.mark.parametrize("study", choices([CONF], "study"))
def test_every_study_composes(study):
    config = composed("compare", f"study={study}")
    rules = [
        (build_schedule(rule), str(config.own.get(name)))
        for name, rule in config.rules.items()
    ]
    assert all(rule not in rules[:k] for k, rule in enumerate(rules))
    assert len(rules) > 3
    for name in config.rules:
        assert rule_config(config, name, 0).seed == 0
    assert f"study={study}" in (CONF / "study" / f"{study}.yaml").read_text()


@pytest.mark.parametrize("sweep", choices([CONF], "sweep"))
def test_every_sweep_composes(sweep):
    schema.register()
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        asked = compose("train", [f"+sweep={sweep}"], return_hydra_config=True).hydra
    assert asked.mode.name == "MULTIRUN"
    for option, values in asked.sweeper.params.items():
        for value in ["0"] if values.startswith("range(") else values.split(","):
            assert composed("train", f"+sweep={sweep}", f"{option}={value}")
    assert f"-m +sweep={sweep}" in (CONF / "sweep" / f"{sweep}.yaml").read_text()


@pytest.mark.parametrize(
    "path", sorted((CONF / "wandb").iterdir()), ids=lambda path: path.stem
)
def test_every_sweep_of_wandb_has_options_that_compose(path):
    sweep = yaml.safe_load(path.read_text())
    assert (CONF.parent / sweep["program"]).exists()
    *_, tracked = sweep["command"]
    for option, asked in sweep["parameters"].items():
        for value in asked.get("values", [asked.get("min")]):
            assert (
                composed("train", tracked, f"{option}={value}").tracking.mode
                == "online"
            )
    assert f"wandb sweep {path.relative_to(CONF.parent)}" in path.read_text()


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_choice_composes(group, choice):
    config = composed(
        "simulate" if group == "hardware" else "train", f"{group}={choice}"
    )
    assert not OmegaConf.missing_keys(config)
    assert config[group]._target_.startswith(
        ("toolkit.", "torch.optim.", "timm.optim.")
    )


@pytest.mark.parametrize("bench", choices([CONF], "bench"))
def test_every_benchmark_composes(bench):
    assert composed("bench", f"bench={bench}").bench._target_.startswith("benchmarks.")


@pytest.mark.parametrize("model", ["resnet18", "resnet50"])
@pytest.mark.parametrize(
    ("preset", "data", "batch", "epochs", "lr", "gamma", "weight_decays"),
    [
        (
            "imagenet",
            "image_folder",
            32,
            90,
            0.1,
            0.1,
            {"resnet18": 1e-4, "resnet50": 1e-4},
        ),
        (
            "cifar10",
            "cifar10",
            64,
            100,
            0.05,
            0.2,
            {"resnet18": 5e-4, "resnet50": 1e-3},
        ),
    ],
)
def test_settings_of_the_paper(  # noqa: PLR0913
    preset, model, data, batch, epochs, lr, gamma, weight_decays
):
    """arXiv 2403.08837, section 5 and appendix."""
    config = composed("compare", f"experiment=paper/{preset}_{model}")
    assert (config.stages, config.microbatches) == (4, 8)
    assert (config.model.name, config.batch, config.epochs) == (model, batch, epochs)
    assert config.data._target_ == f"toolkit.training.data.{data}"
    sgd = {
        "lr": lr,
        "momentum": 0.9,
        "nesterov": False,
        "weight_decay": weight_decays[model],
    }
    assert config.optimizer == {"_target_": "torch.optim.SGD"} | sgd
    plain = {"warmup_epochs": 0, "reference_batch": None}
    steps = {"_target_": "toolkit.training.lr.Step", "every_epochs": 30, "gamma": gamma}
    assert config.lr == steps | plain
    assert [rule.get("delay") for rule in config.rules.values()] == [0, 1, "freshest"]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["schedule=dp", "schedule.delay=2"], catalog.data_parallel(4, delay=2)),
        (["schedule.delay=[1,1,1,2]"], catalog.cyclic(4, [1, 1, 1, 2])),
        (
            [
                "schedule=dp",
                "schedule.delay=[[0,1],[2,0]]",
                "stages=2",
                "microbatches=2",
            ],
            catalog.data_parallel(2, delay=[[0, 1], [2, 0]]),
        ),
        (
            [
                "schedule=dp",
                "schedule.delay={distribution: geometric, p: 0.5, most: 4, seed: 1}",
            ],
            catalog.data_parallel(
                4, delay=RandomDelay("geometric", most=4, p=0.5, seed=1)
            ),
        ),
        (
            ["schedule=zero_cdp_v1", "schedule.delay={least: 1, most: 3, per: stage}"],
            catalog.cyclic(
                4, RandomDelay(least=1, most=3, per="stage"), state="sharded"
            ),
        ),
        (
            ["schedule=dp", "schedule.accumulate=2"],
            catalog.data_parallel(4, accumulate=2),
        ),
        (["schedule.accumulate=3"], catalog.cyclic(4, accumulate=3)),
        (
            ["schedule.correction=extrapolate"],
            catalog.cyclic(4, correction="extrapolate"),
        ),
        (
            ["schedule.correction={kind: compensate, strength: 0.5}"],
            catalog.cyclic(4, correction=Correction("compensate", 0.5)),
        ),
        (
            ["schedule.phases=[{schedule: dp, steps: 3}]"],
            after([(catalog.data_parallel(4), 3)], catalog.cyclic(4)),
        ),
        (
            ["schedule=pipedream_2bw", "schedule.correction=extrapolate"],
            catalog.pipedream_2bw(4, 4, correction="extrapolate"),
        ),
        (["schedule=published", "microbatches=8"], catalog.published(8)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_delays_and_accumulation(overrides, expected):
    """In all that takes a schedule; the delay is plain Python, such as is compared and copied."""
    for experiment in ("train", "simulate"):
        sizes = (
            [] if any("microbatches" in o for o in overrides) else ["microbatches=4"]
        )
        built = build_schedule(composed(experiment, *overrides, *sizes).schedule)
        assert built == expected
        assert type(built.delay) is type(expected.delay)
    rule = [
        o.replace("schedule.", "rules.cdp_v2.") for o in overrides if "schedule." in o
    ]
    if not overrides[0].startswith("schedule="):
        built = build_schedule(
            composed("compare", *rule, "microbatches=4").rules.cdp_v2
        )
        assert built == expected


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    return path


def test_a_file_has_the_options_that_are_not_of_a_method(file):
    for overrides, late, state, correction in (
        (["schedule.delay=2"], 2, "replicated", "none"),
        (
            ["schedule=cdp_v1", "schedule.correction=extrapolate"],
            1,
            "replicated",
            "extrapolate",
        ),
        (["schedule.state=sharded"], 0, "sharded", "none"),
        (["schedule=gpipe"], 0, "replicated", "none"),
    ):
        built = build_schedule(
            composed("train", f"schedule.file={file}", *overrides).schedule
        )
        assert built.staleness == ((late,) * 2,) * 2
        assert (built.name, built.state, built.correction) == (
            "mine",
            state,
            correction,
        )


@pytest.mark.parametrize("schedule", ["cdp_v2", "gpipe"])
def test_the_steps_of_a_file_may_overlap(schedule, file):
    options = [f"schedule={schedule}", f"schedule.file={file}", "schedule.period=4"]
    delay = [] if schedule == "cdp_v2" else ["+schedule.delay=freshest"]
    built = build_schedule(composed("train", *options, *delay).schedule)
    assert (built.period, built.staleness) == (4, ((1, 1), (0, 0)))


def test_the_pairs_of_a_file_unfold(tmp_path):
    path = tmp_path / "pairs.csv"
    path.write_text("0F0,0F1;0B0,0B1\n1F0,1B0,1F1,1B1\n")
    for options, pairs in (([], 1), (["schedule.unfold=true"], 0)):
        built = build_schedule(
            composed("train", f"schedule.file={path}", *options).schedule
        )
        assert len(built.timing.pairs) == pairs
    with pytest.raises(UserError, match=r"schedule\.unfold=True"):
        build_schedule(composed("train", "schedule.unfold=true").schedule)
