"""Scripts for DistributedDataParallel become cyclic by three lines, and train by the update rule.

Each pair of scripts is run in float64, on ranks with the variables that torchrun sets. With
rule=dp the weights are those that torch's DistributedDataParallel trains; with CDP-v2 they are
those of a single process.
"""

import difflib
import functools
import importlib.util
import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR, StepLR

from tests import warm_python
from tests.runtime.models import assert_same
from tests.thorough import more, thorough
from toolkit.model import partition
from toolkit.runtime import SingleProcess, StepOptions, by_name
from toolkit.schedule import ScheduleSpec, catalog

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "experiments/examples"

NAMES = ("tutorial", "nanogpt", "imagenet", "huggingface")
INSTALLED = {
    name: pytest.param(
        name,
        marks=pytest.mark.skipif(
            name == "huggingface" and importlib.util.find_spec("transformers") is None,
            reason="needs transformers",
        ),
    )
    for name in NAMES
}
USUAL = ("nanogpt", "imagenet")
every_pair = pytest.mark.parametrize(
    "name", more(USUAL, [INSTALLED[name] for name in NAMES])
)

OUTPUT = {
    "tutorial": ("--snapshot", "snapshot.pt"),
    "nanogpt": ("--out-dir", "."),
    "imagenet": ("--output", "."),
    "huggingface": ("--output-dir", "."),
}
# Option that sets how long a script trains; half of its default, and the default.
LENGTH = {
    "tutorial": ("--epochs", 3, 6),
    "nanogpt": ("--max-iters", 20, 40),
    "imagenet": ("--epochs", 2, 4),
}
RESUME = {
    "tutorial": (),
    "nanogpt": ("--init-from", "resume"),
    "imagenet": ("--resume", "checkpoint.pth.tar"),
}


# Scripts as processes.


def on_ranks(folder, n_ranks, script, *options, rule="cdp_v2"):
    """Run a script on ``n_ranks`` processes in ``folder``; return what it prints."""
    folder.mkdir(parents=True, exist_ok=True)
    if script.name.startswith("huggingface"):
        warm_python.preload("transformers.models.gpt2.modeling_gpt2")
    environment = os.environ | {"RULE": rule, "PYTHONPATH": str(ROOT)}
    return warm_python.run_ranks(
        n_ranks, [script, *options], cwd=folder, env=environment
    )


def options_of(name, *options):
    return ("--dtype", "float64", *OUTPUT[name], *options)


def run_cdp(name, folder, n_ranks, *options, rule="cdp_v2"):
    """Run the CDP version of a script; return what it prints."""
    script = EXAMPLES / f"{name}_cdp.py"
    return on_ranks(folder, n_ranks, script, *options_of(name, *options), rule=rule)


def run_ddp(name, folder, n_ranks, *options):
    """Run the DDP version of a script."""
    on_ranks(folder, n_ranks, EXAMPLES / f"{name}_ddp.py", *options_of(name, *options))


def parameters_of(name, folder):
    """Return the trained parameters that a script saved, by name.

    Running statistics of batch norms are left out: DistributedDataParallel keeps those of rank 0,
    and CDP the mean over ranks. Training does not read them.
    """
    if name == "huggingface":
        model = load_example(name).make_model(torch.float64, folder)
        return {key: p.detach() for key, p in model.named_parameters()}
    file, key = {
        "tutorial": ("snapshot.pt", "model"),
        "nanogpt": ("ckpt.pt", "model"),
        "imagenet": ("checkpoint.pth.tar", "state_dict"),
    }[name]
    weights = torch.load(folder / file)[key]
    return {
        key.removeprefix("module."): tensor
        for key, tensor in weights.items()
        if "running" not in key and "num_batches" not in key
    }


def losses_of(output):
    """Return the losses in a script's output, in their order."""
    return [
        float(loss) for loss in re.findall(r"(?<!val )(?<!eval )loss ([\d.]+)", output)
    ]


