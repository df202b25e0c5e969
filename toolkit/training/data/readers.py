"""Worker processes that read images, kept from one epoch to the next."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from threading import Thread
from traceback import clear_frames
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from toolkit.errors import UserError

Key = tuple[int, int]
"""The seed of an epoch, and the number of an image."""

_MOST = 16


def n_workers(asked: int | None) -> int:
    """As many as asked for, but at most one a core; unless asked, this rank's share of the cores.

    Raises:
        UserError: fewer than none.
    """
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    if asked is None:
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return max(1, min(_MOST, cores // ranks_here))
    if asked < 0:
        raise UserError(f"data.num_workers is 0 or more, or null for all cores: got {asked}")
    return min(asked, cores)


@dataclass
class _Plan:
    """The batch sampler of a loader that lasts: it is told what to read for each epoch."""

    seed: int = 0
    chosen: list[Tensor] = field(default_factory=list)

    def __iter__(self) -> Iterator[list[Key]]:
        for indices in self.chosen:
            yield [(self.seed, index) for index in indices.tolist()]


@dataclass(frozen=True)
class _Loader:
    plan: _Plan
    batches: DataLoader
    pinned: bool


class Readers:
    """Reads batches of images by worker processes, which last.

    Args:
        images: gives an image by its :data:`Key`.
        num_workers: processes; 0 reads in this one.
        prefetch_factor: batches that each reads ahead.
        collate: makes a batch of a list of images.

    Raises:
        UserError: nothing is read ahead.
    """

    def __init__(
        self,
        images: Dataset,
        num_workers: int,
        prefetch_factor: int,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        if prefetch_factor < 1:
            raise UserError(f"data.prefetch_factor is 1 or more: got {prefetch_factor}")
        self._images = images
        self._options: dict[str, Any] = {"num_workers": num_workers, "collate_fn": collate}
        if num_workers:
            self._options |= {"persistent_workers": True, "prefetch_factor": prefetch_factor}
        self._idle: _Loader | None = None

    def read(self, seed: int, chosen: list[Tensor], pinned: bool) -> Iterator[Any]:
        """The batches of the images at ``chosen``, in page-locked memory if ``pinned``."""
        if not chosen:
            return
        loader = self._take(pinned)
        loader.plan.seed, loader.plan.chosen = seed, chosen
        with _kept_back():  # readers that begin inherit it, with all threads that they have
            batches = iter(loader.batches)
        try:
            for k, batch in enumerate(islice(batches, len(chosen)), start=1):
                if k == len(chosen):  # whoever counts its batches never comes back for more
                    self._idle = loader
                yield batch
        except Exception as error:
            # torch's frames hold the error that holds them, and the workers: what only the garbage
            # collector finds ends seconds later.
            clear_frames(error.__traceback__)
            raise

    def _take(self, pinned: bool) -> _Loader:
        """A loader that nobody reads from: the last one, if it has been read to its end."""
        idle, self._idle = self._idle, None
        if idle is not None and idle.pinned == pinned:
            return idle
        plan = _Plan()
        batches: DataLoader = DataLoader(
            self._images,
            batch_sampler=plan,
            pin_memory=pinned,
            generator=torch.Generator(),
            multiprocessing_context=_start_method() if self._options["num_workers"] else None,
            worker_init_fn=_end_with_the_run,
            **self._options,
        )
        return _Loader(plan, batches, pinned)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_idle": None}


# Slurm, torchrun and a terminal send a signal to all processes of a job. A run that saves itself
# first still reads then, so its readers end by the SIGTERM of the run alone.

_KEPT_BACK = {signal.SIGINT, signal.SIGTERM}
if not hasattr(signal, "sigwaitinfo"):  # as on macOS, where nobody knows whose SIGTERM it is
    _KEPT_BACK.remove(signal.SIGTERM)


@contextmanager
def _kept_back() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _KEPT_BACK)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_the_run(worker: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, _KEPT_BACK)  # which a spawned one has not inherited
    run = multiprocessing.parent_process()
    if run is not None and signal.SIGTERM in _KEPT_BACK:
        Thread(target=_wait_for_the_end, args=(run.pid,), daemon=True).start()


def _wait_for_the_end(run: int | None) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != run:
        pass
    os._exit(0)


def _start_method() -> str | None:
    """How workers are started; None: as everywhere.

    joblib's processes start others in a way of their own, which a DataLoader's workers do not bear,
    and hand it on to those that are spawned.
    """
    return "fork" if multiprocessing.get_start_method() == "loky" else None
