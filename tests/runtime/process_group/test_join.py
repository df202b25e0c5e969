"""The world, without processes: which backend it takes, on GPUs that are made up."""

import os
import re
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
from toolkit.runtime.process_group.watch import EXIT_FAILED, Watch
from toolkit.runtime.process_group.world import World


@pytest.fixture
def gpus(monkeypatch):
    """The GPUs that this process sees, by their number."""
    seen = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: bool(seen))
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(seen))
    monkeypatch.setattr(
        "torch.cuda.get_device_properties",
        lambda gpu: SimpleNamespace(uuid=seen[gpu.index]),
    )
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    return seen


@pytest.mark.parametrize(
    ("seen", "n_gpus"),
    [
        (lambda rank: [f"gpu {rank}"], 4),  # as Slurm's tasks see with gpus_per_task=1
        (lambda rank: [f"gpu {k}" for k in range(4)], 4),
        (lambda rank: ["gpu 0", "gpu 1", "gpu 2"], 3),
        (lambda rank: ["gpu 0"] if rank else [], 1),
        (lambda rank: [], 0),
    ],
)
def test_nccl_takes_a_gpu_a_rank(gpus, seen, n_gpus):
    found = []
    for rank in range(4):
        gpus[:] = seen(rank)
        found.append(world._gpu(world._device("auto", rank)))
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
        assert [met.result().get(f"came/{rank}") for rank in range(2)] == [
            b"gpu 0",
            b"gpu 1",
        ]


WATCH = SimpleNamespace(
    start=lambda: None, timeout=1.0, waiting=lambda *_: nullcontext()
)
VARIABLES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"}


def joined(monkeypatch, gpus, backend, **environment):
    """The world of a process that is alone, and its calls of torch.distributed."""
    gpus[:] = ["gpu 0"]
    place = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }
    others = {
        name: value for name, value in os.environ.items() if name not in VARIABLES
    }
    monkeypatch.setattr("os.environ", others | place | environment)
    store, calls = HashStore(), []
    store.set("came/0", "gpu 0")

    def new_group(backend, timeout):
        calls.append(("group", backend))
        return f"group of {backend}"

    def all_gather_object(gathered, value, group):
        calls.append(group)
        gathered[:] = [value] * len(gathered)

    monkeypatch.setattr(world, "_joined", None)
    monkeypatch.setattr(world, "_meet", lambda *_: store)
    monkeypatch.setattr(world, "Watch", lambda *_: WATCH)
    for name, fake in {
        "cuda.set_device": calls.append,
        "distributed.init_process_group": lambda name, **_: calls.append(name),
        "distributed.new_group": new_group,
        "distributed.all_gather_object": all_gather_object,
    }.items():
        monkeypatch.setattr(f"torch.{name}", fake)
    return world.join(backend=backend), calls


@pytest.mark.parametrize(
    ("backend", "made", "gathered"),
    [("auto", ["nccl", ("group", "gloo")], "group of gloo"), ("gloo", ["gloo"], None)],
)
def test_objects_do_not_go_through_the_gpus_memory(
    monkeypatch, gpus, backend, made, gathered
):
    here, calls = joined(monkeypatch, gpus, backend)
    here.gather("anything")
    assert calls == [here.device, *made, gathered]


@pytest.mark.parametrize("backend", ["auto", "nccl", "gloo"])
@pytest.mark.parametrize("chosen", [{}, dict.fromkeys(VARIABLES, "1")])
def test_nothing_waits_for_an_early_receive(monkeypatch, gpus, backend, chosen):
    """CUDA finds the variables at its first call; those that the user has set stay."""
    found = []

    def available():
        found.append(
            {name: os.environ[name] for name in VARIABLES if name in os.environ}
        )
        return True

    monkeypatch.setattr("torch.cuda.is_available", available)
    joined(monkeypatch, gpus, backend, **chosen)
    assert found[0] == (chosen if chosen or backend == "gloo" else VARIABLES)


PAIRS = sorted(permutations(range(3), 2))
GROUPS = [("all", (0, 1)), ("all", (0, 1, 2)), ("gather", (1, 2))]


def test_first_messages_do_not_wait_for_each_other(monkeypatch):
    """All ranks send them in one order, and where these have been sent, nothing more."""
    met, finished = [], []
    monkeypatch.setattr("torch.distributed.new_group", lambda ranks, timeout: (*ranks,))
    monkeypatch.setattr(
        "torch.distributed.all_reduce", lambda number, group: met.append(group)
    )
    for call in ("send", "recv"):
        monkeypatch.setattr(
            f"torch.distributed.{call}", lambda number, peer, group: met.append(group)
        )
    monkeypatch.setattr(
        World, "finish_computing", lambda self: finished.append(self.rank)
    )
    order = [(0, 1), PAIRS[0], *(ranks for _, ranks in GROUPS[1:]), *PAIRS[1:]]
    for rank in range(3):
        met.clear()
        here = World(rank, 3, torch.device("cpu"), "nccl", WATCH, HashStore())
        here.make_groups(GROUPS[:1], PAIRS[:1])
        here.make_groups(GROUPS, PAIRS)
        here.make_groups(GROUPS, PAIRS)
        assert met == [ranks for ranks in order if rank in ranks]
        assert finished.count(rank) == len(met)


def connect():
    here = join(device="cpu")
    here.make_groups(GROUPS, PAIRS)
    here.connect(GROUPS, PAIRS)
    return here.total(torch.ones(1)).item()


@thorough
def test_first_messages_over_gloo():
    assert launch(connect, 3) == [3.0] * 3


def test_a_store_that_stops_to_answer_is_named(monkeypatch, capsys):
    def silent(watch):
        raise DistStoreError("wait timeout after 3000ms, keys: /watch/process/1\nmore")

    place = {
        "RANK": 0,
        "WORLD_SIZE": 1,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": free_port(),
    }
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


def test_an_unknown_interface_is_refused(monkeypatch):
    monkeypatch.setattr(world, "_place", lambda n_ranks: (0, 1, 0))
    with pytest.raises(UserError, match=r"interface 'eth99'.*lo"):
        join(interface="eth99")
