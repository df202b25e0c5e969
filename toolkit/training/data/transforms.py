"""What a model sees of an image: which box of it, at what size.

A view works alike on a PIL image and on a tensor of bytes, on whichever device that is.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional


class Cut(NamedTuple):
    """A box of an image in pixels, and whether it is mirrored."""

    top: int
    left: int
    height: int
    width: int
    mirrored: bool


class View(Protocol):
    def draw(self, image: Any, seed: int) -> Cut | None:
        """What is seen of ``image``, drawn at random by ``seed``; only its size is read."""
        ...

    def apply(self, image: Any, cut: Cut | None) -> Any:
        """What is seen of ``image``, at its final size."""
        ...


class RandomView:
    """For training: a random box, resized, and mirrored for every second image."""

    def __init__(self, size: int) -> None:
        self._size = [size, size]
        self._box = v2.RandomResizedCrop(size)

    def draw(self, image: Any, seed: int) -> Cut:
        with _seeded(seed):
            box = self._box.make_params([image])
            return Cut(**box, mirrored=bool(torch.rand(1) < 0.5))

    def apply(self, image: Any, cut: Cut | None) -> Any:
        assert cut is not None
        image = functional.resized_crop(image, *cut[:4], self._size)
        return functional.horizontal_flip(image) if cut.mirrored else image


class CentralView:
    """For testing: resized to 8/7 of the size, and cropped at the centre."""

    def __init__(self, size: int) -> None:
        self._view = v2.Compose([v2.Resize(size * 8 // 7), v2.CenterCrop(size)])

    def draw(self, image: Any, seed: int) -> None:
        return None

    def apply(self, image: Any, cut: Cut | None) -> Any:
        return self._view(image)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """torch's global generator of the CPU draws by ``seed``, and then goes on as before."""
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(state)
