"""Sets of samples: the same batches for the same seed and epoch, and errors that name the path."""

import gzip
import hashlib
import os
import pickle
from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torchvision.datasets import CIFAR10

from tests.training.test_run_with_checkpoints import assert_identical, configured, weights
from toolkit.cli import build_run
from toolkit.errors import UserError
from toolkit.runtime.microbatches import Divisible
from toolkit.training import evaluate, run_with_checkpoints
from toolkit.training.data import (
    Datasets,
    InMemory,
    Labelled,
    cifar10,
    class_folders,
    digits,
    fashion_mnist,
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


def write_idx(folder, n_train=30, n_test=20):
    """Fashion-MNIST's four files, random; the classes in turn."""
    random = np.random.default_rng(0)
    folder.mkdir(exist_ok=True)
    for split, n in (("train", n_train), ("t10k", n_test)):
        pixels = random.integers(0, 256, (n, 28, 28), np.uint8)
        for name, x in (("images", pixels), ("labels", np.arange(n, dtype=np.uint8) % 10)):
            header = bytes([0, 0, 8, x.ndim]) + np.array(x.shape, ">u4").tobytes()
            file = folder / f"{split}-{name}-idx{x.ndim}-ubyte.gz"
            file.write_bytes(gzip.compress(header + x.tobytes()))
    return folder


def write_folders(folder):
    write_images(folder / "train", CLASSES, n=6, size=(20, 24))
    write_images(folder / "val", CLASSES, n=3, size=(20, 24), seed=1)
    return folder


def write_text(folder):
    (folder / "some.txt").write_bytes(bytes(k * k % 251 for k in range(300)))
    return folder


def write_tokens(folder):
    for name, n in (("train", 250), ("val", 70)):
        (np.arange(n) ** 2 % 37).astype(np.uint16).tofile(folder / f"{name}.bin")
    return folder


def epoch_of(samples, seed=0, epoch=0, batch_size=4):
    found = zip(*samples.train(batch_size, seed, epoch, CPU), strict=True)
    return tuple(map(torch.cat, found))


class Noisy(Dataset):
    """Its samples are varied by torch's generator."""

    def __init__(self, n):
        self.images = torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, number):
        return self.images[number] + 0.1 * torch.randn(3, 8, 8), number % 10


SETS = {
    "digits": lambda root: digits(),
    "synthetic": lambda root: synthetic(n_train=24, n_test=8, image_size=8),
    "cifar10": lambda root: cifar10(str(write_ten(root))),
    "fashion_mnist": lambda root: fashion_mnist(str(write_idx(root))),
    "image_folder": lambda root: image_folder(str(write_folders(root)), 16, num_workers=0),
    "text": lambda root: text(str(write_text(root) / "some.txt"), length=8),
    "tokens": lambda root: token_files(str(write_tokens(root)), length=8, vocabulary=40),
    "datasets": lambda root: Datasets(Noisy(20), Noisy(6), 10),
}


@pytest.fixture(scope="module", params=SETS)
def samples(request, tmp_path_factory):
    """Every set; to add one here is to buy the tests below."""
    return SETS[request.param](tmp_path_factory.mktemp(request.param))


def test_batches_follow_from_seed_and_epoch(samples):
    """And not from torch's generator, which stays as it is."""
    torch.manual_seed(0)
    x, y = epoch_of(samples, seed=3, epoch=2)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    for again, labels in (epoch_of(samples, seed=3, epoch=2) for _ in range(2)):
        assert torch.equal(x, again)
        assert torch.equal(y, labels)
    assert torch.equal(torch.get_rng_state(), before)
    for seed, epoch in ((1, 2), (3, 1), (2, 3)):
        other, labels = epoch_of(samples, seed, epoch)
        assert not torch.equal(x, other)
        assert not torch.equal(y, labels)


def test_an_epoch_is_read_again_and_from_any_place(samples):
    epoch = samples.train(4, 0, 0, CPU)
    whole = [*epoch]
    for first, found in ((0, [*epoch]), (2, [*epoch.between(2, len(whole))])):
        for batch, other in zip(found, whole[first:], strict=True):
            assert all(map(torch.equal, batch, other))


