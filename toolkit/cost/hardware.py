"""Machines: how fast they compute, move memory and talk, in the simplest terms that predict."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import inf, isfinite
from numbers import Real
from pathlib import Path
from typing import Any

import yaml

from toolkit.errors import UserError, suggest
from toolkit.files import conf
from toolkit.model.analysis import Work
from toolkit.schedule import Action
from toolkit.schedule.traffic import rounds


@dataclass(frozen=True)
class Hardware:
    """Ranks that are alike but for ``speeds`` and ``memories``, each with one full-duplex port.

    Args:
        name: what tables and figures call it.
        flops: floating-point operations a second that a rank reaches.
        memory_bandwidth: bytes a second between a rank and its memory.
        link_bandwidth: bytes a second through a rank's port, each way.
        link_latency: seconds from the start of a message to its first byte.
        memory: bytes of a rank's memory.
        speeds: of each rank, as multiples of ``flops`` and ``memory_bandwidth``; all 1 if empty.
        memories: bytes of each rank's memory; all ``memory`` if empty.
        flops_in_16_bits: operations a second on numbers of 16 bits; None: no more than ``flops``.

    Raises:
        ValueError: a number that is not positive (a latency may be 0).
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

    def __post_init__(self) -> None:
        positive = {
            "flops": self.flops,
            "memory_bandwidth": self.memory_bandwidth,
            "link_bandwidth": self.link_bandwidth,
            "memory": self.memory,
            **{f"speeds[{k}]": speed for k, speed in enumerate(self.speeds)},
            **{f"memories[{k}]": memory for k, memory in enumerate(self.memories)},
        }
        if self.flops_in_16_bits is not None:
            positive["flops_in_16_bits"] = self.flops_in_16_bits
        for name, value in positive.items():
            if not (isinstance(value, Real) and value > 0):
                raise UserError(f"{name} of a hardware is a number above 0: got {value!r}")
        latency = self.link_latency
        if not (isinstance(latency, Real) and isfinite(latency) and latency >= 0):
            raise UserError(f"link_latency is 0 seconds or more: got {latency!r}")

    @classmethod
    def preset(cls, name: str) -> "Hardware":
        """A machine of ``conf/hardware``, such as ``a100_nvlink``.

        Raises:
            ValueError: there is none of that name, or no configuration.
        """
        found = _files()
        if name not in found:
            raise UserError(f"unknown hardware {name!r}: {suggest(name, [*found])}")
        return _read(found[name])

    def speed(self, rank: int) -> float:
        """How fast ``rank`` computes and updates, as a multiple of what the machine says."""
        return self.speeds[rank] if rank < len(self.speeds) else 1.0

    def memory_of(self, rank: int) -> float:
        """Bytes of the memory of ``rank``."""
        return self.memories[rank] if rank < len(self.memories) else self.memory

    def roofline(self, work: Work) -> float:
        """Seconds of one kernel: the larger of its arithmetic and its memory traffic."""
        flops = self.flops_in_16_bits if work.in_16_bits else None
        return max(work.flops / (flops or self.flops), work.bytes / self.memory_bandwidth)

    def message(self, n_bytes: float) -> float:
        """Seconds of a point-to-point message."""
        return self.link_latency + n_bytes / self.link_bandwidth

    def all_reduce(self, n_bytes: float, n_ranks: int) -> float:
        """Seconds of a ring all-reduce: 2(n-1) rounds of 1/n of the bytes."""
        return rounds(Action.ALL_REDUCE, n_ranks) * self.message(n_bytes / n_ranks)

    def tree(self, n_bytes: float, n_ranks: int) -> float:
        """Seconds of a broadcast, or of a reduction to one rank, over a binomial tree."""
        return rounds(Action.BROADCAST, n_ranks) * self.message(n_bytes)


def check_hardware(hardware: Hardware) -> None:
    """Refuse what is no hardware, such as a preset's name alone.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(hardware, Hardware):
        name = hardware if isinstance(hardware, str) else "NAME"
        raise UserError(
            f"hardware is a toolkit.cost.Hardware: got {hardware!r}; one of conf/hardware is"
            f" Hardware.preset({name!r})"
        )


def presets() -> dict[str, Hardware]:
    """The machines of ``conf/hardware``, by name.

    Raises:
        ValueError: there is no configuration, or a file that does not tell of a machine.
    """
    return {name: _read(path) for name, path in _files().items()}


def _files() -> dict[str, Path]:
    return {path.stem: path for path in sorted((conf() / "hardware").glob("*.yaml"))}


@cache
def _read(path: Path) -> Hardware:
    values: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    values.pop("defaults", None)  # the schema
    try:
        return Hardware(**values)
    except TypeError as error:
        raise UserError(f"{path} does not tell all of a machine by itself: {error}") from error


UNIT = Hardware("unit", flops=1.0, memory_bandwidth=inf, link_bandwidth=inf)
"""Messages take no time and a unit of arithmetic takes one second: the schedule's own time."""
