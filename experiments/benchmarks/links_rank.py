"""The ranks of the benchmark of links: what each trains, and how the benchmark orders it.

Orders are JSON lines on a rank's standard input, the same for all ranks; it answers by one line:

{"do": "train", "method": ..., "steps": ...}  the moment at the end of each step
{"do": "send", "bytes": ..., "times": ...}    from rank 0 to 1: moments of the begin, or of the end
{"do": "hello"}                               bytes of the model's parameters

Moments are those of time.monotonic(), which all processes of a machine share.
"""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from benchmarks.network import INTERFACE, Network
from toolkit.model import build, partition
from toolkit.runtime import Distributed, JobFailedError, World, join, leave
from toolkit.runtime.baselines import DDP, DelayedAllReduce
from toolkit.schedule import Schedule, catalog

COMPUTE = "compute"
"""The same computation without any message: a lower bound, not a method."""

Train = Callable[[int], Iterator[object]]
"""Trains a number of steps, and yields at the end of each."""

_PIECE = 2**20  # bytes
_PARTING = 10.0  # seconds in which ranks without an order end


@dataclass(frozen=True)
class Method:
    runtime: Callable[..., Any]
    delay: Any  # of the weights
    options: Mapping[str, Any] = field(default_factory=dict)


_HALF = {"compression": "bf16"}
_PACED = {"pacing": True, "chunk_mb": 0.25}
METHODS = {
    "DDP": Method(DDP, 0),
    "DDP tuned": Method(DDP, 0, {"bucket_mb": 4.0, "bucket_view": True}),
    "DDP 16-bit": Method(DDP, 0, _HALF),
    "delayed all-reduce": Method(DelayedAllReduce, 1),
    "delayed all-reduce 16-bit": Method(DelayedAllReduce, 1, _HALF),
    **{
        f"{name}{suffix}": Method(Distributed, delay, options)
        for name, delay in (("CDP-v1", 1), ("CDP-v2", "freshest"))
        for suffix, options in (
            ("", {}),
            (" 16-bit", _HALF),
            (" paced", _PACED),
            (" 16-bit paced", _HALF | _PACED),
        )
    },
}
ALL = (COMPUTE, *METHODS)


@dataclass(frozen=True)
class Task:
    """What every method trains.

    Attributes:
        batch: images of a worker.
        chunk_mb: of CDP's messages; None: the default of its runtime.
        chains: of CDP-v1; None: the default of its schedule.
    """

    workers: int
    model: str
    image_size: int
    batch: int
    stages: int
    partition: Any
    chunk_mb: float | None
    chains: str | None
    seed: int

    def images(self) -> tuple[Tensor, Tensor]:
        """Random images of all workers ``[workers * batch, 3, size, size]``, and their classes."""
        generator = torch.Generator().manual_seed(self.seed)
        n, size = self.workers * self.batch, self.image_size
        images = torch.randn(n, 3, size, size, generator=generator)
        return images, torch.randint(10, (n,), generator=generator)

    def fresh_model(self) -> torch.nn.Module:
        torch.manual_seed(self.seed)
        return build(self.model, 10, self.image_size)

    def schedule(self, method: Method) -> Schedule:
        if method.delay == 0:
            return catalog.data_parallel(self.workers, n_stages=self.stages)
        chained = method.runtime is Distributed and method.delay == 1 and self.chains is not None
        more: dict[str, Any] = {"chains": self.chains} if chained else {}
        return catalog.cyclic(self.workers, method.delay, n_stages=self.stages, **more)

    def make(self, name: str, world: World) -> Train:
        """Make a method, ready to train from the first weights on. Every rank calls it."""
        images, classes = self.images()
        if name == COMPUTE:
            mine = (images.chunk(self.workers)[world.rank], classes.chunk(self.workers)[world.rank])
            return _plain(self.fresh_model(), *mine)
        method, options = METHODS[name], dict(METHODS[name].options)
        stages = partition(self.fresh_model(), self.stages, images[: self.batch], by=self.partition)
        if method.runtime is Distributed and self.chunk_mb is not None:
            options["chunk_mb"] = self.chunk_mb
        runtime = method.runtime(
            stages, self.schedule(method), _sgd, F.cross_entropy, world=world, **options
        )
        return lambda n_steps: runtime.run([(images, classes)] * n_steps)


