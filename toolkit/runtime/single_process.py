"""Runtime of a schedule in one process."""

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from torch import nn

from toolkit.cost.boundary_compression import BOUNDARY_COMPRESSIONS
from toolkit.cost.compression import MESSAGE_CODES
from toolkit.errors import UserError, check_choice
from toolkit.runtime.base import Steps
from toolkit.runtime.boundary_codes import BoundaryCodes
from toolkit.runtime.capture import CAPTURES, StepCapture, obstacle
from toolkit.runtime.cuda_graphs import recorder_for
from toolkit.runtime.grouped import Grouped
from toolkit.runtime.grouped_pass import GroupedPass
from toolkit.runtime.local_runtime import LocalRuntime
from toolkit.runtime.microbatch_losses import MicrobatchLosses
from toolkit.runtime.microbatches import BatchReader, MicrobatchQueue, StepResult
from toolkit.runtime.rank import Payload, Rank, Watching
from toolkit.runtime.rank_compression import (
    RankCompressor,
    load_ranks_state,
    ranks_state,
)
from toolkit.runtime.stage import StageRunner
from toolkit.runtime.state import load_model, loaded, local_state_of
from toolkit.runtime.step_options import Loss
from toolkit.runtime.updater import GradientSum, Weights
from toolkit.schedule import Action, Instruction, Program, Schedule
from toolkit.schedule.replay import replay

ORDERS = ("grouped", "scheduled")
# A program of all steps of a long run would take memory and time before the first step.
_WINDOW = 64  # training steps lowered at once


