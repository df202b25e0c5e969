"""Images that are held in memory: digits, CIFAR-10, Fashion-MNIST, and their augmentation."""

import gzip
import hashlib
import os
import pickle
from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F
from torchvision.datasets import CIFAR10

from tests.training.test_data import (
    CPU,
    MEAN,
    STD,
    TEN,
    epoch_of,
    held,
    labelled,
    write_folders,
    write_idx,
    write_ten,
)
from toolkit.errors import UserError
from toolkit.training.data import (
    cifar10,
    digits,
    fashion_mnist,
    image_folder,
    in_memory,
    synthetic,
)
from toolkit.training.data.in_memory import balanced_subset


def one_by_one(padding, flip, seed, epoch, batch_size):
    """Padded with the mean colour, cropped, mirrored: image by image, drawn batch by batch."""
    images, labels = labelled(24).images, labelled(24).labels
    mean, std = (torch.tensor(c).view(3, 1, 1) for c in (MEAN, STD))
    generator = torch.Generator().manual_seed(hash((seed, epoch)))
    for chosen in torch.randperm(24, generator=generator).split(batch_size):
        n = len(chosen)
        x = (images[chosen].float() / 255 - mean) / std
        if padding:
            top, left = torch.randint(2 * padding + 1, (2, n, 1), generator=generator)
            corners = zip(F.pad(x, (padding,) * 4), top, left, strict=True)
            x = torch.stack([image[:, t : t + 8, s : s + 8] for image, t, s in corners])
        if flip:
            mirrored = torch.rand(n, 1, 1, 1, generator=generator) < 0.5
            x = torch.where(mirrored, x.flip(3), x)
        yield x, labels[chosen]


@pytest.mark.parametrize("padding", [0, 1, 3])
@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("epoch", [0, 1])
def test_augmentation_to_the_bit(padding, flip, epoch):
    found = held(crop_padding=padding, flip=flip).train(8, 3, epoch, CPU)
    for batch, expected in zip(
        found, one_by_one(padding, flip, 3, epoch, 8), strict=True
    ):
        assert all(map(torch.equal, batch, expected))
        assert batch[0].is_contiguous()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("n_parts", [1, 4])
