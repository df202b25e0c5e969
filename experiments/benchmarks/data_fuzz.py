"""Damaged image sets: whether each is refused by one clear error, or read as its files say.

Each mutation damages a small set by chance, in one way of many; a process of its own then reads one
epoch of it, by data.damaged=refuse or skip, alone or with workers. What comes is compared with what
PIL makes of the same files, listed and put in order here, without the toolkit:

refused    one sentence that names the damaged file or folder, and PIL cannot read it either
equal      the batches of the whole set
changed    batches as PIL decodes the damaged files: an image that is still valid, though another,
           or fewer images; nobody can know that they were different
skipped    the next image of the class stands in, and exactly these are counted

Anything else is a failure: a traceback, a hang, a dead process, an error for no reason or without a
path, batches that differ (silent).
"""

import hashlib
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from PIL import Image
from torch import Tensor
from torchvision.datasets import CIFAR10
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms.v2 import functional

from benchmarks import fuzz, mutations
from toolkit.cli.errors import explain
from toolkit.errors import UserError
from toolkit.training.data import cifar10, image_folder
from toolkit.training.data.image_loader import (
    Transform,
    apply_seeded,
    evaluation_transform,
    training_transform,
)

SETS = ("batches", "cifar", "folder")
KINDS = (*mutations.FILES, *mutations.FOLDERS)
PASSED = ("refused", "equal", "changed", "skipped")
FAILED = ("traceback", "hang", "died", "silent", "needless", "unclear")
_CONF = Path(__file__).parents[2] / "conf"
_CPU = torch.device("cpu")
_SIZE = 16  # of what is seen of a folder's images
_BATCH = 3
_NOBODY = 65534  # root may read everything, and so reads as this user what nobody may read
_LEVELS = 3.0  # between two decoders, of 255

Epochs = tuple[list[Tensor], list[int]]
"""Pixels ``[3, size, size]`` from 0 to 255 of all images, in order, and their classes."""


class DamagedSetError(Exception):
    """PIL and the rules for folders say that a set cannot be read."""


@dataclass(kw_only=True)
class Round(fuzz.Round):
    """A mutation of a set, and what came of it."""

    images: str
    damaged: str  # data.damaged
    num_workers: int
    skipped: int = 0


@dataclass
class Expected:
    """What PIL makes of a set; the paths of what stood in for."""

    train: Epochs
    test: Epochs
    damaged: set[str] = field(default_factory=set)


def run(config: DictConfig, device: torch.device, seed: int) -> list[dict[str, Any]]:
    """A row a kind of mutation: how many ended how, and a message."""
    _check(config)
    output = Path(HydraConfig.get().runtime.output_dir)
    with tempfile.TemporaryDirectory() as scratch:
        wholes = {name: _whole(name, Path(scratch)) for name in set(config.sets)}

        def one(kind: str, number: int, chance: Random) -> Round:
            done = Round(
                kind=kind,
                number=number,
                images=chance.choice(config.sets),
                damaged=chance.choice(["refuse", "skip"]),
                num_workers=chance.choice([0, 0, 0, 2]),
            )
            one_round(done, wholes[done.images], chance, config.limit)
            return done

        kinds = list(config.kinds) or list(KINDS)
        found = fuzz.rounds(kinds, config.mutations, seed, one, PASSED, output)
    return [summary(of_kind) for of_kind in fuzz.by_kind(found)]


def summary(rounds: list[Round]) -> dict[str, Any]:
    """The row of a kind."""
    row = fuzz.summary(rounds, "sets", PASSED, FAILED)
    return row | {"images skipped": sum(done.skipped for done in rounds)}


def _check(config: DictConfig) -> None:
    if not hasattr(os, "fork"):
        raise UserError(f"bench=data_fuzz forks processes, as on Linux: this is {sys.platform}")
    fuzz.check(config)
    for name, known in (("kinds", KINDS), ("sets", SETS)):
        if unknown := [each for each in config[name] if each not in known]:
            raise UserError(f"unknown bench.{name} {unknown[0]!r}: choose of {', '.join(known)}")
    if not config.sets:
        raise UserError(f"bench.sets are some of {', '.join(SETS)}: got none")


# A mutation, in a process of its own


@dataclass(frozen=True)
class Whole:
    """A set as it was before.

    Attributes:
        root: where it lies.
        sums: MD5 sums of its batch files, by name.
        read: what the toolkit makes of it.
    """

    root: Path
    sums: dict[str, str]
    read: tuple[Epochs, Epochs]


def _whole(name: str, scratch: Path) -> Whole:
    scratch.chmod(0o755)
    root = scratch / name
    mutations.build(name, root)
    files = [path for path in root.glob("cifar-10-batches-py/*") if path.is_file()]
    sums = {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in files}
    with _published(sums):
        train, test, _ = _read(name, root, "refuse", 0)
        expected = _expected(name, root, sums, skip=False)
        assert _alike(train, expected.train), f"{name} is not what PIL makes of it"
        assert _alike(test, expected.test), f"{name} is not what PIL makes of it"
    return Whole(root, sums, (train, test))


