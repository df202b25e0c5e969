"""What one would take instead: torch's own runtimes, under this toolkit's interface."""

from toolkit.runtime.baselines.ddp import DDP
from toolkit.runtime.baselines.delayed import DelayedAllReduce
from toolkit.runtime.baselines.fsdp import FSDP
from toolkit.runtime.baselines.pipelining import TorchPipelining

__all__ = ["DDP", "FSDP", "DelayedAllReduce", "TorchPipelining"]
