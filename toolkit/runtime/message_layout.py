"""What each message consists of, known to its receiver before it comes.

A message is one flat tensor of bytes, without padding, whatever tensors it carries.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import prod

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from toolkit.model.analysis import differentiable
from toolkit.runtime.microbatch_norm import MicrobatchNorm, take_statistics
from toolkit.runtime.rank import Payload
from toolkit.runtime.stage import Values
from toolkit.runtime.updater import GradientSum
from toolkit.schedule import Buffer, Instruction

_CPU = torch.device("cpu")

COMPRESSIONS = {"none": None, "fp16": torch.float16, "bf16": torch.bfloat16}
"""The types in which gradients and weights can travel, by the name of the option."""


@dataclass(frozen=True)
class Part:
    """One tensor of a message, by a parameter's name or its index among a boundary's tensors."""

    place: str | int
    shape: tuple[int, ...]
    dtype: torch.dtype
    sent_as: torch.dtype

    @property
    def n_bytes(self) -> int:
        """Bytes of the tensor in the message."""
        return prod(self.shape) * self.sent_as.itemsize


@dataclass(frozen=True)
class Layout:
    """The tensors of a message, largest elements first, so that each is aligned."""

    parts: tuple[Part, ...]

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, Tensor] | Mapping[int, Tensor],
        wire: torch.dtype | None = None,
        exact: Container[str] = (),  # places that travel as they are
    ) -> "Layout":
        """Return the layout of ``tensors``; larger types than ``wire`` travel as it."""

        def sent_as(place: str | int, x: Tensor) -> torch.dtype:
            shorter = x.is_floating_point() and wire and wire.itemsize < x.dtype.itemsize
            return wire if wire and shorter and place not in exact else x.dtype

        parts = [Part(k, tuple(x.shape), x.dtype, sent_as(k, x)) for k, x in tensors.items()]
        parts.sort(key=lambda part: (-part.sent_as.itemsize, str(part.sent_as)))
        return cls(tuple(parts))

    @cached_property
    def n_bytes(self) -> int:
        """Bytes of the whole message."""
        return sum(part.n_bytes for part in self.parts)

    def pack(self, tensors: Mapping, device: torch.device) -> Tensor:
        """Return one flat tensor of bytes on ``device``, from tensors by place."""
        given = [tensors[part.place] for part in self.parts]
        # Packed where the tensors are, in one operation; then it leaves a GPU as a whole.
        here = given[0].device if given else device
        flat = torch.empty(self.n_bytes, dtype=torch.uint8, device=here)
        if given:
            torch._foreach_copy_(self._views(flat), given)
        return flat.to(device)

    def unpack(self, flat: Tensor) -> dict:
        """Return the tensors by place; those that travelled in their own type share its memory."""
        views = self._views(flat)
        return {p.place: view.to(p.dtype) for p, view in zip(self.parts, views, strict=True)}

    def _views(self, flat: Tensor) -> list[Tensor]:
        pieces = flat.split([part.n_bytes for part in self.parts])
        return [
            piece.view(part.sent_as).view(part.shape)
            for part, piece in zip(self.parts, pieces, strict=True)
        ]

    def by_dtype(self, flat: Tensor) -> list[Tensor]:
        """Return the message as one flat tensor of each type that is in it."""
        sizes: dict[torch.dtype, int] = {}
        for part in self.parts:
            sizes[part.sent_as] = sizes.get(part.sent_as, 0) + part.n_bytes
        pieces = flat.split(list(sizes.values()))
        return [piece.view(dtype) for dtype, piece in zip(sizes, pieces, strict=True)]


@dataclass(frozen=True)
class Layouts:
    """The messages of every stage, for micro-batches of one size."""

    activations: tuple[Layout, ...]  # that a stage passes on
    activation_gradients: tuple[Layout, ...]  # of a stage's inputs that have a gradient
    n_inputs: tuple[int, ...]
    gradients: tuple[Layout, ...]  # of a stage's weights, with the statistics of its norms
    weights: tuple[Layout, ...]  # one version

    def of(self, i: Instruction) -> Layout:
        """Return the layout of the message of an instruction."""
        found = {
            Buffer.ACTIVATION: self.activations,
            Buffer.ACTIVATION_GRADIENT: self.activation_gradients,
            Buffer.GRADIENT: self.gradients,
            Buffer.WEIGHTS: self.weights,
        }
        assert i.buffer is not None
        return found[i.buffer][i.stage]

    def pack(self, i: Instruction, payload: Payload, device: torch.device) -> Tensor:
        """Return what instruction ``i`` sends, as bytes on ``device``."""
        tensors = payload.tensors if isinstance(payload, GradientSum) else payload
        named = dict(enumerate(tensors)) if isinstance(tensors, tuple) else tensors
        return self.of(i).pack(named, device)

    def unpack(self, i: Instruction, flat: Tensor) -> Payload:
        """Return what instruction ``i`` received."""
        tensors = self.of(i).unpack(flat)
        if i.buffer == Buffer.WEIGHTS:
            return tensors
        if i.buffer == Buffer.GRADIENT:
            return GradientSum(tensors)
        n = len(tensors) if i.buffer == Buffer.ACTIVATION else self.n_inputs[i.stage]
        return tuple(tensors.get(k) for k in range(n))


def find_layouts(
    skeletons: Sequence[nn.Module],
    inputs: Values,
    wire: torch.dtype | None = None,
    device: torch.device = _CPU,
) -> Layouts:
    """Find the layouts of all stages, without computing or allocating anything.

    ``skeletons`` and a micro-batch's ``inputs`` are on the meta device. ``device`` is where they
    compute, which decides the types that autocast chooses; ``wire`` is as in ``Layout.of``.
    """
    with FakeTensorMode():
        inputs = tuple(_fake(x, device) for x in inputs)
        runs: list[tuple[dict[str, Tensor], Values, Values]] = []
        for stage in skeletons:
            named = chain(stage.named_parameters(), stage.named_buffers())
            tensors = {k: _fake(x, device).requires_grad_(x.requires_grad) for k, x in named}
            outputs: Values = torch.func.functional_call(stage, tensors, inputs)
            runs.append((tensors, inputs, outputs))
            inputs = tuple(torch.empty_like(x).requires_grad_(differentiable(x)) for x in outputs)
        given: Sequence[Tensor | None] = [torch.empty_like(x) for x in runs[-1][2]]
        activation_gradients, gradients, versions = [], [], []
        for stage, (tensors, received, outputs) in reversed([*zip(skeletons, runs, strict=True)]):
            weights = {name: x for name, x in tensors.items() if x.requires_grad}
            found = _gradients(outputs, given, [*received, *weights.values()])
            given, of_weights = found[: len(received)], found[len(received) :]
            crossing = {k: grad for k, grad in enumerate(given) if grad is not None}
            activation_gradients.append(Layout.of(crossing))
            pairs = zip(weights, of_weights, strict=True)
            summed = {name: grad for name, grad in pairs if grad is not None}
            norms = {k: m for k, m in stage.named_modules() if isinstance(m, MicrobatchNorm)}
            statistics = take_statistics(norms)
            gradients.append(Layout.of(summed | statistics, wire, exact=statistics))
            versions.append(Layout.of(weights, wire))
    return Layouts(
        activations=tuple(Layout.of(dict(enumerate(outputs))) for *_, outputs in runs),
        activation_gradients=tuple(reversed(activation_gradients)),
        n_inputs=tuple(len(received) for _, received, _ in runs),
        gradients=tuple(reversed(gradients)),
        weights=tuple(reversed(versions)),
    )


def _fake(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def _gradients(
    outputs: Values, given: Sequence[Tensor | None], wanted: list[Tensor]
) -> list[Tensor | None]:
    pairs = zip(outputs, given, strict=True)
    roots = [(x, grad) for x, grad in pairs if x.requires_grad and grad is not None]
    trained = [x for x in wanted if x.requires_grad]
    if not roots or not trained:
        return [None] * len(wanted)
    ends, grads = zip(*roots, strict=True)
    found = iter(torch.autograd.grad(ends, trained, grads, allow_unused=True))
    return [next(found) if x.requires_grad else None for x in wanted]