@functools.cache
def load_example(name):
    """Import the DDP version of a script."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}_ddp.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def installed_names():
    return [name for name, param in INSTALLED.items() if not param.marks[0].args[0]]


@pytest.fixture(scope="module")
def ddp_folder(tmp_path_factory):
    """What the DDP versions save on two ranks, with and without an interruption."""
    folder = tmp_path_factory.mktemp("ddp")
    for name in more(USUAL, installed_names()):
        run_ddp(name, folder / name, 2)
    for name, (option, half, all_) in more({}, LENGTH).items():
        run_ddp(name, folder / f"resumed_{name}", 2, option, half)
        run_ddp(name, folder / f"resumed_{name}", 2, option, all_, *RESUME[name])
    return folder


@pytest.fixture(scope="module")
def cdp_folders(tmp_path_factory):
    """Return a function to the folder, and the output, of a CDP version on two ranks."""

    @functools.cache
    def run(name, rule):
        folder = tmp_path_factory.mktemp(f"{name}_{rule}")
        return folder, run_cdp(name, folder, 2, rule=rule)

    return run


# The same training in a single process.


class Logits(nn.Module):
    """The predictions of a model that also returns a loss."""

    def __init__(self, model, take):
        super().__init__()
        self.model = model
        self.take = take

    def forward(self, *args, **kwargs):
        return self.take(self.model(*args, **kwargs))


class HuggingFaceLogits(nn.Module):
    """The predictions of a model of Hugging Face."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        return self.model(input_ids=input_ids, attention_mask=attention_mask).logits


def joined(schedule, shares):
    """Join the ranks' micro-batches of a step in the order of the schedule.

    ``shares[rank][k]``: inputs and targets of that rank's pass k. Inputs may be dictionaries.
    """
    passes = [iter(share) for share in shares]
    in_order = [
        next(passes[schedule.rank(0, m)]) for m in range(schedule.n_microbatches)
    ]
    inputs, targets = zip(*in_order, strict=True)
    if isinstance(inputs[0], dict):
        whole = {key: torch.cat([part[key] for part in inputs]) for key in inputs[0]}
    else:
        whole = torch.cat(inputs)
    return whole, torch.cat(targets)


def epochs_of(schedule, loaders, n_epochs, split=tuple):
    """Yield the global batches of all epochs, from one loader a rank."""
    for epoch in range(n_epochs):
        for loader in loaders:
            loader.sampler.set_epoch(epoch)
        for batches in zip(*loaders, strict=True):
            yield joined(schedule, [[split(batch)] for batch in batches])


def train(model, schedule, batches, *, optimizer, loss, lr_scheduler=None, clip=None):
    """Train in a single process; return the parameters by name."""
    batches = list(batches)
    inputs = batches[0][0]
    size = len(batches[0][1]) // schedule.n_microbatches
    example = (
        {key: tensor[:size] for key, tensor in inputs.items()}
        if isinstance(inputs, dict)
        else inputs[:size]
    )
    runtime = SingleProcess(
        partition(model, schedule.n_stages, example),
        schedule,
        optimizer,
        loss,
        lr_scheduler=lr_scheduler,
        options=StepOptions(clip=clip, clip_by="model" if clip else "stage"),
    )
    list(runtime.run(batches))
    return {
        name.removeprefix("model."): p.detach()
        for name, p in runtime.module().named_parameters()
    }


def train_tutorial(schedule):
    example = load_example("tutorial")
    dataset = example.make_dataset(torch.float64)
    ranks = range(schedule.n_ranks)
    loaders = [
        example.make_loader(dataset, 32, rank, schedule.n_ranks) for rank in ranks
    ]
    return train(
        example.make_model(torch.float64),
        schedule,
        epochs_of(schedule, loaders, 6),
        optimizer=example.make_optimizer,
        loss=F.mse_loss,
    )


def train_nanogpt(schedule, clip=1.0):
    example = load_example("nanogpt")
    args = example.parse_args([])
    tokens = example.make_tokens()["train"]

    def shares_of(iter_num):
        for rank in range(schedule.n_ranks):
            passes = []
            for micro_step in range(args.accum):
                number = (iter_num * args.accum + micro_step) * schedule.n_ranks + rank
                passes.append(example.get_batch(tokens, args.batch_size, number))
            yield passes

    @by_name
    def optimizer(parameters):
        tensors = [p for _, p in parameters]
        decayed = {
            "params": [p for p in tensors if p.dim() >= 2],
            "weight_decay": args.weight_decay,
        }
        others = {"params": [p for p in tensors if p.dim() < 2], "weight_decay": 0.0}
        groups = [group for group in (decayed, others) if group["params"]]
        return AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.95))

    def relative_lr(iter_num):
        return example.get_lr(iter_num, args) / args.learning_rate

    def loss(logits, targets):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    torch.manual_seed(args.seed)
    model = example.GPT().double()
    return train(
        Logits(model, take=lambda results: results[0]),
        schedule,
        [
            joined(schedule, [*shares_of(iter_num)])
            for iter_num in range(args.max_iters)
        ],
        optimizer=optimizer,
        loss=loss,
        lr_scheduler=lambda optimizer: LambdaLR(optimizer, relative_lr),
        clip=clip,
    )