def test_batches_fit_what_the_set_says(samples):
    like = samples.form.example(1)
    for found in (samples.train(5, 0, 0, CPU), samples.test(5, CPU)):
        pairs = [*found]
        assert len(pairs) == len(found)
        assert {x.shape[1:] for x, _ in pairs} == {like.shape[1:]}
        assert {x.dtype for x, _ in pairs} == {like.dtype}
        labels = torch.cat([y for _, y in pairs])
        assert labels.dtype == torch.int64
        assert (*labels.shape, samples.form.n_classes) == samples.form.output(len(labels))
        assert 0 <= labels.min() <= labels.max() < samples.form.n_classes


def test_training_drops_the_last_and_testing_keeps_it(samples):
    n = sum(len(y) for _, y in samples.train(1, 0, 0, CPU))
    with pytest.raises(UserError, match=f"{n + 1} .* {n}"):
        samples.train(n + 1, 0, 0, CPU)
    n_test = sum(len(y) for _, y in samples.test(1, CPU))
    assert [len(y) for _, y in samples.train(n - 1, 0, 0, CPU)] == [n - 1]
    assert [len(y) for _, y in samples.test(n_test - 1, CPU)] == [n_test - 1, 1]


# In memory: each image as a loop over images would have it

MEAN, STD = (0.5, 0.4, 0.3), (0.25, 0.2, 0.3)


def labelled(n, size=8):
    generator = torch.Generator().manual_seed(n)
    pixels = torch.randint(256, (n, 3, size, size), dtype=torch.uint8, generator=generator)
    return Labelled(pixels, torch.arange(n) % 4)


def held(**augmentation):
    return InMemory(labelled(24), labelled(13), 4, MEAN, STD, **augmentation)


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
    for batch, expected in zip(found, one_by_one(padding, flip, 3, epoch, 8), strict=True):
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
    train, test = ([y for _, y in b] for b in (images.train(1, 0, 0, CPU), images.test(1, CPU)))
    assert (len(train), len(test), images.form.n_classes) == (1437, 360, 10)
    x, _ = epoch_of(images, batch_size=1437)
    assert abs(x.mean()) < 0.1
    assert abs(x.std() - 1) < 0.1
    counts = torch.cat(test).bincount()
    assert 35 <= counts.min() <= counts.max() <= 37


# CIFAR-10


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
        name: {"data": random.integers(0, 256, (3, 3072), np.uint8), "labels": [7, 0, 9]}
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
    with pytest.raises(UserError, match=f"data.root={root}: {root}/cifar-10-batches-py"):
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
    assert balanced_subset(None, LABELS, "n_train").tolist() == [*range(84)] == subsets[-1]


