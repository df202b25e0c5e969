"""Images a second that data loaders deliver on the training device, and that a model consumes.

A loader whose ratio is below 1 is slower than the model, which then waits for images.
"""

import itertools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from omegaconf import DictConfig
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from benchmarks.step_times import alternate
from benchmarks.training_steps import N_CLASSES, WARM_UP, Setting
from toolkit.cli.check_options import check_counts
from toolkit.errors import UserError
from toolkit.format import count
from toolkit.training.data import SampleSet, image_folder, synthetic
from toolkit.training.data.class_folders import n_workers

_COUNTS = ("image_size", "microbatches", "stages", "batch", "rounds", "steps")
_CDP = "CDP-v2 grouped, step"
_PLAIN = "plain PyTorch, step"


def run(config: DictConfig, device: torch.device, seed: int) -> list[dict[str, Any]]:
    """Return a row for each method: images/s, seconds a batch, and ratios to the model.

    *in memory*: bytes on the device, augmented there. *folder*: JPEGs, read by so many processes,
    copied to the device as bytes, pinned if it is a GPU. A run of a loader reads ``steps`` batches,
    from the first one on. The images of a model's step are on the device already.
    """
    check_counts(config, *_COUNTS, of="bench.")
    if config.num_workers is not None and config.num_workers < 0:
        raise UserError(
            f"bench.num_workers is 0 or more, or null: got {config.num_workers}"
        )
    setting = Setting.of(config, device, seed)
    n_images = len(setting.inputs)
    # A GPU works while Python begins the next step, so its steps are timed many at a time.
    n_timed = config.steps if device.type == "cuda" else 1
    steps = {_CDP: setting.cyclic().step, _PLAIN: setting.plain().step}
    model_runs = {
        name: _repeated(partial(step, setting.inputs, setting.targets), n_timed)
        for name, step in steps.items()
    }
    seconds: dict[str, list[float]] = {}
    for name, run_seconds in alternate(
        model_runs, config.rounds, device, WARM_UP
    ).items():
        seconds[name] = [run_second / n_timed for run_second in run_seconds]
    with folder_of_images(config, n_images * config.steps, seed) as root:
        read = partial(reader, config=config, device=device, seed=seed)
        in_memory = synthetic(n_images * config.steps, 1, N_CLASSES, config.image_size)
        loaders = {"in memory": read(in_memory)}
        # 0: this process decodes the images itself.
        for workers in dict.fromkeys((0, n_workers(config.num_workers))):
            images = image_folder(root, config.image_size, workers)
            loaders[f"folder, {count(workers, 'worker')}"] = read(images)
        for name, run_seconds in alternate(loaders, config.rounds, device).items():
            seconds[name] = [run_second / config.steps for run_second in run_seconds]
    return rows(seconds, n_images)


def reader(
    images: SampleSet, config: DictConfig, device: torch.device, seed: int
) -> Callable[[], Tensor]:
    """Return a function that reads the first batches of the next epoch of ``images``."""
    epochs = itertools.count()
    n_images = config.microbatches * config.batch

    def read() -> Tensor:
        batches = images.train(n_images, seed, next(epochs), device).between(
            0, config.steps
        )
        if len(batches) < config.steps:
            raise UserError(
                f"bench.steps={config.steps} batches of {n_images} images are more than an epoch of"
                f" bench.root={config.root} has: at most {len(batches)}"
            )
        for inputs, _ in batches:
            last = inputs
        return last

    return read


@contextmanager
def folder_of_images(config: DictConfig, n_train: int, seed: int) -> Iterator[str]:
    """The folder ``root``, or a temporary one with random JPEGs, 8/7 of ``image_size`` wide."""
    if config.root is not None:
        yield config.root
        return
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder), n_train, config.image_size * 8 // 7, seed)
        yield folder


def write_images(folder: Path, n_train: int, size: int, seed: int) -> None:
    """Write ``n_train`` JPEGs for training and one a class for the test.

    They are blurred noise: a photograph has few details, and so is decoded faster than noise.
    """
    generator = torch.Generator().manual_seed(seed)
    small = max(1, size // 8)
    for split, n in (("train", n_train), ("val", N_CLASSES)):
        for label in range(N_CLASSES):
            (folder / split / str(label)).mkdir(parents=True)
        for k in tqdm(range(n), desc=f"writing {split}", leave=False):
            pixels = torch.randint(
                256, (small, small, 3), dtype=torch.uint8, generator=generator
            )
            image = Image.fromarray(pixels.numpy()).resize(
                (size, size), Image.Resampling.BICUBIC
            )
            image.save(folder / split / str(k % N_CLASSES) / f"{k}.jpg", quality=90)


def rows(seconds: dict[str, list[float]], n_images: int) -> list[dict[str, Any]]:
    """Return rows of methods whose batches, of ``n_images``, have taken these seconds."""
    medians = {name: median(rounds) for name, rounds in seconds.items()}
    return [
        {
            "method": name,
            "images/s": round(n_images / batch_seconds, 1),
            "seconds a batch": round(batch_seconds, 5),
            "of CDP-v2's": round(medians[_CDP] / batch_seconds, 3),
            "of plain PyTorch's": round(medians[_PLAIN] / batch_seconds, 3),
        }
        for name, batch_seconds in medians.items()
    ]


def _repeated(step: Callable[[], object], n: int) -> Callable[[], object]:
    def repeat() -> None:
        for _ in range(n):
            step()

    return repeat
