"""What a traced stage says about its own training: modes, random draws, and mixed samples."""

from typing import TypeVar

from torch import nn

_Module = TypeVar("_Module", bound=nn.Module)


def draws_at_random(stage: nn.Module) -> bool:
    """Return whether a stage's forward in training uses a random generator."""
    return bool(getattr(stage, "meta", {}).get("draws", False))


def one_by_one(stage: nn.Module) -> bool:
    """Return whether a stage must run micro-batches one by one to compute the same."""
    return draws_at_random(stage) or bool(
        getattr(stage, "meta", {}).get("mixes", False)
    )


def in_training(module: _Module) -> _Module:
    """Set ``module`` to the mode in which it was traced, and return it."""
    # train() would also switch the frozen norms, so these are switched back.
    module.train()
    evaluated_names = evaluated(module)
    for name, inner in module.named_modules():
        if name in evaluated_names:
            inner.training = False
    return module


def evaluated(module: nn.Module) -> frozenset[str]:
    """Return the names of modules that stay in evaluation mode while a stage trains."""
    return frozenset(getattr(module, "meta", {}).get("evaluated", ()))
