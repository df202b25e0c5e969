"""Start ranks on this machine that run a function, from a script, a test or a notebook."""

from collections.abc import Callable
from typing import Any

from toolkit.runtime.process_group.join import leave
from toolkit.runtime.process_group.processes import OnReport, Processes


def launch(
    function: Callable[..., Any],
    n_ranks: int,
    *args: Any,
    on_report: OnReport = lambda rank, value: None,
    timeout: float = 120.0,
    **kwargs: Any,
) -> list[Any]:
    """Call ``function(*args, **kwargs)`` in ``n_ranks`` new processes, each of them a rank.

    In them :func:`toolkit.runtime.join` finds the others, :func:`toolkit.runtime.report` reaches
    this process, and their output appears where its own does. All processes end with the call.

    Args:
        function: function that each rank calls; it and its arguments are pickled, also from a
            notebook's cell.
        n_ranks: number of processes.
        *args: positional arguments of ``function``.
        on_report: function that is called here with the rank and the value of each report.
        timeout: seconds within which all ranks have to start.
        **kwargs: keyword arguments of ``function``.

    Returns:
        The value that each rank returned, ``[rank]``.

    Raises:
        UserError: an argument is invalid.
        ValueError: a rank raised it.
        RankError: a rank raised another exception.
        JobFailedError: a rank died, stalled or did not start.
    """
    with Processes(n_ranks, timeout) as processes:
        results = processes.call(function, *args, on_report=on_report, **kwargs)
        processes.call(leave)
        return results