def one_round(done: Round, whole: Whole, chance: Random, limit: float) -> None:
    """Damage a copy of ``whole``, read it, and note what came of it."""
    with tempfile.TemporaryDirectory(dir=whole.root.parent) as scratch:
        os.chmod(scratch, 0o755)
        root = Path(scratch) / "set"
        shutil.copytree(whole.root, root)
        target = mutations.damage(done.kind, root, chance)
        done.target = os.fsencode(target.relative_to(root)).decode(errors="backslashreplace")
        context = multiprocessing.get_context("fork")
        mine, other = context.Pipe(duplex=False)
        process = context.Process(target=_reader, args=(other, done, root, whole))
        process.start()
        other.close()
        try:
            ended = mine.poll(limit)
            done.outcome, done.skipped, done.message = mine.recv() if ended else ("hang", 0, "")
        except EOFError:
            process.join()
            done.outcome, done.message = "died", f"status {process.exitcode}"
        finally:
            if done.outcome == "hang" and process.pid is not None:
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
            mine.close()
        done.message = done.message.replace(str(root), "SET")


def _reader(connection: Connection, done: Round, root: Path, whole: Whole) -> None:
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with _published(whole.sums):
        if done.kind in mutations.PERMISSIONS and os.geteuid() == 0:
            _read(done.images, whole.root, done.damaged, done.num_workers)  # imports all it takes
            os.seteuid(_NOBODY)
        connection.send(_judged(done, root, whole))


def _judged(done: Round, root: Path, whole: Whole) -> tuple[str, int, str]:
    """The outcome, how many images were skipped, and what was said."""
    expected: Expected | None
    try:
        expected, reason = _expected(done.images, root, whole.sums, done.damaged == "skip"), ""
    except (DamagedSetError, OSError) as error:
        expected, reason = None, str(error)
    try:
        train, test, damaged = _read(done.images, root, done.damaged, done.num_workers)
    except Exception as error:
        message = explain(error, "train", _CONF, [])
        if message is None or not isinstance(error, ValueError):
            return "traceback", 0, traceback.format_exc()
        if expected is not None:
            return "needless", 0, message
        lines, named = message.splitlines(), str(root) in message
        clear = len(lines) == 1 and named and "Traceback" not in message
        return ("refused" if clear else "unclear"), 0, message
    n = len(damaged)
    if expected is None:
        return "silent", n, f"read, though {reason}"
    if not _alike(train, expected.train) or not _alike(test, expected.test):
        return "silent", n, f"other batches: {_difference((train, test), expected)}"
    if set(damaged) != expected.damaged or len(set(damaged)) != n:
        return "silent", n, f"skipped {damaged}, and {sorted(expected.damaged)} are damaged"
    if n:
        return "skipped", n, f"{damaged[0]} is skipped"
    same = _alike(train, whole.read[0], 0.0) and _alike(test, whole.read[1], 0.0)
    return ("equal" if same else "changed"), 0, ""


def _alike(epochs: Epochs, other: Epochs, levels: float = _LEVELS) -> bool:
    if epochs[1] != other[1]:
        return False
    pairs = zip(epochs[0], other[0], strict=True)
    return all(a.shape == b.shape and (a - b).abs().max() <= levels for a, b in pairs)


def _difference(found: tuple[Epochs, Epochs], expected: Expected) -> str:
    told = []
    for (x, y), (other, labels) in zip(found, (expected.train, expected.test), strict=True):
        if y != labels:
            told.append(f"classes {y} for {labels}")
        else:
            worst = max(float((a - b).abs().max()) for a, b in zip(x, other, strict=True))
            told.append(f"{worst:.1f} levels")
    return ", ".join(told)


# What the toolkit makes of a set


def _published(sums: dict[str, str]) -> Any:
    """These are the published batch files."""
    names = sorted(sums)
    train, test = ([[n, sums[n]] for n in names if n.startswith(w)] for w in ("data", "test"))
    meta = CIFAR10.meta | {"md5": sums.get("batches.meta")}
    return mock.patch.multiple(CIFAR10, train_list=train, test_list=test, meta=meta)


def _read(
    name: str, root: Path, damaged: str, num_workers: int
) -> tuple[Epochs, Epochs, tuple[str, ...]]:
    """One epoch, and the test images; what was skipped."""
    images: Any
    if name == "folder":
        images = image_folder(str(root), _SIZE, num_workers, damaged=damaged)
        mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    else:
        images = cifar10(str(root), crop_padding=0, flip=False, damaged=damaged)
        mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    offset, scale = (torch.tensor(c).view(3, 1, 1) for c in (mean, std))
    epochs: list[Epochs] = []
    for batches in (images.train(_BATCH, 5, 1, _CPU), images.test(_BATCH, _CPU)):
        read = [*batches]
        pixels = [(x * scale + offset) * 255 for batch, _ in read for x in batch]
        epochs.append((pixels, [int(y) for _, labels in read for y in labels]))
    return epochs[0], epochs[1], images.damaged


