"""Sets of samples: the same batches for the same seed and epoch, and errors that name the path."""

import gzip

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from tests.thorough import more
from tests.training.test_run_with_checkpoints import (
    assert_identical,
    configured,
    weights,
)
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
    synthetic,
    text,
    token_files,
)

CPU = torch.device("cpu")
CLASSES = ("cat", "dog", "eel")
TEN = tuple(f"class{k}" for k in range(10))
MEAN, STD = (0.5, 0.4, 0.3), (0.25, 0.2, 0.3)


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
        for name, x in (
            ("images", pixels),
            ("labels", np.arange(n, dtype=np.uint8) % 10),
        ):
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


def labelled(n, size=8):
    generator = torch.Generator().manual_seed(n)
    pixels = torch.randint(
        256, (n, 3, size, size), dtype=torch.uint8, generator=generator
    )
    return Labelled(pixels, torch.arange(n) % 4)


def held(**augmentation):
    return InMemory(labelled(24), labelled(13), 4, MEAN, STD, **augmentation)


class Noisy(Dataset):
    """Its samples are varied by torch's generator."""

    def __init__(self, n):
        self.images = torch.randn(
            n, 3, 8, 8, generator=torch.Generator().manual_seed(0)
        )

    def __len__(self):
        return len(self.images)

    def __getitem__(self, number):
        return self.images[number] + 0.1 * torch.randn(3, 8, 8), number % 10


def vectors(n):
    features = torch.randn(n, 7, generator=torch.Generator().manual_seed(0))
    return TensorDataset(features, torch.arange(n) % 5)


SETS = {
    "digits": lambda root: digits(),
    "synthetic": lambda root: synthetic(n_train=24, n_test=8, image_size=8),
    "cifar10": lambda root: cifar10(str(write_ten(root))),
    "fashion_mnist": lambda root: fashion_mnist(str(write_idx(root))),
    "image_folder": lambda root: image_folder(
        str(write_folders(root)), 16, num_workers=0
    ),
    "text": lambda root: text(str(write_text(root) / "some.txt"), length=8),
    "tokens": lambda root: token_files(
        str(write_tokens(root)), length=8, vocabulary=40
    ),
    "datasets": lambda root: Datasets(Noisy(20), Noisy(6), 10),
    "features": lambda root: Datasets(vectors(20), vectors(6), 5),
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
        assert (*labels.shape, samples.form.n_classes) == samples.form.output(
            len(labels)
        )
        assert 0 <= labels.min() <= labels.max() < samples.form.n_classes


def test_training_drops_the_last_and_testing_keeps_it(samples):
    n = sum(len(y) for _, y in samples.train(1, 0, 0, CPU))
    with pytest.raises(UserError, match=f"{n + 1} .* {n}"):
        samples.train(n + 1, 0, 0, CPU)
    n_test = sum(len(y) for _, y in samples.test(1, CPU))
    assert [len(y) for _, y in samples.train(n - 1, 0, 0, CPU)] == [n - 1]
    assert [len(y) for _, y in samples.test(n_test - 1, CPU)] == [n_test - 1, 1]


# In memory: each image as a loop over images would have it

# CIFAR-10


# Fashion-MNIST


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
        (
            TensorDataset(torch.zeros(4, 3, 2), torch.zeros(4)),
            r"\[3, 2\], Tensor \[\]\);",
        ),
        (TensorDataset(torch.zeros(4, 3).long(), torch.zeros(4)), r"int64.*tokens"),
    ],
)
def test_datasets_of_another_kind_are_refused(train, message):
    with pytest.raises(UserError, match=message):
        Datasets(train, Noisy(4), 10)


class Spoilt(Noisy):
    """One sample of it is what a function returns."""

    def __init__(self, make):
        super().__init__(32)
        self.make = make

    def __getitem__(self, number):
        return (
            self.make(*super().__getitem__(number))
            if number == 7
            else super().__getitem__(number)
        )


