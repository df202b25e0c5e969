"""The layout of each message, which its receiver knows in advance.

A message is one flat tensor of bytes, without padding, whatever tensors it carries.
"""

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from toolkit.cost.compression import BLOCK_CODES, BlockCode, MessageCode
from toolkit.errors import UserError
from toolkit.runtime.compressed_form import (
    CODES,
    CompressedForm,
    CompressedMessage,
    TensorForm,
)
from toolkit.runtime.compressed_sums import CompressedSum
from toolkit.runtime.compressed_weights import CompressedWeights
from toolkit.runtime.losses import COUNT
from toolkit.runtime.quantization import dequantize, quantize
from toolkit.runtime.rank import Payload
from toolkit.runtime.updater import GradientSum
from toolkit.schedule import Buffer, Instruction

MESSAGE_DTYPES = {"none": None, "fp16": torch.float16, "bf16": torch.bfloat16}
"""The types in which gradients and weights can travel, by the name of the option."""


@dataclass(frozen=True)
class MessageTensor:
    """One tensor of a message.

    Attributes:
        place: a parameter's name, or an index among a boundary's tensors.
        shape: shape of the tensor.
        dtype: its type at both ends.
        sent_as: its type in the message.
        code: of its numbers in the message, which are bytes then; None: each has its type.
    """

    place: str | int
    shape: tuple[int, ...]
    dtype: torch.dtype
    sent_as: torch.dtype
    code: BlockCode | None = None

    @property
    def n_bytes(self) -> int:
        """Bytes of the tensor in the message."""
        if self.code is not None:
            return self.code.n_bytes(prod(self.shape))
        return prod(self.shape) * self.sent_as.itemsize

    @property
    def sent_shape(self) -> tuple[int, ...]:
        """Shape of what is in the message."""
        if self.code is not None:
            return (self.n_bytes,)
        return self.shape

    def encoded(self, tensor: Tensor) -> Tensor:
        """Return what is copied into the message, in any type."""
        if self.code is None:
            return tensor
        return quantize(tensor.flatten().to(self._code_dtype), self.code)

    def decoded(self, content: Tensor) -> Tensor:
        """Return the tensor of what is in the message."""
        if self.code is None:
            return content.to(self.dtype)
        n_numbers = prod(self.shape)
        numbers = dequantize(content, n_numbers, self.code, self._code_dtype)
        return numbers.view(self.shape).to(self.dtype)

    @property
    def _code_dtype(self) -> torch.dtype:
        """Type in which codes are computed: at least 32 bits."""
        return torch.promote_types(self.dtype, torch.float32)


