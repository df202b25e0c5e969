"""Small sets on the training device: each image as a loop over images would have it."""

import pytest
import torch
from torch.nn import functional as F

from toolkit.training.data.batches import normalise
from toolkit.training.data.in_memory import InMemory, Labelled

CPU = torch.device("cpu")
MEAN, STD = (0.5, 0.4, 0.3), (0.25, 0.2, 0.3)


def labelled(n, size=8):
    generator = torch.Generator().manual_seed(n)
    pixels = torch.randint(256, (n, 3, size, size), dtype=torch.uint8, generator=generator)
    return Labelled(pixels, torch.arange(n) % 4)


def in_memory(**augmentation):
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
            padded = F.pad(x, (padding,) * 4)
            corners = zip(padded, top, left, strict=True)
            x = torch.stack([image[:, t : t + 8, s : s + 8] for image, t, s in corners])
        if flip:
            mirrored = torch.rand(n, 1, 1, 1, generator=generator) < 0.5
            x = torch.where(mirrored, x.flip(3), x)
        yield x, labels[chosen]


@pytest.mark.parametrize("padding", [0, 1, 3])
@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("epoch", [0, 1])
def test_batches_to_the_bit(padding, flip, epoch):
    found = in_memory(crop_padding=padding, flip=flip).train(8, 3, epoch, CPU)
    for batch, expected in zip(found, one_by_one(padding, flip, 3, epoch, 8), strict=True):
        assert torch.equal(batch[0], expected[0])
        assert torch.equal(batch[1], expected[1])
        assert batch[0].is_contiguous()


def test_a_device_gets_its_copy_once():
    images, meta = in_memory(), torch.device("meta")
    for device in (meta, CPU, meta):
        assert {x.device for batch in images.test(4, device) for x in batch} == {device}
    assert {*images._test.copies} == {meta, CPU}


def test_bytes_are_normalised_without_being_changed():
    pixels = torch.tensor([0, 51, 255], dtype=torch.uint8).view(3, 1, 1, 1)
    found = normalise(pixels, (0.2,), (0.4,))
    torch.testing.assert_close(found.flatten(), torch.tensor([-0.5, 0.0, 2.0]))
    assert pixels.flatten().tolist() == [0, 51, 255]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("n_parts", [1, 4])
def test_a_gpu_gets_the_same_images_and_is_never_waited_for(n_parts):
    images = in_memory(crop_padding=2, flip=True)
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
