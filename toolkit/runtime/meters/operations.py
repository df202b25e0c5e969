"""Counts the operations that a computation launches."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


def count_operations(run: Callable[[], object]) -> Counter[str]:
    """Count the operations that ``run`` dispatches, by name: on a GPU, about its kernel launches.

    Views, allocations and marks for the profiler do not count. Code compiled by torch.compile is
    not seen.
    """
    with _Counting() as counting:
        run()
    return counting.operations


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        if not function.is_view and not name.startswith(("empty", "_record_function")):
            self.operations[name] += 1
        return function(*arguments, **(options or {}))
