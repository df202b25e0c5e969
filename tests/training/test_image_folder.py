"""Class folders: workers that last, images drawn alike whoever decodes them, and on what device."""

import multiprocessing
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision.transforms import v2

from tests.training.test_data import CLASSES, CPU
from toolkit.errors import UserError
from toolkit.training.data import image_folder
from toolkit.training.data.image_loader import apply_seeded, training_transform
from toolkit.training.data.readers import Readers, n_workers

MEAN, STD = (torch.tensor(c).view(3, 1, 1) for c in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))


def write_jpegs(folder, n=4, size=(40, 30)):
    """Smooth ones, as photographs are; every class has a grey one and a PNG, too."""
    down, across = np.mgrid[: size[1], : size[0]]
    for c, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for k in range(n):
            waves = [128 + 120 * np.sin((down * (c + 1) + across * (k + p)) / 9) for p in range(3)]
            image = Image.fromarray(np.stack(waves, 2).astype(np.uint8))
            image.save(folder / name / f"{k}.jpg", quality=95)
        image.convert("L").save(folder / name / "grey.jpg", quality=95)
        image.save(folder / name / "flat.png")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("jpeg")
    write_jpegs(root / "train")
    write_jpegs(root / "val", n=2)
    return root


def batches(images, device=CPU, **order):
    return [*images.train(6, **{"seed": 0, "epoch": 0, **order}, device=device)]


def test_drawing_leaves_the_global_generator_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    apply_seeded(training_transform(16), Image.new("RGB", (20, 20)), 5)
    assert torch.equal(torch.get_rng_state(), before)


# Workers


class Who(Dataset):
    """Each image is the process that reads it, its epoch's seed and its number."""

    def __getitem__(self, key):
        if key[1] == 99:
            raise KeyError(99)
        return torch.tensor([os.getpid(), *key])


def read(readers, seed, chosen):
    return torch.stack([*readers.read(seed, [torch.tensor(b) for b in chosen], pinned=False)])


CHOSEN = [[3, 1], [0, 2], [5, 4]]


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_readers_keep_the_order(num_workers):
    readers = Readers(Who(), num_workers, prefetch_factor=1)
    for seed in (7, 8):
        found = read(readers, seed, CHOSEN)
        assert found[:, :, 1].unique().tolist() == [seed]
        assert found[:, :, 2].tolist() == CHOSEN
    assert not [*readers.read(0, [], pinned=False)]


def test_workers_last():
    """From epoch to epoch, also if nobody asks whether there is another batch."""
    readers = Readers(Who(), 2, prefetch_factor=1)
    first = set(read(readers, 0, CHOSEN)[:, :, 0].flatten().tolist())
    counted = readers.read(1, [torch.tensor(b) for b in CHOSEN], pinned=False)
    second = {next(counted)[0, 0].item() for _ in CHOSEN}
    third = set(read(readers, 2, CHOSEN)[:, :, 0].flatten().tolist())
    assert len(first) == 2
    assert os.getpid() not in first
    assert first == second == third


def test_a_signal_to_all_processes_is_left_to_the_run():
    """Ended by it, readers would end the run before it is saved."""
    readers = Readers(Who(), 2, prefetch_factor=1)
    batches = readers.read(0, [torch.tensor(b) for b in CHOSEN], pinned=False)
    who = {next(batches)[0, 0].item()}
    for number in ("INT", "TERM", "TERM"):  # a launcher may send it on
        pids = [str(child.pid) for child in multiprocessing.active_children()]
        subprocess.run(["kill", f"-{number}", *pids], check=True)
    who |= {batch[0, 0].item() for batch in batches}
    assert who == set(read(readers, 1, CHOSEN)[:, :, 0].flatten().tolist())


