"""Random draws by the layer's name, so that neither cuts nor ranks change them."""

import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class _Draws:
    """The micro-batch that draws now, and the generators from which it draws."""

    seed: int
    step: int
    microbatch: int
    generators: Sequence[torch.Generator]


class _Current(threading.local):
    """The draws of this thread; a checkpointed stage may run again in a thread of autograd."""

    draws: _Draws | None = None


_current = _Current()


@contextmanager
def drawing(
    inputs: Sequence[Tensor], seed: int, step: int, microbatch: int
) -> Iterator[None]:
    """Let layers draw by seed, step, name and micro-batch; afterwards restore the generators."""
    gpus = {tensor.device for tensor in inputs if tensor.is_cuda}
    # Each on its own, since torch.manual_seed would change the generators of other GPUs, too.
    generators = [torch.default_generator]
    generators += [torch.cuda.default_generators[device.index] for device in gpus]
    outer = _current.draws
    with torch.random.fork_rng(gpus):
        _current.draws = _Draws(seed, step, microbatch, generators)
        try:
            yield
        finally:
            _current.draws = outer


def seed_layer(name: str) -> None:
    """Seed the draws of the layer ``name``; outside of :func:`drawing`, do nothing.

    Graphs of stages call it right before each operation that draws.
    """
    draws = _current.draws
    if draws is None:
        return
    # Not hash(name), which is another number in each process.
    layer = zlib.crc32(name.encode())
    # Of integers, whose hash is the same in all processes.
    layer_seed = hash((draws.seed, draws.step, layer, draws.microbatch))
    for generator in draws.generators:
        generator.manual_seed(layer_seed)


# torch.compile leaves a marked function out of its graphs, which would freeze the seed of the first
# call. The marks are those of torch.compiler.disable, which takes a second to import the compiler.
vars(seed_layer)["_torchdynamo_disable"] = True
vars(seed_layer)["_torchdynamo_disable_msg"] = (
    "it seeds the generators before each layer's draws"
)