def test_a_part_of_cifar10(cifar_folders, monkeypatch):
    """Only what is chosen is decoded; each image equals that of the whole set."""
    ((whole, _),) = cifar10(str(cifar_folders)).test(20, CPU)
    reads, read = [], in_memory.read_image
    monkeypatch.setattr(in_memory, "read_image", lambda *of: reads.append(of) or read(*of))
    small = cifar10(str(cifar_folders), n_train=20, n_test=10)
    assert (len(reads), len(small.train(20, 0, 0, CPU))) == (30, 1)
    ((x, y),) = small.test(20, CPU)
    assert y.bincount().tolist() == [1] * 10
    assert torch.equal(x, whole[balanced_subset(10, torch.arange(20) // 2, "n_test")])


# Fashion-MNIST


def test_fashion_mnist_as_published(tmp_path):
    ((x, y),) = fashion_mnist(str(write_idx(tmp_path))).test(20, CPU)
    assert y.tolist() == [k % 10 for k in range(20)]
    content = gzip.decompress((tmp_path / "t10k-images-idx3-ubyte.gz").read_bytes())
    pixels = np.frombuffer(content, np.uint8, offset=16).reshape(20, 1, 28, 28) / 255
    np.testing.assert_allclose(x, (pixels - 0.2860) / 0.3530, rtol=1e-4, atol=1e-5)
    small = fashion_mnist(str(tmp_path), n_train=20, n_test=10)
    assert len(small.train(20, 0, 0, CPU)) == 1
    assert torch.equal(next(iter(small.test(20, CPU)))[0], x[balanced_subset(10, y, "n_test")])


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
    with pytest.raises(UserError, match=rf"{split}-\*.gz .*28\] and labels \[40\] up to 9;"):
        fashion_mnist(str(tmp_path))


# Two of torch's Datasets


@pytest.mark.usefixtures("analysed_once")
def test_a_resumed_run_sees_the_same_samples(tmp_path):
    samples, found = Datasets(Noisy(32), Noisy(8), 10), []
    for name, epochs in (("whole", 2), ("again", 1), ("again", 2)):
        run = build_run(configured(f"epochs={epochs}", "lr=constant"), samples)
        found.append(weights(run_with_checkpoints(run, tmp_path / name, resume=None)))
    assert_identical(found[2], found[0])


class Stream(IterableDataset):
    def __iter__(self):
        return iter(Noisy(4))


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (Stream(), "^train: got a Stream"),
        (TensorDataset(torch.zeros(4, 3, 8, 8)), r"\(Tensor \[3, 8, 8\]\);"),
        (TensorDataset(torch.zeros(4, 3), torch.zeros(4)), r"\(Tensor \[3\], Tensor \[\]\);"),
    ],
)
def test_datasets_of_another_kind_are_refused(train, message):
    with pytest.raises(UserError, match=message):
        Datasets(train, Noisy(4), 10)


def test_other_batches_are_refused():
    samples = Datasets(Noisy(32), Noisy(8), 10)
    samples.train = lambda *_: DataLoader(Noisy(32), 8)
    with pytest.raises(UserError, match=r"DataLoader.*between"):
        build_run(configured(), samples)


# Parts of batches are slices of the whole batches, bit for bit, and only they are read

SIZE = 6  # of a batch: parts of 1, 2, 3 and 6 samples


def slices(batch, n_parts, wanted):
    """The wanted ones of equal parts of each tensor."""
    return [torch.cat([x.chunk(n_parts)[m] for m in wanted]) for x in batch]


def assert_equal(found, expected):
    for batch, other in zip(found, expected, strict=True):
        for x, y in zip(batch, other, strict=True):
            assert x.dtype == y.dtype
            assert torch.equal(x, y)


@pytest.mark.parametrize(("size", "n_parts"), [(6, 4), (5, 2), (3, 6)])
def test_what_cannot_be_divided_is_refused(samples, size, n_parts):
    with pytest.raises(UserError, match=f"{size} samples .* {n_parts}"):
        samples.train(size, 0, 0, CPU).parts(n_parts, lambda k: [0])


@pytest.mark.parametrize(
    "wanted",
    [[[2], [1], [0]], [[0, 2], [1], [0, 1, 2]], [[0], [], [2, 0]], [[], [], []]],
    ids=str,
)
def test_parts_are_slices(samples, wanted):
    """Of batches in their order; batches without a wanted part are left out."""
    batches = samples.train(SIZE, 3, 1, CPU)
    assert isinstance(batches, Divisible)
    whole = [*batches][:3]
    expected = [slices(b, 3, w) for b, w in zip(whole, wanted, strict=True) if w]
    for _ in range(2):
        assert_equal(batches.parts(3, lambda k: wanted[k] if k < 3 else []), expected)


@pytest.mark.parametrize("wanted", [[[0], [0], [0]], [[0, 2], [], [1]], [[], [], []]], ids=str)
def test_only_what_is_wanted_is_read(tmp_path, monkeypatch, wanted):
    """By this process, when it is taken; or the same by workers."""
    reads, read = [], class_folders.read_image

    def spy(images, index, skip):
        reads.append(index)
        return read(images, index, skip)

    monkeypatch.setattr(class_folders, "read_image", spy)
    root = str(write_folders(tmp_path))
    batches = image_folder(root, 8, num_workers=0).train(SIZE, 0, 0, CPU)
    whole = [*batches]
    everything = torch.tensor(reads).view(3, 3, 2)
    reads.clear()
    parts = batches.parts(3, wanted.__getitem__)
    assert not reads
    expected = [slices(b, 3, w) for b, w in zip(whole, wanted, strict=True) if w]
    assert_equal(parts, expected)
    assert reads == [n for k in range(3) for m in wanted[k] for n in everything[k][m].tolist()]
    by_workers = image_folder(root, 8, num_workers=1).train(SIZE, 0, 0, CPU)
    assert_equal(by_workers.parts(3, wanted.__getitem__), expected)


def test_parts_are_put_on_the_device(samples):
    meta = torch.device("meta")
    for device in (CPU, meta):
        part, *_ = samples.train(18, 0, 0, device).parts(3, lambda k: [1])
        assert [x.device for x in part] == [device, device]
        assert part[0].shape == (6, *samples.form.example(1).shape[1:])


@pytest.mark.parametrize(("n_ranks", "batch_size"), [(1, 4), (3, 1), (4, 4), (20, 100)])
def test_shares_partition_the_test_images(samples, n_ranks, batch_size):
    """Each image once, as it is in the whole; a rank may have none."""
    everything = [torch.cat(x) for x in zip(*samples.test(100, CPU), strict=True)]
    for rank in range(n_ranks):
        batches = samples.test(batch_size, CPU, rank, n_ranks)
        found = [*batches]
        assert len(found) == len(batches)
        assert all(len(x) == len(y) > 0 for x, y in found)
        expected = [x[rank::n_ranks] for x in everything]
        joined = [torch.cat(x) for x in zip(*found, strict=True)] if found else expected
        assert_equal([joined], [expected])


@pytest.mark.parametrize("n_ranks", [1, 3, 50])
def test_ranks_evaluate_together_what_one_evaluates_alone(n_ranks):
    """All of them come to the same sums."""
    images = synthetic(n_train=8, n_test=37, n_classes=7, image_size=8)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 7))
    sums = []
    for rank in range(n_ranks):
        share = images.test(5, CPU, rank, n_ranks)
        evaluate(model, share, lambda values: sums.append(values) or torch.ones_like(values))
    total = torch.stack(sums).sum(0)
    found = evaluate(model, share, lambda values: total)
    alone = evaluate(model, images.test(5, CPU))
    assert (total[3], found.top1, found.top5) == (37, alone.top1, alone.top5)
    assert found.loss == pytest.approx(alone.loss, rel=1e-6)


