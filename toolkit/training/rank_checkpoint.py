"""A checkpoint to which every rank writes one file, and that any number of ranks read.

It is a folder of files `rank_K.ckpt`, each in the format of `toolkit.training.checkpoint`.
"""

import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map_only

from toolkit.runtime.process_group.group import World
from toolkit.runtime.state import joined, merged
from toolkit.training.checkpoint import DamagedCheckpointError, read, replace_folder, write

_ROWS = "rows by rank"


def write_sharded(path: Path, part: Mapping[str, Any], world: World | None) -> None:
    """Write what every rank adds to a state. Every rank calls this function.

    Args:
        path: folder to write; all ranks see the same.
        part: `runtime`, this rank's `Runtime.part()`, and what else this rank keeps.
        world: the ranks; None for a single process.

    Raises:
        OSError: the folder cannot be written. Every rank raises, and the old folder stays.
    """
    rank, size = (world.rank, world.size) if world else (0, 1)
    beside = path.with_name(f".{path.name}.part")
    try:
        with _on_every_rank(world):
            if rank == 0:
                shutil.rmtree(beside, ignore_errors=True)
                beside.mkdir(parents=True)
        with _on_every_rank(world):
            own = tree_map_only(
                Tensor, lambda x: _plain(x, rank), {"part": dict(part), "n_ranks": size}
            )
            write(beside / f"rank_{rank}.ckpt", own)
        with _on_every_rank(world):
            # The folder gets its name last, so a reader never finds one that lacks a rank.
            if rank == 0:
                replace_folder(beside, path)
    except OSError:
        if rank == 0:
            shutil.rmtree(beside, ignore_errors=True)
        raise


def read_sharded(path: Path, own: Collection[int], world: World | None) -> dict[str, Any]:
    """Return the state whose parts are in `path`, on the CPU. Every rank calls this function.

    Args:
        path: folder to read; all ranks see the same. The number of its writers is free.
        own: stages whose weights and optimizer states this rank needs; the tensors of other
            stages become meta tensors.
        world: the ranks; None for a single process.

    Raises:
        DamagedCheckpointError: a file is not as it was written. Every rank raises.
        OSError: a file cannot be read. Every rank raises.
    """
    with _on_every_rank(world):
        try:
            parts = [_without_others(part, own) for part in read_parts(path)]
            runtime = joined(part.pop("runtime") for part in parts)
            whole: dict[str, Any] = _whole(reduce(merged, parts, {}) | {"runtime": runtime})
            return whole
        except (LookupError, TypeError, AttributeError) as error:
            raise DamagedCheckpointError(f"{path} was not written by this toolkit") from error


def read_parts(path: Path) -> Iterator[dict[str, Any]]:
    """Yield what each rank wrote to `path`, one file after another.

    Raises:
        DamagedCheckpointError: a file is missing, too many, or not as it was written.
        OSError: a file cannot be read.
    """
    names = {file.name for file in path.iterdir()}
    first = path / "rank_0.ckpt"
    if first.name not in names:
        raise DamagedCheckpointError(f"{path} is damaged: it lacks {first.name}")
    n_ranks = read(first)["n_ranks"]
    expected = [f"rank_{k}.ckpt" for k in range(n_ranks)]
    if differing := sorted(names ^ {*expected}):
        raise DamagedCheckpointError(
            f"{path} is damaged: got {differing[0]}; expected {n_ranks} files rank_K.ckpt"
        )
    for name in expected:
        yield read(path / name)["part"]


def _plain(tensor: Tensor, rank: int) -> Any:
    """Return what to save of `tensor`; of a DTensor, this rank's rows.

    A view is copied, because torch.save writes the whole storage that it looks into.
    """
    if isinstance(tensor, DTensor):
        assert tensor.placements == (Shard(0),)
        return {_ROWS: {rank: _plain(tensor.to_local(), rank)}}
    compact = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if compact else tensor.clone()


def _whole(tree: Any) -> Any:
    """Return `tree` with the rows of all ranks in one tensor."""
    if isinstance(tree, dict):
        if tree.keys() == {_ROWS}:
            return torch.cat([rows for _, rows in sorted(tree[_ROWS].items())])
        return {key: _whole(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(map(_whole, tree))
    return tree


def _without_others(part: dict[str, Any], own: Collection[int]) -> dict[str, Any]:
    """Replace the tensors of stages outside `own` by meta tensors."""
    for name in ("versions", "stages"):
        stages = part["runtime"][name]
        for j in stages.keys() - {*own}:
            stages[j] = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), stages[j])
    return part


@contextmanager
def _on_every_rank(world: World | None) -> Iterator[None]:
    """Raise on every rank what could not be written or read on one of them."""
    mine = None
    try:
        yield
    except (OSError, DamagedCheckpointError) as error:
        mine = error
    for found in [mine] if world is None else world.gather(mine):
        if found is not None:
            raise found
