"""One process that drives all ranks.

The ranks are :class:`~toolkit.runtime.process_group.processes.Processes`, which stay alive from one
training to the next. Each makes the only executor, :class:`Distributed`, of what it is sent; stages
and functions are pickled by value, so a cell that has changed is used at once. See
:mod:`toolkit.runtime.controlled` for what is sent in a training, and for what is done when a rank
dies.

On this machine the ranks need no engine. PyTorch Monarch and Ray take 10 to 13 s to start four
actors and 2 to 3 ms a call, more than all that a controlled step adds to a step of ``Distributed``.
Their messages carry tensors at a half to a seventh of gloo's rate, so tensors stay on gloo or NCCL.
On several machines Ray starts a fork server on each, and does no more. Monarch's wheel (0.7.0) also
installs top-level packages ``tests`` and ``examples``, and its calls can time out where an actor
blocks its own thread, as a rank does.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from toolkit.errors import UserError
from toolkit.model import Stages
from toolkit.runtime.controlled import Controlled
from toolkit.runtime.make_optimizer import MakeOptimizer
from toolkit.runtime.microbatches import GlobalBatch, StepResult
from toolkit.runtime.process_group.shared_status import Process, records
from toolkit.runtime.rank_pool import RankPool
from toolkit.runtime.step_options import Loss
from toolkit.schedule import Schedule

if TYPE_CHECKING:
    from toolkit.runtime.meters.measurements import Measurements


class Controller(RankPool):
    """Ranks that train under the control of this process.

    A training, in a script or a notebook's cell::

        with Controller(ranks=4) as controller:
            for result in controller.train(stages, schedule, optimizer, loss, batches):
                print(result.step, result.loss)
            model = controller.module()

    The ranks start with the first training and are used by the next ones. A failure ends them, as
    does a training that is not exhausted, after Ctrl-C or ``break``; the next one starts new ones.

    Args:
        ranks: number of processes: one a rank, or with ``width=2`` two.
        hosts: addresses of their machines, nodes of a running Ray cluster; none: this machine.
        backend, timeout, interface: as of :func:`toolkit.runtime.join`.

    Raises:
        UserError: an argument is invalid.
    """

    def train(
        self,
        stages: Stages,
        schedule: Schedule,
        optimizer: MakeOptimizer,
        loss: Loss,
        batches: Iterable[GlobalBatch],
        n_steps: int | None = None,
        **options: Any,
    ) -> Iterator[StepResult]:
        """Begin to train ``stages``; yield the result of each training step, of all ranks together.

        Exhaust it. A pause of the caller between two results counts as a rank's: it has to be
        shorter than ``timeout``.

        Args:
            stages: the model, partitioned.
            schedule: a schedule of as many stages, and of as many ranks as the controller has, or
                with ``width`` of so many times fewer.
            optimizer: function from the list of a stage's parameters to its optimizer.
            loss: mean loss of a micro-batch, from what the model returns, and targets; or its sum
                and count, see :class:`~toolkit.runtime.base.Runtime`.
            batches: global batches ``(inputs, targets)``, all of one size.
            n_steps: number of batches to take; needed if ``batches`` has no length.
            **options: further arguments of :class:`Controlled`.

        Raises:
            UserError: the arguments do not fit together, or cannot be pickled.
            RankError: a rank raised an exception; the message names the rank and its instruction.
            JobFailedError: a rank died or stalled.
        """
        runtime = Controlled(
            stages, schedule, optimizer, loss, controller=self, **options
        )
        return runtime.run(batches, n_steps)

    def module(self) -> nn.Module:
        """Return the model of the latest training, with its newest weights."""
        return self._trained().module()

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of all state of the latest training except the position in the data."""
        return self._trained().state_dict()

    def measurements(self) -> Measurements:
        """Return what the ranks measured in the latest training, made with ``record=STEPS``."""
        return self._trained().measurements()

    def _trained(self) -> Controlled:
        if self.runtime is None:
            raise UserError("the controller has trained nothing yet: call train()")
        assert isinstance(self.runtime, Controlled)
        return self.runtime

    def status(self) -> list[dict[str, Any]]:
        """Return a row per process: its rank, whether it runs, and where it is now.

        Where the latest training's ranks are several devices, also the number of the device.
        """
        processes = self.processes.process_ids
        rank_records = {}
        if self.processes.store:
            rank_records = records(self.processes.store, len(processes))
        width = 1
        if isinstance(self.runtime, Controlled):
            width = self.runtime.width
        rows = []
        for index, process in sorted(processes.items()):
            alive = index in self.processes.alive
            # Here a rank that has just ended is seen before its fork server reports it.
            if alive and not self.processes.on_other_machines:
                alive = not Process(process).gone
            position = "start"
            if index in rank_records:
                position = rank_records[index].position
            row = {"rank": index // width}
            if width > 1:
                row["device"] = index % width
            rows.append(row | {"process": process, "alive": alive, "at": position})
        return rows

    def _repr_html_(self) -> str:
        lines: list[str] = []
        for row in self.status():
            if not lines:
                names = (f"<th>{name}</th>" for name in row)
                lines.append(f"<tr>{''.join(names)}</tr>")
            cells = (f"<td>{html.escape(str(value))}</td>" for value in row.values())
            lines.append(f"<tr>{''.join(cells)}</tr>")
        return f"<table>{''.join(lines)}</table>"

    def __enter__(self) -> Controller:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
