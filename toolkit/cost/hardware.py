"""Machines: the few numbers that predict compute, memory traffic and messages."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import yaml

from toolkit.errors import UserError, suggest, whole
from toolkit.files import conf
from toolkit.model.kernel_work import Work
from toolkit.schedule import Action
from toolkit.schedule.traffic import rounds

_LATENCIES = "link_latency", "local_latency"


@dataclass(frozen=True)
class Hardware:
    """Machines with one full-duplex port each, ranks equal except for ``speeds`` and ``memories``.

    Args:
        name: label in tables and figures.
        flops: floating-point operations per second of a rank.
        memory_bandwidth: bytes per second between a rank and its memory.
        link_bandwidth: bytes per second through a machine's port, in each direction.
        link_latency: seconds from the start of a message to its first byte. The message occupies
            its ports meanwhile: latencies of messages on one port do not overlap, and if ports are
            shared they share the port too. Real networks have several messages under way.
        memory: bytes of a rank's memory.
        speeds: per rank, multiples of ``flops`` and ``memory_bandwidth``; empty: all 1.
        memories: per rank, bytes of memory; empty: all ``memory``.
        flops_in_16_bits: operations per second on 16-bit numbers; None: ``flops``.
        ranks_per_machine: consecutive ranks that share a machine, and its one port to others.
        local_bandwidth: bytes per second of a rank's port within its machine, in each direction.
        local_latency: as ``link_latency``, within a machine.
        overlap_time: seconds of a forward and a backward that a rank overlaps, divided by those of
            one after the other; 1 unless measured.
        shared_ports: whether messages of different ranks share the bandwidth of a port, as
            connections of TCP do, or follow each other.

    Raises:
        UserError: a number is not positive (latencies may be 0), or only one of
            ``ranks_per_machine`` and ``local_bandwidth`` is given.
    """

    name: str
    flops: float
    memory_bandwidth: float
    link_bandwidth: float
    link_latency: float = 0.0
    memory: float = inf
    speeds: Sequence[float] = ()
    memories: Sequence[float] = ()
    flops_in_16_bits: float | None = None
    ranks_per_machine: int = 1
    local_bandwidth: float = inf
    local_latency: float = 0.0
    overlap_time: float = 1.0
    shared_ports: bool = False

    def __post_init__(self) -> None:
        flops_in_16_bits = (
            self.flops if self.flops_in_16_bits is None else self.flops_in_16_bits
        )
        whole(self.ranks_per_machine, "hardware.ranks_per_machine", 1)
        # Lists are checked item by item, so that a message names the rank.
        positive_values = vars(self) | {"flops_in_16_bits": flops_in_16_bits}
        for name in ("speeds", "memories"):
            positive_values |= {
                f"{name}[{rank}]": value
                for rank, value in enumerate(positive_values.pop(name))
            }
        for name, value in positive_values.items():
            is_positive = isinstance(value, float | int) and value > 0
            if not is_positive and name not in ("name", "shared_ports", *_LATENCIES):
                raise UserError(f"hardware.{name} is a positive number: got {value!r}")
        for name in _LATENCIES:
            latency = getattr(self, name)
            if not (isinstance(latency, float | int) and 0 <= latency < inf):
                raise UserError(
                    f"hardware.{name} is 0 or more seconds: got {latency!r}"
                )
        # Machines of one rank have no inner links; and the default of inner links, which take no
        # time, is not what machines of several ranks have.
        if (self.ranks_per_machine > 1) != (self.local_bandwidth < inf):
            raise UserError(
                "hardware.ranks_per_machine above 1 and hardware.local_bandwidth go together: got"
                f" {self.ranks_per_machine} and {self.local_bandwidth}"
            )

    @classmethod
    def preset(cls, name: str) -> "Hardware":
        """Return the machine of a file in ``conf/hardware``, for example ``a100_nvlink``.

        Raises:
            UserError: the name is unknown, or the repository's ``conf`` is missing.
        """
        path_of_name = _files()
        if name not in path_of_name:
            raise UserError(
                f"unknown hardware {name!r}: {suggest(name, [*path_of_name])}"
            )
        return _read(path_of_name[name])

    def speed(self, rank: int) -> float:
        """Return the relative compute speed of ``rank``."""
        return self.speeds[rank] if rank < len(self.speeds) else 1.0

    def memory_of(self, rank: int) -> float:
        """Return the bytes of the memory of ``rank``."""
        return self.memories[rank] if rank < len(self.memories) else self.memory

    def roofline(self, work: Work) -> float:
        """Return the seconds of one kernel: the larger of arithmetic and memory traffic."""
        flops = self.flops_in_16_bits if work.in_16_bits else None
        # Arithmetic and memory traffic of a kernel overlap: the slower of them decides.
        return max(
            work.flops / (flops or self.flops), work.bytes / self.memory_bandwidth
        )

    def machine(self, rank: int) -> int:
        """Return the machine of ``rank``."""
        # Consecutive ranks share a machine, as launchers number them.
        return rank // self.ranks_per_machine

    def message(self, n_bytes: float, *, local: bool = False) -> float:
        """Return the seconds of a message.

        Args:
            n_bytes: size of the message.
            local: whether both ranks are on one machine.
        """
        if local:
            return self.local_latency + n_bytes / self.local_bandwidth
        # alpha + beta n: what takes several messages one after the other pays the latency for each.
        return self.link_latency + n_bytes / self.link_bandwidth

    def collective(self, action: Action, n_bytes: float, ranks: Sequence[int]) -> float:
        """Return the seconds of a ring all-reduce, or a broadcast or reduction over a tree.

        A collective of several machines takes its time within them, and that between them.

        Args:
            action: the ring of n takes 2(n-1) rounds of 1/n of the bytes, a binomial tree log2(n)
                of all, rounded up.
            n_bytes: of the tensor on each rank.
            ranks: those that take part.
        """
        # First within each machine, where the fullest one counts, then among one rank of each
        # machine.
        members = Counter(map(self.machine, ranks))
        seconds = 0.0
        for n_members, is_local in (
            (max(members.values()), True),
            (len(members), False),
        ):
            bytes_per_round = (
                n_bytes / n_members if action == Action.ALL_REDUCE else n_bytes
            )
            seconds += rounds(action, n_members) * self.message(
                bytes_per_round, local=is_local
            )
        return seconds


def check_hardware(hardware: Hardware | None) -> Hardware:
    """Return ``hardware``; raise UserError if it is something else, such as a preset's name."""
    if not isinstance(hardware, Hardware):
        raise UserError(
            f"hardware is a Hardware, such as Hardware.preset(name): got {hardware!r}"
        )
    return hardware


def presets() -> dict[str, Hardware]:
    """Return the machines of ``conf/hardware`` by name; raise UserError if one is incomplete."""
    return {name: _read(path) for name, path in _files().items()}


def _files() -> dict[str, Path]:
    """Return the files of ``conf/hardware`` by the name of their machine."""
    return {
        path.stem: path for path in sorted((conf() / "hardware").glob("[!_]*.yaml"))
    }


@cache
def _read(path: Path) -> Hardware:
    """Read a machine from a file; raise UserError if it is incomplete."""
    values: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    values.pop("defaults", None)  # the schema
    try:
        return Hardware(**values)
    except TypeError as error:
        raise UserError(f"{path} is not a complete hardware: {error}") from error


UNIT = Hardware("unit", flops=1.0, memory_bandwidth=inf, link_bandwidth=inf)
"""Messages take no time and a unit of arithmetic takes one second."""
