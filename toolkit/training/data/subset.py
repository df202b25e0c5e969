"""A part of an image set, for small studies."""

import torch
from torch import Tensor

from toolkit.errors import UserError


def first(n: int | None, labels: Tensor, option: str) -> Tensor:
    """The first ``n`` images of a fixed random order in which the classes take turns.

    Classes have equal numbers of them, or one more or less, as long as each has images left. A
    larger subset holds the smaller ones.

    Args:
        n: how many; None is all.
        labels: the classes of all images.
        option: what sets ``n``, as the error names it.

    Returns:
        their numbers, ascending.

    Raises:
        ValueError: there are not so many.
    """
    everything = torch.arange(len(labels))
    if n is None:
        return everything
    if n < 1:
        raise UserError(f"data.{option} is 1 or more, or null for all: got {n}")
    if n > len(labels):
        raise UserError(
            f"data.{option}={n} and there are {len(labels)} images: give fewer, or null for all"
        )
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    turn = torch.empty_like(everything)
    for label in labels.unique():
        of_class = shuffled[labels[shuffled] == label]
        turn[of_class] = torch.arange(len(of_class))
    return shuffled[turn[shuffled].argsort(stable=True)][:n].sort().values
