"""A checkpoint that all ranks write and read, each its share, by torch.distributed.checkpoint.

It is a folder in that library's format. A tensor is under the path that it has in the state, what
is no tensor under ``rest/RANK``, and SHA256SUMS, in the form of ``sha256sum``, tells of damage.
"""

import errno
import io
import pathlib
import pickle
import shutil
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from toolkit.errors import first_line
from toolkit.runtime.process_group.group import World
from toolkit.runtime.state import joined, map_places, merged
from toolkit.training.checkpoint import DamagedCheckpointError, replace_folder, serialised
from toolkit.training.checksums import check_sums, sums, write_sums

_PLACE = "the tensor of"
_REST = "rest/"
_METADATA = "torch.distributed.checkpoint.metadata"
_METADATA_CLASSES = frozenset(
    {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    }
)
_PATHS = ("pathlib", "pathlib._local")  # where Python 3.13 has them


def write_sharded(path: Path, part: Mapping[str, Any], world: World | None) -> None:
    """Write what every rank adds to a state. Every rank calls it.

    Args:
        path: of the folder; all ranks see the same.
        part: ``runtime``, this rank's :meth:`~toolkit.runtime.base.Runtime.part`; and what
            else this rank has to keep.
        world: the ranks; None where there is one.

    Raises:
        OSError: it cannot be written, on every rank alike; what was at ``path`` is still there.
    """
    rank, size = (world.rank, world.size) if world else (0, 1)
    beside = path.with_name(f".{path.name}.part")
    tensors: dict[str, Tensor] = {}

    def placed(place: tuple[Any, ...], tensor: Tensor) -> dict[str, str]:
        key = "/".join(map(str, place))
        tensors[key] = tensor
        return {_PLACE: key}

    rest = serialised(map_places(placed, dict(part)))
    tensors[f"{_REST}{rank}"] = torch.frombuffer(bytearray(rest), dtype=torch.uint8)
    with _alike(world):
        if rank == 0:
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)
    try:
        with _waiting(world), _alone_is_fine():
            dcp.save(
                tensors,
                storage_writer=dcp.FileSystemWriter(beside),
                process_group=world.group if world else None,
                no_dist=world is None,
            )
        mine: list[str] = []
        with _alike(world):
            mine += sums(beside, rank, size)
        lines = [line for lines in _gathered(world, mine) for line in lines]
        with _alike(world):
            if rank == 0:
                write_sums(beside, lines)
                replace_folder(beside, path)
    except dcp.CheckpointException as error:
        reasons = [reason for reason, _ in error.failures.values()]
        _give_up(beside, rank)
        raise _as_os_error(reasons[0], beside) from None
    except OSError:
        _give_up(beside, rank)
        raise


def read_sharded(path: Path, own: Collection[int], world: World | None) -> dict[str, Any]:
    """The state whose parts were written to ``path``, on the CPU. Every rank calls it.

    The number of ranks need not be that of the writers.

    Args:
        path: of the folder; all ranks see the same.
        own: the stages whose weights and optimizer states this rank needs; those of others are
            meta tensors.
        world: the ranks; None where there is one.

    Raises:
        DamagedCheckpointError: it is not as it was written, on every rank alike.
        OSError: it cannot be read, on every rank alike.
    """
    rank, size = (world.rank, world.size) if world else (0, 1)
    with _alike(world):
        check_sums(path, rank, size)
    with _alike(world):
        return _assembled(path, own)


def read_parts(path: Path, own: Collection[int] | None = None) -> list[dict[str, Any]]:
    """What each rank has written to ``path``, without a look at the sums.

    Args:
        path: of the folder.
        own: as in :func:`read_sharded`; all stages unless given.

    Raises:
        DamagedCheckpointError: it cannot be read, or something else has written it.
    """
    reader = _Reader(path)
    try:
        tensors = {
            key: torch.empty(
                form.size,
                dtype=form.properties.dtype,
                device="cpu" if own is None or _is_read(key, own) else "meta",
            )
            for key, form in reader.read_metadata().state_dict_metadata.items()
            if isinstance(form, TensorStorageMetadata)
        }
        with _alone_is_fine():
            dcp.load(
                {key: tensor for key, tensor in tensors.items() if not tensor.is_meta},
                storage_reader=reader,
                no_dist=True,
            )
        return [
            _filled(torch.load(io.BytesIO(rest.numpy().tobytes()), weights_only=True), tensors)
            for key, rest in sorted(tensors.items())
            if key.startswith(_REST)
        ]
    except (Exception, dcp.CheckpointException) as error:
        raise DamagedCheckpointError(f"{path} is not in the form in which it is written") from error


def _assembled(path: Path, own: Collection[int]) -> dict[str, Any]:
    parts = read_parts(path, own)
    try:
        runtime = joined(part.pop("runtime") for part in parts)
        return reduce(merged, parts, {}) | {"runtime": runtime}
    except (LookupError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(f"{path} was not written by this toolkit") from error


def _filled(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """``tree`` with the tensors in their places."""
    if isinstance(tree, dict):
        if tree.keys() == {_PLACE}:
            return tensors[tree[_PLACE]]
        return {key: _filled(value, tensors) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_filled(value, tensors) for value in tree)
    return tree


def _is_read(key: str, own: Collection[int]) -> bool:
    match key.split("/"):
        case ["runtime", "versions" | "stages", stage, *_]:
            return stage in {str(j) for j in own}
    return True


class _Reader(dcp.FileSystemReader):
    """Its metadata is a pickle, from which nothing is made but what describes tensors."""

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            found: Metadata = _Unpickler(file).load()
        return found


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        # A protocol-4 name may have dots, which pickle follows from attribute to attribute: through
        # a module's own imports, `os.system` would be a name like any other.
        if "." in name:
            raise pickle.UnpicklingError(f"{module}.{name}")
        if module in _PATHS and name in ("PosixPath", "WindowsPath"):
            return getattr(pathlib, name)
        described = (
            (module == _METADATA and name in _METADATA_CLASSES)
            or (module, name) == ("torch.distributed.checkpoint.filesystem", "_StorageInfo")
            or (module, name) == ("torch.serialization", "_get_layout")
            or (module, name) == ("torch", "Size")
            or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype))
        )
        if not described:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)


def _gathered(world: World | None, value: Any) -> list[Any]:
    return [value] if world is None else world.gather(value)


@contextmanager
def _alike(world: World | None) -> Iterator[None]:
    """What could not be written or read on one rank is raised on every rank."""
    mine = None
    try:
        yield
    except (OSError, DamagedCheckpointError) as error:
        mine = error
    for found in _gathered(world, mine):
        if found is not None:
            raise found


def _waiting(world: World | None) -> Any:
    if world is None:
        return nullcontext()
    return world.watch.waiting("a checkpoint that all ranks write", range(world.size))


@contextmanager
def _alone_is_fine() -> Iterator[None]:
    """torch warns where there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _give_up(beside: Path, rank: int) -> None:
    if rank == 0:
        shutil.rmtree(beside, ignore_errors=True)


def _as_os_error(reason: BaseException, path: Path) -> OSError:
    if isinstance(reason, OSError):
        return reason
    text = f"{first_line(reason)} (is the disk full?)"  # torch's writer does not tell
    return OSError(errno.EIO, text, str(path))
