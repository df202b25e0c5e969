"""The graph of a model's operations."""

import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import fx, nn
from torch.nn import functional as F

from toolkit.errors import UserError, first_line
from toolkit.model.custom_norms import own_norms

_EVALUATED = "evaluated"  # in a graph's meta: the modules that stay in evaluation mode
_DRAWS = "draws"  # whether it draws at random
_MIXES = "mixes"  # whether it sees the samples of a batch together
_Module = TypeVar("_Module", bound=nn.Module)


def trace(model: nn.Module, n_inputs: int) -> fx.GraphModule:
    """The graph of ``model`` in training mode.

    Modules that are in evaluation mode, in a model that is in training mode, stay in it: batch
    norms whose statistics are frozen, for one.

    Args:
        model: a module of ``n_inputs`` tensors; what else its forward takes has its default.

    Raises:
        ValueError: torch.fx cannot trace it, or its graph would lack what it does.
    """
    try:
        with _unchanged(model), _seeing_autocast(), _seeing_draws():
            if not model.training:
                model.train()
            # A traced functional dropout keeps the mode in which it was traced.
            kept = tuple(name for name, module in model.named_modules() if not module.training)
            graph = _Tracer(model, n_inputs).trace(model)
            traced = fx.GraphModule(model, graph, type(model).__name__)
            _check_changes(model, n_inputs)
    except _UntraceableError as error:
        raise UserError(f"{type(model).__name__} {error}") from error
    except Exception as error:  # the tracer runs the model's own code, which may raise anything
        raise UserError(
            f"torch.fx cannot trace {type(model).__name__}: {first_line(error)}; what depends on"
            " the values or sizes of tensors has to move into a function of its own, marked by"
            " torch.fx.wrap, or out of forward"
        ) from error
    traced.meta[_EVALUATED] = kept
    return traced


def part(traced: fx.GraphModule, graph: fx.Graph, *, draws: bool, mixes: bool) -> fx.GraphModule:
    """Some of the operations of ``traced`` as a module, with its parameters and buffers.

    Args:
        draws: whether any of them draws at random.
        mixes: whether any sees micro-batches that run as one batch together.
    """
    found = fx.GraphModule(traced, graph, class_name="Stage")
    found.meta |= {_EVALUATED: traced.meta[_EVALUATED], _DRAWS: draws, _MIXES: mixes}
    return found


def draws_at_random(stage: nn.Module) -> bool:
    """Whether the forward of a stage in training uses a random generator."""
    return bool(getattr(stage, "meta", {}).get(_DRAWS, False))


def one_by_one(stage: nn.Module) -> bool:
    """Whether micro-batches have to run one after another in a stage, or would be otherwise."""
    return draws_at_random(stage) or bool(getattr(stage, "meta", {}).get(_MIXES, False))


def kept_generators(inputs: tuple[torch.Tensor, ...]) -> AbstractContextManager[None]:
    """Draw on the devices of ``inputs``; afterwards the user's generators are as they were."""
    return torch.random.fork_rng({tensor.device for tensor in inputs if tensor.is_cuda})


def in_training(module: _Module) -> _Module:
    """``module`` itself, in the mode in which it was traced."""
    module.train()
    kept = evaluated(module)
    for name, inner in module.named_modules():
        if name in kept:
            inner.training = False
    return module


def evaluated(module: nn.Module) -> frozenset[str]:
    """The names of the modules that stay in evaluation mode in a stage's training."""
    return frozenset(getattr(module, "meta", {}).get(_EVALUATED, ()))


def changing(names: Sequence[str], where: object) -> str:
    """What a model does that changes tensors or attributes at the node ``where``, and no may."""
    return (
        f"changes {', '.join(names)} in its forward ({where}), and of what a forward changes only"
        " batch norms' running statistics are kept alike in every order and on every rank: leave"
        " that out, or do it between steps"
    )


def shapes_of(inputs: tuple[torch.Tensor, ...]) -> str:
    """As they are told in an error."""
    return ", ".join(str(list(tensor.shape)) for tensor in inputs)


