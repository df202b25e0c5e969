"""Data parallelism under a wrapper of torch: forward, backward, update."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from toolkit.model import Stages
from toolkit.runtime.baselines.base import Baseline, called, is_data_parallel
from toolkit.runtime.baselines.chain import Chain
from toolkit.runtime.grouped import Loss
from toolkit.runtime.processes.world import World
from toolkit.runtime.recipe import Recipe
from toolkit.runtime.result import StepResult
from toolkit.runtime.stage import Values, channels_last
from toolkit.runtime.updater import MakeOptimizer, MakeScheduler
from toolkit.schedule import Schedule


class Optimizers:
    """An optimizer a stage, and its learning-rate schedule; none where all is frozen."""

    def __init__(
        self,
        stages: Sequence[nn.Module],
        make_optimizer: MakeOptimizer,
        make_scheduler: MakeScheduler | None,
    ) -> None:
        trained = ([p for p in stage.parameters() if p.requires_grad] for stage in stages)
        self.optimizers = [make_optimizer(parameters) for parameters in trained if parameters]
        self.schedulers = [make_scheduler(o) for o in self.optimizers] if make_scheduler else []

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        for scheduler in self.schedulers:
            scheduler.step()

    @property
    def learning_rates(self) -> list[float]:
        return [optimizer.param_groups[0]["lr"] for optimizer in self.optimizers]


class Synchronous(Baseline):
    """Rank m runs micro-batch m; the wrapper averages the gradients over the ranks.

    Batch norms normalise by the micro-batch; running statistics, which advance on each rank by
    its own, are averaged in :meth:`module`. That equals averaging them at each step.
    """

    runtime: str
    states: tuple[str, ...]

    def __init__(
        self,
        stages: Stages,
        schedule: Schedule,
        optimizer: MakeOptimizer,
        loss: Loss,
        lr_scheduler: MakeScheduler | None,
        seed: int,
        recipe: Recipe,
        world: World | None,
    ) -> None:
        if not is_data_parallel(schedule, 0, self.states):
            raise ValueError(
                f"runtime={self.runtime} trains data parallelism, a micro-batch a rank:"
                f" schedule=dp with placement=per_microbatch and state={' or '.join(self.states)}"
                f" (got {called(schedule)})"
            )
        recipe.check_only(self.runtime, "precision", "loss_scale", "channels_last")
        if recipe.precision == "fp16":
            raise ValueError(
                f"runtime={self.runtime} takes no precision=fp16: use bf16, or runtime=distributed"
            )
        self._chain = Chain(stages, seed)
        self._recipe = recipe
        super().__init__(stages, schedule, optimizer, recipe.computed(loss), world)
        if recipe.channels_last:
            self._chain.to(memory_format=torch.channels_last)
        self._wrapped = self._wrap(self._chain)
        self._optimizers = Optimizers(list(self._chain.stages), optimizer, lr_scheduler)

    def _wrap(self, model: Chain) -> nn.Module:
        raise NotImplementedError

    @property
    def learning_rates(self) -> list[float]:
        """The learning rate of each stage's next update."""
        return self._optimizers.learning_rates

    def module(self) -> nn.Module:
        """The whole model with the newest weights, on every rank. Every rank calls it."""
        self._average_running_statistics()
        return self.stages.model

    def _train(self, step: int, inputs: Values, targets: Tensor) -> StepResult:
        self._chain.at(step, self.rank)
        if self._recipe.channels_last:
            inputs = tuple(channels_last(tensor) for tensor in inputs)
        with self._recipe.autocast(self.world.device):
            outputs = self._wrapped(*inputs)
        loss = self._loss(outputs, targets)
        with self.world.watch.waiting("the gradients of all ranks", self._everyone):
            loss.backward()
        self._optimizers.step()
        return self._result(step, outputs, loss)

    @torch.no_grad()
    def _average_running_statistics(self) -> None:
        norms = self._chain.norms()
        running = [
            t for norm in norms for t in (norm.running_mean, norm.running_var) if t is not None
        ]
        if not running:
            return
        mean = self.total(torch.cat(running)) / self.n_ranks
        for tensor, part in zip(running, mean.split([len(t) for t in running]), strict=True):
            tensor.copy_(part)
