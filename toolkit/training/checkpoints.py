"""The checkpoints of a run: the latest, and the best; of those that are damaged the one before."""

import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from toolkit.errors import UserError
from toolkit.runtime.base import Runtime
from toolkit.runtime.state import joined
from toolkit.training.checkpoint import DamagedCheckpointError, read, replace_folder, write

_BEST = "best.ckpt"
_NAME = re.compile(r"step_(\d{9})\.ckpt")


def check_keep(keep: int) -> None:
    """Refuse a number of checkpoints that leaves none."""
    if keep < 1:
        raise UserError(f"save.keep is 1 or more: got {keep}")


class Checkpoints:
    """The checkpoints of one run, in one folder.

    Each is a file, which rank 0 writes and reads; or, if ``sharded``, a folder, which all ranks
    write and read. Both kinds are found and read, whichever is written.

    Args:
        folder: where they are; if any is sharded, one that all ranks see.
        keep: how many of the latest stay; the best stays beside them.
        sharded: how they are written.
    """

    def __init__(self, folder: Path, keep: int = 2, *, sharded: bool = False) -> None:
        check_keep(keep)
        self.folder, self.keep, self.sharded = folder, keep, sharded

    def save(
        self, runtime: Runtime, rest: Mapping[str, Any], step: int, *, best: bool = False
    ) -> None:
        """Keep the state of ``runtime``, and let go of the oldest. Every rank calls it.

        Args:
            runtime: after ``step`` training steps of the run.
            rest: what else is kept, of tensors and plain values.
            step: training steps of the run until then.
            best: whether the run was never better.

        Raises:
            OSError: it cannot be written, on rank 0 at least; the earlier ones are still there.
        """
        path = self.folder / f"step_{step:09d}.ckpt"
        leads = runtime.rank == 0
        if self.sharded:
            from toolkit.training.rank_checkpoint import write_sharded

            part = {"runtime": runtime.part(), **(rest if leads else {})}
            write_sharded(path, part, runtime.world)
        else:
            # One process need not copy what it writes at once.
            alone = runtime.world is None
            state = joined([runtime.part()]) if alone else runtime.state_dict()
            if leads:
                self.folder.mkdir(parents=True, exist_ok=True)
                write(path, {"runtime": state, **rest})
        if leads:
            if best:
                _link(path, self.folder / _BEST)
            for old in (*self.paths()[: -self.keep], *self.folder.glob(".step_*")):
                _remove(old)

    def paths(self) -> list[Path]:
        """Those that there are, the oldest first; without the best."""
        found = self.folder.glob("step_*.ckpt")
        return sorted(path for path in found if _NAME.fullmatch(path.name))

    def any(self, runtime: Runtime) -> bool:
        """Whether rank 0 finds one. Every rank calls it."""
        return bool(from_rank_0(runtime, self.paths()))

    def load(self, runtime: Runtime, skip: int = 0) -> tuple[dict[str, Any], list[str]]:
        """The latest state that is whole, and a sentence on each later one that is not.

        If none is, the best.

        Every rank calls it, and gets the same, but for what is meta tensors of a sharded one.

        Args:
            runtime: that is to go on from it.
            skip: how many of the latest to pass over; the oldest is never passed over.

        Raises:
            UserError: there is none.
        """
        damaged: list[str] = []
        paths = self.paths()
        paths = [self.folder / _BEST, *paths[: max(1, len(paths) - skip)]]  # the best at last
        there = [(path, path.is_dir()) for path in paths if path.exists()]
        for path, sharded in reversed(from_rank_0(runtime, there)):
            try:
                if sharded:
                    from toolkit.training.rank_checkpoint import read_sharded

                    return read_sharded(path, runtime.own, runtime.world), damaged
                return _read_on_rank_0(path, runtime), damaged
            except (DamagedCheckpointError, OSError) as error:
                damaged.append(str(error))
        if damaged:
            raise UserError(
                f"no checkpoint in {self.folder} is whole ({'; '.join(damaged)}): remove that"
                " folder to begin anew"
            )
        raise UserError(
            f"there is no checkpoint in {self.folder}: give resume= the output directory of a run"
            " that has saved one, or begin anew without resume="
        )


def _read_on_rank_0(path: Path, runtime: Runtime) -> dict[str, Any]:
    state: Any = None
    if runtime.rank == 0:
        try:
            state = read(path)
        except (DamagedCheckpointError, OSError) as error:
            state = str(error)
    state = from_rank_0(runtime, state)
    if isinstance(state, str):
        raise DamagedCheckpointError(state)
    assert isinstance(state, dict)
    return state


def from_rank_0(runtime: Runtime, value: Any) -> Any:
    """Rank 0's ``value``, on every rank."""
    return value if runtime.world is None else runtime.world.gather(value)[0]


def _link(path: Path, best: Path) -> None:
    """Have ``best`` be the same checkpoint, without writing it again where that can be."""
    beside = best.with_name(f".{best.name}.part")
    _remove(beside)
    if path.is_dir():
        shutil.copytree(path, beside, copy_function=_link_or_copy)
        if best.is_file():
            _remove(best)
        replace_folder(beside, best)
    else:
        _link_or_copy(str(path), str(beside))
        if best.is_dir():
            shutil.rmtree(best)
        beside.replace(best)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)