@contextmanager
def refused(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Iterator[None]:
    """Tell in one sentence, as a ValueError, why ``model`` cannot train on ``inputs``."""
    try:
        yield
    except Exception as error:  # the model's own code may raise anything
        raise UserError(
            f"{type(model).__name__} cannot train on an example of shape {shapes_of(inputs)}:"
            f" {first_line(error)}"
        ) from error


def _positional(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters that a function names, and takes by their place."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p for p in inspect.signature(function).parameters.values() if p.kind in kinds]


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Modes, attributes and buffers of ``model``, which the tracer runs, are then as before."""
    before = [(m, dict(vars(m)), dict(m._buffers)) for m in model.modules()]
    try:
        yield
    finally:
        for module, attributes, buffers in before:
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)


def _check_changes(model: nn.Module, n_inputs: int) -> None:
    """Refuse buffers that the forward of ``model``, just traced, has set, and attributes it keeps.

    An attribute that it sets before it reads it does no harm: then it can be traced without.
    """
    names, nodes = [], []
    for path, module in model.named_modules():
        for name, value in [*module._buffers.items(), *vars(module).items()]:
            if found := _proxies(value):
                names.append(f"{path}.{name}".lstrip("."))
                nodes.append(found[0].node)
                if name in module._buffers:
                    raise _UntraceableError(changing(names[-1:], nodes[-1]))
                del vars(module)[name]
    if names:
        try:
            _Tracer(model, n_inputs).trace(model)
        except Exception as error:
            raise _UntraceableError(changing(names, nodes[0])) from error


def _proxies(value: object) -> list[fx.Proxy]:
    """The traced values that an attribute is or holds."""
    if isinstance(value, fx.Proxy):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [proxy for item in value for proxy in _proxies(item)]
    return []


class _UntraceableError(UserError):
    """What the model does is not seen by torch.fx."""


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True  # so that a buffer can be cut to a traced size

    def __init__(self, model: nn.Module, n_inputs: int) -> None:
        super().__init__()
        self._n_inputs = n_inputs
        self._norms = own_norms(model)  # tried now, for the tracer changes how modules are called
        self._gradients = torch.is_grad_enabled()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Also a class of one's own that sets options of one of torch's, or ends a batch norm."""
        inherited = type(m).forward.__module__.startswith("torch.nn.modules")
        leaf = super().is_leaf_module(m, module_qualified_name) or m in self._norms
        return leaf or (inherited and not isinstance(m, nn.Sequential))

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        """The inputs; what else the forward takes has its default, which branches may depend on."""
        names = [p.name for p in _positional(root_fn)][1:]
        names += [f"input_{k}" for k in range(len(names), self._n_inputs)]
        inputs = [self.create_proxy("placeholder", n, (), {}) for n in names[: self._n_inputs]]
        return root_fn, [self.root, *inputs]

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if torch.is_grad_enabled() != self._gradients:
            raise _UntraceableError(
                "computes a part of its forward under torch.no_grad or enable_grad, which its graph"
                " would lack: use detach(), requires_grad_(False) on the parameters, or a function"
                " marked by torch.fx.wrap"
            )
        node = super().create_node(*args, **kwargs)
        if node.target in _BATCH_NORMS and _in_batches(node) and _sees_input(node):
            kind = getattr(self.scope.module_type, "__name__", "")
            within = f" in {self.scope.module_path} ({kind})" if self.scope.module_path else ""
            raise _UntraceableError(
                f"calls batch_norm as a function{within}, which would mix the micro-batches that"
                " run as one batch: use torch.nn's batch norms, whose statistics are of each"
                " micro-batch"
            )
        return node


_BATCH_NORMS = (F.batch_norm, torch.batch_norm)


def _in_batches(norm: fx.Node) -> bool:
    """Whether a call of a function normalises by the statistics of its batch."""
    given = norm.kwargs.get("training", norm.args[5] if len(norm.args) > 5 else False)
    return given is not False


def _sees_input(node: fx.Node) -> bool:
    """Whether a value depends on the model's input, rather than on its weights alone."""
    seen, left = set(), [node]
    while left:
        if (current := left.pop()) not in seen:
            seen.add(current)
            left += current.all_input_nodes
    return any(found.op == "placeholder" for found in seen)


@contextmanager
def _seeing_draws() -> Iterator[None]:
    """Refuse what would be drawn once and for all."""
    before = _generators()
    yield
    if any(state != now for state, now in zip(before, _generators(), strict=True)):
        raise _UntraceableError(
            "draws at random in its forward what does not depend on its input, which its graph"
            " would never draw again: draw it from a tensor that does, as torch.randn_like(x), or"
            " in a function marked by torch.fx.wrap"
        )


def _generators() -> tuple[object, ...]:
    """The states of those that a forward may draw from."""
    _, numbers, *rest = np.random.get_state(legacy=True)
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    tensors = [torch.get_rng_state(), *devices]
    drawn = tuple(state.numpy(force=True).tobytes() for state in tensors)
    return drawn, random.getstate(), np.asarray(numbers).tobytes(), rest


@contextmanager
def _seeing_autocast() -> Iterator[None]:
    def refuse(region: torch.autocast) -> None:
        raise _UntraceableError(
            "sets torch.autocast within its forward, which its graph would lack: move that part"
            " into a function marked by torch.fx.wrap"
        )

    enter = torch.autocast.__enter__
    torch.autocast.__enter__ = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__enter__ = enter  # type: ignore[method-assign]
