"""Parts of batches are slices of the whole batches, bit for bit, and only they are read."""

import numpy as np
import pytest
import torch
from torch import nn

from tests.training.test_data import CLASSES, CPU, Noisy, held, write_images
from toolkit.errors import UserError
from toolkit.runtime.microbatches import Divisible
from toolkit.training import evaluate
from toolkit.training.data import Datasets, Tokens, class_folders, image_folder, synthetic

SIZE = 6  # of a batch: parts of 1, 2, 3 and 6 images
MEMORY = held(crop_padding=2, flip=True)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("folder")
    write_images(root / "train", CLASSES, n=6, size=(20, 24))
    write_images(root / "val", CLASSES, n=3, size=(20, 24), seed=1)
    return root


@pytest.fixture(params=["memory", "folder", "text", "datasets"])
def images(request, root):
    """Of every kind; each has 3 batches of 6 or more."""
    if request.param == "text":
        tokens = np.arange(200) ** 2 % 11
        return Tokens(tokens, tokens[::-1], 8, 11)
    if request.param == "datasets":
        return Datasets(Noisy(20), Noisy(6), 10)
    return MEMORY if request.param == "memory" else image_folder(str(root), 8, num_workers=0)


def slices(batch, n_parts, wanted):
    """The wanted ones of equal parts of each tensor."""
    return [torch.cat([x.chunk(n_parts)[m] for m in wanted]) for x in batch]


def assert_equal(found, expected):
    for batch, other in zip(found, expected, strict=True):
        for x, y in zip(batch, other, strict=True):
            assert x.dtype == y.dtype
            assert torch.equal(x, y)


@pytest.mark.parametrize(("size", "n_parts"), [(6, 4), (5, 2), (3, 6)])
def test_what_cannot_be_divided_is_refused(images, size, n_parts):
    with pytest.raises(UserError, match=f"{size} samples .* {n_parts}"):
        images.train(size, 0, 0, CPU).parts(n_parts, lambda k: [0])


@pytest.mark.parametrize(
    "wanted",
    [[[2], [1], [0]], [[0, 2], [1], [0, 1, 2]], [[0], [], [2, 0]], [[], [], []]],
    ids=str,
)
def test_parts_are_slices(images, wanted):
    """Of batches in their order; batches without a wanted part are left out."""
    batches = images.train(SIZE, 3, 1, CPU)
    assert isinstance(batches, Divisible)
    whole = [*batches][:3]
    expected = [slices(b, 3, w) for b, w in zip(whole, wanted, strict=True) if w]
    for _ in range(2):
        assert_equal(batches.parts(3, lambda k: wanted[k] if k < 3 else []), expected)


@pytest.mark.parametrize("wanted", [[[0], [0], [0]], [[0, 2], [], [1]], [[], [], []]], ids=str)
def test_only_what_is_wanted_is_read(root, monkeypatch, wanted):
    """By this process, when it is taken; or the same by workers."""
    reads, read = [], class_folders.read_image

    def spy(images, index, skip):
        reads.append(index)
        return read(images, index, skip)

    monkeypatch.setattr(class_folders, "read_image", spy)
    batches = image_folder(str(root), 8, num_workers=0).train(SIZE, 0, 0, CPU)
    whole = [*batches]
    everything = torch.tensor(reads).view(3, 3, 2)
    reads.clear()
    parts = batches.parts(3, wanted.__getitem__)
    assert not reads
    expected = [slices(b, 3, w) for b, w in zip(whole, wanted, strict=True) if w]
    assert_equal(parts, expected)
    assert reads == [n for k in range(3) for m in wanted[k] for n in everything[k][m].tolist()]
    by_workers = image_folder(str(root), 8, num_workers=1).train(SIZE, 0, 0, CPU)
    assert_equal(by_workers.parts(3, wanted.__getitem__), expected)


def test_parts_are_put_on_the_device(images):
    meta = torch.device("meta")
    for device in (CPU, meta):
        (part,) = images.train(18, 0, 0, device).parts(3, lambda k: [1])
        assert [x.device for x in part] == [device, device]
        assert part[0].shape == (6, *images.form.example(1).shape[1:])


@pytest.mark.parametrize(("n_ranks", "batch_size"), [(1, 4), (3, 1), (4, 4), (20, 100)])
def test_shares_partition_the_test_images(images, n_ranks, batch_size):
    """Each image once, as it is in the whole; a rank may have none."""
    everything = [torch.cat(x) for x in zip(*images.test(100, CPU), strict=True)]
    for rank in range(n_ranks):
        batches = images.test(batch_size, CPU, rank, n_ranks)
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


@pytest.mark.parametrize("images", [synthetic(24, 1, 4, 4), MEMORY], ids=["plain", "augmented"])
def test_parts_of_some_batches_count_from_the_first_of_these(images):
    batches = images.train(8, 0, 0, CPU)
    whole = [*batches]
    assert_equal(batches.between(1, 3), whole[1:3])
    found = batches.between(1, 3).parts(4, lambda k: [k])
    assert_equal(found, [slices(whole[1 + k], 4, [k]) for k in range(2)])
