"""The rank of a controlled training: what it is asked to do, one call after another."""

from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from toolkit.model import Stages
from toolkit.runtime.distributed import Distributed
from toolkit.runtime.losses import LossValue
from toolkit.runtime.microbatches import Batch
from toolkit.runtime.process_group.join import join
from toolkit.runtime.process_group.rank_process import receive, report

_training: Distributed | None = None


class _Received:
    """The batches that the controller sends, as far as this rank reads them."""

    def parts(self, n_parts: int, wanted: Callable[[int], Any]) -> Iterator[Batch]:
        for index in count():
            if wanted(index):
                inputs, targets = receive()
                yield tuple(torch.as_tensor(tensor) for tensor in inputs), torch.as_tensor(targets)


def build(given: tuple[Any, ...], reach: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Join the other ranks, and make what they train of ``given`` and ``options``."""
    global _training
    _training = None  # its memory is free before the next takes any
    world = join(**reach)
    stages: Stages = given[0]
    stages.model.to(world.device)
    _training = Distributed(*given, world=world, **options)


def train(n_steps: int, keep: bool) -> tuple[bool, dict[str, Any] | None]:
    """Train on what the controller sends; report the losses of each step.

    Returns:
        Whether steps have been measured; this rank's part of the state, if the controller keeps it.
    """
    assert _training is not None
    for result in _training.run(_Received(), n_steps):  # type: ignore[arg-type]
        if result.microbatches:
            counts = [None] * len(result.losses) if result.counts is None else result.counts.cpu()
            losses = map(LossValue, result.losses.cpu(), counts)
            report((result.step, dict(zip(result.microbatches, losses, strict=True))))
    return _training.measures, ask("local_state") if keep else None


def ask(name: str, *args: Any) -> Any:
    """Call a method; return its result if it is this rank's part, or this is the first rank."""
    assert _training is not None
    value = getattr(_training, name)(*args)
    if _training.rank and name != "local_state":
        return None
    value = value.state_dict() if isinstance(value, nn.Module) else value
    return tree_map_only(Tensor, Tensor.cpu, value)