# What PIL makes of it


def _expected(name: str, root: Path, sums: dict[str, str], skip: bool) -> Expected:
    os.listdir(root / ".")
    if name == "batches":
        return _batches(root, sums)
    splits = [_listed(root / split) for split in ("train", "val" if name == "folder" else "test")]
    if [c for c, _ in splits[0]] != [c for c, _ in splits[1]]:
        raise DamagedSetError("the classes differ")
    if name == "cifar" and len(splits[0]) != 10:
        raise DamagedSetError(f"{len(splits[0])} classes")
    damaged: set[str] = set()
    epochs: list[Epochs] = []
    views: list[Transform | None] = [None, None]
    if name == "folder":
        views = [training_transform(_SIZE), evaluation_transform(_SIZE)]
    for split, view in zip(splits, views, strict=True):
        paths = [(path, label) for label, (_, paths) in enumerate(split) for path in paths]
        training = split is splits[0]
        seed = hash((5, 1)) if training else 0
        order, everything = _order(len(paths), training), list(range(len(paths)))
        seen = {
            k: _stands_in(paths, k, skip, seed, view, damaged)
            for k in (order if name == "folder" else everything)
        }
        epochs.append(([seen[k] for k in order], [paths[k][1] for k in order]))
    return Expected(epochs[0], epochs[1], damaged)


def _order(n: int, training: bool) -> list[int]:
    if not training:
        return list(range(n))
    if n < _BATCH:
        raise DamagedSetError(f"{n} images")
    generator = torch.Generator().manual_seed(hash((5, 1)))
    return torch.randperm(n, generator=generator).tolist()[: n // _BATCH * _BATCH]


def _listed(folder: Path) -> list[tuple[str, list[str]]]:
    """Classes and their images."""
    found = []
    for name in sorted(os.listdir(folder / ".")):
        if not os.path.isdir(folder / name):
            continue
        paths = sorted(_walked(folder / name))
        if not paths:
            raise DamagedSetError(f"{name} is empty")
        found.append((name, [os.path.join(*path) for path in paths]))
    if not found:
        raise DamagedSetError("there are no classes")
    return found


def _walked(folder: Path) -> Iterator[tuple[str, str]]:
    def refuse(error: OSError) -> None:
        raise error

    for root, _, names in os.walk(folder, onerror=refuse, followlinks=True):
        os.stat(os.path.join(root, "."))
        if os.path.islink(root) and folder.is_relative_to(os.path.realpath(root)):
            raise DamagedSetError(f"{root} is in itself")
        yield from ((root, n) for n in names if n.lower().endswith(IMG_EXTENSIONS))


def _stands_in(
    paths: list[tuple[str, int]],
    index: int,
    skip: bool,
    seed: int,
    view: Transform | None,
    damaged: set[str],
) -> Tensor:
    """What is seen of the image, or of the next of its class that PIL can read."""
    label = paths[index][1]
    alike = [k for k, (_, other) in enumerate(paths) if other == label]
    start = alike.index(index)
    for k in alike[start:] + alike[:start]:
        path = paths[k][0]
        try:
            if not os.path.isfile(path):
                raise DamagedSetError("no file")
            with Image.open(path) as image:
                decoded = image.convert("RGB")
        except Exception as error:
            if not skip:
                raise DamagedSetError(f"{path} is damaged: {error!r}") from error
            damaged.add(path)
            continue
        if view is not None:
            return apply_seeded(view, decoded, hash((seed, k))).float()
        if decoded.size != (32, 32):
            raise DamagedSetError(f"{path} has another size")
        return functional.pil_to_tensor(decoded).float()
    raise DamagedSetError(f"of class {label} all are damaged")


def _batches(root: Path, sums: dict[str, str]) -> Expected:
    """Only if each file is what it was: its pixels and labels then stand where they stood."""
    pixels: dict[bool, list[Any]] = {True: [], False: []}
    for name, md5 in sorted(sums.items()):
        path = root / "cifar-10-batches-py" / name
        if not path.is_file():
            raise DamagedSetError(f"{name} is none")
        data = path.read_bytes()
        if hashlib.md5(data).hexdigest() != md5:
            raise DamagedSetError(f"{name} is another file")
        if name != "batches.meta":
            pixels[name.startswith("data")].append(pickle.loads(data))
    epochs: list[Epochs] = []
    for training in (True, False):
        found = pixels[training]
        images = torch.cat([torch.as_tensor(f["data"]) for f in found]).view(-1, 3, 32, 32).float()
        labels = [label for f in found for label in f["labels"]]
        order = _order(len(labels), training)
        epochs.append(([images[k] for k in order], [labels[k] for k in order]))
    return Expected(epochs[0], epochs[1])
