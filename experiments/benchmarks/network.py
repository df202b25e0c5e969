"""A small network on one machine: a namespace a rank, links of limited rate, sampled traffic.

Every rank has a namespace with one interface. Its other end is a port of a bridge in a further
namespace, the hub. A token bucket on both ends limits what the rank sends and receives.
Linux only, as root, with ip and tc of iproute2.
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import UserError

INTERFACE = "eth0"
WINDOW = 0.01  # seconds
_INTERVAL = 0.002  # seconds from sample to sample
_PATIENCE = 20.0  # seconds in which a sample has to come
_SUBNET = "10.77.0"  # of namespaces of their own: it cannot collide with the machine's networks
_BURST = 128 * 1024  # bytes: two of the largest packets that a host hands over at once
_LIMIT = 4 * 1024 * 1024  # bytes that wait, of many connections, before packets are dropped

Array = NDArray[np.float64]


class Network:
    """``n`` ranks on a switch; made by :func:`network`."""

    def __init__(self, n: int) -> None:
        self.ranks = [f"cdp-{os.getpid()}-{rank}" for rank in range(n)]
        self.hub = f"cdp-{os.getpid()}-hub"

    def address(self, rank: int) -> str:
        return f"{_SUBNET}.{rank + 1}"

    def inside(self, rank: int) -> list[str]:
        """The prefix of a command that runs in the namespace of ``rank``."""
        return ["ip", "netns", "exec", self.ranks[rank]]

    def shape(self, rate: float | None) -> None:
        """Limit what every rank sends and receives to ``rate`` bits a second; None: no limit."""
        for rank, name in enumerate(self.ranks):
            for namespace, device in ((name, INTERFACE), (self.hub, f"port{rank}")):
                qdisc, on = ["tc", "-n", namespace, "qdisc"], ["dev", device]
                if rate is not None:
                    limit = f"tbf rate {round(rate)}bit burst {_BURST}b limit {_LIMIT}b"
                    _run([*qdisc, "replace", *on, "root", *limit.split()])
                elif "tbf" in _run([*qdisc, "show", *on]):
                    _run([*qdisc, "delete", *on, "root"])

    def commands(self) -> Iterator[str]:
        """The commands that build it."""
        hub = f"ip -n {self.hub}"
        yield f"ip netns add {self.hub}"
        yield f"{hub} link add bridge type bridge"
        yield f"{hub} link set bridge up"
        for rank, name in enumerate(self.ranks):
            here, address = f"ip -n {name}", self.address(rank)
            yield f"ip netns add {name}"
            yield f"{here} link set lo up"
            yield f"{hub} link add port{rank} type veth peer name {INTERFACE} netns {name}"
            yield f"{hub} link set port{rank} master bridge up"
            # No address of IPv6, so that there is one way to each rank.
            yield f"{here} link set {INTERFACE} addrgenmode none up"
            yield f"{here} address add {address}/24 dev {INTERFACE}"
            # A fixed congestion control: bbr, for one, stops to probe every ten seconds.
            yield (
                f"{here} route change {_SUBNET}.0/24 dev {INTERFACE} src {address}"
                " proto kernel scope link congctl cubic"
            )


@contextmanager
def network(n: int) -> Iterator[Network]:
    """Build a network of ``n`` ranks without limit; remove it at the end of the block.

    Raises:
        UserError: this is not Linux, or not root, or a tool or a kernel module is missing.
    """
    check(n)
    made = Network(n)
    try:
        for command in made.commands():
            _run(command.split())
        made.shape(1e9)  # a kernel without token buckets fails here, not in the first run
        made.shape(None)
        yield made
    finally:
        for name in (*made.ranks, made.hub):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def check(n: int) -> None:
    """Refuse a network that cannot be built here."""
    if not 2 <= n <= 250:
        raise UserError(f"a network has 2 to 250 ranks: got {n}")
    if sys.platform != "linux":
        raise UserError(f"links are limited by namespaces of Linux: this is {sys.platform}")
    if os.geteuid() != 0:
        raise UserError("network namespaces are made by root: start it with sudo")
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        raise UserError(f"{' and '.join(missing)} of iproute2 cannot be found: install iproute2")


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"status {done.returncode}"
        raise UserError(
            f"{' '.join(command)}: {said}; it needs the kernel modules veth, bridge, sch_tbf and"
            " tcp_cubic (modprobe)"
        )
    return done.stdout


class Traffic:
    """The bytes that each rank has sent over time; made by :func:`sampled`."""

    def __init__(self, path: Path, n_ranks: int) -> None:
        self._path = path
        self._record = np.dtype([("moment", "<f8"), ("bytes", "<u8", (n_ranks,))])
        self._begin = 0

    def mark(self) -> None:
        """Drop samples before the last one."""
        size = self._record.itemsize
        self._begin = max(0, self._path.stat().st_size // size - 1) * size

    def samples(self, until: float) -> tuple[Array, Array]:
        """Wait for the first sample after ``until``.

        Returns:
            moments ``[samples]``, and the bytes sent by then ``[samples, ranks]``, from the mark.
        """
        end = time.monotonic() + _PATIENCE
        size = self._record.itemsize
        while time.monotonic() < end:
            raw = self._path.read_bytes()[self._begin :]
            found = np.frombuffer(raw[: len(raw) // size * size], self._record)
            if len(found) and found["moment"][-1] > until:
                return found["moment"], found["bytes"].astype(np.float64)
            time.sleep(5 * _INTERVAL)
        raise UserError(f"no sample of the traffic has come for {_PATIENCE:g} s: was it killed?")


@contextmanager
def sampled(network: Network) -> Iterator[Traffic]:
    """Sample what the ranks of ``network`` send, from the block's begin to its end."""
    n_ranks = len(network.ranks)
    experiments = str(Path(__file__).parents[1])
    with tempfile.NamedTemporaryFile() as file:
        hub = ["ip", "netns", "exec", network.hub]  # where every port is seen
        process = subprocess.Popen(
            [*hub, sys.executable, "-m", "benchmarks.network", file.name, str(n_ranks)],
            cwd=experiments,
            env=dict(os.environ) | {"PYTHONPATH": os.pathsep.join([experiments, *sys.path])},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # so that Ctrl-C reaches the benchmark alone
        )
        try:
            traffic = Traffic(Path(file.name), n_ranks)
            traffic.samples(time.monotonic())
            yield traffic
        finally:
            process.kill()
            process.wait()


