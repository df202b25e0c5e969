"""Sets of samples: the same batches for the same seed and epoch, and errors that name the path."""

import hashlib
import os
import pickle
from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import CIFAR10

from toolkit.errors import UserError
from toolkit.training.data import (
    cifar10,
    digits,
    image_folder,
    in_memory,
    synthetic,
    text,
    token_files,
)
from toolkit.training.data.in_memory import balanced_subset

CPU = torch.device("cpu")
CLASSES = ("cat", "dog", "eel")
TEN = tuple(f"class{k}" for k in range(10))


def write_images(folder, classes, n=2, size=(32, 32), seed=0):
    """``folder/<class>/<k>.png``, random."""
    random = np.random.default_rng(seed)
    for name in classes:
        (folder / name).mkdir(parents=True)
        for k in range(n):
            pixels = random.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{k}.png")


def write_ten(folder):
    """CIFAR-10's layout: three training and two test images of each of ten classes."""
    write_images(folder / "train", TEN, n=3)
    write_images(folder / "test", TEN, n=2, seed=1)
    return folder


@pytest.fixture
def folders(tmp_path):
    write_images(tmp_path / "train", CLASSES, n=4, size=(20, 24))
    write_images(tmp_path / "val", CLASSES, n=2, size=(20, 24), seed=1)
    return tmp_path


@pytest.fixture
def cifar_folders(tmp_path):
    return write_ten(tmp_path)


def epoch_of(images, seed=0, epoch=0, batch_size=4):
    batches = [*images.train(batch_size, seed, epoch, CPU)]
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


SETS = {
    "digits": lambda root: digits(),
    "synthetic": lambda root: synthetic(n_train=24, n_test=8, image_size=8),
    "cifar10": lambda root: cifar10(str(root / "cifar")),
    "image_folder": lambda root: image_folder(str(root / "folder"), 16, num_workers=0),
    "text": lambda root: text(str(root / "some.txt"), length=8),
    "tokens": lambda root: token_files(str(root), length=8, vocabulary=40),
}


@pytest.fixture(scope="module", params=SETS)
def images(request, tmp_path_factory):
    """Every set; to add one here is to buy the tests below."""
    root = tmp_path_factory.mktemp(request.param)
    if request.param == "cifar10":
        write_images(root / "cifar/train", TEN)
        write_images(root / "cifar/test", TEN, n=1)
    if request.param == "image_folder":
        write_images(root / "folder/train", CLASSES, n=4, size=(20, 24))
        write_images(root / "folder/val", CLASSES)
    if request.param == "text":
        (root / "some.txt").write_bytes(bytes(k * k % 251 for k in range(300)))
    if request.param == "tokens":
        for name, n in (("train", 250), ("val", 70)):
            (np.arange(n) ** 2 % 37).astype(np.uint16).tofile(root / f"{name}.bin")
    return SETS[request.param](root)


def test_equal_seeds_and_epochs_give_equal_batches(images):
    """Whatever torch's generator is at."""
    torch.manual_seed(0)
    x, y = epoch_of(images, seed=3, epoch=2)
    torch.manual_seed(1)
    again, labels = epoch_of(images, seed=3, epoch=2)
    assert torch.equal(x, again)
    assert torch.equal(y, labels)


@pytest.mark.parametrize("other", [(1, 0), (0, 1), (1, 1)])
def test_other_seeds_and_epochs_give_another_order(images, other):
    x, y = epoch_of(images)
    changed, labels = epoch_of(images, *other)
    assert not torch.equal(x, changed)
    assert not torch.equal(y, labels)
    assert not torch.equal(changed, epoch_of(images, *other[::-1])[0]) or other == (1, 1)


def test_an_epoch_can_be_read_again(images):
    batches = images.train(4, 0, 0, CPU)
    for (x, y), (again, labels) in zip(batches, batches, strict=True):
        assert torch.equal(x, again)
        assert torch.equal(y, labels)


def test_batches_fit_what_the_set_says(images):
    like = images.form.example(1)
    for batches in (images.train(5, 0, 0, CPU), images.test(5, CPU)):
        found = [*batches]
        assert len(found) == len(batches)
        assert {x.shape[1:] for x, _ in found} == {like.shape[1:]}
        assert {x.dtype for x, _ in found} == {like.dtype}
        labels = torch.cat([y for _, y in found])
        assert labels.dtype == torch.int64
        assert (*labels.shape, images.form.n_classes) == images.form.output(len(labels))
        assert 0 <= labels.min() <= labels.max() < images.form.n_classes


