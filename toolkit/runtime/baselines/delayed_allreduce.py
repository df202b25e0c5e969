"""Data parallelism whose gradients are summed during the next step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.errors import check_choice
from toolkit.runtime.base import Steps
from toolkit.runtime.baselines.baseline import Baseline, check_data_parallel
from toolkit.runtime.losses import COUNT
from toolkit.runtime.message_layout import MESSAGE_DTYPES, Layout
from toolkit.runtime.microbatches import BatchReader, StepResult
from toolkit.runtime.process_group.world import World
from toolkit.runtime.stage import Values, leaves, take_gradients
from toolkit.runtime.state import loaded
from toolkit.runtime.updater import GradientSum, Updater, Weights
from toolkit.schedule import Schedule


@dataclass(eq=False, repr=False, kw_only=True)
class DelayedAllReduce(Baseline):
    """Data parallelism whose all-reduce of step t runs while step t+1 computes.

    Each update is one step late, so the trajectory is that of CDP-v1::

        theta_{t+1} = optimizer(theta_t, 1/M sum_m grad f_m(theta_{t-1}))

    Within a run it keeps one version of the weights. The end of a run applies the last update
    and keeps the version before it, with which the next run starts.

    Args:
        stages, optimizer, loss, lr_scheduler, seed, options, world: as in ``Distributed``.
        schedule: ``catalog.cyclic(n, 1)``, or any other of a rank per micro-batch and delay 1.
        compression: ``none``, or ``fp16`` or ``bf16`` for the gradients' messages.

    Raises:
        UserError: the schedule has another delay or placement, or an option has no such value.
    """

    runtime = "delayed_allreduce"

    compression: str = "none"

    def __post_init__(self) -> None:
        check_choice("compression", self.compression, MESSAGE_DTYPES)
        self._messages: list[_Message] = []  # under way, of each stage
        super().__post_init__()

    def _build(self) -> Sequence[Updater]:
        self._runners = self._make_runners()
        # By the next step.
        self._weights_read = [runner.newest() for runner in self._runners]
        return self._runners

    @classmethod
    def check_schedule(cls, schedule: Schedule) -> None:
        """Raise UserError unless ``schedule`` is data parallelism of delay 1."""
        check_data_parallel(schedule, cls.runtime, "cdp_v1", 1, ("replicated",))

    def _settle(self) -> None:
        self._update(keep_old=True)

    def _versions_read(self, stage: int) -> dict[int, Weights]:
        versions = super()._versions_read(stage)
        if self.steps_done:
            versions[self.steps_done - 1] = self._weights_read[stage]
        return versions

    def _load(self, state: Mapping[str, Any]) -> None:
        super()._load(state)
        # theta_{-1} is theta_0.
        oldest = max(0, state["steps_done"] - 1)
        self._weights_read = [
            loaded(state, stage, runner)[oldest]
            for stage, runner in enumerate(self._runners)
        ]

    def _steps(self, source: BatchReader) -> Steps:
        """Run the steps, and apply the last update at their end."""
        yield from super()._steps(source)
        self._settle()

    def _train(self, step: int, inputs: Values, targets: Tensor) -> StepResult:
        #     compute    gradients of t on theta_{t-1}  |  gradients of t+1 on theta_t  |
        #     messages   sums of t-1 ------------------>|  sums of t ------------------>|
        #     update                                    theta_t                         theta_{t+1}
        values = inputs
        stage_leaves = [leaves(weights) for weights in self._weights_read]
        for runner, weights in zip(self._runners, stage_leaves, strict=True):
            values = runner.forward(weights, values, (self.rank,), step)
        loss = self._loss(values[0], targets)
        # A rank is a micro-batch: the root has 1/M, so that sums over ranks are means.
        loss.root(self.n_ranks, self.options.scale).backward()
        counts = {} if loss.count is None else {COUNT: loss.count}
        messages = []
        for runner, weights in zip(self._runners, stage_leaves, strict=True):
            exact = runner.take_statistics() | counts
            gradients = take_gradients(weights)
            messages.append(
                _Message(gradients, exact, MESSAGE_DTYPES[self.compression], self.world)
            )
        # These messages travel while the step before is applied and the next one computes.
        self._update(keep_old=False)
        self._weights_read = [runner.newest() for runner in self._runners]
        self._messages = messages
        return self._result(step, values[0], loss)

    def _update(self, *, keep_old: bool) -> None:
        """Apply the gradients under way, if any."""
        # Before the first step there are none.
        for runner, message in zip(self._runners, self._messages, strict=False):
            runner.update(message.received(), self.n_ranks, keep_old=keep_old)
        self._messages = []


class _Message:
    """A stage's gradients, as ``wire``, and what stays exact, under way to be summed over ranks."""

    def __init__(
        self,
        gradients: Weights,
        exact: dict[str, Tensor],  # statistics of norms, and the count of the loss
        wire: torch.dtype | None,
        world: World,
    ) -> None:
        self.world = world
        self.layout = Layout.of(gradients | exact, wire, exact=exact)
        self.flat = self.layout.pack(gradients | exact, world.message_device)
        with world.watch.waiting("gradients to be sent", range(world.size)):
            self.works = [
                dist.all_reduce(piece, group=world.group, async_op=True)
                for piece in self.layout.by_dtype(self.flat)
            ]

    def received(self) -> GradientSum:
        """Wait for the sums, and return them."""
        with self.world.watch.waiting(
            "gradients of the step before", range(self.world.size)
        ):
            for work in self.works:
                work.wait()
        return GradientSum(self.layout.unpack(self.flat.to(self.world.device)))
