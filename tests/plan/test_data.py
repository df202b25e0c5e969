"""What the pilot trains and tests on."""

import pytest
import torch

from toolkit.plan import measure as data
from toolkit.training.data import synthetic

CPU = torch.device("cpu")


def test_pilots_test_images_are_not_trained_on():
    pixels = torch.arange(20.0).view(20, 1).expand(20, 2)
    found = data.read((pixels, torch.arange(20)), 4, CPU)
    tested = {int(k) for _, labels in found.test() for k in labels}
    for epoch in range(3):
        trained = [int(k) for _, labels in found.epoch(0, epoch) for k in labels]
        assert len(trained) == len({*trained}) == 16
        assert not tested & {*trained}


def test_bytes_are_scaled():
    white = torch.full((8, 1, 2, 2), 255, dtype=torch.uint8)
    (pixels, _), *_ = data.read((white, torch.zeros(8, dtype=torch.long)), 4, CPU).epoch(0, 0)
    assert pixels.max() == 1


class Sorted:
    """Class after class, as folders of classes are."""

    def __init__(self, n, n_classes):
        self.n, self.each, self.read = n, n // n_classes, []

    def __len__(self):
        return self.n

    def __getitem__(self, k):
        self.read.append(k)
        return torch.zeros(2, 2), k // self.each


def test_of_a_large_data_set_images_of_all_classes_are_read():
    many = Sorted(10**6, 10)
    found = data.read(many, 4, CPU)
    assert len(many.read) == len({*many.read}) == 2048
    assert found.n_tested == 2048 // 5
    counts = torch.cat([labels for _, labels in found.test()]).bincount(minlength=10)
    assert counts.min() > 20
    again = Sorted(10**6, 10)
    data.read(again, 4, CPU)
    assert again.read == many.read
    few = Sorted(40, 4)
    data.read(few, 4, CPU)
    assert few.read == [*range(40)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "images",
    [
        torch.rand(20, 1, 4, 4, dtype=torch.float64),
        torch.rand(20, 1, 4, 4),
        torch.ones(20, 1, 4, 4, dtype=torch.uint8),
        synthetic(20, 8, 4, 4, 1),
    ],
    ids=["float64", "float32", "bytes", "set"],
)
def test_images_are_in_the_type_of_the_model(images, dtype):
    found = data.read(images, 4, CPU, dtype)
    batches = [*found.epoch(0, 0), *found.test()]
    assert {pixels.dtype for pixels, _ in batches} == {dtype}