def train_imagenet(schedule):
    example = load_example("imagenet")
    args = example.parse_args([])
    dataset, _ = example.make_datasets(torch.float64)
    n_ranks = schedule.n_ranks
    loaders = [
        example.make_loader(dataset, args.batch_size, rank, n_ranks, shuffle=True)
        for rank in range(n_ranks)
    ]
    steps = args.step_size * len(loaders[0])
    return train(
        example.make_model(torch.float64),
        schedule,
        epochs_of(schedule, loaders, args.epochs),
        optimizer=lambda p: SGD(
            p, args.lr, momentum=args.momentum, weight_decay=args.weight_decay
        ),
        loss=F.cross_entropy,
        lr_scheduler=lambda optimizer: StepLR(optimizer, steps, gamma=0.1),
    )


def train_huggingface(schedule):
    example = load_example("huggingface")
    args = example.parse_args([])
    dataset, _ = example.make_datasets()
    n_ranks = schedule.n_ranks
    loaders = [
        example.make_loader(
            dataset, args.per_device_batch_size, rank, n_ranks, shuffle=True
        )
        for rank in range(n_ranks)
    ]
    n_steps = args.num_train_epochs * len(loaders[0])

    def split(batch):
        return {key: batch[key] for key in ("input_ids", "attention_mask")}, batch[
            "labels"
        ]

    def loss(logits, labels):
        return model.loss_function(logits, labels, vocab_size=example.VOCAB_SIZE)

    def lr_scheduler(optimizer):
        return example.get_linear_schedule_with_warmup(
            optimizer, args.num_warmup_steps, n_steps
        )

    example.set_seed(args.seed)
    model = example.make_model(torch.float64)
    # The script's own loss is a mean over the words that are not padding, on every rank.
    with pytest.warns(UserWarning, match="not ignored"):
        return train(
            HuggingFaceLogits(model),
            schedule,
            epochs_of(schedule, loaders, args.num_train_epochs, split),
            optimizer=lambda p: AdamW(
                p, lr=args.learning_rate, weight_decay=args.weight_decay
            ),
            loss=loss,
            lr_scheduler=lr_scheduler,
        )


REFERENCES = {
    "tutorial": train_tutorial,
    "nanogpt": train_nanogpt,
    "imagenet": train_imagenet,
    "huggingface": train_huggingface,
}


def single_process(name, rule, **options):
    """Return the weights of the same training in a single process, on two micro-batches."""
    accumulate = 2 if name == "nanogpt" else 1
    sizes = {"n": 2, "n_stages": 2, "accumulate": accumulate}
    return REFERENCES[name](ScheduleSpec.from_call(rule, sizes).build(), **options)


def assert_equal(found, expected, tolerance):
    """Compare trained parameters by name; ``found`` may have a tied weight under both names."""
    assert expected
    shared = {key: tensor for key, tensor in found.items() if key in expected}
    assert_same(shared, expected, tolerance, tolerance)


# What is tested.


@pytest.mark.parametrize("name", NAMES)
def test_three_lines_differ(name):
    """Blank lines and imports count; a line that has moved counts as one."""
    ddp, cdp = (
        (EXAMPLES / f"{name}_{kind}.py").read_text().splitlines()
        for kind in ("ddp", "cdp")
    )
    matcher = difflib.SequenceMatcher(None, ddp, cdp, autojunk=False)
    changes = [code[1:] for code in matcher.get_opcodes() if code[0] != "equal"]
    removed = sum(end - begin for begin, end, _, _ in changes)
    added = sum(end - begin for _, _, begin, end in changes)
    assert max(removed, added) <= 3


@every_pair
def test_ddp_trains_as_a_single_process(name, ddp_folder):
    """It does, so that the single process is a reference for CDP, too."""
    accumulate = 2 if name == "nanogpt" else 1
    schedule = catalog.data_parallel(2, n_stages=1, accumulate=accumulate)
    found = parameters_of(name, ddp_folder / name)
    assert_equal(found, REFERENCES[name](schedule), 1e-10)


