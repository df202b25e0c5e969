"""Rank processes that one training uses after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolkit.runtime.base import Runtime
from toolkit.runtime.process_group.processes import Processes


class RankPool:
    """Processes, how they join, and what they trained last.

    Args:
        ranks: number of processes.
        hosts: addresses of their machines, nodes of a running Ray cluster; none: this machine.
        backend, timeout, interface: as of :func:`toolkit.runtime.join`.

    Attributes:
        processes: the ranks.
        join_options: how they join.
        runtime: the runtime of the latest training; the ranks hold that training and no other.

    Raises:
        UserError: an argument is invalid.
    """

    def __init__(
        self,
        ranks: int,
        *,
        hosts: Sequence[str] = (),
        backend: str = "auto",
        timeout: float = 120.0,
        interface: str | None = None,
    ) -> None:
        self.processes = Processes(ranks, timeout, hosts)
        self.join_options = {
            "backend": backend,
            "timeout": timeout,
            "interface": interface,
        }
        self.runtime: Runtime | None = None

    def close(self) -> None:
        """End all processes."""
        self.processes.close()


# To start processes and to import torch in each takes seconds, so trainings share them.
_shared: RankPool | None = None


def shared(ranks: int, **join_options: Any) -> RankPool:
    """Return this process's own pool; another number of ranks or way to join replaces it."""
    global _shared
    if _shared is not None:
        if (_shared.processes.n_ranks, _shared.join_options) == (ranks, join_options):
            return _shared
        _shared.close()
    _shared = RankPool(ranks, **join_options)
    return _shared
