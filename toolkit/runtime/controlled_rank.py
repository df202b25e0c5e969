"""The rank of a controlled training: what it is asked to do, one call after another."""

from collections.abc import Callable, Iterator, Mapping
from itertools import count, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from toolkit.model import Stages
from toolkit.runtime.distributed import Distributed
from toolkit.runtime.losses import LossValue
from toolkit.runtime.microbatches import GlobalBatch
from toolkit.runtime.process_group.join import join
from toolkit.runtime.process_group.rank_process import receive, report

_training: Distributed | None = None


class _ReceivedBatches:
    """The batches that the controller sends, as far as this rank reads them; they are Divisible."""

    def parts(self, n_parts: int, reads: Callable[[int], Any]) -> Iterator[GlobalBatch]:
        for index in count():
            if reads(index):
                inputs, targets = receive()
                yield (
                    tuple(torch.as_tensor(tensor) for tensor in inputs),
                    torch.as_tensor(targets),
                )


def join_training(
    training: tuple[Any, ...],
    join_options: Mapping[str, Any],
    options: Mapping[str, Any],
) -> None:
    """Join the other ranks, and make what they train.

    Args:
        training: positional arguments of ``Distributed``, the stages first.
        join_options: arguments of :func:`toolkit.runtime.join`.
        options: further arguments of ``Distributed``.
    """
    global _training
    _training = None  # its memory is free before the next takes any
    world = join(**join_options)
    world.watch.begin_training()
    stages: Stages = training[0]
    stages.model.to(world.device)
    _training = Distributed(*training, world=world, **options)


def train_steps(n_steps: int, keep: bool) -> tuple[bool, dict[str, Any] | None]:
    """Train on what the controller sends; report the losses of each step.

    Returns:
        Whether steps have been measured; this rank's part of the state, if the controller keeps it.
    """
    assert _training is not None
    for result in _training.run(_ReceivedBatches(), n_steps):  # type: ignore[arg-type]
        # The other devices of the rank have the same losses.
        if result.microbatches and _training.is_first_device:
            counts = repeat(None) if result.counts is None else result.counts.cpu()
            losses = map(LossValue, result.losses.cpu(), counts)
            report((result.step, dict(zip(result.microbatches, losses, strict=True))))
    local_state = None
    if keep:
        local_state = call_method("local_state")
    return _training.measures, local_state


def call_method(name: str, *args: Any) -> Any:
    """Call a method of the training.

    Returns:
        Its result on the CPU; None on other ranks than the first, whose result is the same, except
        for ``local_state``. None on other devices of a rank than the first.
    """
    assert _training is not None
    value = getattr(_training, name)(*args)
    # Each rank has a state of its own; devices of a rank have gathered the same.
    speaks = _training.is_first_device if name == "local_state" else _training.writes
    if not speaks:
        return None
    if isinstance(value, nn.Module):
        value = value.state_dict()
    return tree_map_only(Tensor, Tensor.cpu, value)
