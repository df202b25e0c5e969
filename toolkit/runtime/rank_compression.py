"""What ranks keep for messages of codes, in a runtime and in its state.

Gradients: see :mod:`toolkit.runtime.compressed_sums`. Weights, with the same bits on all
ranks: see :mod:`toolkit.runtime.compressed_weights`. A program knows nothing of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from toolkit.cost.compression import MESSAGE_CODES, MessageCode, sends_differences
from toolkit.errors import UserError
from toolkit.runtime.compressed_form import CODES, separated
from toolkit.runtime.compressed_sums import SumCompressor
from toolkit.runtime.compressed_weights import WeightCompressor
from toolkit.runtime.updater import Weights
from toolkit.schedule import Action, Buffer, Schedule

_COLLECTIVES = (Action.ALL_REDUCE, Action.REDUCE)


@dataclass(frozen=True)
class RankCompressor:
    """What compresses the messages of one rank.

    Attributes:
        sums: of the gradients that it hands on.
        weights: of the stages that it owns, and those that it receives.
    """

    sums: SumCompressor
    weights: WeightCompressor

    @classmethod
    def of(cls, schedule: Schedule, rank: int, code: MessageCode) -> "RankCompressor":
        """Return what compresses the messages of a rank.

        Args:
            schedule: that the ranks follow.
            rank: the rank.
            code: of gradients.
        """
        differences = sends_differences(schedule.state)
        stages = [
            stage
            for stage in travelling_stages(schedule)
            if schedule.owners[stage] == rank
        ]
        weights = WeightCompressor(code, stages, differences=differences)
        return cls(SumCompressor(code), weights)

    @property
    def chained(self) -> tuple[Buffer, ...]:
        """Kinds whose messages of a stage each depend on the one before."""
        if self.weights.differences:
            return Buffer.GRADIENT, Buffer.WEIGHTS
        return (Buffer.GRADIENT,)

    def follow_loop(self, lead: int, newest: Mapping[int, Weights]) -> None:
        """Keep what another rank may still read while this one is steps ahead, in its own loop.

        Args:
            lead: number of training steps that this rank may be ahead.
            newest: by stage, the exact weights of the stages that this rank updates.
        """
        self.sums.lead = lead
        self.weights.keeps_newest = True
        for stage in self.weights.stages:
            self.weights.newest[stage] = newest[stage]

    def state(self, steps_done: int | None = None) -> dict[str, Any]:
        """Return what the next messages depend on, besides versions of weights.

        Args:
            steps_done: training steps after which; None: all so far. See :meth:`follow_loop`.
        """
        state: dict[str, Any] = {"errors": self.sums.errors_after(steps_done)}
        if not self.weights.differences:
            state["weights"] = self.weights.state()
        return state

    def load(
        self, state: Mapping[str, Any], versions: Mapping[int, dict[int, Weights]]
    ) -> None:
        """Take over a copy of a :meth:`state`.

        Args:
            state: of the same rank.
            versions: ``[stage][version]``, the weights in the state.
        """
        self.sums.load(state.get("errors", {}))
        self.weights.load(state.get("weights", {}), versions)


def travelling_stages(schedule: Schedule) -> list[int]:
    """Return the stages whose weights are read on other ranks than their owner's."""
    stages = []
    for stage, owner in enumerate(schedule.owners):
        if {*schedule.layout.ranks(stage)} != {owner}:
            stages.append(stage)
    return stages


def ranks_state(
    compressors: Mapping[int, RankCompressor], steps_done: int | None = None
) -> dict[str, Any]:
    """Return the entry of the compressors, by rank, in a state; nothing without compressors.

    Args:
        compressors: by rank.
        steps_done: as of :meth:`RankCompressor.state`.
    """
    if not compressors:
        return {}
    states = {}
    for rank, compressor in compressors.items():
        states[rank] = compressor.state(steps_done)
    return {"ranks": states}


def load_ranks_state(
    compressors: Mapping[int, RankCompressor],
    state: Mapping[str, Any],
    versions: Mapping[int, dict[int, Weights]],
) -> None:
    """Take over what ranks have in ``state``, which :func:`check_ranks_state` accepts.

    Args:
        compressors: by rank.
        state: of a run.
        versions: ``[stage][version]``, the weights in the state.
    """
    ranks = state.get("ranks", {})
    for rank, compressor in compressors.items():
        compressor.load(ranks.get(rank, {}), versions)


def check_ranks_state(
    state: Mapping[str, Any], sizes: Mapping[int, int], code: MessageCode | None
) -> None:
    """Raise UserError if what ranks keep in ``state`` is not that of compressed messages.

    Args:
        state: of all ranks.
        sizes: numbers of the weights of each stage.
        code: of the runtime's messages; None: they are not compressed.
    """
    for rank, entries in state.get("ranks", {}).items():
        errors = entries.get("errors", {}) if isinstance(entries, dict) else None
        if errors and code is None:
            raise UserError(
                f"the state has what compressed messages of rank {rank} lost: give the"
                f" compression={' or '.join(MESSAGE_CODES)} that saved it"
            )
        if code is not None and not _fits(entries, sizes, state["versions"]):
            raise UserError(
                f"the state of rank {rank} is not that of compressed messages of this model:"
                " give the runtime and options that saved it"
            )


def _fits(
    entries: Any, sizes: Mapping[int, int], versions: Sequence[Mapping[int, Weights]]
) -> bool:
    """Whether a rank's errors are of no more numbers than weights, and messages of versions."""
    if not isinstance(entries, dict) or not {"errors"} <= entries.keys() <= {
        "errors",
        "weights",
    }:
        return False
    for stage, tensors in entries["errors"].items():
        for error in tensors.values():
            if not (isinstance(error, Tensor) and error.ndim == 1):
                return False
            if len(error) > sizes.get(stage, 0):
                return False
    for stage, messages in entries.get("weights", {}).items():
        if stage not in sizes or not messages.keys() <= versions[stage].keys():
            return False
        for version, tensors in messages.items():
            weights = versions[stage][version]
            form, exact = separated(weights, weights, MESSAGE_CODES["int8"])
            content = tensors.get(CODES)
            if tensors.keys() != {CODES, *exact} or content.dtype != torch.uint8:
                return False
            if len(content) != form.n_bytes:
                return False
    return True


def check_handed_on(schedule_plan: Schedule, code: MessageCode) -> None:
    """Raise UserError unless all gradients that travel are handed from rank to rank.

    Args:
        schedule_plan: the schedule.
        code: of gradients.
    """
    if any(schedule_plan.changes(range(2**31))):
        raise UserError(
            f"compression={code.name} takes one schedule, since a message adds what the one before"
            f" lost: got {schedule_plan.name} with changes; use compression=bf16"
        )
    actions = set()
    for instructions in schedule_plan.at(0).lower(2).ranks:
        actions |= {i.action for i in instructions if i.buffer == Buffer.GRADIENT}
    if Action.SEND not in actions or not actions.isdisjoint(_COLLECTIVES):
        raise UserError(
            f"compression={code.name} is of messages that are handed from rank to rank, as by"
            f" cdp_v1 and cdp_v2: {schedule_plan.name} sums them otherwise. Use compression=bf16,"
            f" or runtime=ddp with compression={code.name}"
        )
