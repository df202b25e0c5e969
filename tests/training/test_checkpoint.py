"""Checkpoints are whole or not read_checkpoint, and the latest and the best are kept."""

import hashlib
import io
import os
import random
import shutil
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from tests.runtime.test_baselines import CASES, assert_same
from tests.thorough import more
from toolkit.errors import UserError
from toolkit.model import partition
from toolkit.runtime import Distributed, SingleProcess, join
from toolkit.runtime.baselines import FSDP
from toolkit.runtime.process_group.launch import launch
from toolkit.schedule import catalog
from toolkit.training.checkpoint import (
    _MAGIC,
    Checkpoints,
    DamagedCheckpointError,
    read_checkpoint,
    read_sharded,
    write,
    write_sharded,
)


@dataclass
class Saved:
    """A runtime that is alone and has two stages."""

    steps_done: int = 0
    rank = 0
    writes = True
    world = None
    updated_stages: tuple = (0, 1)
    stages: dict = field(default_factory=dict)

    def local_state(self):
        generator = torch.Generator().manual_seed(self.steps_done)
        weights = [{f"w{j}": torch.randn(5, 3, generator=generator)} for j in range(2)]
        return {
            "steps_done": self.steps_done,
            "fixed": {"n": torch.tensor(self.steps_done)},
            "versions": {j: {self.steps_done: weights[j]} for j in range(2)},
            "stages": {
                j: {"betas": (0.5, None), 0: weights[j]["w" + str(j)]} for j in range(2)
            },
        }

    def state_dict(self):
        part = self.local_state()
        weights = [part["versions"][j][self.steps_done] for j in range(2)]
        return {
            "steps_done": self.steps_done,
            "model": part["fixed"] | weights[0] | weights[1],
            "versions": [*part["versions"].values()],
            "stages": [*part["stages"].values()],
        }


def save(checkpoints, step, **options):
    checkpoints.save(
        Saved(step), {"position": [step, 1.5], "name": "run"}, step, **options
    )


def same(found, step):
    expected = {
        "runtime": Saved(step).state_dict(),
        "position": [step, 1.5],
        "name": "run",
    }
    assert tree_map_only(torch.Tensor, torch.Tensor.tolist, found) == tree_map_only(
        torch.Tensor, torch.Tensor.tolist, expected
    )


@pytest.fixture(params=[False, True], ids=["file", "sharded"])
def checkpoints(request, tmp_path):
    return Checkpoints(tmp_path, keep=2, sharded=request.param)


def mutated(content, chance):
    """A byte flipped, the end cut off, something put in, or a part taken out."""
    at = chance.randrange(len(content))
    kind = chance.randrange(4)
    if kind == 0:
        return (
            content[:at]
            + bytes([content[at] ^ (1 << chance.randrange(8))])
            + content[at + 1 :]
        )
    if kind == 1:
        return content[:at]
    if kind == 2:
        return content[:at] + chance.randbytes(1 + chance.randrange(40)) + content[at:]
    return content[:at] + content[at + 1 + chance.randrange(40) :]


def test_uses_the_one_before_a_damaged_checkpoint(checkpoints):
    """Mutations of the files of the latest checkpoint."""
    save(checkpoints, 1)
    save(checkpoints, 2)
    latest = checkpoints.paths()[-1]
    files = sorted(latest.iterdir()) if latest.is_dir() else [latest]
    chance = random.Random(0)
    for k in range(more(80, 300)):
        file = files[k % len(files)]
        whole = file.read_bytes()
        file.write_bytes(mutated(whole, chance))
        found, damaged = checkpoints.load(Saved())
        same(found, 1)
        (sentence,) = damaged
        assert str(latest) in sentence
        assert "\n" not in sentence
        file.write_bytes(whole)
    found, damaged = checkpoints.load(Saved())
    same(found, 2)
    assert damaged == []


def test_the_latest_and_the_best_stay(checkpoints, tmp_path):
    for step in range(1, 7):
        save(checkpoints, step, best=step in (2, 3))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["best.ckpt", *(f"step_00000000{k}.ckpt" for k in (3, 5, 6))]
    assert (tmp_path / "best.ckpt").samefile(tmp_path / "step_000000003.ckpt")
    same(checkpoints.load(Saved())[0], 6)


def test_files_and_folders_side_by_side(checkpoints, tmp_path):
    other = Checkpoints(tmp_path, keep=2, sharded=not checkpoints.sharded)
    save(checkpoints, 1, best=True)
    save(other, 2, best=True)
    assert [path.is_dir() for path in other.paths()] == [
        checkpoints.sharded,
        other.sharded,
    ]
    assert (tmp_path / "best.ckpt").is_dir() == other.sharded
    same(checkpoints.load(Saved())[0], 2)
    remove = shutil.rmtree if other.sharded else os.unlink
    remove(other.paths()[-1])
    same(checkpoints.load(Saved())[0], 1)


def test_saves_a_step_again_and_in_a_copied_folder(checkpoints, tmp_path):
    """A copy may hold the best itself in place of the link."""
    for step in (1, 1, 2):
        save(checkpoints, step, best=True)
    copied = Checkpoints(tmp_path / "copy", sharded=checkpoints.sharded)
    shutil.copytree(tmp_path, copied.folder, ignore=lambda *_: ["copy"])
    save(copied, 3, best=True)
    assert (copied.folder / "best.ckpt").samefile(copied.paths()[-1])
    assert [path.name[-6:] for path in copied.paths()] == ["2.ckpt", "3.ckpt"]


