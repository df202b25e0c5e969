"""Trace a model into a graph of operations, and refuse what the graph would do otherwise."""

import inspect
import os
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from toolkit.errors import UserError, first_line
from toolkit.model.attribute_writes import Attributes, depends_on_inputs, equal
from toolkit.model.batch_norms import own_norms
from toolkit.model.export import NormCallError, export
from toolkit.model.generators import generator_states
from toolkit.model.structure import (
    Results,
    arguments,
    filled,
    input_names,
    named_tensors,
)

_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)
_BATCH_NORMS = (F.batch_norm, torch.batch_norm)
_FRAME = re.compile(r'File "(.+)", line (\d+), in .*\n\s*(.*)')
_TORCH = os.path.dirname(torch.__file__)
_OURS = os.path.dirname(__file__)

# Of torch 2.11, whenever a traced module is copied
warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)


def trace(model: nn.Module, example: Any) -> fx.GraphModule:
    """Return the graph of ``model`` in training mode: of tensors, to a tuple of tensors.

    It is traced symbolically or, where that fails, by torch.export. Modules in evaluation mode
    inside a model in training mode stay in it (frozen batch norms).

    Args:
        model: a module.
        example: a tensor, a tuple of arguments, or a dictionary of keyword arguments; these are
            tensors, constants, or tuples and dictionaries of them. Other arguments of its forward
            take their defaults.

    Raises:
        UserError: neither can trace it, or the graph would lose something.
    """
    # Before anything runs the model: the call notes its attributes as they are.
    call = _Call(model, example)
    model_name = type(model).__name__
    with _unchanged(model):
        if not model.training:
            model.train()
        # Functional dropout keeps the mode in which it is traced: trace in training mode.
        evaluated_names = tuple(
            name for name, module in model.named_modules() if not module.training
        )
        try:
            # What a trace leaves behind when it fails must not enter the next one.
            with _unchanged(model), _seeing_autocast(), _seeing_draws():
                traced = _symbolic(model, call)
        except _ChangingError as error:
            raise UserError(f"{model_name} {error}") from error
        except Exception as error:
            # The tracer runs the model's own code: it may raise anything.
            traced = _exported(model, call, error)
    assert call.results is not None
    traced.meta |= {"evaluated": evaluated_names, "results": call.results}
    return traced


def _symbolic(model: nn.Module, call: "_Call") -> fx.GraphModule:
    """Return the graph of ``model`` by torch.fx."""
    traced = fx.GraphModule(
        model, _Tracer(model, call).trace(model), type(model).__name__
    )
    _check_buffers(model)
    _check_writes(call, lambda: _Tracer(model, call).trace(model))
    return traced


class _Call:
    """A call of ``model`` as one of tensors alone, with a tuple of tensors as its result."""

    def __init__(self, model: nn.Module, example: Any) -> None:
        self.args, self.kwargs = arguments(example)
        self.who = type(model).__name__
        parameters = inspect.signature(model.forward).parameters.values()
        names = [
            parameter.name for parameter in parameters if parameter.kind in _POSITIONAL
        ]
        names += [f"input_{index}" for index in range(len(names), len(self.args))]
        named_arguments = [*zip(names, self.args, strict=False), *self.kwargs.items()]
        named_inputs = [
            pair
            for name, value in named_arguments
            for pair in named_tensors(value, name)
        ]
        self.names = input_names(name for name, _ in named_inputs)
        self.tensors = tuple(tensor for _, tensor in named_inputs)
        self.results: Results | None = None
        self.attributes = Attributes(model)  # before any call
        self.writes: dict[str, Any] = {}  # attributes that the last call has written

    def flat(
        self, forward: Callable[..., Any], *first: Any
    ) -> Callable[..., tuple[Any, ...]]:
        """Return ``forward`` of the tensors, after the arguments ``first``."""

        def call(*tensors: Any) -> tuple[Any, ...]:
            remaining_tensors = iter(tensors)
            args = [filled(value, remaining_tensors) for value in self.args]
            kwargs = {
                key: filled(value, remaining_tensors)
                for key, value in self.kwargs.items()
            }
            # The arguments of the example, with traced values in place of its tensors::
            #
            #     example     (x, {"mask": m, "scale": 2.0})
            #     names       x, options_mask                  of forward(x, options)
            #     tensors     x_proxy, mask_proxy
            #     call        forward(x_proxy, {"mask": mask_proxy, "scale": 2.0})
            result = forward(*first, *args, **kwargs)
            self.writes = self.attributes.writes()
            self.results, result_tensors = Results.of(result, _is_value, self.who)
            return tuple(result_tensors)

        return call


