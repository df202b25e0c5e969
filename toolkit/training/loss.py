"""The loss of classes, whatever is classified."""

from typing import Any

from torch import Tensor
from torch.nn import functional as F


def cross_entropy(outputs: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """Cross-entropy over all answers alike, in nats.

    Args:
        outputs: ``[..., n_classes]``: of an image, or at each place of a sequence.
        targets: ``[...]``: the right classes.
        options: of torch's ``cross_entropy``.
    """
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), **options)
