"""Ways in which image sets are damaged, and small whole ones to do it to."""

import io
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image

Mutation = Callable[[Path, Random], None]


# Whole sets


def build(name: str, root: Path) -> None:
    """A small set: ``folder``, as ImageNet; ``cifar`` in class folders; or its ``batches``."""
    {"folder": _folder, "cifar": _cifar, "batches": _batches}[name](root)
    for path in [root, *root.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)


def _folder(root: Path) -> None:
    for split, seed, endings in (("train", 0, ("jpg", "jpeg", "png", "bmp")), ("val", 1, ("jpg",))):
        for c, name in enumerate(("cat", "dog", "eel")):
            (root / split / name).mkdir(parents=True)
            for k, ending in enumerate(("jpg", *endings)):
                image = _smooth(40, 30, seed + 3 * c + 7 * k)
                image.save(root / split / name / f"{k}.{ending}")


def _cifar(root: Path) -> None:
    for split, n in (("train", 2), ("test", 1)):
        for c in range(10):
            folder = root / split / f"class{c}"
            folder.mkdir(parents=True)
            for k in range(n):
                _smooth(32, 32, c + 11 * k + 31 * n).save(folder / f"{k}.png")


def _batches(root: Path) -> None:
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for name in (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"):
        pixels = random.integers(0, 256, (6, 3072), dtype=np.uint8)
        labels = random.integers(0, 10, 6).tolist()
        (folder / name).write_bytes(pickle.dumps({"data": pixels, "labels": labels}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": ["cat"] * 10}))


def _smooth(width: int, height: int, phase: float) -> Image.Image:
    down, across = np.mgrid[:height, :width]
    waves = [
        128 + 120 * np.sin((down * (phase % 3 + 1) + across * p + phase) / 9) for p in (1, 2, 3)
    ]
    return Image.fromarray(np.stack(waves, 2).astype(np.uint8))


# Of files


def _flipped(path: Path, random: Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(random.randint(1, 8)):
        data[random.randrange(len(data))] ^= random.randint(1, 255)
    path.write_bytes(data)


def _flipped_head(path: Path, random: Random) -> None:
    data = bytearray(path.read_bytes())
    data[random.randrange(min(64, len(data)))] ^= random.randint(1, 255)
    path.write_bytes(data)


def _zeroed(path: Path, random: Random) -> None:
    data = bytearray(path.read_bytes())
    start = random.randrange(len(data))
    end = min(len(data), start + random.randint(1, 500))
    data[start:end] = bytes(end - start)
    path.write_bytes(data)


def _cut(path: Path, random: Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: random.randrange(1, len(data))])


def _emptied(path: Path, random: Random) -> None:
    path.write_bytes(b"")


def _longer(path: Path, random: Random) -> None:
    path.write_bytes(path.read_bytes() + random.randbytes(random.randint(1, 500)))


def _another(path: Path, random: Random) -> None:
    """Another file of the set in its place."""
    others = [other for other in path.parents[1].rglob("*") if other.is_file() and other != path]
    path.write_bytes(random.choice(others).read_bytes())


def _another_format(path: Path, random: Random) -> None:
    size = random.choice([32, 40])
    image = _smooth(size, size, random.random() * 9)
    forms = {
        "GIF": image.convert("P"),
        "PNG": image.convert(random.choice(["L", "1", "RGBA", "P", "I;16"])),
        "JPEG": image.convert(random.choice(["L", "CMYK", "RGB"])),
        "TIFF": image,
        "WEBP": image,
        "BMP": image,
        "PPM": image,
    }
    texts = [b"<!DOCTYPE html><html>404</html>", b"PK\x03\x04" + bytes(40), b"\x93NUMPY\x01\x00{}"]
    texts += [pickle.dumps({"data": [1, 2], "labels": [3]}), b"cos\nsystem\n(S'true'\ntR."]
    choices: list[str | bytes] = [*forms, *texts]
    form = random.choice(choices)
    if isinstance(form, bytes):
        path.write_bytes(form)
        return
    data = io.BytesIO()
    forms[form].save(data, form)
    path.write_bytes(data.getvalue())


def _removed(path: Path, random: Random) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _renamed(path: Path, random: Random) -> None:
    stem, ending = path.stem, path.suffix
    name = random.choice(
        [f"{path.name}.part", f"{stem}.txt", f"z {stem}{ending}", f"\udcff{ending}"]
    )
    path.rename(path.with_name(random.choice([name, f"{stem}{ending.upper()}"])))


def _becomes_folder(path: Path, random: Random) -> None:
    path.unlink()
    path.mkdir()


def _becomes_pipe(path: Path, random: Random) -> None:
    path.unlink()
    os.mkfifo(path)


def _becomes_link(path: Path, random: Random) -> None:
    _removed(path, random)
    path.symlink_to(random.choice(["nowhere", path.name]))


def _mode(*modes: int) -> Mutation:
    def change(path: Path, random: Random) -> None:
        path.chmod(random.choice(modes))

    return change


# Of folders


def _emptied_folder(path: Path, random: Random) -> None:
    shutil.rmtree(path)
    path.mkdir()


def _renamed_folder(path: Path, random: Random) -> None:
    path.rename(path.with_name(f"{path.name}{random.choice(['2', ' ', '.old'])}"))


def _becomes_file(path: Path, random: Random) -> None:
    shutil.rmtree(path)
    path.write_bytes(random.choice([b"", b"text"]))


def _flat(path: Path, random: Random) -> None:
    """All files that it holds lie in it."""
    for k, file in enumerate(sorted(p for p in path.rglob("*") if p.is_file())):
        file.rename(path / f"moved{k}{file.suffix}")
    for folder in [each for each in path.iterdir() if each.is_dir()]:
        shutil.rmtree(folder)


def _link_to_itself(path: Path, random: Random) -> None:
    (path / "again").symlink_to(path, target_is_directory=True)


def _more(path: Path, random: Random) -> None:
    """Something in it that does not belong there."""
    if random.random() < 0.5:
        (path / ".hidden").mkdir()
    else:
        (path / random.choice(["Thumbs.db", "labels.csv", "._0.jpg"])).write_bytes(b"text")


FILES: dict[str, Mutation] = {
    "bytes flipped": _flipped,
    "head flipped": _flipped_head,
    "block zeroed": _zeroed,
    "cut": _cut,
    "emptied": _emptied,
    "longer": _longer,
    "another file": _another,
    "another format": _another_format,
    "removed": _removed,
    "renamed": _renamed,
    "becomes a folder": _becomes_folder,
    "becomes a pipe": _becomes_pipe,
    "becomes a link": _becomes_link,
    "file permissions": _mode(0o000, 0o333),
}

FOLDERS: dict[str, Mutation] = {
    "folder emptied": _emptied_folder,
    "folder removed": _removed,
    "folder renamed": _renamed_folder,
    "folder becomes a file": _becomes_file,
    "folder becomes a link": _becomes_link,
    "folder flat": _flat,
    "folder in itself": _link_to_itself,
    "folder with more": _more,
    "folder permissions": _mode(0o000, 0o444, 0o333),
}

PERMISSIONS = ("file permissions", "folder permissions")


def damage(kind: str, root: Path, random: Random) -> Path:
    """Do it to a random file or folder of the set at ``root``; returns which."""
    if mutate := FILES.get(kind):
        target = random.choice(sorted(path for path in root.rglob("*") if path.is_file()))
    else:
        mutate = FOLDERS[kind]
        folders = [root, *sorted(path for path in root.rglob("*") if path.is_dir())]
        target = random.choice(folders)
    mutate(target, random)
    return target