def test_training_drops_the_last_and_testing_keeps_it(images):
    n = sum(len(y) for _, y in images.train(1, 0, 0, CPU))
    with pytest.raises(UserError, match=f"{n + 1} .* {n}"):
        images.train(n + 1, 0, 0, CPU)
    n_test = sum(len(y) for _, y in images.test(1, CPU))
    train = [len(y) for _, y in images.train(n - 1, 0, 0, CPU)]
    test = [len(y) for _, y in images.test(n_test - 1, CPU)]
    assert train == [n - 1]
    assert test == [n_test - 1, 1]


# The sets themselves


def test_digits():
    images = digits()
    train, test = ([y for _, y in b] for b in (images.train(1, 0, 0, CPU), images.test(1, CPU)))
    assert (len(train), len(test), images.form.n_classes) == (1437, 360, 10)
    x, _ = epoch_of(images, batch_size=1437)
    assert abs(x.mean()) < 0.1
    assert abs(x.std() - 1) < 0.1
    counts = torch.cat(test).bincount()
    assert 35 <= counts.min() <= counts.max() <= 37


def test_cifar10_in_class_folders(cifar_folders):
    images = cifar10(str(cifar_folders), crop_padding=0, flip=False)
    x = torch.cat([x for x, _ in images.test(4, CPU)])
    y = torch.cat([y for _, y in images.test(4, CPU)])
    assert y.tolist() == [k // 2 for k in range(20)]
    pixels = np.asarray(Image.open(cifar_folders / "test/class3/0.png")) / 255
    expected = (pixels - [0.4914, 0.4822, 0.4465]) / [0.2470, 0.2435, 0.2616]
    np.testing.assert_allclose(x[6].permute(1, 2, 0), expected, rtol=1e-4, atol=1e-5)


@pytest.fixture
def published(tmp_path, monkeypatch):
    """A folder with CIFAR-10's batch files, three images each, whose MD5 sums are published."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    random = np.random.default_rng(0)
    batches = {
        name: {"data": random.integers(0, 256, (3, 3072), np.uint8), "labels": [7, 0, 9]}
        for name in ("data_batch_1", "test_batch")
    }
    files = batches | {"batches.meta": {"label_names": list(TEN)}}
    sums = {}
    for name, content in files.items():
        (folder / name).write_bytes(pickle.dumps(content))
        sums[name] = hashlib.md5((folder / name).read_bytes()).hexdigest()
    monkeypatch.setattr(CIFAR10, "train_list", [["data_batch_1", sums["data_batch_1"]]])
    monkeypatch.setattr(CIFAR10, "test_list", [["test_batch", sums["test_batch"]]])
    monkeypatch.setattr(CIFAR10, "meta", CIFAR10.meta | {"md5": sums["batches.meta"]})
    return tmp_path, batches["test_batch"]["data"]


def test_cifar10_as_published(published):
    root, data = published
    images = cifar10(str(root), crop_padding=0, flip=False)
    ((x, y),) = images.test(4, CPU)
    assert y.tolist() == [7, 0, 9]
    red = torch.as_tensor(data[0, :1024].astype(np.float32).reshape(32, 32)) / 255
    torch.testing.assert_close(x[0, 0], (red - 0.4914) / 0.2470)
    ((_, y),) = cifar10(str(root), n_test=2).test(4, CPU)
    assert len(set(y.tolist())) == 2


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("damage", ["code", "cut", "missing", "folder", "pipe"])
def test_another_file_than_the_published_is_refused(published, damage, tmp_path):
    """And no code in it runs."""
    root, _ = published
    file = root / "cifar-10-batches-py/test_batch"
    content = file.read_bytes()
    file.unlink()
    if damage == "code":
        file.write_bytes(pickle.dumps(Malicious(str(tmp_path / "made"))))
    if damage == "cut":
        file.write_bytes(content[:-9])
    if damage == "folder":
        file.mkdir()
    if damage == "pipe":
        os.mkfifo(file)
    with pytest.raises(UserError, match=f"data.root={root}: {root}/cifar-10-batches-py"):
        cifar10(str(root))
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("epoch", [0, 1])
def test_workers_do_not_change_the_images(folders, epoch):
    alone, shared = (
        epoch_of(image_folder(str(folders), 16, n), epoch=epoch, batch_size=5) for n in (0, 2)
    )
    assert torch.equal(alone[0], shared[0])
    assert torch.equal(alone[1], shared[1])


def test_test_images_are_cropped_at_the_centre(tmp_path):
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        pixels = np.zeros((32, 48, 3), dtype=np.uint8)
        pixels[:, 16:32] = 255
        Image.fromarray(pixels).save(tmp_path / split / "a" / "0.png")
    ((x, _),) = image_folder(str(tmp_path), 28, 0).test(1, CPU)
    white = (1 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225])
    torch.testing.assert_close(x[0, :, 14, 14], white)
    assert x.shape == (1, 3, 28, 28)
    assert (x[0, 0, 14] > 0).sum() == 16  # resized to 8/7 of 28, which changes nothing


# Parts of CIFAR-10

LABELS = torch.tensor([0] * 50 + [1] * 30 + [2] * 4)


@pytest.mark.parametrize(
    ("n", "counts"),
    [(3, [1, 1, 1]), (12, [4, 4, 4]), (20, [8, 8, 4]), (70, [36, 30, 4]), (84, [50, 30, 4])],
)
def test_subsets_are_of_all_classes_alike(n, counts):
    chosen = balanced_subset(n, LABELS, "n_train")
    assert chosen.tolist() == sorted({*chosen.tolist()})
    assert LABELS[chosen].bincount(minlength=3).tolist() == counts


def test_a_larger_subset_holds_the_smaller():
    """They differ by an image, so classes differ by one image, while they have any left."""
    subsets = [set(balanced_subset(n, LABELS, "n_train").tolist()) for n in range(1, 85)]
    for smaller, larger in pairwise(subsets):
        assert smaller < larger
    for subset in subsets[:12]:
        counts = LABELS[[*subset]].bincount(minlength=3)
        assert counts.max() - counts.min() <= 1
    assert subsets[8] != {0, 1, 2, 50, 51, 52, 80, 81, 82}
    assert balanced_subset(None, LABELS, "n_train").tolist() == [*range(84)] == [*subsets[-1]]


def test_a_part_of_cifar10(cifar_folders, monkeypatch):
    """Only what is chosen is decoded; it is what the whole set has at that place."""
    whole = torch.cat([x for x, _ in cifar10(str(cifar_folders)).test(20, CPU)])
    reads = []
    read = in_memory.read_image
    monkeypatch.setattr(in_memory, "read_image", lambda *image: reads.append(image) or read(*image))
    small = cifar10(str(cifar_folders), n_train=20, n_test=10)
    assert len(reads) == 30
    assert len(small.train(20, 0, 0, CPU)) == 1
    ((x, y),) = small.test(20, CPU)
    assert y.bincount().tolist() == [1] * 10
    assert torch.equal(x, whole[balanced_subset(10, torch.arange(20) // 2, "n_test")])


@pytest.mark.parametrize(("option", "n"), [("n_train", 31), ("n_test", 21), ("n_test", 0)])
def test_more_images_than_cifar10_has(cifar_folders, option, n):
    with pytest.raises(UserError, match=rf"data\.{option}.* {n}"):
        cifar10(str(cifar_folders), **{option: n})


# Refusals


@pytest.mark.parametrize(
    ("load", "inside"), [(cifar10, "train/ and test/"), (image_folder, "val/")]
)
def test_a_root_that_is_missing(tmp_path, load, inside):
    with pytest.raises(UserError, match=f"data.root .*{inside}"):
        load(None)
    for name in ("no", "file"):
        with pytest.raises(UserError, match=f"data.root={tmp_path}/{name} .*{inside}"):
            load(str(tmp_path / name))
        (tmp_path / "file").touch()
    with pytest.raises(UserError, match=f"{tmp_path}/train"):
        load(str(tmp_path))


@pytest.mark.parametrize(
    ("load", "test", "classes"), [(cifar10, "test", TEN), (image_folder, "val", CLASSES)]
)
def test_classes_that_differ(tmp_path, load, test, classes):
    write_images(tmp_path / "train", classes)
    write_images(tmp_path / test, (*classes[1:], "zebra"))
    with pytest.raises(UserError, match=f"{tmp_path}/train and {tmp_path}/{test} .*{classes[0]}"):
        load(str(tmp_path))


@pytest.mark.parametrize("name", ["n_train", "n_test", "n_classes", "image_size", "in_channels"])
def test_synthetic_images_have_sizes(name):
    with pytest.raises(UserError, match=rf"data\.{name} .* 0"):
        synthetic(**{name: 0})
