"""Checkpoints that all ranks write, each its share, and that any number of ranks read."""

import hashlib
import io
import os
import pickle
import warnings
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.nn import functional as F

from tests.runtime.test_baselines import CASES, assert_same
from toolkit.model import partition
from toolkit.runtime import Distributed, SingleProcess, join
from toolkit.runtime.baselines import FSDP
from toolkit.runtime.process_group.launch import launch
from toolkit.schedule import catalog
from toolkit.training.checkpoint import DamagedCheckpointError
from toolkit.training.checkpoints import Checkpoints
from toolkit.training.rank_checkpoint import _Unpickler, read_sharded, write_sharded

CASE = CASES["fsdp-plain-2"]
SCHEDULE = catalog.cyclic(2, 1, state="sharded", n_stages=3)


def cyclic():
    return CASE.stages(), SCHEDULE, CASE.optimizer, F.cross_entropy


def train(runtime, batches):
    for batch in batches:
        runtime.step(*batch)


def on_ranks(folder):
    """Train half, save, and train the rest; and again from what was saved. What it comes to."""
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
    """What every rank says of damage that only one of them sees, and of a folder in the way."""
    said = []
    path = folder / "damaged.ckpt"
    write_sharded(path, {"runtime": runtime.part()}, world)
    if world.rank == 0:
        file = next(path.glob("__1_*"))
        file.write_bytes(file.read_bytes()[:-1])
    world.barrier()
    try:
        read_sharded(path, runtime.own, world)
    except DamagedCheckpointError as error:
        said.append(str(error))
    (folder / "file").touch()
    try:
        write_sharded(folder / "file" / "a.ckpt", {"runtime": runtime.part()}, world)
    except OSError as error:
        said.append(str(error))
    return said


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def found(folder):
    return launch(on_ranks, 2, str(folder))


@pytest.mark.parametrize("name", ["Distributed", "FSDP"])
def test_ranks_go_on_from_what_they_have_saved(found, name):
    for on_rank in found:
        first, again = on_rank[name]["ends"]
        assert_same(again, first, rtol=0, atol=0)
        assert on_rank[name]["damaged"] == []


def test_a_rank_writes_its_share(folder, found):
    """Of each tensor's bytes one copy, on the rank that keeps it."""
    for name in ("Distributed", "FSDP"):
        path = folder / name / "step_000000003.ckpt"
        sizes = [sum(f.stat().st_size for f in path.glob(f"__{rank}_*")) for rank in range(2)]
        assert min(sizes) > 0.25 * sum(sizes)


def test_a_rank_reads_its_share(found):
    for on_rank in found:
        assert on_rank["Distributed"]["read"] == on_rank["Distributed"]["own"] != [0, 1, 2]
        assert on_rank["FSDP"]["read"] == on_rank["FSDP"]["own"] == [0, 1, 2]


@pytest.mark.parametrize("name", ["Distributed", "FSDP"])
def test_a_single_process_goes_on_from_it(folder, found, name):
    runtime = SingleProcess(*(cyclic() if name == "Distributed" else CASE.arguments()))
    state, _ = Checkpoints(folder / name).load(runtime)
    assert state["name"] == "run"
    runtime.load_state_dict(state["runtime"])
    train(runtime, CASE.batches()[3:])
    assert_same(runtime.module().state_dict(), found[0][name]["ends"][0])


def test_what_one_rank_finds_every_rank_says(found):
    said = [on_rank["errors"] for on_rank in found]
    assert said[0] == said[1]
    damaged, blocked = said[0]
    assert "damaged.ckpt is damaged: the bytes of __1_0.distcp are not those written" in damaged
    assert "Not a directory" in blocked


def test_torch_reads_it_by_itself(folder, found, tmp_path):
    """It is in the format of torch.distributed.checkpoint."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    path = folder / "FSDP" / "step_000000003.ckpt"
    dcp_to_torch_save(path, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    model = CASE.stages().model
    key = "runtime/versions/0/3/stem.weight"
    assert whole[key].shape == model.stem.weight.shape


def signed(path):
    """Put down the sums of what is there, as somebody who tampers would."""
    lines = (path / "SHA256SUMS").read_text().splitlines()
    names = [line.split("  ")[1] for line in lines]
    sums = [hashlib.sha256((path / name).read_bytes()).hexdigest() for name in names]
    text = "".join(f"{digest}  {name}\n" for digest, name in zip(sums, names, strict=True))
    (path / "SHA256SUMS").write_text(text)


@pytest.fixture
def written(tmp_path):
    stages = partition(torch.nn.Sequential(torch.nn.Linear(2, 2)), 1, torch.zeros(2, 2))
    runtime = SingleProcess(stages, catalog.data_parallel(1), CASE.optimizer, F.cross_entropy)
    write_sharded(tmp_path / "a.ckpt", {"runtime": runtime.part()}, None)
    return tmp_path / "a.ckpt"


def test_its_sums_are_those_of_sha256sum(written):
    assert os.system(f"cd {written} && sha256sum --quiet -c SHA256SUMS") == 0


def test_runs_no_code(written):
    """Not even of metadata whose sum is right."""

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(written / "evil"),)

    (written / ".metadata").write_bytes(pickle.dumps(Evil()))
    signed(written)
    with pytest.raises(DamagedCheckpointError, match="is not in the form"):
        read_sharded(written, [0], None)
    assert not (written / "evil").exists()


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_reads_paths_that_another_python_has_written(module):
    pickled = f"c{module}\nPosixPath\n(Vhere\ntR.".encode()
    assert _Unpickler(io.BytesIO(pickled)).load() == Path("here")


def test_refuses_names_with_a_dot():
    module = "torch.distributed.checkpoint.metadata"
    reached = b"\x80\x04\x8c" + bytes([len(module)]) + module.encode() + b"\x8c\tos.getcwd\x93)R."
    with pytest.raises(pickle.UnpicklingError, match=r"os\.getcwd"):
        _Unpickler(io.BytesIO(reached)).load()


def test_what_something_else_has_written_is_refused(tmp_path):
    with warnings.catch_warnings(action="ignore"):
        dcp.save({"a": torch.zeros(2)}, storage_writer=dcp.FileSystemWriter(tmp_path))
    names = [file.name for file in tmp_path.iterdir()]
    (tmp_path / "SHA256SUMS").write_text("".join(f"0  {name}\n" for name in names))
    signed(tmp_path)
    with pytest.raises(DamagedCheckpointError, match="was not written by this toolkit"):
        read_sharded(tmp_path, [0], None)
