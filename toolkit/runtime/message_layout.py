"""The layout of each message, which its receiver knows in advance.

A message is one flat tensor of bytes, without padding, whatever tensors it carries.
"""

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from toolkit.errors import UserError
from toolkit.model.analysis import differentiable
from toolkit.runtime.losses import COUNT
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
        tensors: Mapping[Any, Tensor | None],
        wire: torch.dtype | None = None,
        exact: Container[str] = (),
    ) -> "Layout":
        """Return the layout of ``tensors`` by place, without those that are None.

        Types larger than ``wire`` are sent as ``wire``, except at ``exact`` places.
        """

        def travelling(place: str | int, tensor: Tensor) -> Part:
            shorter = tensor.is_floating_point() and wire and wire.itemsize < tensor.dtype.itemsize
            sent_as = wire if wire and shorter and place not in exact else tensor.dtype
            return Part(place, tuple(tensor.shape), tensor.dtype, sent_as)

        present = {place: tensor for place, tensor in tensors.items() if tensor is not None}
        return cls(_by_size([travelling(place, tensor) for place, tensor in present.items()]))

    def extended(self, tensors: Mapping[Any, Tensor]) -> "Layout":
        """Return this layout with further ``tensors``, which travel in their own types."""
        return Layout(_by_size([*self.parts, *Layout.of(tensors).parts]))

    @cached_property
    def n_bytes(self) -> int:
        """Bytes of the whole message."""
        return sum(tensor.n_bytes for tensor in self.parts)

    def pack(self, tensors: Mapping, device: torch.device) -> Tensor:
        """Return one flat tensor of bytes on ``device``, from tensors by place."""
        ordered_tensors = [tensors[travelling.place] for travelling in self.parts]
        # Packed where the tensors are, in one operation; then it leaves a GPU as a whole.
        packing_device = ordered_tensors[0].device if ordered_tensors else device
        flat = torch.empty(self.n_bytes, dtype=torch.uint8, device=packing_device)
        if ordered_tensors:
            torch._foreach_copy_(self._views(flat), ordered_tensors)
        return flat.to(device)

    def unpack(self, flat: Tensor) -> dict:
        """Return the tensors by place; those that travelled in their own type share its memory."""
        views = self._views(flat)
        return {p.place: view.to(p.dtype) for p, view in zip(self.parts, views, strict=True)}

    def _views(self, flat: Tensor) -> list[Tensor]:
        pieces = zip(self.parts, flat.split([part.n_bytes for part in self.parts]), strict=True)
        return [piece.view(part.sent_as).view(part.shape) for part, piece in pieces]

    def by_dtype(self, flat: Tensor) -> list[Tensor]:
        """Return the message as one flat tensor of each type that is in it."""
        sizes: Counter[torch.dtype] = Counter()
        for part in self.parts:
            sizes[part.sent_as] += part.n_bytes
        pieces = flat.split([*sizes.values()])
        return [piece.view(dtype) for dtype, piece in zip(sizes, pieces, strict=True)]


def _by_size(parts: Sequence[Part]) -> tuple[Part, ...]:
    return tuple(sorted(parts, key=lambda p: (-p.sent_as.itemsize, str(p.sent_as))))


