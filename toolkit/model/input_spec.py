"""What a model takes and returns: images or features and classes, or tokens and next tokens."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from toolkit.metric import ACCURACY, LOSS


@dataclass(frozen=True)
class Images:
    """Images ``[b, channels, height, width]``, each of one class.

    Args:
        channels: colours, such as 3.
        height: of an image, in pixels.
        width: of an image, in pixels.
        n_classes: number of classes; a class is 0 .. n_classes-1.
    """

    channels: int
    height: int
    width: int
    n_classes: int
    samples = "images"  # plural name
    answers = "images"  # what has an answer each
    metric = ACCURACY  # by which a model is judged
    # Name that other models use for the number of classes.
    usual_argument = "num_classes"

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of a function that makes a model for these images."""
        sizes = {"image_size": self.width, "in_channels": self.channels}
        return {"n_classes": self.n_classes, **sizes}

    def example(self, n: int, device: torch.device | str = "cpu") -> Tensor:
        """Return pixels ``[n, channels, height, width]`` from a fixed seed."""
        return _numbers((n, self.channels, self.height, self.width), device)

    def output(self, n: int) -> tuple[int, ...]:
        """Return the shape of a model's output for ``n`` images: scores, classes last."""
        return (n, self.n_classes)


@dataclass(frozen=True)
class Features:
    """Vectors of features ``[b, size]``, each of one class.

    Args:
        size: numbers of a vector.
        n_classes: number of classes; a class is 0 .. n_classes-1.
    """

    size: int
    n_classes: int
    samples = "feature vectors"
    answers = "feature vectors"
    metric = ACCURACY
    usual_argument = "num_classes"

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of a function that makes a model for these vectors."""
        return {"n_classes": self.n_classes, "n_features": self.size}

    def example(self, n: int, device: torch.device | str = "cpu") -> Tensor:
        """Return numbers ``[n, size]`` from a fixed seed."""
        return _numbers((n, self.size), device)

    def output(self, n: int) -> tuple[int, ...]:
        """Return the shape of a model's output for ``n`` vectors: scores, classes last."""
        return (n, self.n_classes)


@dataclass(frozen=True)
class Sequences:
    """Sequences of tokens ``[b, length]``, each token with the next one as its answer.

    Args:
        length: tokens of a sequence.
        vocabulary: number of tokens; a token is 0 .. vocabulary-1.
    """

    length: int
    vocabulary: int
    samples = "sequences"
    answers = "tokens"
    metric = LOSS
    usual_argument = "vocabulary"

    @property
    def n_classes(self) -> int:
        """Size of the vocabulary."""
        return self.vocabulary

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of a function that makes a model for these sequences."""
        return {"vocabulary": self.vocabulary, "length": self.length}

    def example(self, n: int, device: torch.device | str = "cpu") -> Tensor:
        """Return tokens ``[n, length]`` from a fixed seed."""
        if torch.device(device).type == "meta":
            return torch.empty(n, self.length, dtype=torch.long, device=device)
        tokens = torch.randint(
            self.vocabulary, (n, self.length), generator=_drawn(), device="cpu"
        )
        return tokens.to(device)

    def output(self, n: int) -> tuple[int, ...]:
        """Return the shape of a model's output for ``n`` sequences: scores, tokens last."""
        return (n, self.length, self.vocabulary)


InputSpec = Images | Features | Sequences
"""Samples of one kind, and their answers."""


def _numbers(shape: tuple[int, ...], device: torch.device | str) -> Tensor:
    """Return numbers from 0 to 1 from a fixed seed; on meta they take no memory."""
    if torch.device(device).type == "meta":
        return torch.empty(shape, device=device)
    # Drawn on the CPU, so that all devices have the same.
    return torch.rand(shape, generator=_drawn(), device="cpu").to(device)


def _drawn() -> torch.Generator:
    """Return a generator with a fixed seed, separate from torch's global one."""
    return torch.Generator("cpu").manual_seed(0)
