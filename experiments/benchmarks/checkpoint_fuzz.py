"""Damaged checkpoints: whether a resumed run reports the damage, or silently ends differently.

Each round damages a run's latest checkpoint at random: the bytes of a file, or its contents under a
valid checksum. The run is then resumed:

refused     one sentence
previous    the run names the damaged file, uses the checkpoint before it, and ends bit-identical
equal       the run ends bit-identical; nothing depends on what was damaged

Anything else is a failure: a traceback, or another end (silent).
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import hydra
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from benchmarks import fuzz
from toolkit.cli import build_run
from toolkit.training import Outcome, run_with_checkpoints
from toolkit.training.checkpoint import Checkpoints, read, read_parts, write, write_sharded

PASSED = ("refused", "previous", "equal")
FAILED = ("traceback", "silent")
_TINY = (
    "model=resnet8 model.width=4 data=synthetic data.n_train=32 data.n_test=8 data.image_size=8"
    " batch=4 stages=2 microbatches=2 epochs=2 save.steps=2 save.keep=4 device=cpu"
)
_RUNS = {
    "sgd": ["schedule=cdp_v1", "ema=0.9"],
    "adamw": ["schedule=cdp_v2", "optimizer=adamw"],
    "plain": ["schedule=dp", "optimizer.momentum=0"],
    "sharded": ["schedule=cdp_v2", "ema=0.9", "save.sharded=true"],
}


@dataclass(frozen=True)
class Whole:
    """A run with checkpoints of its middle and its end, its final weights and its metrics."""

    config: DictConfig
    folder: Path
    weights: dict[str, Tensor]
    scores: list[tuple[Any, ...]]


def run(config: DictConfig, device: torch.device, seed: int) -> list[dict[str, Any]]:
    """Return a row for each kind of damage: the number of rounds by outcome, and a message."""
    with tempfile.TemporaryDirectory() as scratch:
        wholes = {name: _whole(options, Path(scratch) / name) for name, options in _RUNS.items()}

        def one(done: fuzz.Round, chance: Random) -> None:
            done.subject = chance.choice([*wholes])
            folder = Path(scratch) / "damaged"
            _one_round(done, wholes[done.subject], folder, chance)
            done.message = done.message.replace(f"{scratch}/", "")

        return fuzz.run(config, seed, [*fuzz.BYTES, *CONTENTS], one, PASSED, FAILED)


def _whole(options: list[str], folder: Path) -> Whole:
    config = hydra.compose("train", [*_TINY.split(), *options])
    OmegaConf.resolve(config)
    return Whole(config, folder, *_end(run_with_checkpoints(build_run(config), folder)))


def _end(outcome: Outcome) -> tuple[dict[str, Tensor], list[tuple[Any, ...]]]:
    """Weights of a run, and metrics of its epochs."""
    state = outcome.run.runtime.module().state_dict()
    scores = [(e.epoch, e.train_loss, e.test_loss, e.top1, e.ema_top1) for e in outcome.epochs]
    return {name: tensor.clone() for name, tensor in state.items()}, scores


def _one_round(done: fuzz.Round, whole: Whole, folder: Path, chance: Random) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole.folder, folder)
    *_, last, end = Checkpoints(folder / "checkpoints").paths()
    shutil.rmtree(end) if end.is_dir() else end.unlink()
    if done.kind in fuzz.BYTES:
        file = chance.choice(sorted(last.iterdir())) if last.is_dir() else last
        file.write_bytes(fuzz.BYTES[done.kind](file.read_bytes(), chance))
    elif last.is_dir():
        (part,) = read_parts(last)
        done.target = _mutate(part, done.kind, chance)
        write_sharded(last, part, None)
    else:
        state = read(last)
        done.target = _mutate(state, done.kind, chance)
        write(last, state)
    outcome = fuzz.attempt(
        done, lambda: run_with_checkpoints(build_run(whole.config), folder, resume=True)
    )
    if outcome is None:
        return
    found, scores = _end(outcome)
    alike = all(torch.equal(found[name], tensor) for name, tensor in whole.weights.items())
    alike &= scores == whole.scores
    named = any(last.name in note for note in outcome.notes)
    done.outcome = "silent" if not alike else "previous" if named else "equal"
    done.message = " / ".join(outcome.notes)


# Damage to contents

Container = Any  # a dict or a list


def _mutate(state: dict[str, Any], kind: str, chance: Random) -> str:
    """Change one value, anywhere in ``state``, to which that can be done; return its path."""
    taken, change = CONTENTS[kind]
    places = [place for place in _places(state, "") if isinstance(place[1][place[2]], taken)]
    path, container, key = chance.choice(places)
    change(container, key, chance)
    return path


def _places(container: Container, path: str) -> Iterator[tuple[str, Container, Any]]:
    items = container.items() if isinstance(container, dict) else enumerate(container)
    for key, value in [*items]:
        yield f"{path}/{key}", container, key
        if isinstance(value, dict | list):
            yield from _places(value, f"{path}/{key}")


def _add(container: Container, key: Any, chance: Random) -> None:
    value, more = container[key], chance.choice([0, "x", torch.zeros(2)])
    value.update(more=more) if isinstance(value, dict) else value.append(more)


def _shape(container: Container, key: Any, chance: Random) -> None:
    tensor, flat = container[key], container[key].flatten()
    container[key] = chance.choice([tensor[None], flat[:-1], flat.repeat(2)]).clone()


def _dtype(container: Container, key: Any, chance: Random) -> None:
    kinds = [k for k in (torch.float16, torch.float64, torch.int32) if k != container[key].dtype]
    container[key] = container[key].to(chance.choice(kinds))


def _kind(container: Container, key: Any, chance: Random) -> None:
    others: list[Any] = [None, "x", [], {}, 1j, [{}], {"x": 1}]
    container[key] = chance.choice([o for o in others if type(o) is not type(container[key])])


CONTENTS: dict[str, tuple[Any, Callable[..., Any]]] = {
    "key removed": (object, lambda container, key, chance: container.pop(key)),
    "value added": (dict | list, _add),
    "shape changed": (Tensor, _shape),
    "dtype changed": (Tensor, _dtype),
    "value of another type": (object, _kind),
}
"""By kind of damage, the type of values that can be so damaged, and what does it."""
