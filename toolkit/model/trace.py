"""The graph of a model's operations."""

from torch import fx, nn


def trace(model: nn.Module) -> fx.GraphModule:
    """The graph of ``model`` in training mode.

    Raises:
        ValueError: torch.fx cannot trace it.
    """
    modes = {module: module.training for module in model.modules()}
    model.train()  # a traced functional dropout keeps the mode in which it was traced
    try:
        return fx.symbolic_trace(model)
    except Exception as error:  # the tracer runs the model's own code, which may raise anything
        raise ValueError(
            f"torch.fx cannot trace {type(model).__name__}: {reason(error)};"
            " control flow that depends on tensors has to move into a module marked as a leaf with"
            " torch.fx.wrap, or out of forward"
        ) from error
    finally:
        for module, mode in modes.items():
            module.training = mode


def reason(error: Exception) -> str:
    """The first line of what an error says."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else repr(error)
