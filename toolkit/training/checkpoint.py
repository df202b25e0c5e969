"""Checkpoint files: one per rank where the state is sharded, and a run's folder of them.

A file is a line that names the format, the SHA-256 of the rest, and torch.save's bytes. It is
written to a temporary file, flushed to the disk and renamed, so a reader never finds half of one. A
sharded checkpoint is a folder of such files, `rank_K.ckpt`, that any number of ranks reads.
"""

import hashlib
import io
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map, tree_map_only

from toolkit.errors import UserError, first_line, shortened
from toolkit.files import check_regular, replacing
from toolkit.runtime.base import Runtime
from toolkit.runtime.process_group.world import World
from toolkit.runtime.state import join_states, merged

_MAGIC = b"cdp-toolkit checkpoint 2\n"
_ROWS = "rows by rank"


class DamagedCheckpointError(UserError):
    """A file that is not, or is no longer, a whole checkpoint."""


def write(path: Path, state: Mapping[str, Any], *, plain: bool = False) -> None:
    """Write tensors and plain values; after an OSError ``path`` stays. ``plain``: no head."""
    buffer = io.BytesIO()  # torch.save to a file would raise other errors than OSError
    torch.save(state, buffer)
    payload = buffer.getvalue()
    head = (
        b"" if plain else _MAGIC + hashlib.sha256(payload).hexdigest().encode() + b"\n"
    )
    # The file::
    #
    #     cdp-toolkit checkpoint 2     \n      the format
    #     64 hexadecimal digits        \n      SHA-256 of what follows
    #     torch.save's bytes
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.writelines([head, payload])
        file.flush()
        # Before the rename: after a crash of the machine the new name must not have empty contents.
        os.fsync(file.fileno())


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return what was written to ``path``, on the CPU; DamagedCheckpointError if it has changed."""
    check_regular(path, max_bytes=None)
    with path.open("rb") as file:
        head = file.read(len(_MAGIC))
        # Before the rest of what may be a huge file is read.
        if not _MAGIC.startswith(head):
            raise DamagedCheckpointError(f"{path} is not a checkpoint of this version")
        # 64 digits, and the end of the line.
        digest = file.read(65)
        start = file.tell()
        if digest != hashlib.file_digest(file, "sha256").hexdigest().encode() + b"\n":
            raise DamagedCheckpointError(
                f"{path} is damaged: its bytes are not those written"
            )
        file.seek(start)
        payload = file.read()
    try:
        state = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    except Exception as error:
        # On other bytes than those of torch.save, torch.load raises exceptions of any type.
        raise DamagedCheckpointError(
            f"{path} was not written by this toolkit: {shortened(first_line(error))}"
        ) from error
    if not isinstance(state, dict):
        raise DamagedCheckpointError(
            f"{path} was not written by this toolkit: it holds a {type(state).__name__}"
        )
    return state


def write_sharded(
    path: Path, rank_state: Mapping[str, Any], world: World | None
) -> None:
    """Write every rank's part of a state: its ``local_state()`` as ``runtime``, and its own values.

    Every rank calls it. If one cannot write, all raise OSError, and what was at ``path`` stays.
    """
    rank = world.rank if world else 0
    size = world.size if world else 1
    # Hidden, so that :meth:`Checkpoints.paths` does not find it, and in the same folder, so that
    # its rename is one step.
    temporary = path.with_name(f".{path.name}.part")
    try:
        with _raise_on_every_rank(world):
            if rank == 0:
                _remove(temporary)
                path.parent.mkdir(exist_ok=True)
                temporary.mkdir()
        with _raise_on_every_rank(world):
            state = {"part": dict(rank_state), "n_ranks": size}
            write(
                temporary / f"rank_{rank}.ckpt",
                tree_map_only(Tensor, _rows(rank), state),
            )
        with _raise_on_every_rank(world):
            # The folder gets its name last, so a reader never finds one that lacks a rank.
            if rank == 0:
                _remove(path)
                temporary.rename(path)
    except OSError:
        if rank == 0:
            _remove(temporary)
        raise


def read_sharded(
    path: Path, own_stages: Collection[int], world: World | None
) -> dict[str, Any]:
    """Return the state whose parts are in ``path``, on the CPU, however many ranks wrote it.

    Every rank calls it; if one finds damage, all raise. Tensors of stages outside ``own_stages``
    become meta tensors, so no rank holds the whole.
    """
    with _raise_on_every_rank(world):
        try:
            # Every rank reads all files: which of them has a stage depends on the ranks that wrote
            # them. It keeps its own stages only, so memory stays that of a share.
            rank_states = []
            for rank_state in read_parts(path):
                for stages in (
                    rank_state["runtime"]["versions"],
                    rank_state["runtime"]["stages"],
                ):
                    for stage in stages.keys() - {*own_stages}:
                        stages[stage] = tree_map_only(
                            Tensor, lambda tensor: tensor.to("meta"), stages[stage]
                        )
                rank_states.append(rank_state)
            runtime = join_states(
                rank_state.pop("runtime") for rank_state in rank_states
            )
            state = reduce(merged, rank_states, {}) | {"runtime": runtime}
            return tree_map(_joined_rows, state, is_leaf=_has_rows)
        except (LookupError, TypeError, AttributeError) as error:
            raise DamagedCheckpointError(
                f"{path} was not written by this toolkit"
            ) from error


def read_parts(path: Path) -> Iterator[dict[str, Any]]:
    """Yield what each rank wrote to ``path``; a missing or unknown file is damage."""
    names = {file.name for file in path.iterdir()}
    n_ranks = (
        read_checkpoint(path / "rank_0.ckpt")["n_ranks"]
        if "rank_0.ckpt" in names
        else 1
    )
    # The number may be of a damaged file. One name more than there are files shows a gap.
    expected = [f"rank_{rank}.ckpt" for rank in range(min(n_ranks, len(names) + 1))]
    differing = sorted(names ^ {*expected})
    if differing:
        raise DamagedCheckpointError(
            f"{path} is damaged: got {differing[0]}; expected {n_ranks} files rank_K.ckpt"
        )
    for name in expected:
        yield read_checkpoint(path / name)["part"]


def _rows(rank: int) -> Any:
    """Return a function from a tensor to what ``rank`` saves: of a DTensor, this rank's rows."""

    def saved(tensor: Tensor) -> Any:
        if isinstance(tensor, DTensor):
            assert tensor.placements == (Shard(0),)
            return {_ROWS: {rank: saved(tensor.to_local())}}
        # torch.save would write the whole storage that a view looks into.
        compact = (
            tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        )
        return tensor if compact else tensor.clone()

    return saved


