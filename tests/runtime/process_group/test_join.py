"""The world, without processes: which backend it takes, on GPUs that are made up."""

import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import permutations
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import DistStoreError, HashStore, TCPStore

from tests.ports import free_port
from tests.thorough import thorough
from toolkit.errors import UserError
from toolkit.runtime import join, launch
from toolkit.runtime.process_group import join as world
from toolkit.runtime.process_group.group import World
from toolkit.runtime.process_group.watch import EXIT_FAILED, Watch


@pytest.fixture
def gpus(monkeypatch):
    """The GPUs that this process sees, by their number."""
    seen = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: bool(seen))
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(seen))
    monkeypatch.setattr(
        "torch.cuda.get_device_properties", lambda gpu: SimpleNamespace(uuid=seen[gpu.index])
    )
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    return seen


def gpu_of(gpus, seen, local_rank):
    """The identity of a rank's GPU, one of those that its process sees."""
    gpus[:] = seen
    return world._gpu(world._device("auto", local_rank))


@pytest.mark.parametrize(
    ("seen", "n_gpus"),
    [
        (lambda rank: [f"gpu {rank}"], 4),  # as Slurm's tasks see with gpus_per_task=1
        (lambda rank: [f"gpu {k}" for k in range(4)], 4),
        (lambda rank: ["gpu 0", "gpu 1", "gpu 2"], 3),
        (lambda rank: ["gpu 0"], 1),
        (lambda rank: ["gpu 0"] if rank else [], 1),
        (lambda rank: [], 0),
    ],
)
def test_nccl_takes_a_gpu_a_rank(gpus, seen, n_gpus):
    found = [gpu_of(gpus, seen(rank), rank) for rank in range(4)]
    assert world._backend("gloo", found) == "gloo"
    if n_gpus == 4:
        assert found == ["gpu 0", "gpu 1", "gpu 2", "gpu 3"]
        assert world._backend("auto", found) == world._backend("nccl", found) == "nccl"
    else:
        assert world._backend("auto", found) == "gloo"
        with pytest.raises(UserError, match=f"backend=nccl .* {n_gpus}"):
            world._backend("nccl", found)


def test_ranks_share_the_identity_of_their_gpu(monkeypatch):
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with ThreadPoolExecutor() as pool:
        meeting = [pool.submit(world._meet, r, 2, 20.0, f"gpu {r}") for r in range(2)]
    for met in meeting:
        assert [met.result().get(f"came/{rank}") for rank in range(2)] == [b"gpu 0", b"gpu 1"]


VARIABLES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"}


def joined(monkeypatch, gpus, backend, **environment):
    """The world of a process that is alone, and its calls of torch.distributed."""
    gpus[:] = ["gpu 0"]
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    others = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    monkeypatch.setattr("os.environ", others | place | environment)
    store, calls = HashStore(), []
    store.set("came/0", "gpu 0")

    def new_group(ranks=None, backend=None, timeout=None):
        calls.append(("group", backend))
        return f"group of {backend}"

    watch = SimpleNamespace(start=lambda: None, timeout=1.0, waiting=lambda *_: nullcontext())
    monkeypatch.setattr(world, "_joined", None)
    monkeypatch.setattr(world, "_meet", lambda *_: store)
    monkeypatch.setattr(world, "Watch", lambda *_: watch)
    monkeypatch.setattr("torch.cuda.set_device", calls.append)
    monkeypatch.setattr(
        "torch.distributed.init_process_group", lambda name, **_: calls.append(name)
    )
    monkeypatch.setattr("torch.distributed.new_group", new_group)
    monkeypatch.setattr(
        "torch.distributed.all_gather_object", lambda found, value, group: calls.append(group)
    )
    return world.join(backend=backend), calls


@pytest.mark.parametrize(
    ("backend", "made", "gathered"),
    [("auto", ["nccl", ("group", "gloo")], "group of gloo"), ("gloo", ["gloo"], None)],
)
def test_objects_do_not_go_through_the_gpus_memory(monkeypatch, gpus, backend, made, gathered):
    here, calls = joined(monkeypatch, gpus, backend)
    here.gather("anything")
    assert calls == [here.device, *made, gathered]