def _is_value(leaf: object) -> bool:
    return isinstance(leaf, Tensor | fx.Proxy)


def _exported(model: nn.Module, call: _Call, reason: Exception) -> fx.GraphModule:
    """Return the graph of ``model`` by torch.export; ``reason`` is why torch.fx failed."""
    model_name = type(model).__name__
    device = next(
        (tensor.device for tensor in model.parameters()), call.tensors[0].device
    )
    # torch.export runs the model where its weights are.
    inputs = tuple(tensor.detach().to(device) for tensor in call.tensors)
    try:
        with _seeing_draws():
            run = partial(export, model, call.flat(model.forward), inputs, call.names)
            call.writes = {}
            try:
                return run()
            finally:
                # Where torch.export refuses it, too, our reason names the way out.
                _check_writes(call, run)
    except (NormCallError, _UntraceableError) as error:
        raise UserError(f"{model_name} {error}") from error
    except Exception as error:  # torch.export runs the model's own code, too
        # torch.fx could follow the model, and found what no graph of it may lose: that helps more
        # than what torch.export says of the same lines.
        if isinstance(reason, _UntraceableError):
            raise UserError(f"{model_name} {reason}") from error
        raise UserError(
            f"torch.fx cannot trace {model_name}: {first_line(reason)}{_line_of(reason)}; nor can"
            f" torch.export: {first_line(error)}{_line_of(error)}. Move code that depends on"
            " tensors' values into a function marked by torch.fx.wrap, or give the stages as a list"
            " of modules"
        ) from error


def _line_of(error: BaseException) -> str:
    """Return the line of the user's code that led to an error, as :func:`user_line`."""
    return user_line(str(error)) or user_line(
        "".join(traceback.format_tb(error.__traceback__))
    )


def user_line(stack: str) -> str:
    """Return the innermost line of the user's code in a stack's text, in brackets; or ""."""
    frames = _FRAME.findall(stack)
    user_frames = [
        frame for frame in frames if not frame[0].startswith((_TORCH, _OURS))
    ]
    if not user_frames:
        return ""
    file, line, code = user_frames[-1]
    return f" ({os.path.basename(file)} line {line}: {code})"


def changing(names: Sequence[str], node: object) -> str:
    """Describe a forbidden change of tensors or attributes at a node, or at one of that name."""
    return (
        f"changes {', '.join(names)} in its forward ({node}); only running statistics of batch"
        " norms may change there: remove that, or do it between steps"
    )


def shapes_of(inputs: tuple[torch.Tensor, ...]) -> str:
    """Return the shapes of ``inputs`` for an error."""
    return ", ".join(str(list(tensor.shape)) for tensor in inputs)