@pytest.mark.parametrize(
    ("make", "got"),
    [
        (lambda x, y: (x, 10), "10"),
        (lambda x, y: (x, -1), "-1"),
        (lambda x, y: (x, 1.5), r"1\.5"),
        (lambda x, y: (x, None), "None"),
        (lambda x, y: None, "None"),
        (lambda x, y: (x, y, y), "7, 7"),
        (lambda x, y: (x.double(), y), "float64"),
        (lambda x, y: (x[:1], y), r"\[1, 8, 8\]"),
        (lambda x, y: 1 / 0, "ZeroDivisionError: division"),
    ],
)
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_spoilt_sample_is_named(make, got, split):
    samples = Datasets(
        *((Spoilt(make), Noisy(8))[:: 1 if split == "train" else -1]), 10
    )
    batches = (
        samples.train(32, 0, 0, CPU) if split == "train" else samples.test(32, CPU)
    )
    with pytest.raises(UserError, match=f"^{split}: sample 7 .*{got}"):
        list(batches)


PARTS = st.one_of(
    st.lists(st.integers(0, 2), max_size=4).map(torch.zeros),
    st.sampled_from(
        [torch.zeros(3, 8, 8, dtype=kind) for kind in (torch.uint8, torch.complex64)]
    ),
    st.just(torch.zeros(3, 8, 8)),
    st.integers(-2, 4),
    st.sampled_from([None, 1.5, "cat", {}, float("nan"), 2**70]),
)


@given(PARTS | st.lists(PARTS, max_size=3).map(tuple))
@settings(deadline=None, max_examples=more(100, 1000))
def test_any_sample_is_read_or_named(sample):
    batches = Datasets(Spoilt(lambda x, y: sample), Noisy(8), 10).train(32, 0, 0, CPU)
    message = ""
    try:
        ((inputs, targets),) = batches
    except UserError as error:
        message = str(error)
    if message:
        assert "\n" not in message
        assert "sample 7 " in message
    else:
        assert len(inputs) == 32
        assert 0 <= targets.min() <= targets.max() < 10


class Negative(Noisy):
    def __len__(self):
        return -1


def test_a_wrong_length_or_class_is_refused():
    with pytest.raises(UserError, match=r"^test: its length"):
        Datasets(Noisy(4), Negative(4), 10)
    with pytest.raises(UserError, match=r"^test: .* length 0"):
        Datasets(Noisy(4), Noisy(0), 10)
    held = Labelled(
        torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.tensor([0, 1, 10, 2])
    )
    with pytest.raises(UserError, match=r"^test: sample 2 has class 10"):
        InMemory(Labelled(held.images, held.labels % 10), held, 10, (0.5,), (0.5,))


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


@pytest.mark.parametrize(
    "wanted", [[[0], [0], [0]], [[0, 2], [], [1]], [[], [], []]], ids=str
)
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
    assert reads == [
        n for k in range(3) for m in wanted[k] for n in everything[k][m].tolist()
    ]
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
        evaluate(
            model, share, lambda values: sums.append(values) or torch.ones_like(values)
        )
    total = torch.stack(sums).sum(0)
    found = evaluate(model, share, lambda values: total)
    alone = evaluate(model, images.test(5, CPU))
    assert (total[3], found.top1, found.top5) == (37, alone.top1, alone.top5)
    assert found.loss == pytest.approx(alone.loss, rel=1e-6)


@pytest.mark.parametrize(
    "of",
    [synthetic(24, 1, 4, 4), held(crop_padding=2, flip=True)],
    ids=["plain", "augmented"],
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
    ("load", "test", "classes"),
    [(cifar10, "test", TEN), (image_folder, "val", CLASSES)],
)
def test_classes_that_differ(tmp_path, load, test, classes):
    write_images(tmp_path / "train", classes)
    write_images(tmp_path / test, (*classes[1:], "zebra"))
    with pytest.raises(
        UserError, match=f"{tmp_path}/train and {tmp_path}/{test} .*{classes[0]}"
    ):
        load(str(tmp_path))
