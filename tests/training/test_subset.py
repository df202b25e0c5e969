"""Parts of CIFAR-10: of all classes alike, always the same images, the smaller in the larger."""

from itertools import pairwise

import pytest
import torch

from tests.training.test_data import CPU, write_ten
from toolkit.errors import UserError
from toolkit.training.data import cifar10, class_folders
from toolkit.training.data.sets import balanced_subset

LABELS = torch.tensor([0] * 50 + [1] * 30 + [2] * 4)


@pytest.mark.parametrize(
    ("n", "counts"),
    [(3, [1, 1, 1]), (12, [4, 4, 4]), (20, [8, 8, 4]), (70, [36, 30, 4]), (84, [50, 30, 4])],
)
def test_classes_take_turns(n, counts):
    chosen = balanced_subset(n, LABELS, "n_train")
    assert len(chosen.unique()) == n
    assert LABELS[chosen].bincount(minlength=3).tolist() == counts


@pytest.mark.parametrize("n", [1, 2, 4, 5])
def test_what_is_left_over_makes_a_difference_of_one(n):
    counts = LABELS[balanced_subset(n, LABELS, "n_train")].bincount(minlength=3)
    assert counts.max() - counts.min() == 1


def test_a_larger_subset_holds_the_smaller():
    subsets = [set(balanced_subset(n, LABELS, "n_train").tolist()) for n in range(1, 85)]
    for smaller, larger in pairwise(subsets):
        assert smaller < larger


def test_images_keep_their_order_and_are_not_the_first_ones():
    chosen = balanced_subset(9, LABELS, "n_train").tolist()
    assert chosen == sorted(chosen)
    assert chosen != [0, 1, 2, 50, 51, 52, 80, 81, 82]
    assert chosen == balanced_subset(9, LABELS, "n_train").tolist()


def test_all():
    for n in (None, len(LABELS)):
        assert balanced_subset(n, LABELS, "n_train").tolist() == list(range(len(LABELS)))


@pytest.mark.parametrize("n", [0, 85])
def test_refuses(n):
    with pytest.raises(UserError, match=rf"data\.n_test.* 84.*{n}"):
        balanced_subset(n, LABELS, "n_test")


@pytest.fixture
def root(tmp_path):
    return write_ten(tmp_path)


def test_of_cifar10(root, monkeypatch):
    """Only what is chosen is decoded; it is what the whole set has at that place."""
    reads = []
    read = class_folders.read_image
    monkeypatch.setattr(
        class_folders, "read_image", lambda *image: reads.append(image) or read(*image)
    )
    small = cifar10(str(root), n_train=20, n_test=10)
    assert len(reads) == 30
    assert len(small.train(20, 0, 0, CPU)) == 1
    ((x, y),) = small.test(20, CPU)
    assert y.bincount().tolist() == [1] * 10
    whole = torch.cat([x for x, _ in cifar10(str(root)).test(20, CPU)])
    assert torch.equal(x, whole[balanced_subset(10, torch.arange(20) // 2, "n_test")])
    with pytest.raises(UserError):
        small.train(21, 0, 0, CPU)


def test_of_all_of_cifar10(root):
    """To ask for all images is to ask for none in particular."""
    found = [cifar10(str(root), n_train=n).train(5, 0, 0, CPU) for n in (None, 30)]
    for (x, y), (again, labels) in zip(*found, strict=True):
        assert torch.equal(x, again)
        assert torch.equal(y, labels)


@pytest.mark.parametrize(("option", "n"), [("n_train", 31), ("n_test", 21)])
def test_refuses_more_than_cifar10_has(root, option, n):
    with pytest.raises(UserError, match=f"{option}"):
        cifar10(str(root), **{option: n})