@dataclass(frozen=True)
class Layout:
    """The tensors of a message, largest elements first, so that each is aligned."""

    tensors: tuple[MessageTensor, ...]

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
        message_tensors = []
        for place, tensor in tensors.items():
            if tensor is None:
                continue
            dtype = sent_as = tensor.dtype
            is_exact = place in exact or not tensor.is_floating_point()
            # Only where it saves bytes: tensors of 16 bits travel in their own type.
            if wire is not None and not is_exact and wire.itemsize < dtype.itemsize:
                sent_as = wire
            message_tensors.append(
                MessageTensor(place, tuple(tensor.shape), dtype, sent_as)
            )
        return cls(_by_size(message_tensors))

    def extended(self, tensors: Mapping[Any, Tensor]) -> "Layout":
        """Return this layout with further ``tensors``, which travel in their own types."""
        return Layout(_by_size([*self.tensors, *Layout.of(tensors).tensors]))

    def coded(self, places: Container[str | int], compression: str) -> "Layout":
        """Return this layout, in which real numbers at ``places`` travel compressed.

        Args:
            places: of tensors.
            compression: ``bf16``, or a name of ``BLOCK_CODES``.
        """
        code = BLOCK_CODES.get(compression)
        tensors = []
        for tensor in self.tensors:
            is_real = tensor.dtype.is_floating_point
            if not (tensor.place in places and is_real):
                tensors.append(tensor)
            elif code is not None:
                tensors.append(replace(tensor, sent_as=torch.uint8, code=code))
            elif tensor.dtype.itemsize > torch.bfloat16.itemsize:
                tensors.append(replace(tensor, sent_as=torch.bfloat16))
            else:
                tensors.append(tensor)
        return Layout(_by_size(tensors))

    @cached_property
    def n_bytes(self) -> int:
        """Bytes of the whole message."""
        return sum(tensor.n_bytes for tensor in self.tensors)

    @property
    def whole_bytes(self) -> int:
        """Bytes of the tensors at both ends."""
        return sum(
            prod(tensor.shape) * tensor.dtype.itemsize for tensor in self.tensors
        )

    def pack(self, tensors: Mapping, device: torch.device) -> Tensor:
        """Return one flat tensor of bytes on ``device``, from tensors by place."""
        ordered_tensors = []
        for tensor in self.tensors:
            ordered_tensors.append(tensor.encoded(tensors[tensor.place]))
        # Packed where the tensors are, in one operation; then it leaves a GPU as a whole.
        packing_device = device
        if ordered_tensors:
            packing_device = ordered_tensors[0].device
        flat = torch.empty(self.n_bytes, dtype=torch.uint8, device=packing_device)
        if ordered_tensors:
            torch._foreach_copy_(self._views(flat), ordered_tensors)
        return flat.to(device)

    def unpack(self, flat: Tensor) -> dict:
        """Return the tensors by place; those that travelled in their own type share its memory."""
        views = zip(self.tensors, self._views(flat), strict=True)
        return {tensor.place: tensor.decoded(view) for tensor, view in views}

    def _views(self, flat: Tensor) -> list[Tensor]:
        """Return views of the message as the tensors in it."""
        pieces = flat.split([tensor.n_bytes for tensor in self.tensors])
        views = []
        for tensor, piece in zip(self.tensors, pieces, strict=True):
            views.append(piece.view(tensor.sent_as).view(tensor.sent_shape))
        return views

    def by_dtype(self, flat: Tensor) -> list[Tensor]:
        """Return the message as one flat tensor of each type that is in it."""
        sizes: Counter[torch.dtype] = Counter()
        for tensor in self.tensors:
            sizes[tensor.sent_as] += tensor.n_bytes
        # Tensors of a type lie together; the counter has the types in the order of the message.
        pieces = flat.split([*sizes.values()])
        return [piece.view(dtype) for dtype, piece in zip(sizes, pieces, strict=True)]


def _by_size(tensors: Sequence[MessageTensor]) -> tuple[MessageTensor, ...]:
    # By name, too, so that tensors of one type lie together: Layout.by_dtype cuts between types.
    #
    #     | count, float64 | weights, float32 | biases, float32 | codes, uint8 |
    #     0                8                                             n_bytes
    #
    # All before a tensor has larger elements, in whole multiples: it is aligned without padding.
    return tuple(sorted(tensors, key=lambda x: (-x.sent_as.itemsize, str(x.sent_as))))