@dataclass(eq=False, repr=False)
class SingleProcess(LocalRuntime):
    """Trains stages by a schedule in this process.

    The trajectory depends only on the schedule's staleness and correction, the seed, the order of
    the data and the hyper-parameters::

        theta^j_{t+1} = optimizer(theta^j_t, 1/M sum_m grad_j f_m(theta_hat_{m,t}))
        theta_hat^j_{m,t} = theta^j_{t - staleness[j][m]}

    or what a :class:`toolkit.schedule.Correction` makes of it.

    Args:
        stages, schedule, optimizer, loss, lr_scheduler, seed, options: as in ``Runtime``. The
            model's parameters are trained in place.
        order: ``"grouped"``, nearly as fast as plain training; or ``"scheduled"``, which runs the
            schedule's program slot by slot and has the schedule's memory.
        diagnostics: training steps between two measurements of the delay's effect on gradients,
            in order "grouped" (see :class:`~toolkit.runtime.microbatches.StageDelay`); 0: none.
        watching: context of each forward in order "scheduled", from its weights, inputs, buffers.
        capture: ``"auto"``: on a GPU, order "grouped" replays its gradients as CUDA graphs where
            it can, and warns once where it cannot; or ``"off"``. See
            :mod:`toolkit.runtime.capture`.
        compression: ``none``, or in order "scheduled" ``int8``, ``int4``, ``topk`` or ``low_rank``
            for gradients and weights that the schedule's ranks hand on, as in
            :class:`~toolkit.runtime.Distributed`.
        boundary_compression: ``none``, or in order "scheduled" ``bf16``, ``int8`` or ``int4`` for
            activations and their gradients that go from rank to rank, likewise.

    Raises:
        UserError: stages, schedule and options do not fit, or the order is unknown.

    Source: the update rules (DP), (CDP-v1) and (CDP-v2) of arXiv 2403.08837, section 3.
    """

    order: str = "grouped"
    _: KW_ONLY
    diagnostics: int = 0
    watching: Watching | None = None
    capture: str = "auto"
    compression: str = "none"
    boundary_compression: str = "none"

    _follows_schedule = True

    def __post_init__(self) -> None:
        check_choice("order", self.order, ORDERS)
        check_choice("capture", self.capture, CAPTURES)
        check_choice("compression", self.compression, ("none", *MESSAGE_CODES))
        self._gradient_code = MESSAGE_CODES.get(self.compression)
        if self._gradient_code is not None and self.order != "scheduled":
            raise UserError(
                f"compression={self.compression} needs order=scheduled: order={self.order} hands no"
                " sums of gradients from rank to rank"
            )
        check_choice(
            "boundary_compression", self.boundary_compression, BOUNDARY_COMPRESSIONS
        )
        if self.boundary_compression != "none" and self.order != "scheduled":
            raise UserError(
                f"boundary_compression={self.boundary_compression} needs order=scheduled:"
                f" order={self.order} sends no activations from rank to rank"
            )
        # Order "grouped" has all gradients of a step before its first update; "scheduled" updates a
        # stage as soon as its own gradients are there, while others still compute.
        self._whole_step = self.order == "grouped"
        self._overlaps = not self._whole_step
        if self.diagnostics < 0 or (self.diagnostics and self._overlaps):
            raise UserError(
                f"diagnostics: got {self.diagnostics} with order={self.order}; expected 0 or more"
                " steps with order=grouped"
            )
        super().__post_init__()
        self._updaters = self._runners = self._make_runners()
        self._versions: list[dict[int, Weights]] = [
            {0: r.newest()} for r in self._runners
        ]
        self._make_compressors(
            range(self.schedule.n_ranks), dict(enumerate(self._versions))
        )
        self._make_engine()

    def _make_engine(self) -> None:
        self._engine: Scheduled | Grouped
        if self._overlaps:
            self._engine = Scheduled(
                self._runners, self.schedule, self._loss, self.watching
            )
            self._engine.compressors = self._compressors
            self._engine.boundary_codes = self._boundary_codes
            return
        losses = MicrobatchLosses(
            self.loss, self._loss, self.options, self.stages.results
        )
        grouped_pass = GroupedPass(self._runners, self.schedule, losses)
        self._engine = Grouped(
            grouped_pass, self.diagnostics, self._make_capture(grouped_pass)
        )

    def _make_capture(self, grouped_pass: GroupedPass) -> StepCapture | None:
        """Return what replays steps; None where no step can be replayed."""
        recorder = recorder_for(self._device) if self.capture == "auto" else None
        if recorder is None:
            return None
        reason = obstacle(self._runners, self.schedule)
        if reason is None:
            return StepCapture(grouped_pass, recorder)
        warnings.warn(
            f"capture: CUDA graphs replay no step: {reason}. Set capture=off to hide this",
            stacklevel=2,
        )
        return None

    def module(self) -> nn.Module:
        """Return the model, which is trained in place."""
        self._check_ended()
        return self.stages.model

    def _steps(self, source: BatchReader) -> Steps:
        for runner in self._runners:
            runner.take_statistics()  # left by a step that raised
        for result in self._engine.run(source, self._versions, self.steps_done):
            self.steps_done = result.step + 1
            yield result
            del result  # or its outputs would live through the next step

    def _local_state(self) -> dict[str, Any]:
        versions = dict(enumerate(self._versions))
        local_state = local_state_of(
            self.steps_done,
            self.stages,
            self._runners,
            versions,
            self.updated_stages,
            is_rank_zero=True,
        )
        return local_state | ranks_state(self._compressors)

    def _load(self, state: Mapping[str, Any]) -> None:
        load_model(state, self.stages, self._runners, self.updated_stages)
        for stage, runner in enumerate(self._runners):
            self._versions[stage] = loaded(state, stage, runner)
            runner.load(state["stages"][stage])
        load_ranks_state(self._compressors, state, dict(enumerate(self._versions)))
        # A new one: order "scheduled" keeps replicas of the weights before.
        self._make_engine()