def test_a_gpu_gets_the_same_images_and_is_never_waited_for(n_parts):
    images = held(crop_padding=2, flip=True)
    cuda = torch.device("cuda")
    wanted = [0] if n_parts == 1 else [1, 3]
    list(images.train(8, 0, 0, cuda))  # moves the set
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [*images.train(8, 0, 0, cuda).parts(n_parts, lambda k: wanted)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = images.train(8, 0, 0, CPU).parts(n_parts, lambda k: wanted)
    for batch, other in zip(found, expected, strict=True):
        assert {x.device.type for x in batch} == {"cuda"}
        torch.testing.assert_close(batch[0].cpu(), other[0], rtol=1e-6, atol=1e-6)
        assert torch.equal(batch[1].cpu(), other[1])


def test_digits():
    images = digits()
    train, test = (
        [y for _, y in b] for b in (images.train(1, 0, 0, CPU), images.test(1, CPU))
    )
    assert (len(train), len(test), images.form.n_classes) == (1437, 360, 10)
    x, _ = epoch_of(images, batch_size=1437)
    assert abs(x.mean()) < 0.1
    assert abs(x.std() - 1) < 0.1
    counts = torch.cat(test).bincount()
    assert 35 <= counts.min() <= counts.max() <= 37


@pytest.fixture(scope="module")
def cifar_folders(tmp_path_factory):
    return write_ten(tmp_path_factory.mktemp("cifar"))


def test_cifar10_in_class_folders(cifar_folders):
    ((x, y),) = cifar10(str(cifar_folders)).test(20, CPU)
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
    content = {
        name: {
            "data": random.integers(0, 256, (3, 3072), np.uint8),
            "labels": [7, 0, 9],
        }
        for name in ("data_batch_1", "test_batch")
    }
    sums = {}
    for name, each in (content | {"batches.meta": {"label_names": list(TEN)}}).items():
        (folder / name).write_bytes(pickle.dumps(each))
        sums[name] = hashlib.md5((folder / name).read_bytes()).hexdigest()
    monkeypatch.setattr(CIFAR10, "train_list", [["data_batch_1", sums["data_batch_1"]]])
    monkeypatch.setattr(CIFAR10, "test_list", [["test_batch", sums["test_batch"]]])
    monkeypatch.setattr(CIFAR10, "meta", CIFAR10.meta | {"md5": sums["batches.meta"]})
    return tmp_path, content["test_batch"]["data"]


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
    with pytest.raises(
        UserError, match=f"data.root={root}: {root}/cifar-10-batches-py"
    ):
        cifar10(str(root))
    assert not (tmp_path / "made").exists()


LABELS = torch.tensor([0] * 50 + [1] * 30 + [2] * 4)


def test_subsets_are_of_all_classes_alike_and_a_larger_one_holds_the_smaller():
    """Classes differ by one image, while they have any left."""
    chosen = [balanced_subset(n, LABELS, "n_train") for n in range(1, 85)]
    counts = [LABELS[numbers].bincount(minlength=3) for numbers in chosen]
    assert all(each.max() - each.min() <= 1 for each in counts[:12])
    assert [counts[n - 1].tolist() for n in (20, 70)] == [[8, 8, 4], [36, 30, 4]]
    subsets = [numbers.tolist() for numbers in chosen]
    assert subsets == [sorted(subset) for subset in subsets]
    assert all({*smaller} < {*larger} for smaller, larger in pairwise(subsets))
    assert subsets[8] != [0, 1, 2, 50, 51, 52, 80, 81, 82]
    assert (
        balanced_subset(None, LABELS, "n_train").tolist() == [*range(84)] == subsets[-1]
    )


def test_a_part_of_cifar10(cifar_folders, monkeypatch):
    """Only what is chosen is decoded; each image equals that of the whole set."""
    ((whole, _),) = cifar10(str(cifar_folders)).test(20, CPU)
    reads, read = [], in_memory.read_image
    monkeypatch.setattr(
        in_memory, "read_image", lambda *of: reads.append(of) or read(*of)
    )
    small = cifar10(str(cifar_folders), n_train=20, n_test=10)
    assert (len(reads), len(small.train(20, 0, 0, CPU))) == (30, 1)
    ((x, y),) = small.test(20, CPU)
    assert y.bincount().tolist() == [1] * 10
    assert torch.equal(x, whole[balanced_subset(10, torch.arange(20) // 2, "n_test")])


def test_fashion_mnist_as_published(tmp_path):
    ((x, y),) = fashion_mnist(str(write_idx(tmp_path))).test(20, CPU)
    assert y.tolist() == [k % 10 for k in range(20)]
    content = gzip.decompress((tmp_path / "t10k-images-idx3-ubyte.gz").read_bytes())
    pixels = np.frombuffer(content, np.uint8, offset=16).reshape(20, 1, 28, 28) / 255
    np.testing.assert_allclose(x, (pixels - 0.2860) / 0.3530, rtol=1e-4, atol=1e-5)
    small = fashion_mnist(str(tmp_path), n_train=20, n_test=10)
    assert len(small.train(20, 0, 0, CPU)) == 1
    assert torch.equal(
        next(iter(small.test(20, CPU)))[0], x[balanced_subset(10, y, "n_test")]
    )


@pytest.mark.parametrize(
    "damage", ["missing", "folder", "cut", "no gzip", "too short", "no header"]
)
def test_a_damaged_file_of_fashion_mnist_is_refused(tmp_path, damage):
    file = write_idx(tmp_path) / "t10k-labels-idx1-ubyte.gz"
    content = file.read_bytes()
    file.unlink()
    if damage == "folder":
        file.mkdir()
    elif damage != "missing":
        file.write_bytes(
            {
                "cut": content[:-9],
                "no gzip": b"labels",
                "too short": gzip.compress(gzip.decompress(content)[:-1]),
                "no header": gzip.compress(b""),
            }[damage]
        )
    message = f"data.root={tmp_path}: cannot read {file.name}: .* dataset-fashion-mnist"
    with pytest.raises(UserError, match=message):
        fashion_mnist(str(tmp_path))


@pytest.mark.parametrize("split", ["train", "t10k"])
def test_images_and_labels_of_fashion_mnist_that_differ_are_refused(tmp_path, split):
    other = write_idx(tmp_path / "other", 40, 40)
    name = f"{split}-labels-idx1-ubyte.gz"
    (other / name).rename(write_idx(tmp_path) / name)
    with pytest.raises(
        UserError, match=rf"{split}-\*.gz .*28\] and labels \[40\] up to 9;"
    ):
        fashion_mnist(str(tmp_path))


def test_three_classes_are_no_cifar10(tmp_path):
    (write_folders(tmp_path) / "val").rename(tmp_path / "test")
    with pytest.raises(UserError, match=r"3 classes.*data=image_folder"):
        cifar10(str(tmp_path))


@pytest.mark.parametrize(
    ("load", "option", "value"),
    [
        *(
            (synthetic, f"{name}", 0)
            for name in ("n_train", "n_test", "n_classes", "image_size")
        ),
        (synthetic, "in_channels", 0),
        (image_folder, "damaged", "skp"),
        (image_folder, "image_size", 0),
        (image_folder, "num_workers", -1),
        (image_folder, "prefetch_factor", 0),
        (cifar10, "crop_padding", -1),
        (cifar10, "n_train", 31),
        (cifar10, "n_test", 21),
        (cifar10, "n_test", 0),
    ],
)
def test_options_out_of_range_are_refused(cifar_folders, load, option, value):
    root = {} if load is synthetic else {"root": str(cifar_folders)}
    with pytest.raises(UserError, match=rf"data\.{option}.*{value}"):
        load(**root, **{option: value})