def test_a_failed_save_keeps_the_earlier_checkpoints(
    checkpoints, tmp_path, monkeypatch
):
    save(checkpoints, 1)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save(checkpoints, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000000001.ckpt"]
    same(checkpoints.load(Saved())[0], 1)


def test_removes_what_a_killed_run_left_half_written(checkpoints, tmp_path):
    (tmp_path / ".step_000000001.ckpt.77").write_bytes(b"half")
    (tmp_path / ".step_000000001.ckpt.part").mkdir()
    (tmp_path / ".step_000000001.ckpt.part" / "x").write_bytes(b"half")
    save(checkpoints, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000000002.ckpt"]


def test_without_a_whole_checkpoint(tmp_path):
    with pytest.raises(UserError, match=f"{tmp_path}.*resume="):
        Checkpoints(tmp_path).load(Saved())
    (tmp_path / "step_000000001.ckpt").write_bytes(b"something else" * 9)
    (tmp_path / "step_000000002.ckpt").mkdir()
    with pytest.raises(UserError, match=f"{tmp_path} .*2.ckpt .*1.ckpt "):
        Checkpoints(tmp_path).load(Saved())


def test_runs_no_code(tmp_path):
    """Not even that of a file whose checksum is right."""

    class Malicious:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    write(tmp_path / "a.ckpt", {"x": Malicious()})
    with pytest.raises(DamagedCheckpointError, match=r"a\.ckpt"):
        read_checkpoint(tmp_path / "a.ckpt")
    assert not (tmp_path / "made").exists()


# Checkpoints that all ranks write, each its share, and that any number of ranks reads

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
        again = make(
            cyclic()[0] if make is Distributed else CASE.stages(), *arguments[1:]
        )
        state, damaged = checkpoints.load(again)
        again.load_state_dict(state["runtime"])
        train(again, batches[3:])
        versions = state["runtime"]["versions"]
        found[make.__name__] = {
            "ends": [r.module().state_dict() for r in (runtime, again)],
            "damaged": damaged,
            "own": [*again.updated_stages],
            "read": [
                j
                for j, known in enumerate(versions)
                if not any(
                    t.is_meta for weights in known.values() for t in weights.values()
                )
            ],
        }
    found["errors"] = errors(folder, runtime, world)
    return found


def errors(folder, runtime, world):
    """Every rank's errors: a damage that one of them finds, and a file in place of a folder."""
    found = []
    path = folder / "damaged.ckpt"
    write_sharded(path, {"runtime": runtime.local_state()}, world)
    if world.rank == 0:
        file = path / "rank_1.ckpt"
        file.write_bytes(file.read_bytes()[:-1])
    world.barrier()
    try:
        read_sharded(path, runtime.updated_stages, world)
    except DamagedCheckpointError as error:
        found.append(str(error))
    (folder / "file").touch()
    try:
        write_sharded(
            folder / "file" / "a.ckpt", {"runtime": runtime.local_state()}, world
        )
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


def test_a_rank_writes_and_reads_its_share(folder, found):
    """Of each tensor's bytes one copy, on the rank that keeps it."""
    for name in ("Distributed", "FSDP"):
        path = folder / name / "step_000000003.ckpt"
        sizes = [(path / f"rank_{rank}.ckpt").stat().st_size for rank in range(2)]
        assert min(sizes) > 0.25 * sum(sizes)
    for on_rank in found:
        assert (
            on_rank["Distributed"]["read"] == on_rank["Distributed"]["own"] != [0, 1, 2]
        )
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
    assert "File exists" in blocked


@pytest.fixture
def written(tmp_path):
    stages = partition(torch.nn.Sequential(torch.nn.Linear(2, 2)), 1, torch.zeros(2, 2))
    runtime = SingleProcess(
        stages, catalog.data_parallel(1), CASE.optimizer, F.cross_entropy
    )
    write_sharded(tmp_path / "a.ckpt", {"runtime": runtime.local_state()}, None)
    return tmp_path / "a.ckpt"


def not_ours(path):
    """Files that are not checkpoints, most under a right checksum."""
    for state in ([], b"", 1, torch.zeros(2)):
        yield lambda state=state: write(path, state)
    cut, script = io.BytesIO(), io.BytesIO()
    torch.save({"x": torch.zeros(99)}, cut)
    with zipfile.ZipFile(script, "w") as archive:  # as TorchScript's
        archive.writestr("archive/constants.pkl", b"")
    for payload in (b"", b"junk", cut.getvalue()[:-200], script.getvalue()):
        digest = hashlib.sha256(payload).hexdigest().encode()
        yield (
            lambda content=_MAGIC + digest + b"\n" + payload: path.write_bytes(content)
        )
    yield lambda: os.mkfifo(path)
    yield path.mkdir
    yield lambda: path.symlink_to("/dev/zero")
    yield lambda: [path.touch(), os.truncate(path, 2**40)]


def test_uses_the_one_before_a_file_that_is_no_checkpoint(tmp_path):
    checkpoints, latest = Checkpoints(tmp_path), tmp_path / "step_000000002.ckpt"
    save(checkpoints, 1)
    for make in not_ours(latest):
        make()
        found, (sentence,) = checkpoints.load(Saved())
        same(found, 1)
        assert latest.name in sentence
        assert "\n" not in sentence
        latest.rmdir() if latest.is_dir() else latest.unlink()


@pytest.mark.parametrize(
    "state",
    [{}, {"n_ranks": 1, "part": {"a": 1}}, {"n_ranks": "x"}, {"n_ranks": 10**12}],
)
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