@dataclass(frozen=True)
class Layouts:
    """The messages of every stage, for micro-batches of one size."""

    activations: tuple[Layout, ...]  # that a stage passes on
    activation_gradients: tuple[Layout, ...]  # of a stage's inputs that have a gradient
    n_inputs: tuple[int, ...]
    gradients: tuple[Layout, ...]  # of a stage's weights, with the statistics of its norms
    weights: tuple[Layout, ...]  # one version

    def with_counts(self) -> "Layouts":
        """Return the layouts for a loss with a count, which travels with the gradients."""
        count = torch.empty((), dtype=torch.float64, device="meta")
        input_layouts = zip(self.activation_gradients, self.n_inputs, strict=True)
        return replace(
            self,
            activation_gradients=tuple(
                layout.extended({n_inputs: count}) for layout, n_inputs in input_layouts
            ),
            n_inputs=tuple(n_inputs + 1 for n_inputs in self.n_inputs),
            gradients=tuple(layout.extended({COUNT: count}) for layout in self.gradients),
        )

    def of(self, i: Instruction) -> Layout:
        """Return the layout of the message of an instruction."""
        match i.buffer:
            case Buffer.ACTIVATION:
                return self.activations[i.stage]
            case Buffer.ACTIVATION_GRADIENT:
                return self.activation_gradients[i.stage]
            case Buffer.GRADIENT:
                return self.gradients[i.stage]
        return self.weights[i.stage]

    def pack(self, i: Instruction, payload: Payload, device: torch.device) -> Tensor:
        """Return what instruction ``i`` sends, as bytes on ``device``."""
        tensors = payload.tensors if isinstance(payload, GradientSum) else payload
        named = dict(enumerate(tensors)) if isinstance(tensors, tuple) else tensors
        self._check_count(i, named)
        return self.of(i).pack(named, device)

    def _check_count(self, i: Instruction, named: Mapping[Any, Any]) -> None:
        """Raise UserError if a count of the loss would be left out of a message."""
        if i.buffer == Buffer.GRADIENT:
            loses_count = COUNT in named and all(
                entry.place != COUNT for entry in self.gradients[i.stage].parts
            )
        else:
            loses_count = (
                i.buffer == Buffer.ACTIVATION_GRADIENT and len(named) > self.n_inputs[i.stage]
            )
        if loses_count:
            raise UserError(
                "loss: got a sum with a count, but an error for outputs of zeros; expected a sum"
                " with a count for any outputs"
            )

    def unpack(self, i: Instruction, flat: Tensor) -> Payload:
        """Return what instruction ``i`` received."""
        tensors = self.of(i).unpack(flat)
        if i.buffer == Buffer.WEIGHTS:
            return tensors
        if i.buffer == Buffer.GRADIENT:
            return GradientSum(tensors)
        n_tensors = len(tensors) if i.buffer == Buffer.ACTIVATION else self.n_inputs[i.stage]
        return tuple(tensors.get(index) for index in range(n_tensors))


def find_layouts(
    skeletons: Sequence[nn.Module],
    inputs: Values,
    wire: torch.dtype | None = None,
    device: torch.device = _CPU,
) -> Layouts:
    """Find the layouts of stages and a micro-batch's ``inputs`` on the meta device.

    They compute on ``device``, for which autocast chooses types; ``wire`` is as in ``Layout.of``.
    """
    activations, activation_gradients, gradients, versions = [], [], [], []
    with FakeTensorMode():
        inputs = tuple(_fake(tensor, device) for tensor in inputs)
        runs: list[tuple[dict[str, Tensor], Values, Values]] = []
        for stage in skeletons:
            named_tensors = chain(stage.named_parameters(), stage.named_buffers())
            tensors = {
                name: _fake(tensor, device).requires_grad_(tensor.requires_grad)
                for name, tensor in named_tensors
            }
            outputs: Values = torch.func.functional_call(stage, tensors, inputs)
            runs.append((tensors, inputs, outputs))
            activations.append(Layout.of(dict(enumerate(outputs))))
            inputs = tuple(
                torch.empty_like(tensor).requires_grad_(differentiable(tensor))
                for tensor in outputs
            )
        output_gradients: Sequence[Tensor | None] = [torch.empty_like(tensor) for tensor in inputs]
        for stage, (tensors, received, outputs) in reversed([*zip(skeletons, runs, strict=True)]):
            weights = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
            all_gradients = _gradients(outputs, output_gradients, [*received, *weights.values()])
            output_gradients = all_gradients[: len(received)]
            weight_gradients = dict(zip(weights, all_gradients[len(received) :], strict=True))
            norms = {
                name: norm
                for name, norm in stage.named_modules()
                if isinstance(norm, MicrobatchNorm)
            }
            statistics = take_statistics(norms)
            activation_gradients.append(Layout.of(dict(enumerate(output_gradients))))
            gradients.append(Layout.of(weight_gradients | statistics, wire, exact=statistics))
            versions.append(Layout.of(weights, wire))
    return Layouts(
        tuple(activations),
        tuple(reversed(activation_gradients)),
        tuple(len(received) for _, received, _ in runs),
        tuple(reversed(gradients)),
        tuple(reversed(versions)),
    )


def _fake(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def _gradients(
    outputs: Values, output_gradients: Sequence[Tensor | None], leaves: list[Tensor]
) -> list[Tensor | None]:
    pairs = zip(outputs, output_gradients, strict=True)
    roots = [(x, grad) for x, grad in pairs if x.requires_grad and grad is not None]
    differentiable_leaves = [x for x in leaves if x.requires_grad]
    if not roots or not differentiable_leaves:
        return [None] * len(leaves)
    root_outputs, root_gradients = zip(*roots, strict=True)
    gradients = iter(
        torch.autograd.grad(root_outputs, differentiable_leaves, root_gradients, allow_unused=True)
    )
    return [next(gradients) if x.requires_grad else None for x in leaves]
