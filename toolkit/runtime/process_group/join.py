"""How a rank meets the others: its place, its GPU, the store, the backend."""

import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist

from toolkit.errors import UserError, check_choice, first_line
from toolkit.runtime.process_group import watch as watching
from toolkit.runtime.process_group.group import World, backend_timeout
from toolkit.runtime.process_group.watch import Watch
from toolkit.runtime.streams import enter_device

BACKENDS = ("auto", "nccl", "gloo")
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SUBMITIT = "SUBMITIT_EXECUTOR"  # set in tasks that submitit has started

_joined: World | None = None


def join(
    n_ranks: int | None = None,
    *,
    device: str = "auto",
    backend: str = "auto",
    timeout: float = 120.0,
    interface: str | None = None,
) -> World:
    """Meet the other ranks of this job, as torchrun, Slurm or ``launch`` started them.

    A process joins once; a second call returns the same world.

    Args:
        n_ranks: required number of ranks; any number unless given.
        device: ``auto`` is this rank's GPU if it has one, else the CPU; ``cuda`` or ``cpu``.
        backend: ``auto`` is NCCL if every rank has a GPU of its own, else gloo, whose messages
            go through the CPU's memory.
        timeout: seconds after which a rank that does not answer ends the job.
        interface: network interface of this machine's messages, such as ``eth1``; as the
            environment says (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) unless given.

    Returns:
        The ranks of the job, seen from this process.

    Raises:
        UserError: this process is not a rank, or the job does not have ``n_ranks`` ranks; the
            interface does not exist; or NCCL lacks a GPU for each rank.
        SystemExit: other ranks do not come; the reason has been printed.
    """
    global _joined
    check_choice("backend", backend, BACKENDS)
    if not timeout > 0:
        raise UserError(f"timeout is a number of seconds above 0: got {timeout}")
    rank, size, local_rank = _place(n_ranks)
    if _joined is not None:
        return _joined
    if interface is not None:
        check_choice("interface", interface, [name for _, name in socket.if_nameindex()])
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface
    if backend != "gloo" and device != "cpu":
        # NCCL's channels have a stream each. A stream that shares one of a GPU's 8 queues with an
        # early receive waits as long as that. CUDA reads the variable as it starts.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        # Loading a kernel at its first use waits for such a receive, too.
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    on = _device(device, local_rank)
    enter_device(on)
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} within {timeout:g} s"
    with _meeting(rank, where):
        store = _meet(rank, size, timeout, _gpu(on))
        backend = _backend(backend, [store.get(f"came/{r}").decode() for r in range(size)])
        watch = Watch(store, rank, size, timeout)
        watch.start()
    patience, objects = backend_timeout(timeout), None
    with watch.waiting("connections to all ranks", range(size)):
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=size,
            timeout=patience,
            device_id=on if backend == "nccl" else None,
        )
        if backend == "nccl":
            objects = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=patience))
    _joined = World(rank, size, on, backend, watch, store, objects=objects)
    return _joined


def joined() -> World | None:
    """Return the ranks that this process has joined, or None."""
    return _joined


def leave() -> None:
    """Leave the other ranks after the work is done; do nothing if this process did not join."""
    global _joined
    if _joined is not None:
        _joined.watch.stop()
        dist.destroy_process_group()
        _joined = None


def _command(n_ranks: int) -> str:
    """Return the command that starts this program on ``n_ranks`` ranks of one machine."""
    if _SUBMITIT in os.environ:
        return f"make hydra.launcher.nodes times hydra.launcher.tasks_per_node {n_ranks}"
    script, *arguments = sys.argv
    if not script.endswith(".py"):
        return f"toolkit.runtime.launch(function, {n_ranks})"
    program = shlex.join([os.path.relpath(script), *arguments])
    return f"torchrun --nproc-per-node {n_ranks} {program}"


def _place(n_ranks: int | None) -> tuple[int, int, int]:
    """Return this process's number, the number of ranks, and its number on its machine."""
    if "RANK" not in os.environ and _SUBMITIT in os.environ:
        from submitit.helpers import TorchDistributedEnvironment

        TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
    if missing := [name for name in _VARIABLES if name not in os.environ]:
        raise UserError(
            f"this process was not started as a rank ({', '.join(missing)} not set):"
            f" {_command(n_ranks or 2)}"
        )
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
    except ValueError as error:
        raise UserError(f"torchrun's variables are whole numbers: {error}") from error
    if not 0 <= rank < size:
        raise UserError(f"RANK={rank} is outside WORLD_SIZE={size}: start with torchrun")
    if n_ranks is not None and size != n_ranks:
        raise UserError(
            f"the schedule has {n_ranks} ranks and {size} were started: {_command(n_ranks)}"
        )
    return rank, size, local_rank


def _device(name: str, local_rank: int) -> torch.device:
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if name not in ("auto", "cuda"):
        raise UserError(f"device={name}: a rank takes the GPU of its turn, so auto, cuda or cpu")
    if not torch.cuda.is_available():
        raise UserError("device=cuda cannot be used: there is no GPU; try device=auto")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def _gpu(device: torch.device) -> str:
    """Return the GPU's identity, whatever its number in this process; empty for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def _backend(name: str, gpus: Sequence[str]) -> str:
    """Return the backend of ranks with these ``gpus``."""
    n_gpus = len({*gpus} - {""})
    if name == "nccl" and n_gpus < len(gpus):
        time.sleep(1)  # all have seen the store before rank 0 leaves
        raise UserError(
            f"backend=nccl takes a GPU a rank, and {len(gpus)} ranks have {n_gpus}: use"
            " backend=gloo, or fewer ranks a machine"
        )
    return ("nccl" if n_gpus == len(gpus) else "gloo") if name == "auto" else name


@contextmanager
def _meeting(rank: int, where: str) -> Iterator[None]:
    """End this rank with one sentence if the store of the ranks cannot be reached within."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch.distributed's errors are RuntimeErrors
        watching.announce(
            f"rank {rank} cannot meet the others at {where}: {first_line(error)}; is rank 0"
            " running, and the port open?"
        )
        raise SystemExit(watching.EXIT_FAILED) from error


def _meet(rank: int, size: int, timeout: float, gpu: str) -> dist.Store:
    """Return the store that all ranks share, once all have written their GPU to it."""
    # Like torch.distributed's env://, which does not name the ranks that are missing.
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    end = time.monotonic() + timeout
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not hosts:
        _await_port(host, port, end)
    patience = timedelta(seconds=timeout)
    store: dist.Store = dist.TCPStore(
        host, port, None, hosts, patience, wait_for_workers=False, multi_tenant=hosts
    )
    if (attempt := os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) != "0":
        store = dist.PrefixStore(f"attempt_{attempt}", store)  # ignore earlier attempts' keys
    store.set(f"came/{rank}", gpu)
    came = [f"came/{r}" for r in range(size)]
    while not store.check(came):
        late = [str(r) for r in range(size) if not store.check(came[r : r + 1])]
        if late and time.monotonic() > end:  # the last may have come since the check above
            if store.add("missing", 1) == 1:
                watching.announce(
                    f"rank {', '.join(late)} did not come to {host}:{port} within {timeout:g} s:"
                    " look at its log, or start all ranks at the same time"
                )
            time.sleep(1)  # all have seen the store and the announcement before a rank leaves
            raise SystemExit(watching.EXIT_FAILED)
        time.sleep(0.05)
    return store


def _await_port(host: str, port: int, end: float) -> None:
    """Wait until the port listens; TCPStore itself tries for longer than its time-out."""
    while True:
        try:
            socket.create_connection((host, port), max(0.1, end - time.monotonic())).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
