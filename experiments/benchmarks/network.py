"""A small network on one machine: namespaces as machines, links of limited rate, sampled traffic.

Every machine is a namespace with one interface. Its other end is a port of a bridge in a further
namespace, the hub. A token bucket on both ends limits what the machine sends and receives.
Linux only, as root, with ip and tc of iproute2.
"""

import ctypes
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from toolkit.errors import UserError
from toolkit.runtime import World, join

INTERFACE = "eth0"
WINDOW = 0.01  # seconds
_INTERVAL = 0.002  # seconds from sample to sample
_BURST = 128 * 1024  # bytes
# Bytes that wait, of many connections, before packets are dropped.
_LIMIT = 64 * 1024 * 1024
_HUB = """\
ip netns add {hub}
ip -n {hub} link add bridge type bridge
ip -n {hub} link set bridge up"""
# No IPv6 address, so that there is one way to each machine. A fixed congestion control: bbr, for
# one, stops to probe every ten seconds. A packet passes two buckets, one after the other: with
# packets of 64 KB and a window no larger, as connections begin, only half of the rate is used. What
# a connection has taken cannot be overtaken by what is more urgent: it takes little ahead.
_MACHINE = """\
ip netns add {name}
ip netns exec {name} sh -c '{settings} true'
ip -n {name} link set lo up
ip -n {hub} link add port{n} type veth peer name eth0 netns {name}
ip -n {hub} link set port{n} master bridge gso_max_size 16384 up
ip -n {name} link set eth0 gso_max_size 16384 addrgenmode none up
ip -n {name} address add {ip}/24 dev eth0
ip -n {name} route change 10.77.0.0/24 dev eth0 src {ip} proto kernel scope link congctl cubic"""

# Of net.ipv4, where they may be changed; with others, messages are a little slower.
_SETTINGS = {
    "tcp_slow_start_after_idle": "0",
    "tcp_rmem": "4096 2097152 8388608",
    "tcp_notsent_lowat": "131072",
}

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Network:
    """Names of the namespaces of ``machines`` on a switch, the ``hub``; made by :func:`network`."""

    machines: tuple[str, ...]
    hub: str

    def shape(self, rate: float | None) -> None:
        """Limit what every machine sends and receives to ``rate`` bits a second; None: no limit."""
        for n, name in enumerate(self.machines):
            for namespace, device in ((name, INTERFACE), (self.hub, f"port{n}")):
                qdisc = f"tc -n {namespace} qdisc"
                if rate is not None:
                    limit = f"tbf rate {round(rate)}bit burst {_BURST}b limit {_LIMIT}b"
                    _run(f"{qdisc} replace dev {device} root {limit}")
                # To delete a limit that is not there would fail.
                elif "tbf" in _run(f"{qdisc} show dev {device}"):
                    _run(f"{qdisc} delete dev {device} root")


class Traffic:
    """A thread that samples the bytes that each machine of ``net`` has sent, until it is closed."""

    def __init__(self, net: Network) -> None:
        self._net = net
        self._closed = threading.Event()
        # The thread only appends to it, and the caller only removes from its front: no lock.
        self._samples: list[tuple[float, list[int]]] = []
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        enter(self._net.hub)  # where every port is seen
        with suppress(OSError):  # it takes little time, but has to get it at once
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), -10)
        while not self._closed.wait(_INTERVAL):
            # thread-self: only this thread has entered the hub's namespace.
            counters = Path("/proc/thread-self/net/dev").read_bytes()
            self._samples.append(
                (time.monotonic(), received(counters, len(self._net.machines)))
            )

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def samples(self, start: float, end: float) -> tuple[Array, Array]:
        """Return moments, and bytes ``[samples, machines]`` sent by then; drop those before."""
        # What was sent by `end` is interpolated, and needs a sample after it. One before `start`
        # stays.
        while not self._samples or self._samples[-1][0] <= end:
            if not self._thread.is_alive():
                raise RuntimeError("the thread that samples the traffic has ended")
            time.sleep(5 * _INTERVAL)
        n_before = sum(moment < start for moment, _ in self._samples)
        del self._samples[: max(0, n_before - 1)]
        moments, bytes_sent = zip(*self._samples, strict=True)
        return np.array(moments), np.array(bytes_sent, float)


def address(machine: int) -> str:
    # Of separate namespaces: no other network can collide with it.
    return f"10.77.0.{machine + 1}"


def enter(namespace: str) -> None:
    """Move the calling thread, and all that it starts from now on, into a network namespace."""
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


def join_from(machine: str, timeout: float) -> World:
    """Let this rank of ``launch`` join the others from the namespace ``machine``."""
    enter(machine)
    # The store of ``launch`` cannot be reached from here, so rank 0 has another.
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    os.environ |= {"MASTER_ADDR": address(0), "MASTER_PORT": "29500"}
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    torch.set_num_threads(1)
    return join(device="cpu", timeout=timeout)


@contextmanager
def network(size: int) -> Iterator[Network]:
    """Build a network of ``size`` machines without limit; remove it at the end of the block."""
    check(size)
    names = [f"cdp-{os.getpid()}-{name}" for name in (*range(size), "hub")]
    net = Network(tuple(names[:-1]), names[-1])
    settings = "".join(
        f"echo {value} > /proc/sys/net/ipv4/{name};"
        for name, value in _SETTINGS.items()
    )

    commands = _HUB.format(hub=net.hub)
    for n, name in enumerate(net.machines):
        commands += "\n" + _MACHINE.format(
            hub=net.hub, name=name, n=n, ip=address(n), settings=settings
        )
    try:
        for command in commands.splitlines():
            _run(command)
        # A kernel without token buckets fails here, not in the first run.
        net.shape(1e9)
        net.shape(None)
        yield net
    finally:
        for name in names:
            subprocess.run(
                ["ip", "netns", "delete", name], capture_output=True, check=False
            )


def check(n: int) -> None:
    """Raise UserError if a network of ``n`` machines cannot be built here."""
    if not 2 <= n <= 250:
        raise UserError(f"a network has 2 to 250 machines: got {n}")
    if sys.platform != "linux" or os.geteuid() != 0:
        raise UserError("only root makes network namespaces, on Linux: use sudo")


def _run(command: str) -> str:
    process = subprocess.run(
        shlex.split(command), capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    if process.returncode:
        reason = " ".join(process.stderr.split())
        modules = "the kernel modules veth, bridge, sch_tbf and tcp_cubic (modprobe)"
        raise UserError(f"{command}: {reason}; it needs {modules}")
    return process.stdout


def received(counters: bytes, n_ports: int) -> list[int]:
    """Return the bytes that each port of the hub has received, from the text of /proc/net/dev."""
    # A port of the hub receives what its machine sends.
    bytes_of_port = {
        name.decode(): int(n_bytes)
        for name, n_bytes in re.findall(rb"(\S+):\s*(\d+)", counters)
    }
    return [bytes_of_port[f"port{port}"] for port in range(n_ports)]


def in_windows(moments: Array, sent: Array, start: float, end: float) -> Array:
    """Return bytes ``[windows, machines]`` of each whole window; between samples evenly sent."""
    edges = start + WINDOW * np.arange(int((end - start) / WINDOW + 1e-6) + 1)
    sent_by_edge = [
        np.interp(edges, moments, machine_bytes) for machine_bytes in sent.T
    ]
    return np.diff(np.stack(sent_by_edge, axis=1), axis=0)


def peak_over_mean(windows: Array) -> float:
    """Return the fullest window by the mean one, of all machines together; NaN without traffic."""
    series = windows.sum(axis=1)
    return float(series.max() / series.mean()) if series.any() else float("nan")
