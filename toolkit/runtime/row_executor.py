"""Executes a rank's program on one of the several devices that share the rank.

The devices of a rank exchange within ops, on the main thread, and within updates, on a thread of
their own::

    main thread       ops in the order of the program
    second thread     begins messages, as in :class:`Executor`; it never waits for the row
    waiter "update"   updates in the order of the program

Each device of a row so begins the same exchanges in the same order. Were updates made by the second
thread, two devices could wait for each other within updates of different stages, each with a
message unsent that the other's column needs.
"""

from collections.abc import Callable

import torch

from toolkit.runtime.executor import Executor
from toolkit.runtime.message_transfer import Transfer
from toolkit.runtime.streams import after_marks
from toolkit.schedule import Action, Instruction


class RowUpdate(Transfer):
    """An update in which the devices of a rank exchange; the waiter makes it."""

    def __init__(self, update: Callable[[], None]) -> None:
        super().__init__(torch.empty(0))
        self.wait = update  # type: ignore[method-assign]


class RowExecutor(Executor):
    """Carries out the instructions of one device of a rank."""

    def _execute(self, i: Instruction) -> int:
        # If one device fails within an op, the others of its row would wait in their next exchange
        # for ever: so its error ends the job.
        if i.action.computes:
            with self._world.within_op(i, i.step):
                return super()._execute(i)
        return super()._execute(i)

    def _begin(self, position: int) -> None:
        i = self._instructions[position]
        if i.action != Action.UPDATE:
            super()._begin(position)
            return
        self._received_sums.add_to_sum(i)
        self._put(position, RowUpdate(lambda: self._measured(i, self._execute)))

    def _wait_for(self, position: int, transfer: Transfer, began: float) -> None:
        if not isinstance(transfer, RowUpdate):
            super()._wait_for(position, transfer, began)
            return
        # The ops that made its gradients, or that read the old weights, are on another stream.
        needs = [self._op_ends.get(p) for p in self._dataflow.needs[position]]
        with after_marks(self._device, needs):
            transfer.wait()
        self._end(position)