@dataclass(frozen=True)
class Layouts:
    """The messages of every stage, for micro-batches of one size.

    Attributes:
        activations: what each stage passes on.
        activation_gradients: gradients of each stage's inputs that have one.
        n_inputs: number of inputs of each stage, with the count of the loss, if any.
        gradients: gradients of each stage's weights, with the statistics of its norms.
        weights: one version of each stage's weights.
        compressed: what travels compressed of each stage's gradients; empty: nothing.
        compressed_weights: likewise of each stage's weights.
    """

    activations: tuple[Layout, ...]
    activation_gradients: tuple[Layout, ...]
    n_inputs: tuple[int, ...]
    gradients: tuple[Layout, ...]
    weights: tuple[Layout, ...]
    compressed: tuple[CompressedForm, ...] = ()
    compressed_weights: tuple[CompressedForm, ...] = ()

    def with_compression(
        self, code: MessageCode, code_of_weights: MessageCode
    ) -> "Layouts":
        """Return the layouts of messages of codes.

        Args:
            code: of gradients.
            code_of_weights: likewise.
        """
        layouts = []
        forms = []
        weight_forms = []
        for layout, weights in zip(self.gradients, self.weights, strict=True):
            # Statistics of norms and counts share the message of the gradients, but no weight's
            # name.
            names = {tensor.place for tensor in weights.tensors}
            form, sent_layout = _compressed(layout, names, code)
            layouts.append(sent_layout)
            forms.append(form)
            weight_form, _ = _compressed(weights, names, code_of_weights)
            weight_forms.append(weight_form)
        return replace(
            self,
            gradients=tuple(layouts),
            compressed=tuple(forms),
            compressed_weights=tuple(weight_forms),
        )

    def with_exact_weights(self) -> "Layouts":
        """Return the layouts whose weights travel as they are."""
        return replace(self, compressed_weights=())

    @cached_property
    def sent_weights(self) -> tuple[Layout, ...]:
        """One version of each stage's weights, as it travels."""
        if not self.compressed_weights:
            return self.weights
        layouts = []
        for layout, form in zip(self.weights, self.compressed_weights, strict=True):
            names = {tensor.name for tensor in form.tensors}
            layouts.append(_compressed(layout, names, form.code)[1])
        return tuple(layouts)

    def with_counts(self) -> "Layouts":
        """Return the layouts for a loss with a count, which travels with the gradients."""
        # The last stage knows the count, and every stage's update divides by the sum of counts:
        #
        #     stage 0   <-gradients, count-   stage 1   <-gradients, count-   stage 2, loss
        #        |  sum of gradients and of counts, to the rank that updates the stage
        count = torch.empty((), dtype=torch.float64, device="meta")
        activation_gradients = []
        for layout, n_inputs in zip(
            self.activation_gradients, self.n_inputs, strict=True
        ):
            activation_gradients.append(layout.extended({n_inputs: count}))
        return replace(
            self,
            activation_gradients=tuple(activation_gradients),
            n_inputs=tuple(n_inputs + 1 for n_inputs in self.n_inputs),
            gradients=tuple(
                layout.extended({COUNT: count}) for layout in self.gradients
            ),
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
        return self.sent_weights[i.stage]

    def pack(self, i: Instruction, payload: Payload, device: torch.device) -> Tensor:
        """Return what instruction ``i`` sends, as bytes on ``device``."""
        if isinstance(payload, GradientSum | CompressedMessage):
            named: Mapping[Any, Any] = payload.tensors
        elif isinstance(payload, tuple):
            named = dict(enumerate(payload))
        else:
            named = payload
        self._check_count(i, named)
        return self.of(i).pack(named, device)

    def _check_count(self, i: Instruction, named: Mapping[Any, Any]) -> None:
        """Raise UserError if a count of the loss would be left out of a message."""
        loses_count = False
        if i.buffer == Buffer.GRADIENT:
            places = {tensor.place for tensor in self.gradients[i.stage].tensors}
            loses_count = COUNT in named and COUNT not in places
        elif i.buffer == Buffer.ACTIVATION_GRADIENT:
            loses_count = len(named) > self.n_inputs[i.stage]
        if loses_count:
            raise UserError(
                "loss: got a sum with a count, but an error for outputs of zeros; expected a sum"
                " with a count for any outputs"
            )

    def unpack(self, i: Instruction, flat: Tensor) -> Payload:
        """Return what instruction ``i`` received."""
        tensors = self.of(i).unpack(flat)
        if i.buffer == Buffer.WEIGHTS and self.compressed_weights:
            return CompressedWeights(tensors, self.compressed_weights[i.stage])
        if i.buffer == Buffer.WEIGHTS:
            return tensors
        if i.buffer == Buffer.GRADIENT and self.compressed:
            return CompressedSum(tensors, self.compressed[i.stage])
        if i.buffer == Buffer.GRADIENT:
            return GradientSum(tensors)
        n_tensors = len(tensors)
        if i.buffer == Buffer.ACTIVATION_GRADIENT:
            n_tensors = self.n_inputs[i.stage]
        # What needs no gradient has no place in the message, and is None here.
        return tuple(tensors.get(index) for index in range(n_tensors))


def _compressed(
    layout: Layout, names: Container[str | int], code: MessageCode
) -> tuple[CompressedForm, Layout]:
    """Return the form of the real numbers of ``names`` in a layout, and the layout with codes."""
    compressed = []
    exact = []
    for tensor in layout.tensors:
        if tensor.place in names and tensor.dtype.is_floating_point:
            compressed.append(TensorForm(str(tensor.place), tensor.shape, tensor.dtype))
        else:
            exact.append(tensor)
    form = CompressedForm.of(compressed, code)
    codes = torch.empty(form.n_bytes, dtype=torch.uint8, device="meta")
    return form, Layout(tuple(exact)).extended({CODES: codes})
