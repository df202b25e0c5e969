"""Which errors are the backend's, of messages between ranks, and not of what a rank computes."""

import re

import torch.distributed as dist

_WORDS = re.compile("gloo|nccl|connection|socket", re.IGNORECASE)


def is_of_backend(error: BaseException) -> bool:
    """Whether ``error`` may be the consequence of another rank's end.

    torch raises most of them as RuntimeErrors, as it does a user's mistakes and a full memory.
    """
    if isinstance(error, ConnectionError | dist.DistError):
        return True
    return isinstance(error, RuntimeError) and _WORDS.search(str(error)) is not None
