"""Which stages compute their forward again in the backward, instead of keeping activations."""

from collections.abc import Sequence

from toolkit.errors import UserError


def check_checkpoint(checkpoint: str | Sequence[int]) -> None:
    """Refuse what cannot name stages.

    Raises:
        ValueError: it is neither ``none`` nor ``all`` nor a list.
    """
    listed = isinstance(checkpoint, Sequence) and not isinstance(checkpoint, str)
    if not listed and checkpoint not in ("none", "all"):
        raise UserError(
            f"unknown checkpoint {checkpoint!r}: give none, all or a list of stages, such as [0,1]"
        )


def checkpointed(checkpoint: str | Sequence[int], n_stages: int) -> frozenset[int]:
    """The stages that ``checkpoint`` names.

    Args:
        checkpoint: ``none``, ``all`` or a list of stages.
        n_stages: how many there are.

    Raises:
        ValueError: it names something else.
    """
    check_checkpoint(checkpoint)
    for stage in () if isinstance(checkpoint, str) else checkpoint:
        if stage not in range(n_stages):
            raise UserError(
                f"checkpoint names stage {stage} and there are {n_stages}: choose from 0 to"
                f" {n_stages - 1}"
            )
    return frozenset(stage for stage in range(n_stages) if recomputes(checkpoint, stage))


def recomputes(checkpoint: str | Sequence[int], stage: int) -> bool:
    """Whether ``stage`` is among those that ``checkpoint`` names."""
    return checkpoint == "all" if isinstance(checkpoint, str) else stage in checkpoint
