"""Every micro-batch of every rank in one process."""

from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

from torch import Tensor, nn

from toolkit.model import Stages
from toolkit.runtime.grouped import Grouped, Loss
from toolkit.runtime.result import StepResult
from toolkit.runtime.scheduled import Scheduled
from toolkit.runtime.stage import MakeOptimizer, MakeScheduler, StageWorker, Values, Weights
from toolkit.schedule import Schedule

ORDERS = ("grouped", "scheduled")
_WINDOW = 64  # training steps lowered at once in order "scheduled"

Batch = tuple[Tensor | Values, Tensor]


class SingleProcess:
    """Trains stages by a schedule, all of it in this process.

    The trajectory is a function of the schedule's staleness, the seed, the order of the data and
    the hyper-parameters, and of nothing else::

        theta^j_{t+1} = optimizer(theta^j_t, 1/M sum_m grad_j f_m(theta_hat_{m,t}))
        theta_hat^j_{m,t} = theta^j_{t - staleness[j][m]}

    Args:
        stages: the model, partitioned; its parameters are trained in place.
        schedule: for as many stages.
        optimizer: makes the optimizer of a stage from the list of its parameters.
        loss: mean loss of a micro-batch, from outputs and targets.
        order: ``"grouped"``, nearly as fast as plain training; or ``"scheduled"``, which runs the
            schedule's program slot by slot and has the schedule's memory.
        lr_scheduler: makes the learning-rate schedule of a stage from its optimizer; it advances
            with each update of the stage.
        seed: of what the model draws at random in training, such as dropout.

    Raises:
        ValueError: stages and schedule do not fit, or an unknown order.

    Source: the update rules (DP), (CDP-v1) and (CDP-v2) of arXiv 2403.08837, section 3.
    """

    def __init__(
        self,
        stages: Stages,
        schedule: Schedule,
        optimizer: MakeOptimizer,
        loss: Loss,
        order: str = "grouped",
        *,
        lr_scheduler: MakeScheduler | None = None,
        seed: int = 0,
    ) -> None:
        if order not in ORDERS:
            raise ValueError(f"unknown order {order!r}: choose one of {', '.join(ORDERS)}")
        if len(stages) != schedule.n_stages:
            raise ValueError(
                f"the schedule is for {schedule.n_stages} stages and the model has {len(stages)}:"
                f" partition it into {schedule.n_stages}"
            )
        if not callable(optimizer):
            raise ValueError(
                "optimizer makes an optimizer from a list of parameters: give a function, such as"
                f" lambda p: torch.optim.SGD(p, lr=0.1), not a {type(optimizer).__name__}"
            )
        self.stages = stages
        self.schedule = schedule
        self.order = order
        self.steps_done = 0
        self._workers = [
            StageWorker(stage, j, optimizer, lr_scheduler, seed) for j, stage in enumerate(stages)
        ]
        self._versions: list[dict[int, Weights]] = [{0: w.newest()} for w in self._workers]
        self._grouped = Grouped(self._workers, schedule, _scalar(loss))
        self._scheduled = Scheduled(self._workers, schedule, _scalar(loss))

    def module(self) -> nn.Module:
        """The whole model; it holds the newest weights."""
        return self.stages.model

    @property
    def learning_rates(self) -> list[float]:
        """The learning rate of each stage's next update."""
        optimizers = (worker.optimizer for worker in self._workers)
        return [optimizer.param_groups[0]["lr"] for optimizer in optimizers if optimizer]

    def step(self, inputs: Tensor | Values, targets: Tensor) -> StepResult:
        """One training step, to its last update.

        Args:
            inputs: ``[n_microbatches * b, ...]``, or a tuple of such tensors; micro-batch m is
                slice m.
            targets: ``[n_microbatches * b, ...]``.

        Raises:
            ValueError: the batch cannot be divided into micro-batches of equal size.
        """
        (result,) = self.run([(inputs, targets)])
        return result

    def run(self, batches: Iterable[Batch], n_steps: int | None = None) -> Iterator[StepResult]:
        """Train on each batch; yield each step's result. Exhaust it: only then are all updates in.

        In order "scheduled" consecutive steps overlap as the schedule has them, so a result can
        precede its step's last update, and the number of batches must be known.

        Args:
            batches: ``(inputs, targets)`` as in :meth:`step`.
            n_steps: how many of them to take; all unless given.

        Raises:
            ValueError: a batch cannot be divided, or the number of batches is not known.
        """
        if self.order == "grouped":
            yield from self._run_grouped(iter(batches), n_steps)
            return
        if n_steps is None:
            if not isinstance(batches, Sized):
                raise ValueError('order="scheduled" looks ahead: give n_steps to run()')
            n_steps = len(batches)
        source = iter(batches)
        for done in range(0, n_steps, _WINDOW):
            window = min(_WINDOW, n_steps - done)
            program = self.schedule.lower(window, self.steps_done)
            yield from self._scheduled.run(
                program, self._versions, lambda: self._divisible(*next(source))
            )
            self.steps_done += window

    def state_dict(self) -> dict[str, Any]:
        """Everything that the rest of the run depends on, but for the data."""
        return {
            "steps_done": self.steps_done,
            "model": self.module().state_dict(),
            "versions": [dict(versions) for versions in self._versions],
            "optimizers": [_state(worker.optimizer) for worker in self._workers],
            "lr_schedulers": [_state(worker.scheduler) for worker in self._workers],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken.

        Raises:
            ValueError: the state is of other stages, or lacks weights that the schedule reads.
        """
        if missing := sorted(_STATE - state.keys()):
            raise ValueError(f"this is not the state of a SingleProcess: it lacks {missing}")
        names = [set(worker.masters) for worker in self._workers]
        theirs = [set(next(iter(versions.values()))) for versions in state["versions"]]
        if names != theirs:
            raise ValueError(
                f"the state is of {len(theirs)} stages cut otherwise than these {len(names)}:"
                " partition the model as it was when the state was taken"
            )
        steps_done = state["steps_done"]
        for j, versions in enumerate(state["versions"]):
            needed = set(range(self.schedule.oldest_version(j, steps_done), steps_done + 1))
            if lacking := sorted(needed - versions.keys()):
                raise ValueError(
                    f"the schedule reads version {lacking[0]} of stage {j} at step {steps_done},"
                    " and the state was taken under one with smaller delays: go on with that one"
                )
        self.steps_done = steps_done
        self.module().load_state_dict(state["model"])
        for j, worker in enumerate(self._workers):
            self._versions[j] = {
                version: {name: tensor.clone() for name, tensor in weights.items()}
                for version, weights in state["versions"][j].items()
                if version != self.steps_done
            }
            self._versions[j][self.steps_done] = worker.newest()
            worker.load(state["optimizers"][j], state["lr_schedulers"][j])
        self._scheduled.forget_replicas()

    def _run_grouped(self, batches: Iterator[Batch], n_steps: int | None) -> Iterator[StepResult]:
        while n_steps is None or n_steps > 0:
            try:
                inputs, targets = self._divisible(*next(batches))
            except StopIteration:
                return
            yield self._grouped.step(self.steps_done, self._versions, inputs, targets)
            self.steps_done += 1
            n_steps = None if n_steps is None else n_steps - 1

    def _divisible(self, inputs: Tensor | Values, targets: Tensor) -> tuple[Values, Tensor]:
        inputs = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        n = self.schedule.n_microbatches
        sizes = {len(tensor) for tensor in (*inputs, targets)}
        if len(sizes) > 1 or (size := sizes.pop()) % n or not size:
            raise ValueError(
                f"a batch is divided into {n} micro-batches of equal size, inputs and targets"
                f" alike: got {[len(tensor) for tensor in inputs]} inputs and {len(targets)}"
                f" targets; make it a multiple of {n} (drop_last=True in a DataLoader)"
            )
        return inputs, targets


def _scalar(loss: Loss) -> Loss:
    """``loss``, refused if it gives anything but one number."""

    def checked(outputs: Tensor, targets: Tensor) -> Tensor:
        value = loss(outputs, targets)
        if not isinstance(value, Tensor) or value.dim() != 0:
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"the loss of a micro-batch is a scalar tensor: got {shape}; average it"
                ' (reduction="mean")'
            )
        return value

    return checked


_STATE = {"steps_done", "model", "versions", "optimizers", "lr_schedulers"}


def _state(part: Any) -> dict[str, Any] | None:
    return None if part is None else part.state_dict()
