"""Weights that are handed from rank to rank as codes.

The owner's optimizer has weights theta of its own, in full precision. All ranks compute with the
weights hat that travel, the owner too, so no placement changes the trajectory::

    replicated state: a receiver keeps the version before, and gets the difference to it
        message_t = Q(theta_t - hat_{t-1})
        hat_t     = hat_{t-1} + message_t,    hat_0 = theta_0

    sharded or circulating state: a receiver keeps no version
        hat_t     = message_t = Q8(theta_t)   in 8 bits, whatever the code of gradients

What a message of differences lost, theta_t - hat_t, is part of the next one: error feedback
without further memory. The owner quantises a version once; others hand on the same bytes, so that
all have the same bits of hat_t. Q: see toolkit.runtime.quantization and toolkit.runtime.low_rank.

Source: differences as in EF21-P, arXiv 2209.15218, algorithm 1; 8-bit weights of a sharded state as
in ZeRO++, arXiv 2306.10209, section 3.1.
"""

from collections.abc import Callable, Collection, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from toolkit.cost.compression import MessageCode, weight_code
from toolkit.runtime.compressed_form import CODES, CompressedMessage, separated
from toolkit.runtime.updater import Weights

Key = tuple[int, int]
"""Stage and version."""


class CompressedWeights(CompressedMessage):
    """A weight version as it travels."""

    @torch.no_grad()
    def decoded(self, base: Weights | None) -> Weights:
        """Return the weights, by name, in memory of their own.

        Args:
            base: the version before, if the message has differences to it.
        """
        numbers = self.numbers()
        if base is not None:
            numbers += self.form.flat(base).to(numbers.device)
        weights = {name: tensor.clone() for name, tensor in self.exact.items()}
        # A copy each: a view would keep the memory of all of the stage's weights.
        for name, tensor in self.form.split(numbers).items():
            weights[name] = tensor.clone()
        return weights


class WeightCompressor:
    """Compresses the weights of the stages that a rank owns, and reads those that it receives.

    Args:
        code: of gradients.
        stages: that this rank owns, and whose weights travel.
        differences: whether messages are differences to the version before.

    Attributes:
        messages: of the versions that this rank has, by stage and version.
        bases: by stage, the newest version that the program has freed, with its number: the next
            message is a difference to it.
        newest: by stage, the owner's own weights of the newest version, where ``keeps_newest``.
        keeps_newest: whether they are kept, for readers while the optimizer shows other weights.
        error_feedback: whether a difference has what the messages before lost.
    """

    def __init__(
        self, code: MessageCode, stages: Collection[int], *, differences: bool
    ) -> None:
        self.code = weight_code(code, differences=differences)
        self.stages = stages
        self.differences = differences
        self.messages: dict[Key, CompressedWeights] = {}
        self.bases: dict[int, tuple[int, Weights]] = {}
        self.newest: dict[int, Weights] = {}
        self.keeps_newest = False
        self.error_feedback = True
        # By stage, theta_{t-1}; without feedback alone.
        self._previous: dict[int, Weights] = {}

    @torch.no_grad()
    def encode(self, key: Key, newest: Weights, base: Weights | None) -> Weights:
        """Compress a new version; return the weights with which all ranks compute.

        Args:
            key: stage and version.
            newest: the owner's own weights, in full precision.
            base: what all ranks have of the version before, for a difference to it.
        """
        form, exact = separated(newest, newest, self.code)
        numbers = form.flat(newest)
        if self.keeps_newest:
            self.newest[key[0]] = newest
        if not self.differences:
            base = None
        else:
            assert base is not None, key
            origin = base
            if not self.error_feedback:
                origin = self._previous.get(key[0], base)
                self._previous[key[0]] = {name: x.clone() for name, x in newest.items()}
            numbers = numbers - form.flat(origin)
        # A copy of what travels as it is: the optimizer changes its own in place.
        tensors = {name: tensor.clone() for name, tensor in exact.items()}
        tensors[CODES] = form.encode(numbers)
        message = CompressedWeights(tensors, form)
        self.messages[key] = message
        return message.decoded(base)

    def receive(
        self, key: Key, message: CompressedWeights, base: Weights | None
    ) -> Weights:
        """Return the weights of a message that came, which this rank may hand on.

        Args:
            key: stage and version.
            message: what came.
            base: the version before, if the program still holds it.
        """
        self.messages[key] = message
        if not self.differences:
            return message.decoded(None)
        stage, version = key
        if base is None:
            base_version, base = self.bases[stage]
            assert base_version == version - 1, (key, base_version)
        weights = message.decoded(base)
        self.bases.pop(stage, None)
        return weights

    def encode_all(self, versions: Mapping[int, MutableMapping[int, Weights]]) -> None:
        """Compress the versions that travel as they are and have no message yet.

        Args:
            versions: ``[stage][version]``, which are replaced by what all ranks compute with.
        """
        if self.differences:
            return  # all ranks have them already
        for stage in self.stages:
            for version, weights in [*versions[stage].items()]:
                if (stage, version) not in self.messages:
                    versions[stage][version] = self.encode(
                        (stage, version), weights, None
                    )

    def free(self, key: Key, weights: Weights, *, is_newest: bool) -> None:
        """Note that the program frees a version of this rank.

        Args:
            key: stage and version.
            weights: of that version.
            is_newest: whether no newer version has come.
        """
        if self.differences and is_newest:
            stage, version = key
            self.bases[stage] = version, weights

    def forget(self, key: Key, needed: Callable[[Key], bool]) -> None:
        """Free the messages of a stage that neither this nor a later program sends again.

        Args:
            key: the version that the program has freed. Messages of later ones stay: another thread
                may receive one right now.
            needed: whether this rank still has a version, for this or a later program.
        """
        stage, freed_version = key
        # Also of versions freed before, which a later program might have sent again until now. A
        # copy: another thread may add a message.
        for message_key in [*self.messages]:
            if message_key[0] != stage or message_key[1] > freed_version:
                continue
            if not needed(message_key):
                self.messages.pop(message_key, None)

    def state(self) -> dict[int, dict[int, dict[str, Tensor]]]:
        """Return the messages, by stage and version, that later programs send again."""
        state: dict[int, dict[int, dict[str, Tensor]]] = {}
        # A copy: another thread may add a message.
        for (stage, version), message in dict(self.messages).items():
            if stage in self.stages and not self.differences:
                state.setdefault(stage, {})[version] = message.tensors
        return state

    def load(
        self,
        state: Mapping[int, Any],
        versions: Mapping[int, MutableMapping[int, Weights]],
    ) -> None:
        """Take over a copy of the :meth:`state` of the same rank.

        Args:
            state: messages by stage and version.
            versions: ``[stage][version]``, the weights in the state.
        """
        self.messages = {}
        self.bases = {}
        self._previous = {}
        for stage, messages in state.items():
            for version, tensors in messages.items():
                weights = versions[stage][version]
                form, _ = separated(weights, weights, self.code)
                device = next(iter(weights.values())).device
                copies = {name: x.to(device, copy=True) for name, x in tensors.items()}
                self.messages[stage, version] = CompressedWeights(copies, form)
        self.encode_all(versions)
