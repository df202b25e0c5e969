"""A damaged checkpoint is named, or the resumed run ends as if it had not been damaged."""

import shutil
from dataclasses import replace
from random import Random

import pytest
import torch

from tests.thorough import more
from tests.training.test_run_with_checkpoints import assert_identical, built, weights
from toolkit.errors import UserError
from toolkit.training import run_with_checkpoints
from toolkit.training.checkpoint import (
    Checkpoints,
    read_checkpoint,
    read_parts,
    write,
    write_sharded,
)

pytestmark = pytest.mark.usefixtures("analysed_once")

RUNS = {
    "sgd": ("schedule=cdp_v1", "ema=0.9"),
    "adamw": ("schedule=cdp_v2", "optimizer=adamw"),
    "plain": ("schedule=dp", "optimizer.momentum=0"),
    "sharded": ("schedule=cdp_v2", "ema=0.9", "save.sharded=true"),
}
OTHER_TYPES = [None, "x", [], {}, 1j, [{}], {"x": 1}]


def scores(outcome):
    """Metrics of the epochs, without their speed."""
    return [replace(epoch, samples_per_second=0) for epoch in outcome.epochs]


def options_of(name):
    return *RUNS[name], "epochs=2", "save.steps=2", "save.keep=4"


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """By run: its folder, weights and scores, without its last checkpoint."""
    runs = {}

    def run(name):
        if name not in runs:
            folder = tmp_path_factory.mktemp(name)
            outcome = run_with_checkpoints(built(*options_of(name)), folder)
            end = Checkpoints(folder / "checkpoints").paths()[-1]
            shutil.rmtree(end) if end.is_dir() else end.unlink()
            runs[name] = folder, weights(outcome), scores(outcome)
        return runs[name]

    return run


def flip_bits(content, random):
    damaged = bytearray(content)
    damaged[random.randrange(len(damaged))] ^= 1 << random.randrange(8)
    return bytes(damaged)


BYTES = {
    "bits flipped": flip_bits,
    "cut": lambda content, random: content[: random.randrange(len(content))],
    "grown": lambda content, random: (
        content + random.randbytes(random.randrange(1, 100))
    ),
    "zeroed": lambda content, random: (
        content[: len(content) // 2] + bytes(len(content) // 2)
    ),
    "noise": lambda content, random: random.randbytes(len(content)),
}


def places(container):
    """Every value below ``container``, as the dict or list that holds it and its key."""
    keys = container if isinstance(container, dict) else range(len(container))
    for key in [*keys]:
        yield container, key
        if isinstance(container[key], dict | list):
            yield from places(container[key])


def reshape(tensor, random):
    flat = tensor.flatten()
    return random.choice([tensor[None], flat[:-1], flat.repeat(2)]).clone()


def convert(tensor, random):
    types = [torch.float16, torch.float64, torch.int32]
    return tensor.to(random.choice([t for t in types if t != tensor.dtype]))


def extend(value, random):
    more_value = random.choice([0, "x", torch.zeros(2)])
    return (
        {**value, "more": more_value}
        if isinstance(value, dict)
        else [*value, more_value]
    )


def replace_type(value, random):
    return random.choice(
        [other for other in OTHER_TYPES if type(other) is not type(value)]
    )


CONTENTS = {
    "key removed": (object, None),
    "value added": (dict | list, extend),
    "shape changed": (torch.Tensor, reshape),
    "dtype changed": (torch.Tensor, convert),
    "value of another type": (object, replace_type),
}


def change(state, kind, random):
    accepted, make = CONTENTS[kind]
    found = [
        place for place in places(state) if isinstance(place[0][place[1]], accepted)
    ]
    container, key = random.choice(found)
    if make is None:
        container.pop(key)
    else:
        container[key] = make(container[key], random)


USUAL = ("bits flipped", "cut", "key removed", "shape changed")


@pytest.mark.parametrize("kind", more(USUAL, [*BYTES, *CONTENTS]))
def test_damaged_checkpoints_do_not_go_unnoticed(tmp_path, original, kind):
    random = Random(kind)
    for round_ in range(more(1, 4)):
        name = [*RUNS][(round_ + len(kind)) % len(RUNS)]
        source, expected, expected_scores = original(name)
        folder = tmp_path / str(round_)
        shutil.copytree(source, folder, symlinks=True)
        latest = Checkpoints(folder / "checkpoints").paths()[-1]
        if kind in BYTES:
            file = (
                random.choice(sorted(latest.iterdir())) if latest.is_dir() else latest
            )
            file.write_bytes(BYTES[kind](file.read_bytes(), random))
        elif latest.is_dir():
            (part,) = read_parts(latest)
            change(part, kind, random)
            write_sharded(latest, part, None)
        else:
            state = read_checkpoint(latest)
            change(state, kind, random)
            write(latest, state)

        outcome, message = None, ""
        try:
            outcome = run_with_checkpoints(
                built(*options_of(name)), folder, resume=True
            )
        except UserError as error:
            message = str(error)
        if outcome is None:
            assert kind in CONTENTS
            assert "\n" not in message
            continue
        assert_identical(weights(outcome), expected)
        assert scores(outcome) == expected_scores
        if kind in BYTES:
            assert any(latest.name in note for note in outcome.notes)
