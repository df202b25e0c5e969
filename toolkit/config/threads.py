"""The threads of torch, which hold for the whole process."""

import os

from omegaconf import DictConfig

from toolkit.errors import UserError

_MOST = 16  # for each processor; far more end the process


def use_threads(config: DictConfig) -> None:
    """Have torch use as many as ``config`` gives it.

    Raises:
        ValueError: there cannot be as many.
    """
    threads, most = config.get("threads"), _MOST * (os.cpu_count() or 1)
    if threads is not None:
        if not 1 <= threads <= most:
            raise UserError(f"threads is from 1 to {most} here: got {threads}")
        import torch

        torch.set_num_threads(threads)