def _plain(model: torch.nn.Module, images: Tensor, classes: Tensor) -> Train:
    optimizer = _sgd(model.parameters())

    def train(n_steps: int) -> Iterator[None]:
        for _ in range(n_steps):
            optimizer.zero_grad()
            F.cross_entropy(model(images), classes).backward()
            optimizer.step()
            yield

    return train


def _sgd(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


class Ranks:
    """One process a rank, each in its namespace; a context that ends with none of them left.

    Args:
        network: has as many ranks as ``task`` has workers.
        task: what they train.
        timeout: seconds in which an order has to be carried out.
        log: the file to which they print.
    """

    def __init__(self, network: Network, task: Task, timeout: float, log: Path) -> None:
        self._timeout, self._log = timeout, log
        self._processes: list[subprocess.Popen[str]] = []
        experiments = str(Path(__file__).parents[1])
        path = os.pathsep.join(filter(None, (experiments, os.environ.get("PYTHONPATH"))))
        common = {
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "MASTER_ADDR": network.address(0),
            "MASTER_PORT": "29500",
            "WORLD_SIZE": str(task.workers),
            "LOCAL_WORLD_SIZE": str(task.workers),
        }
        # Half the time-out: ranks know the reason of a failure, so they report it first.
        options = json.dumps(asdict(task) | {"timeout": timeout / 2})
        command = [sys.executable, "-m", "benchmarks.links_rank", options]
        try:
            with log.open("ab") as file:
                for rank in range(task.workers):
                    place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                    process = subprocess.Popen(
                        [*network.inside(rank), *command],
                        env=dict(os.environ) | common | place,
                        bufsize=1,
                        text=True,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=file,
                        start_new_session=True,  # so that Ctrl-C reaches the benchmark alone
                    )
                    self._processes.append(process)
        except BaseException:
            self._kill()
            raise

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            for process in self._processes:
                assert process.stdin is not None
                with suppress(OSError):
                    process.stdin.close()  # the end of orders
            end = time.monotonic() + _PARTING
            while time.monotonic() < end and any(each.poll() is None for each in self._processes):
                time.sleep(0.02)
        self._kill()

    def order(self, do: str, **how: Any) -> list[Any]:
        """Have every rank ``do`` something; return their answers.

        Raises:
            JobFailedError: a rank has ended, or does not answer in time.
        """
        # Reading blocks, so that a time-out ends the ranks, and with them the reading.
        start = time.monotonic()
        timer = threading.Timer(self._timeout, self._kill)
        timer.start()
        answers, rank = [], 0
        try:
            for rank, process in enumerate(self._processes):  # noqa: B007
                assert process.stdin is not None
                process.stdin.write(json.dumps({"do": do} | how) + "\n")
            for rank, process in enumerate(self._processes):  # noqa: B007
                assert process.stdout is not None
                answers.append(json.loads(process.stdout.readline()))
            return answers
        except (OSError, ValueError) as error:
            expired = time.monotonic() - start >= self._timeout
            late = f" within {self._timeout:g} s (bench.timeout)" if expired else ""
            raise JobFailedError(
                f"{do}: rank {rank} has not answered{late}: {self._reason()}; see {self._log}"
            ) from error
        finally:
            timer.cancel()

    def _reason(self) -> str:
        """The line of the log that gives a reason."""
        time.sleep(1)  # ranks write it while they end
        text = self._log.read_text(errors="replace")
        errors = re.findall(r"^error: (.+)", text, re.MULTILINE)
        return next(iter(errors), (text.strip().splitlines() or ["nothing is printed"])[-1])

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            assert process.stdin is not None
            assert process.stdout is not None
            with suppress(OSError):
                process.stdin.close()
            process.stdout.close()


class Rank:
    """Carries out orders; a method is made when it is first asked for, and kept."""

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
        """When rank 0 begins to send; when all has come to another rank."""
        pieces = torch.zeros(bytes, dtype=torch.uint8).split(_PIECE)
        return [self._send_once(pieces) for _ in range(times)]

    def _send_once(self, pieces: tuple[torch.Tensor, ...]) -> float:
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
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    timeout = options.pop("timeout")
    task = Task(**options)
    rank = Rank(task, join(task.workers, device="cpu", timeout=timeout))
    for line in sys.stdin:
        order: dict[str, Any] = json.loads(line)
        print(json.dumps(getattr(rank, order.pop("do"))(**order)), file=answers)
    leave()


if __name__ == "__main__":
    main()
