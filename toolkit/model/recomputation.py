"""Stages that recompute their forward in the backward instead of keeping activations."""

from collections.abc import Sequence

from toolkit.errors import UserError


def check_checkpoint(checkpoint: str | Sequence[int]) -> None:
    """Raise UserError unless ``checkpoint`` is ``none``, ``all`` or a list."""
    listed = isinstance(checkpoint, Sequence) and not isinstance(checkpoint, str)
    if not listed and checkpoint not in ("none", "all"):
        raise UserError(
            f"unknown checkpoint {checkpoint!r}: give none, all or a list of stages, such as [0,1]"
        )


def checkpointed(checkpoint: str | Sequence[int], n_stages: int) -> frozenset[int]:
    """Return the stages that ``checkpoint`` names.

    Args:
        checkpoint: ``none``, ``all`` or a list of stages.
        n_stages: number of stages.

    Raises:
        UserError: ``checkpoint`` is something else.
    """
    check_checkpoint(checkpoint)
    for stage in () if isinstance(checkpoint, str) else checkpoint:
        if stage not in range(n_stages):
            raise UserError(
                f"unknown stage {stage!r} in checkpoint: choose from 0 to {n_stages - 1}"
            )
    return frozenset(stage for stage in range(n_stages) if recomputes(checkpoint, stage))


def recomputes(checkpoint: str | Sequence[int], stage: int) -> bool:
    """Whether ``checkpoint`` names ``stage``."""
    return checkpoint == "all" if isinstance(checkpoint, str) else stage in checkpoint
