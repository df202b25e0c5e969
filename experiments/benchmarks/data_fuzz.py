"""Damaged image sets: whether each is refused by one clear error, or read as its files say.

Each round damages a small set at random; a process of its own then reads one epoch of it, with
data.damaged=refuse or skip, alone or with workers. The batches are compared with what PIL decodes:

refused    one sentence that names the damaged file or folder, and PIL cannot read it either
equal      the batches of the undamaged set
changed    batches as PIL decodes the damaged files: a valid image, though another, or fewer images
skipped    the next image of the class replaces each damaged one, and exactly these are counted

Anything else is a failure: a traceback, a hang, a dead process, a needless or unclear error, or
other batches (silent).
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
from collections.abc import Callable
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from omegaconf import DictConfig
from PIL import Image
from torch import Tensor
from torchvision.datasets import CIFAR10, ImageFolder
from torchvision.transforms.v2.functional import pil_to_tensor

from benchmarks import fuzz
from toolkit.errors import UserError
from toolkit.training.data import cifar10, image_folder
from toolkit.training.data.batches import seeded
from toolkit.training.data.class_folders import evaluation_transform, training_transform

SETS = ("batches", "cifar", "folder")
PASSED = ("refused", "equal", "changed", "skipped")
FAILED = ("traceback", "hang", "died", "silent", "needless", "unclear")
_CPU = torch.device("cpu")
_SIZE = 16  # pixels of the model's input, for the set "folder"
_BATCH = 3
_SEED, _EPOCH = 5, 1

Samples = list[tuple[Tensor, int]]
"""Pixels ``[3, size, size]`` from 0 to 255, and classes."""


class Read(NamedTuple):
    """An epoch and the test samples, in order; paths of damaged images that were replaced."""

    train: Samples
    test: Samples
    damaged: tuple[str, ...] = ()


class Case(NamedTuple):
    """Which set is read, and how."""

    images: str
    damaged: str = "refuse"
    num_workers: int = 0


class Whole(NamedTuple):
    """An undamaged set: its folder, the MD5 sums of its batch files, and its samples."""

    root: Path
    sums: dict[str, str]
    read: Read


class DamagedSetError(Exception):
    """PIL or torchvision cannot read the set."""


def run(config: DictConfig, device: torch.device, seed: int) -> list[dict[str, Any]]:
    """Return a row for each kind of damage: the number of rounds by outcome, and a message."""
    if not hasattr(os, "fork"):
        raise UserError(f"bench=data_fuzz forks processes, as on Linux: this is {sys.platform}")
    for name, known in (("kinds", KINDS), ("sets", SETS)):
        if unknown := [each for each in config[name] if each not in known]:
            raise UserError(f"unknown bench.{name} {unknown[0]!r}: choose of {', '.join(known)}")
    if not config.sets:
        raise UserError(f"bench.sets are some of {', '.join(SETS)}: got none")
    with tempfile.TemporaryDirectory() as scratch:
        wholes = {name: build(name, Path(scratch) / name) for name in set(config.sets)}

        def one(done: fuzz.Round, chance: Random) -> None:
            damaged, num_workers = chance.choice(["refuse", "skip"]), chance.choice([0, 0, 0, 2])
            case = Case(chance.choice(config.sets), damaged, num_workers)
            one_round(done, wholes[case.images], case, chance, config.limit)

        return fuzz.run(config, seed, [*config.kinds] or [*KINDS], one, PASSED, FAILED)


def one_round(done: fuzz.Round, whole: Whole, case: Case, chance: Random, limit: float) -> None:
    """Damage a copy of ``whole``, read it in another process, and complete the round."""
    done.subject = f"{case.images} {case.damaged} num_workers={case.num_workers}"
    with tempfile.TemporaryDirectory(dir=whole.root.parent) as scratch:
        root = Path(scratch) / "set"
        shutil.copytree(whole.root, root)
        done.target = damage(done.kind, root, chance)
        context = multiprocessing.get_context("fork")
        mine, other = context.Pipe(duplex=False)
        process = context.Process(target=_reader, args=(other, case, root, whole))
        process.start()
        other.close()
        try:
            done.outcome, done.message = mine.recv() if mine.poll(limit) else ("hang", "")
        except EOFError:
            process.join()
            done.outcome, done.message = "died", f"status {process.exitcode}"
        if done.outcome == "hang" and process.pid is not None:
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
        done.message = done.message.replace(str(root), "SET")


def _reader(connection: Connection, case: Case, root: Path, whole: Whole) -> None:
    os.setsid()  # a group of its own, so that a hang is killed together with its workers
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    connection.send(_judge(case, root, whole))


def _judge(case: Case, root: Path, whole: Whole) -> tuple[str, str]:
    """Return the outcome and a message."""
    expected, reason = None, ""
    try:
        expected = _expected(case, root, whole)
    except (DamagedSetError, OSError) as error:
        reason = str(error)
    try:
        found = _read(case, root, whole.sums)
    except Exception as error:
        if not isinstance(error, UserError):
            return "traceback", traceback.format_exc()
        message = str(error)
        if expected is not None:
            return "needless", message
        clear = len(message.splitlines()) == 1 and str(root) in message
        return ("refused" if clear else "unclear"), message
    if expected is None:
        return "silent", f"read, though {reason}"
    for samples, others in zip(found[:2], expected[:2], strict=True):
        if difference := _difference(samples, others):
            return "silent", f"other batches: {difference}"
    if sorted(found.damaged) != sorted(expected.damaged):
        return "silent", f"skipped {found.damaged}, and {expected.damaged} are damaged"
    if found.damaged:
        return "skipped", f"{found.damaged[0]} is skipped"
    return ("changed" if any(map(_difference, found[:2], whole.read[:2])) else "equal"), ""


def _difference(samples: Samples, others: Samples) -> str:
    """Say how samples differ; empty where they are equal, to rounding."""
    if (labels := [y for _, y in samples]) != (expected := [y for _, y in others]):
        return f"classes {labels} for {expected}"
    pairs = zip(samples, others, strict=True)
    worst = max((float((x - z).abs().max()) for (x, _), (z, _) in pairs), default=0.0)
    return f"{worst:.1f} levels" if worst > 0.01 else ""


def _read(case: Case, root: Path, sums: dict[str, str]) -> Read:
    """Return what the toolkit reads."""
    images: Any
    if case.images == "folder":
        images = image_folder(str(root), _SIZE, case.num_workers, damaged=case.damaged)
        mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    else:
        train, test = ([[n, sums[n]] for n in sums if n.startswith(w)] for w in ("data", "test"))
        meta = CIFAR10.meta | {"md5": sums.get("batches.meta")}
        # Take the small files for the published ones.
        with mock.patch.multiple(CIFAR10, train_list=train, test_list=test, meta=meta):
            images = cifar10(str(root), crop_padding=0, flip=False, damaged=case.damaged)
        mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    offset, scale = (torch.tensor(c).view(3, 1, 1) for c in (mean, std))
    epochs = [
        [
            ((pixels * scale + offset) * 255, int(label))
            for inputs, targets in batches
            for pixels, label in zip(inputs, targets, strict=True)
        ]
        for batches in (images.train(_BATCH, _SEED, _EPOCH, _CPU), images.test(_BATCH, _CPU))
    ]
    return Read(epochs[0], epochs[1], images.damaged)


def _expected(case: Case, root: Path, whole: Whole) -> Read:
    """Return what PIL decodes, in the order of the toolkit's seeds.

    Raises:
        DamagedSetError, OSError: the set cannot be read.
    """
    if case.images == "batches":
        if not whole.sums.items() <= _sums(root).items():
            raise DamagedSetError("a batch file is not the published one")
        return whole.read
    folder = case.images == "folder"
    splits = [ImageFolder(str(root / name)) for name in ("train", "val" if folder else "test")]
    if splits[0].classes != splits[1].classes or not (folder or len(splits[0].classes) == 10):
        raise DamagedSetError("the classes differ, or are not 10")
    damaged: set[str] = set()
    epochs: list[Samples] = []
    for images, make in zip(splits, (training_transform, evaluation_transform), strict=True):
        n, seed, order = len(images), 0, [*range(len(images))]
        if make is training_transform:
            if n < _BATCH:
                raise DamagedSetError(f"{n} images")
            seed = hash((_SEED, _EPOCH))
            generator = torch.Generator().manual_seed(seed)
            order = torch.randperm(n, generator=generator).tolist()[: n // _BATCH * _BATCH]
        seen = {}
        for k in order if folder else range(n):  # CIFAR-10 is decoded as a whole
            image, number = _decoded(images, k, case.damaged == "skip", damaged)
            if folder:
                seen[k] = seeded(hash((seed, number)), make(_SIZE), image).float()
            elif image.size == (32, 32):
                seen[k] = pil_to_tensor(image).float()
            else:
                raise DamagedSetError(f"image {number} has another size")
        epochs.append([(seen[k], images.targets[k]) for k in order])
    return Read(epochs[0], epochs[1], tuple(damaged))


def _decoded(
    images: ImageFolder, index: int, skip: bool, damaged: set[str]
) -> tuple[Image.Image, int]:
    """Return the image, or the next one of its class that PIL can read, and its number."""
    same = [k for k, label in enumerate(images.targets) if label == images.targets[index]]
    start = same.index(index)
    for k in same[start:] + same[:start]:
        path = images.samples[k][0]
        try:
            if not os.path.isfile(path):
                raise FileNotFoundError(path)
            with Image.open(path) as image:
                return image.convert("RGB"), k
        except Exception as error:
            if not skip:
                raise DamagedSetError(f"{path} is damaged: {error!r}") from error
            damaged.add(path)
    raise DamagedSetError(f"all images of class {images.targets[index]} are damaged")


def _sums(root: Path) -> dict[str, str]:
    files = [path for path in sorted(root.glob("cifar-10-batches-py/*")) if path.is_file()]
    return {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in files}


def build(name: str, root: Path) -> Whole:
    """Write a small set: images in class folders as ImageNet, or as CIFAR-10; or its batches."""
    random = np.random.default_rng(0)
    splits, classes, size = {"train": "png png", "test": "png"}, 10, 32
    if name == "batches":
        folder = root / "cifar-10-batches-py"
        folder.mkdir(parents=True)
        for file in (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"):
            pixels = random.integers(0, 256, (6, 3072), dtype=np.uint8)
            labels = random.integers(0, 10, 6).tolist()
            (folder / file).write_bytes(pickle.dumps({"data": pixels, "labels": labels}))
        (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": ["cat"] * 10}))
        splits = {}
    elif name == "folder":
        splits, classes, size = {"train": "jpg jpg jpeg png bmp", "val": "jpg jpg"}, 3, 40
    for split, c in product(splits, range(classes)):
        (root / split / f"class{c}").mkdir(parents=True)
        for k, ending in enumerate(splits[split].split()):
            image = _smooth(size, c + 11 * k + len(split))
            image.save(root / split / f"class{c}" / f"{k}.{ending}")
    sums = _sums(root)
    read = _read(Case(name), root, sums)
    expected = _expected(Case(name), root, Whole(root, sums, read))
    assert not any(map(_difference, read[:2], expected[:2])), f"{name} is not what PIL decodes"
    return Whole(root, sums, read)


def _smooth(size: int, phase: float) -> Image.Image:
    down, across = np.mgrid[:size, :size]
    waves = [
        128 + 120 * np.sin((down * (phase % 3 + 1) + across * p + phase) / 9) for p in (1, 2, 3)
    ]
    return Image.fromarray(np.stack(waves, 2).astype(np.uint8))


def damage(kind: str, root: Path, random: Random) -> str:
    """Damage a random file or folder of the set at ``root``; return its path below ``root``."""
    is_file = kind not in FOLDERS
    paths = [path for path in sorted(root.rglob("*")) if path.is_file() == is_file]
    target = random.choice(paths if is_file else [root, *paths])
    if kind in fuzz.BYTES:
        target.write_bytes(fuzz.BYTES[kind](target.read_bytes(), random))
    else:
        if "becomes" in kind or "emptied" in kind:
            _remove(target, random)
        (FILES | FOLDERS)[kind](target, random)
    return str(target.relative_to(root))


def _another(path: Path, random: Random) -> None:
    others = [other for other in path.parents[1].rglob("*") if other.is_file() and other != path]
    path.write_bytes(random.choice(others).read_bytes())


def _another_format(path: Path, random: Random) -> None:
    image = _smooth(random.choice([32, 40]), random.random() * 9)
    form = random.choice(["GIF", "PNG", "JPEG", "TIFF", "WEBP", "BMP", "PPM", "HTML"])
    if form == "HTML":
        path.write_bytes(b"<!DOCTYPE html><html>404</html>")
    else:
        modes = {"PNG": ["L", "1", "RGBA", "P", "I;16"], "JPEG": ["L", "CMYK", "RGB"]}
        image.convert(random.choice(modes.get(form, ["RGB"]))).save(path, form)


def _remove(path: Path, random: Random) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _rename(path: Path, random: Random) -> None:
    stem, ending = path.stem, path.suffix
    names = [f"{path.name}.part", f"{stem}.txt", f"z {stem}{ending}", f"{stem}{ending.upper()}"]
    path.rename(path.with_name(random.choice(names)))


def _link(path: Path, random: Random) -> None:
    path.symlink_to(random.choice(["nowhere", path.name]))


Mutation = Callable[[Path, Random], Any]
FILES: dict[str, Mutation] = {
    "another file": _another,
    "another format": _another_format,
    "removed": _remove,
    "renamed": _rename,
    "becomes a folder": lambda path, random: path.mkdir(),
    "becomes a pipe": lambda path, random: os.mkfifo(path),
    "becomes a link": _link,
}
FOLDERS: dict[str, Mutation] = {
    "folder emptied": lambda path, random: path.mkdir(),
    "folder removed": _remove,
    "folder renamed": lambda path, random: path.rename(path.with_name(f"{path.name} 2")),
    "folder becomes a file": lambda path, random: path.touch(),
    "folder becomes a link": _link,
    "folder in itself": lambda path, random: (path / "again").symlink_to(path, True),
    "folder with more": lambda path, random: (path / "labels.csv").write_bytes(b"text"),
}
KINDS = (*fuzz.BYTES, *FILES, *FOLDERS)
