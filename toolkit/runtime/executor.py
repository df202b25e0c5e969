"""Executes a rank's program: ops one after another, messages and updates concurrently.

::

    main thread     computes ops in the order of the program; waits only for what the next op uses
    second thread   begins messages, makes updates and frees weights, each as soon as its inputs
                    are there; packs what is sent
    waiters         one for each direction, peer, buffer and stage, and one for all collectives;
                    each waits for its messages to end, in order, keeps what came, and begins the
                    next send to that peer

What may begin, and in which order, is decided in toolkit.runtime.dataflow.

Whichever thread ends an instruction on the CPU also frees the weights that this released. Without
``overlap`` the main thread waits for each instruction before the next one, and the second thread
still carries out what is in the background.

A receive begins early, so that its message need not wait for this rank. Of the messages to a rank
the one needed first is sent first.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from math import inf

import torch

from toolkit.runtime.dataflow import (
    Dataflow,
    channel_of,
    in_background,
    last_op_positions,
    last_step,
    next_op,
)
from toolkit.runtime.message_transfer import Messages, Transfer, Turns, tags
from toolkit.runtime.meters.meter import Meter
from toolkit.runtime.meters.running_costs import Stopwatch
from toolkit.runtime.process_group.watch import is_backend_error
from toolkit.runtime.rank import Payload, Rank
from toolkit.runtime.received_sums import ReceivedSums
from toolkit.runtime.start_offset import StartOffset
from toolkit.runtime.streams import after_marks, current_stream, mark, own_stream
from toolkit.runtime.waiters import PendingMessage, PendingQueue, Waiters
from toolkit.schedule import Action, Buffer, Instruction, Program


class Executor:
    """Carries out the instructions of one rank.

    Without ``overlap`` each instruction ends before the next begins, so that memory follows the
    program exactly. With ``stepwise`` a training step begins with its first op and not before, so
    that :meth:`end_here` can end the program after any step, if all ranks do. Updates of training
    steps after ``update_limit`` wait for :meth:`allow_updates`.

    Attributes:
        ends: positions of the last op of each training step.
    """

    def __init__(
        self,
        rank: Rank,
        messages: Messages,
        program: Program,
        meter: Meter | Stopwatch | None,
        *,
        overlap: bool,
        stepwise: bool = False,
        update_limit: float = inf,
    ) -> None:
        self._rank = rank
        self._messages = messages
        self._meter = meter
        self._overlap = overlap
        self._stepwise = stepwise
        self._world = messages.world
        self._watch = messages.world.watch
        self._start_offset = StartOffset(program, self._world)
        self._instructions = program.ranks[self._world.rank]
        self._tags = tags(self._instructions)
        self._lookahead = program.schedule.lookahead
        self.ends = last_op_positions(self._instructions)
        messages.begin_program(self._instructions, program.n_steps)
        self._dataflow = Dataflow(
            self._instructions,
            self._world.rank,
            # NCCL has no tags: messages between two ranks match by order alone.
            ordered=messages.ordered,
            # With ``stepwise`` no step begins before its first op: the caller may end here first.
            limit=program.first_step - 1 if stepwise else inf,
            # Without overlap the main thread waits for each update, so no limit may hold one back.
            update_limit=update_limit if overlap else inf,
            ordered_updates=self._world.shares_ranks,
            chained=rank.compressor.chained if rank.compressor is not None else (),
        )
        # All threads share _dataflow, _unsent, _send_queues, _failure and _closed: they change them
        # with this condition held, and notify the others. _received_sums and _waiters have locks of
        # their own. Without any lock they read _failure, once it is set, and _op_ends[p], which is
        # written before p ends. _remaining is the main thread's alone.
        self._changed = threading.Condition()
        # Positions of sends that have begun and not ended.
        self._unsent: set[int] = set()
        # Sends that wait for their turn or are under way, by receiver.
        self._send_queues: defaultdict[int, Turns] = defaultdict(messages.turns)
        self._failure: tuple[int, BaseException] | None = None
        self._closed = False
        # Positions to carry out; None: all, since the program ends as it was lowered.
        self._remaining: Collection[int] | None = None
        self._received_sums = ReceivedSums(rank)
        self._device = self._world.device
        self._waiters = Waiters()
        self._op_ends: dict[int, torch.cuda.Event] = {}  # on the device, by position
        self._op_stream = current_stream(self._device)

    def allow_updates(self, step: int, limit: float) -> None:
        """Let updates begin, whose learning rates the caller has set by now.

        Args:
            step: the caller waits for the updates up to this training step, so all that they wait
                for may begin too, on this rank and for others.
            limit: updates up to this training step may begin.
        """
        if self._overlap:
            with self._changed:
                self._dataflow.raise_update_limit(limit)
                self._dataflow.open_sums(step)
                self._changed.notify_all()

    def await_sums(self, step: int) -> None:
        """Wait until the updates of ``step`` have all gradients; they have to be on this rank."""
        with self._changed:
            self._dataflow.open_sums(step)
            self._changed.notify_all()
        for position, i in enumerate(self._instructions):
            if i.action == Action.UPDATE and i.step == step:
                self._await_inputs(position)
                self._received_sums.add_to_sum(i)

    def await_updates(self, step: int) -> None:
        """Wait until this rank has made its updates of all training steps up to ``step``."""
        for position, i in enumerate(self._instructions):
            if i.action == Action.UPDATE and last_step(i) <= step:
                self._await_end(position)

    def end_here(self) -> None:
        """Let :meth:`run`, when it continues, end with the training steps that have begun."""
        with self._changed:
            self._remaining = self._dataflow.cut()

    def run(self, pauses: Collection[int]) -> Iterator[Instruction]:
        """Carry out the program; yield the op at each of the ``pauses`` when it has ended."""
        second_thread = threading.Thread(
            target=self._begin_all, name="messages", daemon=True
        )
        second_thread.start()
        try:
            for position, i in enumerate(self._instructions):
                if self._remaining is not None and position not in self._remaining:
                    continue
                if not (self._overlap and in_background(i)):
                    self._perform(position, i)
                if position in self.ends:
                    self._messages.end_step()
                if position in pauses:
                    if self._stepwise:
                        # The caller may work for long before the next op. What that op needs must
                        # travel meanwhile, so the background continues without this thread.
                        self._open_until(next_op(self._instructions, position).tick)
                    yield i
            self._finish()
        finally:
            with self._changed:
                self._closed = True
                self._changed.notify_all()
            # The second thread puts messages to waiters, so it ends before these are closed.
            second_thread.join()
            self._waiters.close()
        # Not after a failure: a message from a dead rank never ends.
        self._waiters.join()

    def _perform(self, position: int, i: Instruction) -> None:
        """Carry out an instruction on the main thread, or wait for it."""
        with self._changed:
            if i.action.computes:
                self._dataflow.raise_limit(last_step(i))
            if not self._overlap:
                self._dataflow.open(position + 1)
                self._changed.notify_all()
        self._open_until(i.tick)
        self._start_offset.before(i)
        self._watch.at(i, i.step, i.peers)  # waiting, maybe for peers
        if in_background(i):
            self._await_end(position)
            return
        self._await_inputs(position)
        self._watch.at(i, i.step)  # at work: _await may have reported what held it up
        self._measured(i, self._execute)
        # The op is only queued on the device. The mark lets other streams wait for its end.
        end = mark(self._device)
        if end is not None:
            self._op_ends[position] = end
        self._end(position)

    def _open_until(self, tick: int) -> None:
        """Let the background begin what an op at ``tick`` may use."""
        if self._overlap:
            with self._changed:
                # Look ahead only as far as needed: a receive begun early takes memory.
                self._dataflow.open_until(tick + self._lookahead)
                self._changed.notify_all()

    def _finish(self) -> None:
        """Wait until everything has been done, received and sent."""
        self._start_offset.finish()
        with self._changed:
            self._dataflow.open(len(self._instructions))
            self._changed.notify_all()
        self._await(
            lambda: self._dataflow.n_left == 0, lambda: self._dataflow.ended.index(0)
        )
        self._await(lambda: not self._unsent, lambda: min(self._unsent))

    def _await_inputs(self, position: int) -> None:
        self._await(lambda: self._dataflow.lacks_nothing(position), lambda: position)

    def _await_end(self, position: int) -> None:
        self._await(lambda: bool(self._dataflow.ended[position]), lambda: position)

    def _await(
        self, is_reached: Callable[[], bool], awaited: Callable[[], int]
    ) -> None:
        """Wait until ``is_reached()``; raise what has failed meanwhile.

        The failure watch learns which instruction holds up the one at position ``awaited()``.
        """
        reported = None
        with self._changed:
            while self._failure is None and not is_reached():
                blocker = self._dataflow.blocker_of(awaited())
                i = self._instructions[blocker]
                if blocker != reported and i.action.communicates:
                    self._watch.at(i, i.step, i.peers)
                    reported = blocker
                self._changed.wait()
        if self._failure is None:
            return
        position, error = self._failure
        i = self._instructions[position]
        may_be_a_peer = i.action.communicates or self._world.shares_ranks
        if may_be_a_peer and is_backend_error(error):
            self._watch.at(i, i.step, i.peers)
            self._watch.fail(error)
        raise error

    def _execute(self, i: Instruction) -> int:
        """Carry out an op, update or release; return the bytes sent to other ranks: none."""
        self._rank.execute(i)
        return 0

    def _measured(self, i: Instruction, do: Callable[[Instruction], int]) -> None:
        if self._meter is None:
            do(i)
        else:
            self._meter.perform(self._rank, i, do)

    def _end(self, position: int) -> None:
        """Note on any thread that an instruction has ended, or that a send is packed."""
        with self._changed:
            self._dataflow.end(position)
            if self._op_stream is None:  # on the CPU
                # Free weights at once, so that the next version finds their memory free. On a GPU
                # the second thread first waits until the device is done with them.
                while (release := self._dataflow.next_release()) is not None:
                    self._measured(self._instructions[release], self._execute)
                    self._dataflow.end(release)
            self._changed.notify_all()

    def _fail(self, position: int, error: BaseException) -> None:
        with self._changed:
            # The first failure is the cause; later ones follow from it.
            if self._failure is None:
                self._failure = position, error
            self._changed.notify_all()

    # The second thread, and what waiters run as well: _begin_sends and _put.

    def _begin_all(self) -> None:
        position = 0  # to blame if not even a stream can be made
        try:
            with own_stream(self._device):
                while (next_position := self._next_to_begin()) is not None:
                    position = next_position
                    self._begin(position)
        except BaseException as error:
            self._fail(position, error)

    def _next_to_begin(self) -> int | None:
        """Return the next instruction to begin; None at the end."""
        with self._changed:
            while not self._closed and self._failure is None:
                position = self._dataflow.next()
                if position is not None:
                    return position
                self._changed.wait()
        return None

    def _begin(self, position: int) -> None:
        i = self._instructions[position]
        # Keep inputs alive until the device is done with them, when after_marks() ends.
        kept_alive: list[object] = [
            self._rank.sums.get((i.stage, i.step)),
            self._received_sums.parts_for(i),
        ]
        # On another stream than the ops: this one waits only for those whose results it uses.
        with after_marks(
            self._device, [self._op_ends.get(p) for p in self._dataflow.needs[position]]
        ):
            if i.action == Action.RECV:
                self._put(position, self._messages.receive(i, self._tags[position]))
                return  # its waiter ends it
            if i.buffer == Buffer.GRADIENT or i.action == Action.UPDATE:
                self._received_sums.add_to_sum(i)
            if i.action == Action.SEND:
                payload = self._rank.give(i)
                kept_alive.append(payload)
                self._measured(i, lambda i: self._send(position, payload))
            elif i.action.communicates:
                contribution = self._rank.give(i) if i.gives(self._world.rank) else None
                self._put(position, self._messages.collective(i, contribution))
                return  # its waiter ends it
            else:
                self._measured(i, self._execute)
        self._end(position)  # of a send: it is packed

    def _send(self, position: int, payload: Payload) -> int:
        i = self._instructions[position]
        transfer = self._messages.send(i, payload, self._tags[position])
        # Before the waiter has the transfer: otherwise it could remove the position first.
        with self._changed:
            self._unsent.add(position)
            next_sends = self._send_queues[i.peers[0]].add(position, transfer)
        self._begin_sends(next_sends)
        return transfer.flat.nbytes

    def _begin_sends(self, sends: Sequence[tuple[int, Transfer]]) -> None:
        for position, transfer in sends:
            transfer.begin()
            self._put(position, transfer)

    def _put(self, position: int, transfer: Transfer) -> None:
        """Let a waiter wait for the end of ``transfer``."""
        i = self._instructions[position]
        began = 0.0 if self._meter is None else self._meter.now()
        message = PendingMessage(position, transfer, began)
        self._waiters.put(channel_of(i), message, self._wait_for_all)

    # The waiters' threads.

    def _wait_for_all(self, queue: PendingQueue) -> None:
        position = 0  # to blame if not even a stream can be made
        try:
            with own_stream(self._device):
                while (message := queue.get()) is not None:
                    position = message.position
                    self._wait_for(*message)
                    del message  # or its memory would live until the next one
        except BaseException as error:
            self._fail(position, error)

    def _wait_for(self, position: int, transfer: Transfer, began: float) -> None:
        i = self._instructions[position]
        with after_marks(self._device):
            transfer.wait()
            if i.leaves(self._world.rank):
                self._store(position, self._messages.received(i, transfer))
        if i.action == Action.SEND:
            with self._changed:
                self._unsent.remove(position)
                next_sends = self._send_queues[i.peers[0]].end(position)
                self._changed.notify_all()
            self._begin_sends(next_sends)
            return
        if self._meter is not None:
            self._meter.note(self._rank, i, began, transfer.flat.nbytes)
        self._end(position)

    def _store(self, position: int, payload: Payload) -> None:
        """Take over what has been received; part of a sum waits until the sum is used."""
        i = self._instructions[position]
        if i.action == Action.RECV and i.buffer == Buffer.GRADIENT:
            self._received_sums.store(position, i, payload)
            return
        if isinstance(payload, tuple) and self._op_stream is not None:
            # The ops' stream reads memory that this stream allocated. The allocator must know, or
            # it would hand the memory out again while an op still reads it.
            for tensor in payload:
                if tensor is not None:
                    tensor.record_stream(self._op_stream)
        self._rank.take(i, payload)