def _has_rows(node: Any) -> bool:
    """Return whether ``node`` is a DTensor's rows, as :func:`_rows` saves them."""
    return isinstance(node, dict) and node.keys() == {_ROWS}


def _joined_rows(node: Any) -> Any:
    """Return the rows of all ranks in one tensor; anything else as it is."""
    if not _has_rows(node):
        return node
    return torch.cat([rows for _, rows in sorted(node[_ROWS].items())])


@contextmanager
def _raise_on_every_rank(world: World | None) -> Iterator[None]:
    """Raise the error of one rank on every rank, so that no other waits for it."""
    own_error = None
    try:
        yield
    except (OSError, DamagedCheckpointError) as error:
        own_error = error
    # All ranks wait here for each other, so the next part begins on all of them or on none.
    for rank_error in [own_error] if world is None else world.gather(own_error):
        if rank_error is not None:
            raise rank_error


def from_rank_0(runtime: Runtime, value: Any) -> Any:
    """Return rank 0's ``value``, on every rank."""
    return value if runtime.world is None else runtime.world.first(value)


@dataclass
class Checkpoints:
    """The checkpoints of one run: the latest, and the best, to which ``best.ckpt`` links.

    Each is a file of rank 0; or, if ``sharded``, a folder of all ranks' files. Both kinds are read,
    whichever is written. Every rank calls the methods that take its runtime.

    Args:
        folder: folder of the checkpoints; if any is sharded, one that all ranks see.
        keep: number of the latest to keep; the best is kept too.
        sharded: whether each rank writes its share.
    """

    folder: Path
    keep: int = 2
    sharded: bool = False

    def save(
        self,
        runtime: Runtime,
        values: Mapping[str, Any],
        step: int,
        *,
        best: bool = False,
    ) -> None:
        """Save the state of ``runtime`` and plain values after ``step`` steps; remove the oldest.

        If it cannot be written, rank 0 at least raises OSError, and the earlier ones stay.
        """
        # With leading zeros, so that the order of the names is that of the steps.
        path = self.folder / f"step_{step:09d}.ckpt"
        is_rank_0 = runtime.writes
        if self.sharded:
            rank_state = {
                "runtime": runtime.local_state(),
                **(values if is_rank_0 else {}),
            }
            write_sharded(path, rank_state, runtime.world)
        else:
            # state_dict() copies; a single process writes at once and need not.
            if runtime.world is None:
                state = join_states([runtime.local_state()])
            else:
                state = runtime.state_dict()
            if is_rank_0:
                self.folder.mkdir(exist_ok=True)
                write(path, {"runtime": state, **values})
        if is_rank_0:
            link = self.folder / "best.ckpt"
            if best:
                _remove(link)
                link.symlink_to(path.name)
            # The hidden ones are unfinished: a run was killed while it wrote them.
            for path_to_remove in (
                *self.paths()[: -self.keep],
                *self.folder.glob(".step_*"),
            ):
                if path_to_remove.name != link.resolve().name:
                    _remove(path_to_remove)

    def paths(self) -> list[Path]:
        """Return the checkpoints, the oldest first."""
        return sorted(self.folder.glob(f"step_{'[0-9]' * 9}.ckpt"))

    def load(self, runtime: Runtime) -> tuple[dict[str, Any], list[str]]:
        """Return the latest whole checkpoint, and a sentence on each later one that is damaged.

        Without one: UserError.
        """
        damaged: list[str] = []
        candidates = [(path, path.is_dir()) for path in self.paths()]
        for path, sharded in reversed(from_rank_0(runtime, candidates)):
            try:
                if sharded:
                    return read_sharded(
                        path, runtime.updated_stages, runtime.world
                    ), damaged
                with _raise_on_every_rank(runtime.world):
                    state = read_checkpoint(path) if runtime.rank == 0 else None
                return from_rank_0(runtime, state), damaged
            except (DamagedCheckpointError, OSError) as error:
                # All ranks raise or none does, so they all try the same one next.
                damaged.append(str(error))
        reasons = f" that is whole ({'; '.join(damaged)})" if damaged else ""
        raise UserError(
            f"there is no checkpoint in {self.folder}{reasons}: give resume= the output"
            " directory of a run that has saved one, or remove that folder to start again"
        )


def _remove(path: Path) -> None:
    """Remove a file, link or folder, if possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
