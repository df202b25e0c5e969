"""What a model takes, and what it makes of it: images and their classes, or tokens and the next."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from toolkit.metric import ACCURACY, LOSS


@dataclass(frozen=True)
class Images:
    """Images, each of one class; sizes in pixels.

    Attributes:
        samples: name of the samples, in the plural.
        answers: name of the answers to them, in the plural.
        n_classes: number of answers to choose from.
        metric: the metric by which a model is judged.
        arguments: arguments of a function that makes a model of this form.
        usual_argument: name that other models give to the number of classes.
    """

    channels: int
    height: int
    width: int
    n_classes: int
    samples = "images"
    answers = "classes"
    metric = ACCURACY
    usual_argument = "num_classes"

    @property
    def arguments(self) -> dict[str, Any]:
        """What a function is told that makes a model of images."""
        return {
            "n_classes": self.n_classes,
            "image_size": self.width,
            "in_channels": self.channels,
        }

    def example(self, n: int, device: torch.device | str = "cpu") -> Tensor:
        """Pixels, ``[n, channels, height, width]``; always the same ones, drawn at random."""
        shape = n, self.channels, self.height, self.width
        if torch.device(device).type == "meta":
            return torch.empty(shape, device=device)
        return torch.rand(shape, generator=_drawn(), device="cpu").to(device)

    def output(self, n: int) -> tuple[int, ...]:
        """The shape of a model's answer to ``n`` of them: a score a class, the classes last."""
        return (n, self.n_classes)


@dataclass(frozen=True)
class Sequences:
    """Sequences of ``length`` tokens out of ``vocabulary``, each with the one that comes next.

    Its attributes are those of :class:`Images`.
    """

    length: int
    vocabulary: int
    samples = "sequences"
    answers = "tokens"
    metric = LOSS
    usual_argument = "vocabulary"

    @property
    def n_classes(self) -> int:
        """Every token of the vocabulary is an answer."""
        return self.vocabulary

    @property
    def arguments(self) -> dict[str, Any]:
        """What a function is told that makes a model of sequences."""
        return {"vocabulary": self.vocabulary, "length": self.length}

    def example(self, n: int, device: torch.device | str = "cpu") -> Tensor:
        """Tokens, ``[n, length]``; always the same ones, drawn at random."""
        if torch.device(device).type == "meta":
            return torch.empty(n, self.length, dtype=torch.long, device=device)
        drawn = torch.randint(self.vocabulary, (n, self.length), generator=_drawn(), device="cpu")
        return drawn.to(device)

    def output(self, n: int) -> tuple[int, ...]:
        """The shape of a model's answer to ``n`` of them: a score a token, the tokens last."""
        return (n, self.length, self.vocabulary)


InputSpec = Images | Sequences
"""Samples of one form, and the answers to them."""


def _drawn() -> torch.Generator:
    """Always the same numbers; what torch draws next is as before."""
    return torch.Generator("cpu").manual_seed(0)
