"""How many operations torch is told to do: on a GPU, about as many kernels to launch."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


def operations(run: Callable[[], object]) -> Counter[str]:
    """The operations that ``run`` dispatches, backward and updates with them, by their names.

    Views, and memory that is only set aside, are none. Code compiled by torch.compile is not seen.
    """
    with _Counting() as counting:
        run()
    return counting.found


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        if not function.is_view and not name.startswith("empty"):
            self.found[name] += 1
        return function(*arguments, **(options or {}))
