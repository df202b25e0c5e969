"""The base class of the baselines."""

from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor, nn

from toolkit.errors import UserError, first_line
from toolkit.runtime.base import Steps
from toolkit.runtime.local_runtime import OnRanks
from toolkit.runtime.losses import LossValue
from toolkit.runtime.microbatches import BatchReader, StepResult
from toolkit.runtime.stage import Values
from toolkit.runtime.state import load_model, local_state_of
from toolkit.runtime.updater import Updater, Weights
from toolkit.schedule import RandomDelay, Schedule


@dataclass(eq=False, repr=False, kw_only=True)
class Baseline(OnRanks):
    """A runtime of another system, under this toolkit's interface.

    Every rank starts with the weights of rank 0.

    Args:
        schedule: of a kind that the baseline can run.
        options: each baseline takes a few of them.

    Raises:
        UserError: stages, schedule, options and ranks do not fit.
    """

    runtime: ClassVar[str]  # name of the option
    _all_save = False  # whether each rank saves the state of the stages that it updates

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.stages.outputs) > 1:
            raise UserError(
                f"runtime={self.runtime} takes models that return one tensor: got"
                f" {len(self.stages.outputs)}. Use runtime=distributed"
            )
        # What collectives wait for, as the failure watch names it.
        self._everyone = range(self.world.size)
        with self.world.watch.waiting("the first weights of rank 0", [0]):
            for tensor in chain(
                self.stages.model.parameters(), self.stages.model.buffers()
            ):
                dist.broadcast(tensor.data, 0, self.world.group)
        self._updaters = self._build()

    @abstractmethod
    def _build(self) -> Sequence[Updater]:
        """Make what trains the stages; return the updater of each."""

    def _check_no_gloo_on_gpus(self) -> None:
        if self.world.device.type == "cuda" and self.world.backend == "gloo":
            raise UserError(
                f"runtime={self.runtime} with backend=gloo runs on the CPU only: use backend=nccl"
                " with a GPU per rank, or device=cpu"
            )

    def _settle(self) -> None:
        """Finish what the last step left open, before the weights are read or replaced."""

    def module(self) -> nn.Module:
        """Return the whole model with the newest weights, on every rank."""
        self._settle()
        return self.stages.model

    def averages(self) -> Weights:
        """Return the averages of weights; see :meth:`Runtime.averages`."""
        self._settle()
        return super().averages()

    def _local_state(self) -> dict[str, Any]:
        self._settle()
        is_rank_zero = self.rank == 0
        saved_stages: Collection[int] = ()
        if is_rank_zero or self._all_save:
            saved_stages = self.updated_stages
        versions = {stage: self._versions_read(stage) for stage in saved_stages}
        state = local_state_of(
            self.steps_done,
            self.stages,
            self._updaters,
            versions,
            saved_stages,
            is_rank_zero=is_rank_zero,
        )
        rank_state = self._rank_state()
        if rank_state is not None:
            state["ranks"] = {self.rank: rank_state}
        return state

    def _rank_state(self) -> dict[str, Any] | None:
        """Return what only this rank has and its next steps depend on. Every rank calls it."""
        return None

    def _load_rank_state(self, state: Mapping[str, Any] | None) -> None:
        """Take over the :meth:`_rank_state` of this rank; None: another runtime saved none."""

    def _versions_read(self, stage: int) -> dict[int, Weights]:
        """Return the weight versions of ``stage`` that later steps read."""
        return {self.steps_done: self._updaters[stage].newest()}

    def _load(self, state: Mapping[str, Any]) -> None:
        self._settle()
        # The model's weights first, then the optimizers', then what only this rank had: a rank's
        # own weights between two meetings replace the common ones.
        load_model(state, self.stages, self._updaters, self.updated_stages)
        for updater, stage_state in zip(self._updaters, state["stages"], strict=True):
            updater.load(stage_state)
        # The state of another runtime has other keys, types or shapes, and torch refuses them in
        # many ways.
        try:
            self._load_rank_state(state.get("ranks", {}).get(self.rank))
        except (
            AttributeError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(
                f"the state of rank {self.rank} is not of this run: {first_line(error)}; give the"
                " runtime and options with which it was taken"
            ) from error

    def _reads(self, step: int) -> Sequence[int]:
        return [self.rank]

    @abstractmethod
    def _train(self, step: int, inputs: Values, targets: Tensor) -> StepResult:
        """Run training step ``step`` on this rank's part of its batch.

        Every wait for other ranks is within ``world.watch.waiting``.
        """

    def _steps(self, source: BatchReader) -> Steps:
        for share in source:
            assert share is not None  # every rank reads something
            step = self.steps_done
            self.world.watch.at(f"step {step}", step)
            result = self._train(step, *share)
            self.steps_done += 1
            yield result

    def _result(self, step: int, outputs: Tensor, loss: LossValue) -> StepResult:
        """Return the result of the one micro-batch of this rank."""
        counts = None
        if loss.count is not None:
            counts = loss.count[None]
        means = loss.mean()[None]
        return StepResult(step, (self.rank,), means, outputs.detach(), counts=counts)


class ReleasedParameters:
    """Parameters whose memory is free during training, since other tensors have their values."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._shapes = {parameter: parameter.shape for parameter in parameters}

    def release(self) -> None:
        """Free their memory."""
        for parameter in self._shapes:
            # Not the parameter itself, which optimizers and stages refer to.
            parameter.data = parameter.data.new_empty(0)

    def restore(self) -> None:
        """Allocate their memory again; its content is undefined."""
        for parameter, shape in self._shapes.items():
            if parameter.shape != shape:
                parameter.data = parameter.data.new_empty(shape)


def check_data_parallel(
    schedule: Schedule, runtime: str, name: str, staleness: int, states: Sequence[str]
) -> None:
    """Raise UserError unless rank m runs micro-batch m, and all weights are ``staleness`` late."""
    # Micro-batch m on rank m, at every stage and in every step.
    one_rank_each = tuple(range(schedule.n_microbatches))
    delays = {*chain.from_iterable(schedule.staleness)}
    is_possible = (
        schedule.state in states
        and all(tuple(ranks) == one_rank_each for ranks in schedule.layout.cycles)
        and delays == {staleness}
        and not isinstance(schedule.delay, RandomDelay)
        # A correction corrects late weights: without them it does nothing.
        and (schedule.corrected.kind == "none" or staleness == 0)
    )
    if not is_possible:
        raise UserError(
            f"runtime={runtime} trains data parallelism, a micro-batch per rank and all weights"
            f" {staleness} steps late: schedule={name} with placement=per_microbatch and"
            f" state={' or '.join(states)} (got {describe_ranks(schedule)})"
        )


def describe_ranks(schedule: Schedule) -> str:
    """Return the schedule's description for an error."""
    return (
        f"{schedule.name}, {schedule.n_stages} stages, {schedule.n_microbatches} micro-batches,"
        f" placement={schedule.layout.name}, state={schedule.state}"
    )