def received(table: bytes, n_ports: int) -> list[int]:
    """The bytes that each port of the hub has received, from the text of /proc/net/dev."""
    found = {name.decode(): int(n) for name, n in re.findall(rb"(\S+):\s*(\d+)", table)}
    return [found[f"port{port}"] for port in range(n_ports)]


def in_windows(moments: Array, sent: Array, start: float, end: float) -> Array:
    """Bytes that each rank sends in each whole window from ``start`` to ``end``.

    Args:
        moments: of the samples, ascending; between two of them bytes are taken to come evenly.
        sent: ``[samples, ranks]``, bytes so far.

    Returns:
        ``[windows, ranks]``.
    """
    edges = start + WINDOW * np.arange(int((end - start) / WINDOW + 1e-6) + 1)
    so_far = [np.interp(edges, moments, of_rank) for of_rank in sent.T]
    return np.diff(np.stack(so_far, axis=1), axis=0)


def peak_over_mean(windows: Array) -> float:
    """The fullest window by the mean one, of all ranks together; NaN without traffic."""
    series = windows.sum(axis=1)
    mean = float(series.mean()) if len(series) else 0.0
    return float(series.max()) / mean if mean > 0 else float("nan")


def _sample() -> None:
    """Append a record to a file every few milliseconds, until the parent has ended."""
    with contextlib.suppress(OSError):
        os.nice(-10)  # it takes little time, but has to get it at once
    path, n_ports = sys.argv[1], int(sys.argv[2])
    record = np.zeros(1, np.dtype([("moment", "<f8"), ("bytes", "<u8", (n_ports,))]))
    table, output = os.open("/proc/self/net/dev", os.O_RDONLY), os.open(path, os.O_WRONLY)
    parent = os.getppid()
    while os.getppid() == parent:
        text = os.pread(table, 1 << 16, 0)
        record["moment"], record["bytes"] = time.monotonic(), received(text, n_ports)
        os.write(output, record.tobytes())
        time.sleep(_INTERVAL)


if __name__ == "__main__":
    _sample()