@pytest.mark.parametrize(("name", "ours"), VARIABLES.items())
@pytest.mark.parametrize("backend", ["auto", "nccl", "gloo"])
@pytest.mark.parametrize("chosen", [None, "1"])
def test_nothing_waits_for_an_early_receive(monkeypatch, gpus, name, ours, backend, chosen):
    """CUDA finds the variables at its first call; those that the user has set stay."""
    found = set()

    def available():
        found.add(os.environ.get(name))
        return True

    monkeypatch.setattr("torch.cuda.is_available", available)
    joined(monkeypatch, gpus, backend, **({name: chosen} if chosen else {}))
    assert found == {chosen if chosen or backend == "gloo" else ours}


# First messages

PAIRS = sorted(permutations(range(3), 2))
GROUPS = [("all", (0, 1)), ("all", (0, 1, 2)), ("gather", (1, 2))]


@pytest.fixture
def meetings(monkeypatch):
    """Calls of torch.distributed that return when all who take part have come, as NCCL's first do.

    ``met[rank]`` is what a thread that goes by that rank has been through.
    """
    met, here = {}, threading.local()
    lock, places = threading.Lock(), {}

    def meet(what, n):
        with lock:
            place = places.setdefault(what, threading.Barrier(n))
        place.wait(10)
        met.setdefault(here.rank, []).append(what)

    def meet_all(number, group):
        assert number.numel() == 1
        meet(group, len(group[1]))

    monkeypatch.setattr("torch.distributed.new_group", lambda ranks, timeout: ("made", (*ranks,)))
    monkeypatch.setattr("torch.distributed.all_reduce", meet_all)
    for call in ("send", "recv"):
        monkeypatch.setattr(
            f"torch.distributed.{call}", lambda number, peer, group: meet_all(number, group)
        )
    return SimpleNamespace(met=met, here=here)


def test_first_messages_do_not_wait_for_each_other(monkeypatch, meetings):
    """With channels both ways between all of three ranks, each of which waits for its peer.

    Where these are there already, nothing more is sent.
    """
    watch = SimpleNamespace(waiting=lambda *_: nullcontext(), timeout=1.0)
    finished = []
    monkeypatch.setattr(World, "finish_computing", lambda self: finished.append(self.rank))

    def work(rank):
        meetings.here.rank = rank
        here = World(rank, 3, torch.device("cpu"), "nccl", watch, HashStore())
        here.make_groups(GROUPS[:1], PAIRS[:1])
        here.make_groups(GROUPS, PAIRS)
        here.make_groups(GROUPS, PAIRS)

    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(work, rank) for rank in range(3)]:
            done.result(20)
    order = [(0, 1), PAIRS[0], *(ranks for _, ranks in GROUPS[1:]), *PAIRS[1:]]
    for rank, through in meetings.met.items():
        own = [("made", ranks) for ranks in order if rank in ranks]
        assert through == own
        assert finished.count(rank) == len(own)


def connect():
    here = join(device="cpu")
    here.make_groups(GROUPS, PAIRS)
    here.connect(GROUPS, PAIRS)
    return here.total(torch.ones(1)).item()


@thorough
def test_first_messages_over_gloo():
    assert launch(connect, 3) == [3.0] * 3


@pytest.mark.parametrize(
    ("nccl", "gloo", "expected"),
    [
        ("eth1", None, "eth1"),
        ("=eth1", None, "eth1"),
        ("eth", None, None),
        ("^lo", None, None),
        ("eth1", "eth0", "eth0"),
        (None, None, None),
    ],
)
def test_gloo_takes_the_interface_of_nccl(monkeypatch, nccl, gloo, expected):
    """If it names one interface, and gloo's variable is not set."""
    monkeypatch.setattr("socket.if_nameindex", lambda: [(1, "lo"), (2, "eth0"), (3, "eth1")])
    for name, value in {"NCCL_SOCKET_IFNAME": nccl, "GLOO_SOCKET_IFNAME": gloo}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    monkeypatch.setattr("os.environ", {**os.environ})
    world._choose_interface(None)
    assert os.environ.get("GLOO_SOCKET_IFNAME") == expected


def test_a_store_that_stops_to_answer_is_named(monkeypatch, capsys):
    def silent(watch):
        raise DistStoreError("wait timeout after 3000ms, keys: /watch/process/1\nmore")

    place = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(Watch, "start", silent)
    with pytest.raises(SystemExit) as ended:
        join(device="cpu", timeout=3)
    assert ended.value.code == EXIT_FAILED
    where = f"rank 0 .* localhost:{place['MASTER_PORT']} within 3 s: wait timeout"
    shown = capsys.readouterr().err
    assert re.search(f"^error: {where}", shown, re.MULTILINE)
    assert "more" not in shown
