"""Executes a rank's program: ops one after another, messages and updates concurrently.

The main thread computes, in the order of the program, and waits only for what the next op uses. A
second thread begins messages and makes updates, each as soon as its inputs are there. Waiters, one
a peer, stage and kind, wait for messages to end. A receive begins early, so that its message need
not wait for this rank. Of the messages to a rank the one needed first is sent first.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta
from functools import partial
from itertools import islice
from math import inf
from queue import SimpleQueue

import torch

from toolkit.runtime.dataflow import Dataflow, in_background, last_step, queue_of
from toolkit.runtime.message_transfer import Messages, Transfer, Turns, tags
from toolkit.runtime.meters.measurements import Meter
from toolkit.runtime.meters.running_costs import Stopwatch
from toolkit.runtime.process_group.join import World
from toolkit.runtime.process_group.watch import is_backend_error
from toolkit.runtime.rank import Payload, Rank
from toolkit.runtime.streams import after, mark, own_stream
from toolkit.schedule import Action, Buffer, Instruction, Program

_Coming = SimpleQueue["tuple[int, Transfer, float] | None"]  # None ends a waiter


class Executor:
    """Carries out the instructions of one rank.

    Without ``overlap`` each instruction ends before the next begins, so that memory follows the
    program exactly. With ``stepwise`` a training step begins with its first op and not before, and
    :meth:`end_here` can end the program after any step, if all ranks do. Updates of
    training steps after ``update_limit`` wait for :meth:`allow_updates`.
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
        self._world = messages.world
        self._watch = messages.world.watch
        self._turn = StartOffset(program, self._world)
        self._order = program.ranks[self._world.rank]
        self._tags = tags(self._order)
        last_ops = {i.step: position for position, i in enumerate(self._order) if i.action.computes}
        self.ends = frozenset(last_ops.values())  # positions of the last op of each training step
        if messages.pacer is not None:
            sends = (i for i in self._order if i.action == Action.SEND)
            messages.pacer.begin(sum(map(messages.n_bytes, sends)) / program.n_steps)
        # With ``stepwise`` no step begins before its first op: the caller may end here first.
        limit = program.first_step - 1 if stepwise else inf
        self._flow = Dataflow(
            self._order,
            self._world.rank,
            # NCCL has no tags: messages between two ranks match by order alone.
            ordered=messages.ordered,
            limit=limit,
            # Without overlap the main thread makes updates before it returns to the caller.
            update_limit=update_limit if overlap else inf,
        )
        self._stepwise = stepwise
        self._ending = False
        self._overlap = overlap
        self._ahead = program.schedule.lookahead
        self._received: defaultdict[tuple, list[tuple[int, Payload]]] = defaultdict(list)
        self._marks: dict[int, torch.cuda.Event] = {}
        self._device = device = self._world.device
        self._ops = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._unsent: set[int] = set()
        self._failure: tuple[int, BaseException] | None = None
        self._closed = False
        self._changed = threading.Condition()  # all threads share _flow, _unsent and _failure
        self._waiters: dict[tuple, tuple[_Coming, threading.Thread]] = {}
        self._turns: defaultdict[int, Turns] = defaultdict(messages.turns)  # by receiver

    def allow_updates(self, step: int, limit: float) -> None:
        """Let updates up to step ``limit`` begin, and all that those up to ``step`` wait for."""
        if self._overlap:
            with self._changed:
                self._flow.raise_update_limit(limit)
                self._flow.open_sums(step)
                self._changed.notify_all()

    def await_sums(self, step: int) -> None:
        """Wait until the updates of ``step`` have all gradients; they have to be on this rank."""
        updates = [
            position
            for position, i in enumerate(self._order)
            if i.action == Action.UPDATE and i.step == step
        ]
        with self._changed:
            self._flow.open_sums(step)
            self._changed.notify_all()
        for position in updates:
            self._await(partial(self._flow.lacks_nothing, position), partial(int, position))
            self._add_received(self._order[position])

    def await_updates(self, step: int) -> None:
        """Wait until this rank has made its updates of all training steps up to ``step``."""
        updates = [
            position
            for position, i in enumerate(self._order)
            if i.action == Action.UPDATE and last_step(i) <= step
        ]
        for position in updates:
            self._await(partial(self._has_ended, position), partial(int, position))

    def _has_ended(self, position: int) -> bool:
        return bool(self._flow.ended[position])

    def end_here(self) -> None:
        """Let :meth:`run`, when it continues, end with the training steps that have begun."""
        self._ending = True

    def run(self, pauses: Collection[int]) -> Iterator[Instruction]:
        """Carry out the program; yield the op at each of the ``pauses`` when it has ended."""
        thread = threading.Thread(target=self._begin_all, name="messages", daemon=True)
        thread.start()
        remaining: Collection[int] = ()  # if the program is cut
        try:
            for position, i in enumerate(self._order):
                if self._ending and position not in (remaining := remaining or self._cut()):
                    continue
                if not (self._overlap and in_background(i)):
                    self._perform(position, i)
                if self._messages.pacer is not None and position in self.ends:
                    self._messages.pacer.end_step()
                if position in pauses:
                    if self._stepwise:
                        # The caller may work for long before the next op. What that op needs must
                        # travel meanwhile, so the background continues without this thread.
                        self._open_until(self._next_op(position).tick)
                    yield i
            self._finish()
        finally:
            with self._changed:
                self._closed = True
                self._changed.notify_all()
            # The second thread creates waiters, so it ends before they do.
            thread.join()
            for transfers, _ in [*self._waiters.values()]:
                transfers.put(None)
        # Not after a failure: a message from a dead rank never ends.
        for _, waiter in self._waiters.values():
            waiter.join()

    def _perform(self, position: int, i: Instruction) -> None:
        """Carry out an instruction on the main thread, or wait for it."""
        with self._changed:
            if i.action.computes:
                self._flow.raise_limit(last_step(i))
            if not self._overlap:
                self._flow.open(position + 1)
                self._changed.notify_all()
        self._open_until(i.tick)
        self._turn.before(i)
        self._watch.at(i, i.step, i.peers)
        if in_background(i):
            self._await(lambda: bool(self._flow.ended[position]), lambda: position)
            return
        self._await(lambda: self._flow.lacks_nothing(position), lambda: position)
        self._watch.at(i, i.step)
        self._measured(i, self._compute)
        # The op is only queued on the device. The mark lets other streams wait for its end.
        if (end := mark(self._device)) is not None:
            self._marks[position] = end
        self._end(position)

    def _open_until(self, tick: int) -> None:
        """Let the background begin what an op at ``tick`` may use."""
        if self._overlap:
            with self._changed:
                # Look ahead only as far as needed: a receive begun early takes memory.
                self._flow.open_until(tick + self._ahead)
                self._changed.notify_all()

    def _next_op(self, position: int) -> Instruction:
        """Return the op after ``position``, or the last instruction."""
        later_instructions = islice(self._order, position + 1, None)
        return next((i for i in later_instructions if i.action.computes), self._order[-1])

    def _cut(self) -> Collection[int]:
        with self._changed:
            return self._flow.cut()

    def _finish(self) -> None:
        """Wait until everything has been done, received and sent."""
        self._turn.finish()
        with self._changed:
            self._flow.open(len(self._order))
            self._changed.notify_all()
        self._await(lambda: self._flow.n_left == 0, lambda: self._flow.ended.index(0))
        self._await(lambda: not self._unsent, lambda: min(self._unsent))

    def _await(self, done: Callable[[], bool], what: Callable[[], int]) -> None:
        """Wait until ``done``; report to the failure watch which instruction holds up ``what``."""
        reported = None
        with self._changed:
            while self._failure is None and not done():
                held_up = self._flow.held_up_by(what())
                i = self._order[held_up]
                if held_up != reported and i.action.communicates:
                    self._watch.at(i, i.step, i.peers)
                    reported = held_up
                self._changed.wait()
        if self._failure is None:
            return
        position, error = self._failure
        i = self._order[position]
        if i.action.communicates and is_backend_error(error):
            self._watch.at(i, i.step, i.peers)
            self._watch.fail(error)
        raise error

    def _compute(self, i: Instruction) -> int:
        self._rank.execute(i)
        return 0

    def _measured(self, i: Instruction, do: Callable[[Instruction], int]) -> None:
        if self._meter is None:
            do(i)
        else:
            self._meter.perform(self._rank, i, do)

    def _end(self, position: int) -> None:
        with self._changed:
            self._flow.end(position)
            # At once, before the second thread has time for them: the next version may arrive. On a
            # GPU that thread waits until the device has done with them.
            while self._ops is None and (release := self._flow.next_release()) is not None:
                self._measured(self._order[release], self._compute)
                self._flow.end(release)
            self._changed.notify_all()

    def _fail(self, position: int, error: BaseException) -> None:
        with self._changed:
            # The first failure is the cause; later ones follow from it.
            if self._failure is None:
                self._failure = position, error
            self._changed.notify_all()

    # The second thread.

    def _begin_all(self) -> None:
        position = 0  # to blame if not even a stream can be made
        try:
            with own_stream(self._device):
                while (next_position := self._take()) is not None:
                    position = next_position
                    self._begin(position)
        except BaseException as error:
            self._fail(position, error)

    def _take(self) -> int | None:
        """Return the next instruction to begin; None at the end."""
        with self._changed:
            while not self._closed and self._failure is None:
                if (position := self._flow.next()) is not None:
                    return position
                self._changed.wait()
        return None

    def _begin(self, position: int) -> None:
        i, tag = self._order[position], self._tags[position]
        key = (i.stage, i.step)
        # Keep inputs alive until the device is done with them: after() ends before this returns.
        kept_alive: list[object] = [self._rank.sums.get(key), self._received.get(key)]
        # On another stream than the ops: it waits for those whose results it uses, and no others.
        with after(self._device, [self._marks.get(p) for p in self._flow.needs[position]]):
            if i.action == Action.RECV:
                self._put(position, self._messages.receive(i, tag))
                return
            if i.buffer == Buffer.GRADIENT or i.action == Action.UPDATE:
                self._add_received(i)
            if i.action == Action.SEND:
                kept_alive.append(payload := self._rank.give(i))
                self._measured(i, lambda i: self._send(position, payload))
            elif i.action.communicates:
                contribution = self._rank.give(i) if i.gives(self._world.rank) else None
                self._put(position, self._messages.collective(i, contribution))
                return
            else:
                self._measured(i, self._compute)
        self._end(position)

    def _add_received(self, i: Instruction) -> None:
        """Add the parts that have come to the sum that ``i`` uses."""
        # In the order of the program: messages arrive in any, and floating-point sums depend on it.
        for position, gradient_sum in sorted(self._received.pop((i.stage, i.step), ())):
            self._rank.take(self._order[position], gradient_sum)

    def _send(self, position: int, payload: Payload) -> int:
        i = self._order[position]
        transfer = self._messages.send(i, payload, self._tags[position])
        # Before the waiter has the transfer: otherwise it could remove the position first.
        with self._changed:
            self._unsent.add(position)
            next_sends = self._turns[i.peers[0]].add(position, transfer)
        self._begin_sends(next_sends)
        return transfer.flat.nbytes

    def _begin_sends(self, taken: Sequence[tuple[int, Transfer]]) -> None:
        for position, transfer in taken:
            transfer.begin()
            self._put(position, transfer)

    def _put(self, position: int, transfer: Transfer) -> None:
        """Let a waiter wait for the end of ``transfer``."""
        i = self._order[position]
        # One waiter per peer, stage and kind: a late message must not hold up the others.
        queue_name = queue_of(i, ordered=False) or ("send", *i.peers, i.buffer, i.stage)
        with self._changed:
            if queue_name not in self._waiters:
                transfers = _Coming()
                # Daemons: a message from a dead rank never ends, but the process must.
                waiter = threading.Thread(
                    target=self._wait_for_all, args=(transfers,), name="waiter", daemon=True
                )
                self._waiters[queue_name] = transfers, waiter
                waiter.start()
        began = 0.0 if self._meter is None else self._meter.now()
        self._waiters[queue_name][0].put((position, transfer, began))

    # The waiters' threads.

    def _wait_for_all(self, coming: _Coming) -> None:
        position = 0  # to blame if not even a stream can be made
        try:
            with own_stream(self._device):
                while (item := coming.get()) is not None:
                    position = item[0]
                    self._wait_for(*item)
                    del item  # or the message would live until the next one
        except BaseException as error:
            self._fail(position, error)

    def _wait_for(self, position: int, transfer: Transfer, began: float) -> None:
        i = self._order[position]
        with after(self._device):
            transfer.wait()
            if i.leaves(self._world.rank):
                self._store(position, self._messages.received(i, transfer))
        if i.action == Action.SEND:
            with self._changed:
                self._unsent.remove(position)
                next_sends = self._turns[i.peers[0]].end(position)
                self._changed.notify_all()
            self._begin_sends(next_sends)
            return
        if self._meter is not None:
            self._meter.note(self._rank, i, began, transfer.flat.nbytes)
        self._end(position)

    def _store(self, position: int, payload: Payload) -> None:
        """Take over what has been received; part of a sum waits until the sum is used."""
        i = self._order[position]
        if i.action == Action.RECV and i.buffer == Buffer.GRADIENT:
            self._received[i.stage, i.step].append((position, payload))
            return
        if isinstance(payload, tuple) and self._ops is not None:
            # The ops' stream reads memory that this stream allocated; the allocator must know.
            for tensor in payload:
                if tensor is not None:
                    tensor.record_stream(self._ops)
        self._rank.take(i, payload)


