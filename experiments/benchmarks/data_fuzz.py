"""Damaged image folders: whether each is refused by one clear error, or read as its files say.

Each round damages a small set at random and reads an epoch and the test images, with
data.damaged=refuse or skip, alone or with workers. The test images are compared with what PIL
decodes:

refused    one sentence that names the damaged file or folder, and PIL cannot read it either
equal      the test images of the undamaged set, and as many training images
changed    as PIL decodes the damaged files: a valid image, though another, or fewer images
skipped    the next image of the class replaces each damaged one, and exactly these are counted

Anything else is a failure: a traceback, a needless or unclear error, or other images
(silent).
"""

import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from omegaconf import DictConfig
from PIL import Image
from torch import Tensor
from torchvision.datasets import ImageFolder

from benchmarks import fuzz
from toolkit.training.data import image_folder
from toolkit.training.data.batches import normalise
from toolkit.training.data.class_folders import evaluation_transform

PASSED = ("refused", "equal", "changed", "skipped")
FAILED = ("traceback", "silent", "needless", "unclear")
_CPU = torch.device("cpu")
_SIZE = 16  # pixels of the model's input
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Read(NamedTuple):
    """What is read of a set."""

    n_train: int
    test: Tensor  # [n, 3, size, size], normalised
    labels: list[int]
    damaged: list[str]  # paths of images that others replace


def run(config: DictConfig, device: torch.device, seed: int) -> list[dict[str, Any]]:
    """Return a row for each kind of damage: the number of rounds by outcome, and a message."""
    with tempfile.TemporaryDirectory() as scratch:
        whole = build(Path(scratch) / "whole")

        def one(done: fuzz.Round, chance: Random) -> None:
            how, num_workers = chance.choice(["refuse", "skip"]), chance.choice([0, 0, 0, 2])
            one_round(done, whole, how, num_workers, chance)

        return fuzz.run(config, seed, KINDS, one, PASSED, FAILED)


def one_round(done: fuzz.Round, whole: Path, how: str, num_workers: int, chance: Random) -> None:
    """Damage a copy of the set ``whole``, read it with data.damaged=``how``, and judge that."""
    done.subject = f"{how} num_workers={num_workers}"
    with tempfile.TemporaryDirectory(dir=whole.parent) as scratch:
        root = Path(scratch) / "set"
        shutil.copytree(whole, root)
        done.target = damage(done.kind, root, chance)
        with warnings.catch_warnings(action="ignore"), redirect_stderr(StringIO()):
            found = fuzz.attempt(done, lambda: read(root, how, num_workers))
            _judge(done, how, root, whole, found)
        done.message = done.message.replace(str(root), "SET")


def _judge(done: fuzz.Round, how: str, root: Path, whole: Path, found: Read | None) -> None:
    """Compare with what PIL decodes, and complete the outcome and the message."""
    expected, reason = None, ""
    try:
        expected = _decoded(root, how)
    except OSError as error:
        reason = str(error)
    if done.outcome == "refused":
        clear = "refused" if str(root) in done.message else "unclear"
        done.outcome = clear if expected is None else "needless"
    elif found is not None and expected is None:
        done.outcome, done.message = "silent", f"read, though {reason}"
    elif found is not None and expected is not None:
        done.outcome, done.message = "silent", _difference(found, expected)
        if not done.message and found.damaged:
            done.outcome, done.message = "skipped", f"{found.damaged[0]} is skipped"
        elif not done.message:
            changed = _difference(found, _decoded(whole, how))
            done.outcome = "changed" if changed else "equal"


def _difference(found: Read, expected: Read) -> str:
    """Say how two readings differ; empty where they are equal, to rounding."""
    if found.n_train != expected.n_train:
        return f"{found.n_train} training images for {expected.n_train}"
    if found.labels != expected.labels:
        return f"classes {found.labels} for {expected.labels}"
    if sorted(found.damaged) != sorted(expected.damaged):
        return f"skipped {found.damaged}, and {expected.damaged} are damaged"
    worst = float((found.test - expected.test).abs().max())
    return f"other pixels, by {worst:.2f} standard deviations" if worst > 1e-3 else ""


def read(root: Path, how: str = "refuse", num_workers: int = 0) -> Read:
    """Return what the toolkit reads."""
    images = image_folder(str(root), _SIZE, num_workers, damaged=how)
    n_train = sum(len(labels) for _, labels in images.train(1, 5, 1, _CPU))
    test, labels = zip(*images.test(3, _CPU), strict=True)
    return Read(n_train, torch.cat(test), torch.cat(labels).tolist(), [*images.damaged])


def _decoded(root: Path, how: str = "refuse") -> Read:
    """Return what PIL decodes; raise OSError if it cannot."""
    splits = [ImageFolder(str(root / name)) for name in ("train", "val")]
    if splits[0].classes != splits[1].classes:
        raise OSError("the classes differ")
    damaged, samples = list[str](), list[Image.Image]()
    for split in splits:
        decoded = {path: _image(path) for path, _ in split.samples}
        broken = [path for path, image in decoded.items() if image is None]
        if broken and how == "refuse":
            raise OSError(f"{broken[0]} is damaged")
        damaged += broken
        samples = []
        for k, label in enumerate(split.targets):
            same = [n for n, other in enumerate(split.targets) if other == label]
            start = same.index(k)
            paths = [split.samples[n][0] for n in same[start:] + same[:start]]
            usable = [image for path in paths if (image := decoded[path]) is not None]
            if not usable:
                raise OSError(f"all images of class {label} are damaged")
            samples.append(usable[0])
    pixels = torch.stack([evaluation_transform(_SIZE)(image) for image in samples])
    return Read(len(splits[0]), normalise(pixels, _MEAN, _STD), splits[1].targets, damaged)


def _image(path: str) -> Image.Image | None:
    """The image, or None if PIL cannot read it."""
    if not os.path.isfile(path):
        return None
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except Exception:  # decoders raise anything on garbled bytes
        return None


def build(root: Path) -> Path:
    """Write a small set of images in class folders."""
    for split, endings in {"train": "jpg jpeg png bmp", "val": "jpg jpg"}.items():
        for k, (c, ending) in enumerate(product(range(3), endings.split())):
            folder = root / split / f"class{c}"
            folder.mkdir(parents=True, exist_ok=True)
            _smooth(40, 7 * k + len(split)).save(folder / f"{k}.{ending}")
    assert not _difference(read(root), _decoded(root))
    return root


def _smooth(size: int, phase: float) -> Image.Image:
    down, across, colour = np.mgrid[:size, :size, 1:4]
    waves = 128 + 120 * np.sin((down * (phase % 3 + 1) + across * colour + phase) / 9)
    return Image.fromarray(waves.astype(np.uint8))


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
    forms = {"GIF": "RGB", "PNG": "I;16", "JPEG": "CMYK", "TIFF": "RGB", "WEBP": "RGBA"}
    form = random.choice([*forms, "HTML"])
    if form == "HTML":
        path.write_bytes(b"<!DOCTYPE html><html>404</html>")
    else:
        _smooth(random.choice([32, 40]), random.random() * 9).convert(forms[form]).save(path, form)


def _remove(path: Path, random: Random) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _rename(path: Path, random: Random) -> None:
    names = [f"{path.name}.part", f"{path.stem}.txt", f"z {path.name}", path.name.upper()]
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