class Scheduled:
    """Order "scheduled": interprets every rank's program, slot by slot.

    Messages are handed over in memory, so the activations alive are those of the schedule, and any
    placement runs without starting processes.

    Attributes:
        compressors: of the messages that ranks hand on, by rank; empty: not compressed.
        boundary_codes: of activations and their gradients; None: not compressed.
    """

    def __init__(
        self,
        runners: Sequence[StageRunner],
        schedule: Schedule,
        loss: Loss,
        watching: Watching | None = None,
    ) -> None:
        self.runners = dict(enumerate(runners))
        self.schedule = schedule
        self.loss = loss
        self.watching = watching
        self.compressors: Mapping[int, RankCompressor] = {}
        self.boundary_codes: BoundaryCodes | None = None
        self.updaters = {
            (schedule.owners[stage], stage): runner
            for stage, runner in enumerate(runners)
        }

    def run(
        self, source: BatchReader, versions: list[dict[int, Weights]], step: int
    ) -> Iterator[StepResult]:
        """Train from ``step`` on; ``versions[stage]`` follows the newest weights.

        Steps overlap, so a result can precede its step's last update.
        """
        assert source.n_steps is not None  # known, since steps overlap
        microbatches = MicrobatchQueue(
            source, step, lambda _: range(self.schedule.n_microbatches)
        )
        end = step + source.n_steps
        for begin in range(step, end, _WINDOW):
            program = self.schedule.lower(min(_WINDOW, end - begin), begin)
            yield from self.execute(program, versions, microbatches)

    def execute(
        self,
        program: Program,
        versions: list[dict[int, Weights]],
        microbatches: MicrobatchQueue,
    ) -> Iterator[StepResult]:
        """Carry out ``program``."""
        ranks = self._ranks(program, versions, microbatches)
        message: Payload = ()
        for rank, i in replay(program.ranks):
            rank_memory = ranks[rank]
            is_root = i.peers[:1] == (rank,)
            # A replay has each receive right after its send, so one message is under way.
            if i.action == Action.SEND:
                message = rank_memory.give(i)
                if self.boundary_codes is not None:
                    message = self.boundary_codes.received(i, message)
            elif i.action == Action.RECV:
                rank_memory.take(i, message)
                message = ()
            elif i.action in (Action.ALL_REDUCE, Action.REDUCE):
                # Once for all ranks: the replay shows a collective as one instruction of each rank.
                if is_root:
                    _reduce(ranks, i)
            elif i.action != Action.BROADCAST:
                rank_memory.execute(i)
            elif not is_root:
                rank_memory.take(i, ranks[i.peers[0]].give(i))
            forward_step = i.step if i.action == Action.FORWARD else None
            if (
                forward_step is not None
                and microbatches.n_finished(forward_step)
                == self.schedule.n_microbatches
            ):
                yield microbatches.result(forward_step)

    def _ranks(
        self,
        program: Program,
        versions: list[dict[int, Weights]],
        microbatches: MicrobatchQueue,
    ) -> list[Rank]:
        """Return every rank, with the weights that it holds before the program."""
        ranks = []
        for rank in range(len(program.ranks)):
            updated = program.updated(rank)
            # Replicas are made now, while all of a stage's updaters have the same weights.
            for stage in updated:
                if (rank, stage) not in self.updaters:
                    self.updaters[rank, stage] = self.runners[stage].replica()
            updaters = {stage: self.updaters[rank, stage] for stage in updated}
            owned_versions = {
                stage: versions[stage]
                for stage in updated
                if self.schedule.owners[stage] == rank
            }
            rank_memory = Rank(
                program,
                self.runners,
                updaters,
                owned_versions,
                self.loss,
                microbatches,
                self.watching,
            )
            rank_memory.compressor = self.compressors.get(rank)
            ranks.append(rank_memory)
        for stage, stage_versions in enumerate(versions):
            for rank in self.schedule.first_holders(stage):
                for version, weights in stage_versions.items():
                    ranks[rank].weights[stage, version] = weights
        return ranks


def _reduce(ranks: Sequence[Rank], i: Instruction) -> None:
    """Sum what the peers of ``i`` have, in their order: the sum has the same bits in each run."""
    root, *other_peers = i.peers
    total = GradientSum()
    for peer in i.peers:
        contribution = ranks[peer].give(i)
        assert isinstance(contribution, GradientSum)
        total.add(contribution.tensors)
    if i.action == Action.ALL_REDUCE:
        # A copy each: optimizers may change gradients in place.
        for peer in other_peers:
            ranks[peer].take(i, copy.deepcopy(total))
    ranks[root].take(i, total)
