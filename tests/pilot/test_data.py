"""What the pilot trains and tests on."""

import torch

from toolkit.pilot import data

CPU = torch.device("cpu")


def test_pilots_test_images_are_not_trained_on():
    pixels = torch.arange(20.0).view(20, 1).expand(20, 2)
    found = data.read((pixels, torch.arange(20)), 4, CPU)
    tested = {int(k) for _, labels in found.test() for k in labels}
    for epoch in range(3):
        trained = [int(k) for _, labels in found.epoch(0, epoch) for k in labels]
        assert len(trained) == len({*trained}) == 16
        assert not tested & {*trained}


def test_bytes_are_scaled_and_large_data_sets_are_cut_off():
    white = torch.full((8, 1, 2, 2), 255, dtype=torch.uint8)
    (pixels, _), *_ = data.read((white, torch.zeros(8, dtype=torch.long)), 4, CPU).epoch(0, 0)
    assert pixels.max() == 1

    class Many:
        def __len__(self):
            return 10**6

        def __getitem__(self, k):
            assert k < 2048
            return torch.zeros(2, 2), 0

    assert data.read(Many(), 4, CPU).n_tested == 2048 // 5
