"""How a rank meets the others of its job: its place, its GPU, the store, the backend."""

import functools
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

from toolkit.errors import UserError, check_choice, first_line
from toolkit.files import EXPERIMENTS, started_by
from toolkit.runtime.process_group import watch as watching
from toolkit.runtime.process_group.watch import Watch
from toolkit.runtime.process_group.world import World, backend_timeout
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

    A process joins once; a second call returns the same world. If the script has called
    ``torch.distributed.init_process_group``, the ranks are the same and have groups of their own.

    Args:
        n_ranks: required number of ranks; by default any number.
        device: ``auto`` is this rank's GPU if it has one, else the CPU; ``cuda`` or ``cpu``.
        backend: ``auto`` is NCCL if every rank has a GPU of its own, else gloo, whose messages
            go through the CPU's memory.
        timeout: seconds after which a rank that does not answer ends the job.
        interface: network interface of this machine's messages, such as ``eth1``; by
            default that of GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME.

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

    # 1. The device. NCCL and CUDA read the variables when they are first used.
    _set_variables(device, backend, interface)
    own_device = _device(device, local_rank)
    enter_device(own_device)

    # 2. The store, where ranks say which GPU they have; then the watch, before any wait for others.
    meeting_place = (
        f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} within {timeout:g} s"
    )
    with _meeting(rank, meeting_place):
        store = _meet(rank, size, timeout, _gpu(own_device))
        backend = _backend(
            backend, [store.get(f"came/{r}").decode() for r in range(size)]
        )
        watch = Watch(store, rank, size, timeout)
        watch.start()

    # 3. The process groups.
    world = World(rank, size, own_device, backend, watch, store)
    _connect(world)
    if world.script_made_group:
        _leave_before_destruction()
    _joined = world
    return world


def _set_variables(device: str, backend: str, interface: str | None) -> None:
    """Set what the backends and CUDA read from the environment as they start."""
    if interface is not None:
        check_choice(
            "interface", interface, [name for _, name in socket.if_nameindex()]
        )
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface
    if backend != "gloo" and device != "cpu":
        # NCCL's channels have a stream each. A stream that shares one of a GPU's 8 queues with an
        # early receive waits as long as that.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        # Loading a kernel at its first use waits for such a receive, too.
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")


def _connect(world: World) -> None:
    """Make the process groups of all ranks."""
    backend = world.backend
    timeout = backend_timeout(world.watch.timeout)
    world.script_made_group = dist.is_initialized()
    with world.watch.waiting("connections to all ranks", range(world.size)):
        if world.script_made_group:
            # Messages start in other threads, and would mix with the script's own.
            group = dist.new_group(backend=backend, timeout=timeout)
            world.group = cast(dist.ProcessGroup, group)
        else:
            dist.init_process_group(
                backend,
                store=dist.PrefixStore("group", world.store),
                rank=world.rank,
                world_size=world.size,
                timeout=timeout,
                device_id=world.device if backend == "nccl" else None,
            )
        if world.script_made_group or backend == "nccl":
            object_group = dist.new_group(backend="gloo", timeout=timeout)
            world.object_group = cast(dist.ProcessGroup, object_group)


def current_world() -> World | None:
    """Return the ranks that this process has joined, or None."""
    return _joined


def leave() -> None:
    """Leave the other ranks after the work is done; do nothing if this process did not join."""
    global _joined
    if _joined is not None:
        _joined.watch.stop()
        if not _joined.script_made_group:
            dist.destroy_process_group()
        _joined = None


def _leave_before_destruction() -> None:
    """Let the script's destroy_process_group, by whatever name it has it, call :func:`leave` first.

    Scripts call it as soon as their own work is done. Other ranks may still need what this one has.
    """
    destroy = dist.destroy_process_group

    @functools.wraps(destroy)
    def leave_and_destroy(group: dist.ProcessGroup | None = None) -> None:
        if group is None or group == dist.group.WORLD:
            leave()
        destroy(group)

    for module in [*sys.modules.values()]:
        names = vars(module) if hasattr(module, "__dict__") else {}
        if names.get("destroy_process_group") is destroy:
            names["destroy_process_group"] = leave_and_destroy


