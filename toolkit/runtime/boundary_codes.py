"""Activations and their gradients in few bits, where they go from rank to rank.

::

    stage j on rank p          message              stage j + 1 on rank q
    x            forward  ---> Q(x)  --->           computes with x' = what Q(x) stands for
    g' <---      backward <--- Q(g)  <---           makes g, the gradient of x'

Stage j keeps x for its backward, so g' is taken for the gradient of x. Nothing is kept from one
message to the next: a sample does not come again in the next step, so an error has no use.

Q is block-wise, see :mod:`toolkit.runtime.quantization`, or a cast to bfloat16. Blocks do not go
across the ends of tensors. So a tensor that is passed on over several cuts has the same blocks at
each cut, and rounding it again changes no bit. Inputs of the model, integers, what has no batch
(tied weights, losses) and counts of the loss travel exact.
"""

from dataclasses import dataclass, replace
from typing import cast

from toolkit.model import Stages
from toolkit.runtime.message_layout import Layout, Layouts
from toolkit.runtime.rank import Payload
from toolkit.runtime.saved_forward import Gradients
from toolkit.schedule import Buffer, Instruction


@dataclass(frozen=True)
class BoundaryCodes:
    """How activations and their gradients travel between ranks.

    Attributes:
        compression: ``bf16``, ``int8`` or ``int4``.
        places: ``[stage]``, places of activations among the tensors that it receives.
    """

    compression: str
    places: tuple[frozenset[int], ...]

    @classmethod
    def of(cls, stages: Stages, compression: str) -> "BoundaryCodes | None":
        """Return the codes for ``stages``; None without compression."""
        if compression == "none":
            return None
        places = tuple(stages.activations(stage) for stage in range(len(stages)))
        return cls(compression, places)

    def layouts(self, layouts: Layouts) -> Layouts:
        """Return ``layouts``, before counts of the loss are added, with codes."""
        # A layout of activations is that of their sender, and places are those of their receiver.
        *activations, results = layouts.activations
        coded_activations = []
        for layout, places in zip(activations, self.places[1:], strict=True):
            coded_activations.append(layout.coded(places, self.compression))
        coded_gradients = []
        for layout, places in zip(
            layouts.activation_gradients, self.places, strict=True
        ):
            coded_gradients.append(layout.coded(places, self.compression))
        return replace(
            layouts,
            activations=(*coded_activations, results),
            activation_gradients=tuple(coded_gradients),
        )

    def received(self, i: Instruction, payload: Payload) -> Payload:
        """Return what the receiver of ``i`` reads in place of ``payload``, which ``i`` sends."""
        if i.buffer == Buffer.ACTIVATION:
            places = self.places[i.stage + 1]
        elif i.buffer == Buffer.ACTIVATION_GRADIENT:
            places = self.places[i.stage]
        else:
            return payload
        tensors = cast(Gradients, payload)
        activations = {}
        for place, tensor in enumerate(tensors):
            if place in places and tensor is not None:
                activations[place] = tensor
        if not activations:
            return payload
        device = next(iter(activations.values())).device
        # By way of a message, as between processes, so that both read the same bits.
        layout = Layout.of(activations).coded(places, self.compression)
        read = layout.unpack(layout.pack(activations, device))
        return tuple(read.get(place, tensor) for place, tensor in enumerate(tensors))
