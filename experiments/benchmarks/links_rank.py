"""One rank of the benchmark of links, which joins the others and obeys.

Orders come as a JSON line each, to all ranks alike:

{"do": "train", "method": ..., "steps": ...}  the answer: the moment at the end of each step
{"do": "send", "bytes": ..., "times": ...}    from rank 0 to 1: moments of the begin, or of the end
{"do": "hello"}                               bytes of the model's parameters

Moments are those of time.monotonic(), which all processes of a machine share.
"""

import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.methods import Task, Train
from benchmarks.network import end_with_parent
from toolkit.runtime import World, join, leave

_PIECE = 2**20  # bytes


class Obedient:
    """Carries out orders; each method is made when it is first asked for, and kept."""

    def __init__(self, task: Task, world: World) -> None:
        self.task, self.world = task, world
        self._made: dict[str, Train] = {}

    def hello(self) -> int:
        return sum(4 * parameter.numel() for parameter in self.task.fresh_model().parameters())

    def train(self, method: str, steps: int) -> list[float]:
        if method not in self._made:
            self._made[method] = self.task.make(method, self.world)
        self.world.barrier()
        return [time.monotonic() for _ in self._made[method](steps)]

    def send(self, bytes: int, times: int) -> list[float]:
        pieces = torch.zeros(bytes, dtype=torch.uint8).split(_PIECE)
        return [self._send_once(pieces) for _ in range(times)]

    def _send_once(self, pieces: tuple[torch.Tensor, ...]) -> float:
        """When rank 0 begins to send; when all has come to another rank."""
        rank = self.world.rank
        works = [dist.irecv(piece, 0, tag=k) for k, piece in enumerate(pieces)] if rank == 1 else []
        self.world.barrier()
        begin = time.monotonic()
        if rank == 0:
            works = [dist.isend(piece, 1, tag=k) for k, piece in enumerate(pieces)]
        for work in filter(None, works):
            work.wait()
        return begin if rank == 0 else time.monotonic()


def main() -> None:
    end_with_parent()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what else is printed is no answer
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    timeout = options.pop("timeout")
    task = Task(**options)
    obedient = Obedient(task, join(task.workers, device="cpu", timeout=timeout))
    for line in sys.stdin:
        order: dict[str, Any] = json.loads(line)
        print(json.dumps(getattr(obedient, order.pop("do"))(**order)), file=answers)
    leave()


if __name__ == "__main__":
    main()