@contextmanager
def refused(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Iterator[None]:
    """Turn any error of ``model`` on ``inputs`` into a UserError of one line."""
    try:
        yield
    except Exception as error:  # the model's own code may raise anything
        raise UserError(
            f"{type(model).__name__} cannot train on an example of shape {shapes_of(inputs)}:"
            f" {first_line(error)}{_line_of(error)}"
        ) from error


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Restore modes, attributes and buffers of ``model``, which tracing runs."""
    attributes = Attributes(model)
    try:
        yield
    finally:
        attributes.restore()


def _check_buffers(model: nn.Module) -> None:
    """Reject buffers that the traced forward has replaced."""
    for path, module in model.named_modules():
        for name, value in module._buffers.items():
            if isinstance(value, fx.Proxy):
                dotted_name = f"{path}.{name}".lstrip(".")
                raise _ChangingError(changing([dotted_name], value.node))


def _check_writes(call: "_Call", trace_again: Callable[[], object]) -> None:
    """Reject attributes that the traced forward writes, except those that it writes only once.

    A cache, such as a table of positions, is as it was after a second forward.
    """
    first_writes = call.writes
    if not first_writes:
        return
    names = [name for name, value in first_writes.items() if depends_on_inputs(value)]
    if not names:
        # A cache that the first forward has filled is left as it is by the second; a counter is
        # not.
        call.attributes.write(first_writes)  # torch.export has undone some
        trace_again()
        second_writes = call.writes
        written_names = first_writes | second_writes
        for name in written_names:
            if not equal(first_writes.get(name), second_writes.get(name)):
                names.append(name)
    if names:
        raise _ChangingError(
            f"sets {', '.join(names)} in its forward, which would happen in none of the training"
            " steps: return it from the forward, or compute it in the training loop"
        )


class _UntraceableError(UserError):
    """torch.fx would lose something that the model does."""


class _ChangingError(_UntraceableError):
    """A forward changes what the next one reads."""


class _Tracer(fx.Tracer):
    """torch.fx's tracer, which refuses what a graph would lose."""

    proxy_buffer_attributes = True  # a buffer may be sliced by a traced size
    record_stack_traces = True  # for the lines that errors name

    def __init__(self, model: nn.Module, call: _Call) -> None:
        super().__init__()
        self._call = call
        self._norms = own_norms(model)  # before tracing, which patches module calls
        self._gradients = torch.is_grad_enabled()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Subclasses that only set options of torch's layers are leaves, as custom batch norms."""
        has_torch_forward = type(m).forward.__module__.startswith("torch.nn.modules")
        is_leaf = super().is_leaf_module(m, module_qualified_name) or m in self._norms
        return is_leaf or (has_torch_forward and not isinstance(m, nn.Sequential))

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        """Trace the inputs; other arguments take defaults, so branches may test them."""
        inputs = [
            self.create_proxy("placeholder", name, (), {}) for name in self._call.names
        ]
        return self._call.flat(root_fn, self.root), inputs

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        # A graph lists operations, and not the mode in which each ran.
        if torch.is_grad_enabled() != self._gradients:
            raise _UntraceableError(
                "uses torch.no_grad or enable_grad in its forward, which its graph would lose: use"
                " detach(), requires_grad_(False), or a function marked by torch.fx.wrap"
            )
        node = super().create_node(*args, **kwargs)
        if node.target in _BATCH_NORMS and _in_batches(node) and _sees_input(node):
            module_kind = getattr(self.scope.module_type, "__name__", "")
            module_text = ""
            if self.scope.module_path:
                module_text = f" in {self.scope.module_path} ({module_kind})"
            raise _UntraceableError(
                f"calls batch_norm as a function{module_text}, which would mix micro-batches: use"
                " torch.nn's batch norm modules"
            )
        return node


def _in_batches(norm: fx.Node) -> bool:
    """Return whether a call of batch_norm uses the statistics of its batch."""
    # batch_norm(input, running_mean, running_var, weight, bias, training, ...)
    training = norm.kwargs.get(
        "training", norm.args[5] if len(norm.args) > 5 else False
    )
    # A traced value counts as True, which it may be.
    return training is not False


def _sees_input(node: fx.Node) -> bool:
    """Return whether a value depends on the model's input, not only on its weights."""
    seen_nodes: set[fx.Node] = set()
    remaining_nodes = [node]
    while remaining_nodes:
        current = remaining_nodes.pop()
        if current.op == "placeholder":
            return True
        if current not in seen_nodes:
            seen_nodes.add(current)
            remaining_nodes += current.all_input_nodes
    return False


@contextmanager
def _seeing_draws() -> Iterator[None]:
    """Reject random draws that the graph would freeze."""
    earlier_states = generator_states()
    yield
    if earlier_states != generator_states():
        raise _UntraceableError(
            "draws random numbers in its forward that do not depend on its input, and its graph"
            " would draw them once: use torch.randn_like(x), or a function marked by torch.fx.wrap"
        )


def _seeing_autocast() -> AbstractContextManager[object]:
    """Reject autocast in a forward, which the graph would lose."""

    def refuse(region: torch.autocast) -> None:
        raise _UntraceableError(
            "sets torch.autocast in its forward, which its graph would lose: move that part into a"
            " function marked by torch.fx.wrap"
        )

    return patch.object(torch.autocast, "__enter__", refuse)
