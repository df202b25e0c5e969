"""Machines of a small network on one machine: namespaces, joined by a bridge, with links of a rate.

Every rank has a namespace with one interface, whose other end is a port of a bridge in a further
namespace, the hub. A token bucket on both ends limits what the rank sends and what it receives.
Linux only, as root, with ip and tc of iproute2.
"""

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from toolkit.errors import UserError

INTERFACE = "eth0"
_PREFIX = "cdp"
_SUBNET = "10.77.0"  # of namespaces of their own: nothing outside them can have it, too
_MOST = 250  # addresses
_BURST = 128 * 1024  # bytes: two of the largest packets that a host hands over at once
_LIMIT = 4 * 1024 * 1024  # bytes that wait, of many connections, before packets are dropped
_ENDS = {signal.SIGINT, signal.SIGTERM}
_PR_SET_PDEATHSIG = 1


class Network:
    """``n`` ranks on a switch; made by :func:`network`."""

    def __init__(self, n: int) -> None:
        self.ranks = [_name(os.getpid(), str(rank)) for rank in range(n)]
        self.hub = _name(os.getpid(), "hub")

    def address(self, rank: int) -> str:
        return f"{_SUBNET}.{rank + 1}"

    def port(self, rank: int) -> str:
        """The interface of the hub at which ``rank`` is."""
        return f"port{rank}"

    def inside(self, rank: int) -> list[str]:
        """What a command begins with, to be run where ``rank`` is."""
        return ["ip", "netns", "exec", self.ranks[rank]]

    def inside_hub(self) -> list[str]:
        """What a command begins with, to be run where every port is seen."""
        return ["ip", "netns", "exec", self.hub]

    def shape(self, rate: float | None) -> None:
        """Let every rank send, and receive, ``rate`` bits a second; without limit if None."""
        for rank, name in enumerate(self.ranks):
            for namespace, device in ((name, INTERFACE), (self.hub, self.port(rank))):
                shown = ["tc", "-n", namespace, "qdisc", "show", "dev", device]
                if rate is not None:
                    _run(limiting(namespace, device, rate))
                elif "tbf" in _run(shown):
                    _run(["tc", "-n", namespace, "qdisc", "delete", "dev", device, "root"])

    def commands(self) -> Iterator[list[str]]:
        """What builds it."""
        yield ["ip", "netns", "add", self.hub]
        yield ["ip", "-n", self.hub, "link", "add", "bridge", "type", "bridge"]
        yield ["ip", "-n", self.hub, "link", "set", "bridge", "up"]
        for rank, name in enumerate(self.ranks):
            port = self.port(rank)
            here = ["ip", "-n", name]
            hub = ["ip", "-n", self.hub]
            yield ["ip", "netns", "add", name]
            yield [*here, "link", "set", "lo", "up"]
            yield [*hub, *f"link add {port} type veth peer name {INTERFACE} netns {name}".split()]
            yield [*hub, *f"link set {port} master bridge up".split()]
            # No address of IPv6, so that there is one way to each rank.
            yield [*here, *f"link set {INTERFACE} addrgenmode none up".split()]
            yield [*here, *f"address add {self.address(rank)}/24 dev {INTERFACE}".split()]
            # Whatever the machine prefers: bbr, for one, stops to probe every ten seconds.
            to_all = f"route change {_SUBNET}.0/24 dev {INTERFACE} src {self.address(rank)}"
            yield [*here, *f"{to_all} proto kernel scope link congctl cubic".split()]


@contextmanager
def network(n: int) -> Iterator[Network]:
    """``n`` ranks on a network without limit, until the end of the block.

    It is removed however the block ends, by SIGINT and SIGTERM, too; what a process has left that
    could not remove it is removed first.

    Raises:
        ValueError: this is not Linux, or not root, or ip, tc or something in the kernel is missing.
    """
    check(n)
    for name in abandoned(_run(["ip", "netns", "list"])):
        _run(["ip", "netns", "delete", name])
    made = Network(n)
    with _ended_by_signals():
        try:
            for command in made.commands():
                _run(command)
            made.shape(1e9)  # so that what is missing is missed here
            made.shape(None)
            yield made
        finally:
            _remove(made)


def limiting(namespace: str, device: str, rate: float) -> list[str]:
    """The command that lets ``device`` send ``rate`` bits a second."""
    where = ["tc", "-n", namespace, "qdisc", "replace", "dev", device, "root"]
    return [*where, *f"tbf rate {round(rate)}bit burst {_BURST}b limit {_LIMIT}b".split()]


def abandoned(listed: str) -> list[str]:
    """Of the namespaces that ``ip netns list`` has listed, ours whose process is gone."""
    names = [line.split()[0] for line in listed.splitlines() if line.strip()]
    made = [(name, re.fullmatch(rf"{_PREFIX}-(\d+)-(\d+|hub)", name)) for name in names]
    return [name for name, found in made if found and not _runs(int(found[1]))]


def check(n: int) -> None:
    """Refuse what cannot be built, or not here."""
    if not 2 <= n <= _MOST:
        raise UserError(f"a network has 2 to {_MOST} ranks: got {n}")
    if sys.platform != "linux":
        raise UserError(f"links are limited by namespaces of Linux: this is {sys.platform}")
    if os.geteuid() != 0:
        raise UserError("network namespaces are made by root: start it with sudo")
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        raise UserError(f"{' and '.join(missing)} of iproute2 cannot be found: install iproute2")


def end_with_parent() -> None:
    """Have this process killed when the one that started it is gone, however it went."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _name(pid: int, what: str) -> str:
    return f"{_PREFIX}-{pid}-{what}"


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        words = " ".join(done.stderr.split()) or f"status {done.returncode}"
        lacking = "unknown" in words.lower() or "not supported" in words.lower()
        hint = "; the kernel lacks what it asks for: modprobe veth, bridge, sch_tbf, tcp_cubic"
        raise UserError(f"{' '.join(command)}: {words}{hint if lacking else ''}")
    return done.stdout


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM leaves the block as an exception does; SIGINT does so anyway."""
    if threading.current_thread() is not threading.main_thread():  # where none can be handled
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _remove(made: Network) -> None:
    """Delete the namespaces that there are, and all in them; a second signal waits for it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
    try:
        there = {line.split()[0] for line in _run(["ip", "netns", "list"]).splitlines() if line}
        for name in (*made.ranks, made.hub):
            if name in there:
                _run(["ip", "netns", "delete", name])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
