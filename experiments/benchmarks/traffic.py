"""What ranks send over time: sampled from outside, in windows of equal length."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks import sampler
from benchmarks.network import Network
from toolkit.errors import UserError

WINDOW = 0.01  # seconds
_INTERVAL = 0.002  # seconds from sample to sample
_PATIENCE = 20.0  # seconds in which a sample has to come

Array = NDArray[np.float64]


class Traffic:
    """The samples of a network; made by :func:`sampled`."""

    def __init__(self, path: Path, n_ranks: int) -> None:
        self._path, self._n_ranks = path, n_ranks
        self._begin = 0

    def mark(self) -> None:
        """Only what comes from now on is looked at: after the last sample that there is."""
        size = sampler.record(self._n_ranks).size
        self._begin = max(0, self._path.stat().st_size // size - 1) * size

    def samples(self, until: float) -> tuple[Array, Array]:
        """Moments, and the bytes that each rank has sent by then, from the mark on.

        It waits for the first sample after ``until``.
        """
        end = time.monotonic() + _PATIENCE
        record = np.dtype([("moment", "<f8"), ("bytes", "<u8", (self._n_ranks,))])
        while time.monotonic() < end:
            raw = self._path.read_bytes()[self._begin :]
            found = np.frombuffer(raw[: len(raw) // record.itemsize * record.itemsize], record)
            if len(found) and found["moment"][-1] > until:
                return found["moment"], found["bytes"].astype(np.float64)
            time.sleep(5 * _INTERVAL)
        raise UserError(f"no sample of the traffic has come for {_PATIENCE:g} s: was it killed?")


@contextmanager
def sampled(network: Network) -> Iterator[Traffic]:
    """Sample what the ranks of ``network`` send, until the end of the block.

    There is a sample before it begins.
    """
    n_ranks = len(network.ranks)
    ports = [network.port(rank) for rank in range(n_ranks)]
    experiments = str(Path(__file__).parents[1])
    with tempfile.NamedTemporaryFile() as file:
        start = [*network.inside_hub(), sys.executable, "-m", "benchmarks.sampler"]
        process = subprocess.Popen(
            [*start, file.name, str(_INTERVAL), *ports],
            cwd=experiments,
            env=dict(os.environ) | {"PYTHONPATH": experiments},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is the benchmark's
        )
        try:
            traffic = Traffic(Path(file.name), n_ranks)
            traffic.samples(time.monotonic())
            yield traffic
        finally:
            process.kill()
            process.wait()


def in_windows(moments: Array, sent: Array, start: float, end: float) -> Array:
    """Bytes that each rank sends in each whole window from ``start`` to ``end``.

    Between two samples bytes are taken to come evenly.

    Args:
        moments: of the samples, ascending.
        sent: ``[samples, ranks]``, bytes so far.
        start: of the first window.
        end: of what is looked at.

    Returns:
        ``[windows, ranks]``.
    """
    n_windows = int((end - start) / WINDOW + 1e-6)
    edges = start + WINDOW * np.arange(n_windows + 1)
    so_far = [np.interp(edges, moments, of_rank) for of_rank in sent.T]
    return np.diff(np.stack(so_far, axis=1), axis=0)


def peak_over_mean(windows: Array) -> float:
    """The fullest window by the mean one, of all ranks together; NaN without traffic."""
    return _peak_over_mean(windows.sum(axis=1))


def worst_peak_over_mean(windows: Array) -> float:
    """The fullest window by the mean one, of the rank where this is most; NaN without traffic."""
    found = [_peak_over_mean(of_rank) for of_rank in windows.T]
    return max((value for value in found if not np.isnan(value)), default=float("nan"))


def _peak_over_mean(series: Array) -> float:
    mean = float(series.mean()) if len(series) else 0.0
    return float(series.max()) / mean if mean > 0 else float("nan")
