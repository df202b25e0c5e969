"""Which stages compute their forward twice instead of keeping activations."""

from collections.abc import Sequence

from toolkit.errors import UserError


def check_checkpoint(
    checkpoint: str | Sequence[int], n_stages: int | None = None
) -> None:
    """Raise UserError unless ``checkpoint`` is ``none``, ``all`` or a list of stages."""
    if isinstance(checkpoint, str) or not isinstance(checkpoint, Sequence):
        if checkpoint not in ("none", "all"):
            raise UserError(
                f"unknown checkpoint {checkpoint!r}: give none, all or a list of stages, such as"
                " [0,1]"
            )
    elif n_stages is not None:
        for stage in checkpoint:
            if stage not in range(n_stages):
                raise UserError(
                    f"unknown stage {stage!r} in checkpoint: choose from 0 to {n_stages - 1}"
                )


def recomputes(checkpoint: str | Sequence[int], stage: int) -> bool:
    """Return whether ``checkpoint`` names ``stage``."""
    return checkpoint == "all" if isinstance(checkpoint, str) else stage in checkpoint
