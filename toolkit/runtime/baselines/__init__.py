"""Runtimes of other systems, under this toolkit's interface; each is imported at first use."""

from importlib import import_module
from typing import Any

_MODULES = {
    "DDP": "ddp",
    "DeepSpeed": "deepspeed",
    "DelayedAllReduce": "delayed_allreduce",
    "DiLoCo": "local_steps",
    "FSDP": "fsdp",
    "Horovod": "horovod",
    "LocalSGD": "local_steps",
    "TorchPipelining": "torch_pipelining",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
