"""Checkpoints that all ranks write, each its share, and that any number of ranks reads."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from tests.runtime.test_baselines import CASES, assert_same
from toolkit.model import partition
from toolkit.runtime import Distributed, SingleProcess, join
from toolkit.runtime.baselines import FSDP
from toolkit.runtime.process_group.launch import launch
from toolkit.schedule import catalog
from toolkit.training.checkpoint import (
    Checkpoints,
    DamagedCheckpointError,
    read_sharded,
    write,
    write_sharded,
)

CASE = CASES["fsdp-plain-2"]
SCHEDULE = catalog.cyclic(2, 1, state="sharded", n_stages=3)


def cyclic():
    return CASE.stages(), SCHEDULE, CASE.optimizer, F.cross_entropy


def train(runtime, batches):
    for batch in batches:
        runtime.step(*batch)


def on_ranks(folder):
    """Train half, save, and train the rest; then the rest again from the checkpoint."""
    torch.set_num_threads(1)
    folder, world, batches = Path(folder), join(device="cpu"), CASE.batches()
    found = {}
    for make, arguments in ((Distributed, cyclic()), (FSDP, CASE.arguments())):
        runtime = make(*arguments)
        train(runtime, batches[:3])
        checkpoints = Checkpoints(folder / make.__name__, sharded=True)
        checkpoints.save(runtime, {"name": "run"}, 3)
        train(runtime, batches[3:])
        again = make(cyclic()[0] if make is Distributed else CASE.stages(), *arguments[1:])
        state, damaged = checkpoints.load(again)
        again.load_state_dict(state["runtime"])
        train(again, batches[3:])
        versions = state["runtime"]["versions"]
        found[make.__name__] = {
            "ends": [r.module().state_dict() for r in (runtime, again)],
            "damaged": damaged,
            "own": [*again.own],
            "read": [
                j
                for j, known in enumerate(versions)
                if not any(t.is_meta for weights in known.values() for t in weights.values())
            ],
        }
    found["errors"] = errors(folder, runtime, world)
    return found


def errors(folder, runtime, world):
    """Every rank's errors: a damage that one of them finds, and a file in place of a folder."""
    found = []
    path = folder / "damaged.ckpt"
    write_sharded(path, {"runtime": runtime.part()}, world)
    if world.rank == 0:
        file = path / "rank_1.ckpt"
        file.write_bytes(file.read_bytes()[:-1])
    world.barrier()
    try:
        read_sharded(path, runtime.own, world)
    except DamagedCheckpointError as error:
        found.append(str(error))
    (folder / "file").touch()
    try:
        write_sharded(folder / "file" / "a.ckpt", {"runtime": runtime.part()}, world)
    except OSError as error:
        found.append(str(error))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def found(folder):
    return launch(on_ranks, 2, str(folder))


@pytest.mark.parametrize("name", ["Distributed", "FSDP"])
def test_ranks_resume_bit_identical(found, name):
    for on_rank in found:
        first, again = on_rank[name]["ends"]
        assert_same(again, first, rtol=0, atol=0)
        assert on_rank[name]["damaged"] == []


def test_a_rank_writes_its_share(folder, found):
    """Of each tensor's bytes one copy, on the rank that keeps it."""
    for name in ("Distributed", "FSDP"):
        path = folder / name / "step_000000003.ckpt"
        sizes = [sum(f.stat().st_size for f in path.glob(f"rank_{rank}.ckpt")) for rank in range(2)]
        assert min(sizes) > 0.25 * sum(sizes)


def test_a_rank_reads_its_share(found):
    for on_rank in found:
        assert on_rank["Distributed"]["read"] == on_rank["Distributed"]["own"] != [0, 1, 2]
        assert on_rank["FSDP"]["read"] == on_rank["FSDP"]["own"] == [0, 1, 2]


@pytest.mark.parametrize("name", ["Distributed", "FSDP"])
def test_a_single_process_resumes_from_it(folder, found, name):
    runtime = SingleProcess(*(cyclic() if name == "Distributed" else CASE.arguments()))
    state, _ = Checkpoints(folder / name).load(runtime)
    assert state["name"] == "run"
    runtime.load_state_dict(state["runtime"])
    train(runtime, CASE.batches()[3:])
    assert_same(runtime.module().state_dict(), found[0][name]["ends"][0])


def test_every_rank_raises_the_error_of_one(found):
    first, second = (on_rank["errors"] for on_rank in found)
    assert first == second
    damaged, blocked = first
    assert "rank_1.ckpt" in damaged
    assert "Not a directory" in blocked


@pytest.fixture
def written(tmp_path):
    stages = partition(torch.nn.Sequential(torch.nn.Linear(2, 2)), 1, torch.zeros(2, 2))
    runtime = SingleProcess(stages, catalog.data_parallel(1), CASE.optimizer, F.cross_entropy)
    write_sharded(tmp_path / "a.ckpt", {"runtime": runtime.part()}, None)
    return tmp_path / "a.ckpt"


@pytest.mark.parametrize("state", [{}, {"n_ranks": 1, "part": {"a": 1}}, {"n_ranks": "x"}])
def test_other_content_is_refused(written, state):
    write(written / "rank_0.ckpt", state)
    with pytest.raises(DamagedCheckpointError, match=written.name):
        read_sharded(written, [0], None)


def test_a_file_too_many_or_missing_is_refused(written):
    (written / "rank_1.ckpt").write_bytes((written / "rank_0.ckpt").read_bytes())
    with pytest.raises(DamagedCheckpointError, match=r"rank_1\.ckpt"):
        read_sharded(written, [0], None)
    (written / "rank_1.ckpt").unlink()
    (written / "rank_0.ckpt").unlink()
    with pytest.raises(DamagedCheckpointError, match=r"rank_0\.ckpt"):
        read_sharded(written, [0], None)