def test_a_run_that_ends_ends_its_readers():
    """Wherever it has them, and though they would read on."""
    program = "\n".join(
        [
            "import torch",
            "from tests.training.test_image_folder import Who",
            "from toolkit.training.data.readers import Readers",
            "batches = Readers(Who(), 2, 2).read(0, [torch.tensor([1])] * 100, pinned=False)",
            "held = next(batches)",
        ]
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_an_epoch_in_between_does_not_disturb():
    readers = Readers(Who(), 1, prefetch_factor=1)
    read(readers, 2, CHOSEN)
    outer = readers.read(0, [torch.tensor(b) for b in CHOSEN], pinned=False)
    found = [next(outer)]
    assert read(readers, 1, CHOSEN)[:, :, 2].tolist() == CHOSEN
    found += outer
    assert torch.stack(found)[:, :, 2].tolist() == CHOSEN
    assert torch.stack(found)[:, :, 1].unique().tolist() == [0]


def test_after_an_error_all_is_read_anew():
    readers = Readers(Who(), 1, prefetch_factor=1)
    with pytest.raises(KeyError):
        read(readers, 0, [[1], [99], [2]])
    assert read(readers, 1, CHOSEN)[:, :, 2].tolist() == CHOSEN


@pytest.mark.parametrize(
    ("asked", "cores", "ranks", "expected"),
    [
        (None, 8, 1, 8),
        (None, 8, 4, 2),
        (None, 2, 4, 1),
        (None, 96, 1, 16),
        (None, 64, 2, 16),
        (None, 64, 8, 8),
        (3, 8, 4, 3),
        (30, 8, 1, 8),
        (0, 8, 1, 0),
    ],
)
def test_number_of_workers(monkeypatch, asked, cores, ranks, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert n_workers(asked) == expected


# Bytes on the device


def test_images_are_sent_as_bytes(root):
    """A quarter of the floats; normalised where they arrive."""
    images = image_folder(str(root), 16, 0)
    pixels, labels = next(images._test.read(0, [torch.arange(5)], CPU))
    assert (pixels.dtype, pixels.shape, labels.dtype) == (torch.uint8, (5, 3, 16, 16), torch.int64)
    x, y = next(iter(images.test(5, CPU)))
    torch.testing.assert_close(x, (pixels / 255 - MEAN) / STD)
    assert torch.equal(y, labels)


# Decoding


@pytest.mark.parametrize("epoch", [0, 1])
def test_images_are_what_pil_and_torchvision_make_of_them(root, epoch):
    """Each drawn by the seed of its epoch and its number; a level here or there apart."""
    images = image_folder(str(root), 16, 0)
    files = images._train.images
    seed = hash((5, epoch))
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(seed))
    view = v2.Compose([v2.RandomResizedCrop(16), v2.RandomHorizontalFlip(), v2.PILToTensor()])
    found = [x for batch, _ in batches(images, seed=5, epoch=epoch) for x in batch]
    assert len(found) == len(files) == 18
    for x, index in zip(found, order.tolist(), strict=True):
        with torch.random.fork_rng([]):
            torch.manual_seed(hash((seed, index)))
            pixels = view(files[index][0])
        worst = ((x * STD + MEAN) * 255 - pixels).abs().max()
        assert worst < 1.1, files.samples[index]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kept", [10, 900])
def test_a_damaged_jpeg(tmp_path, num_workers, kept):
    """Found by its head, or by the decoder."""
    write_jpegs(tmp_path / "train", n=1)
    write_jpegs(tmp_path / "val", n=1)
    broken = tmp_path / "val" / "dog" / "0.jpg"
    broken.write_bytes(broken.read_bytes()[:kept])
    images = image_folder(str(tmp_path), 16, num_workers)
    message = f"^{broken} cannot be decoded: mend it or take it out, or set data.damaged=skip$"
    with pytest.raises(ValueError, match=message):
        list(images.test(3, CPU))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu(root):
    cuda = torch.device("cuda")
    ours = batches(image_folder(str(root), 16, 2), CPU)
    theirs = batches(image_folder(str(root), 16, 2), cuda)
    for (x, y), (other, labels) in zip(ours, theirs, strict=True):
        assert other.device.type == labels.device.type == "cuda"
        assert torch.equal(y, labels.cpu())
        assert ((x - other.cpu()) * STD * 255).abs().mean() < 2


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": -1}, "data.num_workers is 0 or more, or null for all cores: got -1"),
        ({"prefetch_factor": 0}, "data.prefetch_factor is 1 or more: got 0"),
    ],
)
def test_refuses(root, options, message):
    with pytest.raises(UserError, match=f"{message}"):
        image_folder(str(root), 16, **options)