@pytest.mark.parametrize(
    "of", [synthetic(24, 1, 4, 4), held(crop_padding=2, flip=True)], ids=["plain", "augmented"]
)
def test_parts_of_some_batches_count_from_the_first_of_these(of):
    batches = of.train(8, 0, 0, CPU)
    whole = [*batches]
    assert_equal(batches.between(1, 3), whole[1:3])
    found = batches.between(1, 3).parts(4, lambda k: [k])
    assert_equal(found, [slices(whole[1 + k], 4, [k]) for k in range(2)])


# Refusals


@pytest.mark.parametrize(
    ("load", "inside"), [(cifar10, "train/ and test/"), (image_folder, "val/")]
)
def test_a_root_that_is_missing(tmp_path, load, inside):
    (tmp_path / "file").touch()
    for root, words in (
        (None, f"data.root .*{inside}"),
        (f"{tmp_path}/no", f"data.root={tmp_path}/no .*{inside}"),
        (f"{tmp_path}/file", f"data.root={tmp_path}/file .*{inside}"),
        (str(tmp_path), f"{tmp_path}/train"),
    ):
        with pytest.raises(UserError, match=words):
            load(root)


@pytest.mark.parametrize(
    ("load", "test", "classes"), [(cifar10, "test", TEN), (image_folder, "val", CLASSES)]
)
def test_classes_that_differ(tmp_path, load, test, classes):
    write_images(tmp_path / "train", classes)
    write_images(tmp_path / test, (*classes[1:], "zebra"))
    with pytest.raises(UserError, match=f"{tmp_path}/train and {tmp_path}/{test} .*{classes[0]}"):
        load(str(tmp_path))


def test_three_classes_are_no_cifar10(tmp_path):
    (write_folders(tmp_path) / "val").rename(tmp_path / "test")
    with pytest.raises(UserError, match=r"3 classes.*data=image_folder"):
        cifar10(str(tmp_path))


@pytest.mark.parametrize(
    ("load", "option", "value"),
    [
        *((synthetic, f"{name}", 0) for name in ("n_train", "n_test", "n_classes", "image_size")),
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
