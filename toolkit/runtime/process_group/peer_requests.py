"""Questions that one rank asks another, which answers in a thread while its script runs.

Unlike a collective, a question involves two ranks only. So rank 0 alone can ask for the newest
weights, while the others are in their next training step.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from toolkit.errors import UserError, first_line
from toolkit.runtime.process_group.world import World, pickle_to_bytes, unpickle_bytes

_POLL = 0.02  # seconds between two looks for questions
_FIRST_TAG = 2**24  # above the tags of a program's messages


class Question(NamedTuple):
    """What rank ``asker`` asks: the ``subject``, after training step ``step``."""

    number: int
    asker: int
    subject: str
    step: int


class PeerRequests:
    """Asks other ranks, and answers them. Every rank makes one at the same time.

    Args:
        world: the ranks.
        is_ready: whether this rank can answer a question about a step yet.
        answer: function from the subject and the step to an object of tensors and plain values; a
            thread calls it.
    """

    def __init__(
        self,
        world: World,
        is_ready: Callable[[int], bool],
        answer: Callable[[str, int], Any],
    ) -> None:
        self._world = world
        self._is_ready = is_ready
        self._answer = answer
        self._name = world.next_name()
        # A connection of its own: a wait of the main thread on the world's would block its calls.
        self._store = dist.PrefixStore(f"requests/{self._name}", world.store.clone())
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._serve, name="requests", daemon=True
        )
        self._thread.start()

    def ask(self, rank: int, subject: str, step: int) -> Any:
        """Return the answer of ``rank``, once it is ready.

        Raises:
            UserError: it cannot answer.
        """
        store = self._world.store
        # The store counts what a rank is asked, so no two askers have the same number and tag.
        number = store.add(f"requests/{self._name}/asked/{rank}", 1) - 1
        question = f"{self._world.rank} {step} {subject}"
        tag = _FIRST_TAG + number
        n_bytes = torch.zeros(1, dtype=torch.int64)
        with self._world.watch.waiting(f"{subject} of rank {rank}", [rank]):
            store.set(f"requests/{self._name}/{rank}/{number}", question)
            process = self._world.process(rank)
            dist.recv(n_bytes, process, group=self._world.object_group, tag=tag)
            message = torch.empty(int(n_bytes), dtype=torch.uint8)
            dist.recv(message, process, group=self._world.object_group, tag=tag)
        fault, value = unpickle_bytes(message)
        if fault:
            raise UserError(f"rank {rank} cannot give {subject}: {fault}")
        return value

    def close(self) -> None:
        """Answer no more."""
        self._closed.set()
        self._thread.join()

    def leave(self, *, waits: bool = True) -> None:
        """Answer the others until all ranks leave, then :meth:`close`.

        It does not blame a rank for the time that its script still takes. Unless it ``waits`` it
        answers no more.
        """
        if self._closed.is_set():
            return
        # This rank still answers in its thread. The store may have ended with the job's rank 0.
        with contextlib.suppress(RuntimeError):
            store = self._world.store.clone()
            key = f"requests/{self._name}/left"
            n_left = store.add(key, 1)
            while waits and n_left < self._world.size:
                time.sleep(_POLL)
                n_left = store.add(key, 0)
        self.close()

    # The thread.

    def _serve(self) -> None:
        try:
            unanswered: list[Question] = []
            n_read = 0
            while not self._closed.wait(_POLL):
                while self._store.check([f"{self._world.rank}/{n_read}"]):
                    unanswered.append(self._read(n_read))
                    n_read += 1
                # In the order in which they can be answered: one about an earlier step, asked
                # later, may have to be answered before this rank gets to the later step.
                for question in unanswered.copy():
                    if self._is_ready(question.step):
                        unanswered.remove(question)
                        self._reply(question)
        except RuntimeError:
            # The store or a connection is gone: the job ends, and the watch finds the reason.
            return

    def _read(self, number: int) -> Question:
        key = f"{self._world.rank}/{number}"
        asker, step, subject = self._store.get(key).decode().split(" ", 2)
        self._store.delete_key(key)
        return Question(number, int(asker), subject, int(step))

    def _reply(self, question: Question) -> None:
        fault = ""
        value = None
        try:
            value = self._answer(question.subject, question.step)
        except Exception as error:  # the asker reports it
            fault = first_line(error) or type(error).__name__
        message = pickle_to_bytes((fault, value))
        tag = _FIRST_TAG + question.number
        asker = self._world.process(question.asker)
        for tensor in (torch.tensor([len(message)]), message):
            dist.send(tensor, asker, group=self._world.object_group, tag=tag)