def _command(n_ranks: int) -> str:
    """Return the command that starts this program on ``n_ranks`` ranks of one machine."""
    if _SUBMITIT in os.environ:
        return (
            f"make hydra.launcher.nodes times hydra.launcher.tasks_per_node {n_ranks}"
        )
    script, *arguments = sys.argv
    if not script.endswith(".py"):
        return f"toolkit.runtime.launch(function, {n_ranks})"
    path = Path(script).resolve()
    if path.parent == EXPERIMENTS:
        return shlex.join([*started_by(path.stem, n_ranks).split(), *arguments])
    program = shlex.join([os.path.relpath(script), *arguments])
    return f"torchrun --nproc-per-node {n_ranks} {program}"


def _place(n_ranks: int | None) -> tuple[int, int, int]:
    """Return this process's number, the number of ranks, and its number on its machine."""
    if "RANK" not in os.environ and _SUBMITIT in os.environ:
        from submitit.helpers import TorchDistributedEnvironment

        TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
    if unset_variables := [name for name in _VARIABLES if name not in os.environ]:
        raise UserError(
            f"this process was not started as a rank ({', '.join(unset_variables)} not set):"
            f" {_command(n_ranks or 2)}"
        )
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
    except ValueError as error:
        raise UserError(f"torchrun's variables are whole numbers: {error}") from error
    if not 0 <= rank < size:
        raise UserError(
            f"RANK={rank} is outside WORLD_SIZE={size}: start with torchrun"
        )
    if n_ranks is not None and size != n_ranks:
        raise UserError(
            f"the schedule has {n_ranks} ranks and {size} were started: {_command(n_ranks)}"
        )
    return rank, size, local_rank


def _device(name: str, local_rank: int) -> torch.device:
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if name not in ("auto", "cuda"):
        raise UserError(
            f"device={name}: a rank takes the GPU of its turn, so auto, cuda or cpu"
        )
    if not torch.cuda.is_available():
        raise UserError("device=cuda cannot be used: there is no GPU; try device=auto")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def _gpu(device: torch.device) -> str:
    """Return the GPU's identity, whatever its number in this process; empty for the CPU."""
    if device.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def _backend(name: str, gpus: Sequence[str]) -> str:
    """Return the backend of ranks with these ``gpus``."""
    n_gpus = len({*gpus} - {""})
    if name == "nccl" and n_gpus < len(gpus):
        time.sleep(1)  # all have seen the store before rank 0 leaves
        raise UserError(
            f"backend=nccl takes a GPU per rank, and {len(gpus)} ranks have {n_gpus}: use"
            " backend=gloo, or fewer ranks per machine"
        )
    if name != "auto":
        return name
    if n_gpus == len(gpus):
        return "nccl"
    return "gloo"


@contextmanager
def _meeting(rank: int, meeting_place: str) -> Iterator[None]:
    """End this rank with one sentence if the store of the ranks cannot be reached within."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        # torch.distributed's errors are RuntimeErrors.
        watching.announce(
            f"rank {rank} cannot meet the others at {meeting_place}: {first_line(error)}; is rank 0"
            " running, and the port open?"
        )
        raise SystemExit(watching.EXIT_FAILED) from error


def _meet(rank: int, size: int, timeout: float, gpu: str) -> dist.Store:
    """Return the store that all ranks share, once all have written their GPU to it."""
    # Like torch.distributed's env://, which does not name the ranks that are missing.
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    end = time.monotonic() + timeout
    # torchrun's agent serves the store of its job; otherwise rank 0 does.
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not serves:
        _await_port(host, port, end)
    store: dist.Store = dist.TCPStore(
        host,
        port,
        is_master=serves,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        multi_tenant=serves,
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt != "0":
        # Ignore earlier attempts' keys.
        store = dist.PrefixStore(f"attempt_{attempt}", store)

    store.set(f"came/{rank}", gpu)
    came = [f"came/{r}" for r in range(size)]
    while not store.check(came):
        missing_ranks = [
            str(r) for r in range(size) if not store.check(came[r : r + 1])
        ]
        # The last may have come since the check above.
        if missing_ranks and time.monotonic() > end:
            if store.add("missing", 1) == 1:  # so that one rank reports it
                watching.announce(
                    f"rank {', '.join(missing_ranks)} did not come to {host}:{port} within"
                    f" {timeout:g} s: look at its log, or start all ranks at the same time"
                )
            # All have seen the store and the announcement before a rank leaves.
            time.sleep(1)
            raise SystemExit(watching.EXIT_FAILED)
        time.sleep(0.05)
    return store


def _await_port(host: str, port: int, end: float) -> None:
    """Wait until the port listens; TCPStore itself tries for longer than its time-out."""
    while True:
        try:
            socket.create_connection(
                (host, port), max(0.1, end - time.monotonic())
            ).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