class StartOffset:
    """The start of ``program`` on one rank, which waits for its place in the schedule.

    Only its first forward makes a rank wait; after that dependencies keep the order. The rank that
    starts first, the leader, gives each other rank its turn at the tick at which that one starts,
    so no clock is needed.
    """

    def __init__(self, program: Program, world: World) -> None:
        self.world, self._name = world, world.next_name()
        ticks = program.first_forwards()
        self._leader = min(ticks, key=lambda rank: (ticks[rank], rank), default=world.rank)
        later_starts = [(tick, rank) for rank, tick in ticks.items() if tick > ticks[self._leader]]
        self._waiting = sorted(later_starts) if world.rank == self._leader else []
        self._my_turn = next((tick for tick, rank in later_starts if rank == world.rank), None)

    def before(self, i: Instruction) -> None:
        """Give the others their turn, or wait for this rank's, as ``i`` is about to begin."""
        while self._waiting and i.tick >= self._waiting[0][0]:
            _, rank = self._waiting.pop(0)
            # GPU ops are queued: end them first, or the other rank starts before this tick.
            self.world.finish_computing()
            self.world.store.set(self._key(rank), "")
        if self._my_turn is not None and i.action == Action.FORWARD:
            self._my_turn = None
            watch = self.world.watch
            with watch.waiting("its turn to start", [self._leader]):
                patience = timedelta(seconds=2 * watch.timeout)
                self.world.store.wait([self._key(self.world.rank)], patience)
            self.world.store.delete_key(self._key(self.world.rank))

    def finish(self) -> None:
        """Give the turns that are left, at the end of the leader's program."""
        for _, rank in self._waiting:
            self.world.store.set(self._key(rank), "")

    def _key(self, rank: int) -> str:
        return f"turn/{self._name}/{rank}"
