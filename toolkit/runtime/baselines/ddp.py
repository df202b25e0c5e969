"""torch's DistributedDataParallel."""

import inspect
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from toolkit.errors import UserError, check_choice
from toolkit.runtime.baselines.synchronous import Chain, Synchronous

# Its newer name; the older one is deprecated there.
_BUFFERS = "forward_sync_buffers"
if _BUFFERS not in inspect.signature(DistributedDataParallel).parameters:
    _BUFFERS = "broadcast_buffers"

_HOOKS = {
    "none": None,
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
}


class DDP(Synchronous):
    """Data parallelism by torch's DistributedDataParallel.

    Args:
        arguments, common: as in ``Baseline``. The schedule is ``catalog.data_parallel(n)``; of
            the options only precision and memory format may be set.
        compression: ``none``, or ``fp16`` or ``bf16`` for the gradients' messages.
        bucket_mb: size of the messages, in MB.
        bucket_view: whether gradients are views into the messages, which saves their memory.

    Raises:
        UserError: the schedule is not data parallelism, or an option has no such value.
    """

    runtime = "ddp"
    states = ("replicated",)

    def __init__(
        self,
        *arguments: Any,
        compression: str = "none",
        bucket_mb: float = 25.0,
        bucket_view: bool = False,
        **common: Any,
    ) -> None:
        check_choice("compression", compression, _HOOKS)
        if not bucket_mb > 0:
            raise UserError(f"bucket_mb is a size above 0: got {bucket_mb}; torch's is 25")
        self._hook = _HOOKS[compression]
        self._buckets = {"bucket_cap_mb": bucket_mb, "gradient_as_bucket_view": bucket_view}
        super().__init__(*arguments, **common)

    def _wrap(self, model: Chain) -> nn.Module:
        if self._options.channels_last:
            model.to(memory_format=torch.channels_last)
        # Buffers are not broadcast: they would change in place between forward and backward.
        ddp_options: dict[str, Any] = {_BUFFERS: False, **self._buckets}
        wrapped = DistributedDataParallel(model, process_group=self.world.group, **ddp_options)
        if self._hook is not None:
            wrapped.register_comm_hook(self.world.group, self._hook)
        return wrapped