@thorough
@pytest.mark.parametrize("name", LENGTH)
def test_ddp_resumes(name, ddp_folder):
    expected = parameters_of(name, ddp_folder / name)
    assert_equal(parameters_of(name, ddp_folder / f"resumed_{name}"), expected, 0)


@every_pair
def test_rule_dp_equals_ddp(name, ddp_folder, cdp_folders):
    folder, _ = cdp_folders(name, "dp")
    expected = parameters_of(name, ddp_folder / name)
    assert_equal(parameters_of(name, folder), expected, 1e-12)


@thorough
def test_rule_dp_equals_ddp_on_three_ranks(tmp_path):
    for name in installed_names():
        run_ddp(name, tmp_path / "ddp" / name, 3)
        run_cdp(name, tmp_path / name, 3, rule="dp")
        found = parameters_of(name, tmp_path / name)
        # transformers computes its loss in 32 bits, where sums of three parts round otherwise.
        tolerance = 1e-6 if name == "huggingface" else 1e-12
        assert_equal(found, parameters_of(name, tmp_path / "ddp" / name), tolerance)


@every_pair
def test_cdp_learns(name, cdp_folders):
    """As the default of the scripts: clipped in nanoGPT's."""
    _, output = cdp_folders(name, "cdp_v2")
    losses = losses_of(output)
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize(
    "name", ["imagenet", *more([], ["tutorial", INSTALLED["huggingface"]])]
)
def test_cdp_follows_the_update_rule(name, cdp_folders):
    folder, _ = cdp_folders(name, "cdp_v2")
    assert_equal(parameters_of(name, folder), single_process(name, "cdp_v2"), 1e-10)


@thorough
@pytest.mark.parametrize(("rule", "clip"), [("cdp_v2", 0.0), ("cdp_v1", 1.0)])
def test_accumulated_cdp_follows_the_update_rule(rule, clip, tmp_path):
    """CDP-v2 without clipping, since a single process refuses it with the whole model's norm."""
    run_cdp("nanogpt", tmp_path, 2, "--grad-clip", clip, rule=rule)
    expected = single_process("nanogpt", rule, clip=clip or None)
    assert_equal(parameters_of("nanogpt", tmp_path), expected, 1e-10)


def resumed(name, folder, rule):
    """Run the CDP version for half of its length, and then to its end; return the weights."""
    option, half, all_ = LENGTH[name]
    run_cdp(name, folder, 2, option, half, rule=rule)
    output = run_cdp(name, folder, 2, option, all_, *RESUME[name], rule=rule)
    return parameters_of(name, folder), output


@thorough
def test_cdp_resumes_exactly_if_the_wrapped_optimizer_loads(cdp_folders, tmp_path):
    """As in the ImageNet example: the state of the optimizer has the late weights, too."""
    found, _ = resumed("imagenet", tmp_path, "cdp_v2")
    folder, _ = cdp_folders("imagenet", "cdp_v2")
    assert_equal(found, parameters_of("imagenet", folder), 1e-10)


@thorough
@pytest.mark.parametrize("name", ["tutorial", "nanogpt"])
def test_cdp_resumes_from_weights(name, cdp_folders, tmp_path):
    """Scripts that load a state before they wrap the model continue without late weights."""
    _, output = resumed(name, tmp_path, "cdp_v2")
    _, uninterrupted = cdp_folders(name, "cdp_v2")
    assert losses_of(output)[0] < 0.8 * losses_of(uninterrupted)[0]
    assert losses_of(output)[-1] < 1.3 * losses_of(uninterrupted)[-1]


@thorough
@pytest.mark.parametrize("name", LENGTH)
def test_rule_dp_resumes(name, cdp_folders, tmp_path):
    found, _ = resumed(name, tmp_path, "dp")
    folder, _ = cdp_folders(name, "dp")
    assert_equal(found, parameters_of(name, folder), 1e-12)


@thorough
def test_a_saved_language_model_trains_on(ddp_folder, tmp_path):
    """save_pretrained writes what from_pretrained reads."""
    pytest.importorskip("transformers")
    short = (
        "--model-name-or-path",
        ddp_folder / "huggingface",
        "--num-train-epochs",
        1,
    )
    output = run_cdp("huggingface", tmp_path, 2, *short, "--learning-rate", 1e-3)
    assert losses_of(output)[0] < 2
