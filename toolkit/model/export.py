"""Graphs of models that torch.fx cannot trace symbolically, from torch.export.

They have torch's operations instead of layers, and the lengths of the example: only the batch may
differ. Batch norms become layers again, which separate micro-batches, linear layers and embeddings
too, which a plan of tensor parallelism shards, and no device is fixed.
"""

import copy
import io
import logging
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from toolkit.errors import UserError
from toolkit.model.structure import Inputs

Flat = Callable[..., tuple[Tensor, ...]]
"""A forward of tensors alone, which returns tensors alone."""

_aten = torch.ops.aten
_LOGGERS = ("torch.fx.experimental.symbolic_shapes", "torch.export", "torch._export")


class NormCallError(UserError):
    """A batch norm that is called as a function, and would mix micro-batches."""


def export(
    model: nn.Module, forward: Flat, inputs: Inputs, names: list[str]
) -> fx.GraphModule:
    """Return the graph of ``forward`` of a model in training, by torch.export.

    Args:
        model: the model, whose parameters and batch norms the graph shares.
        forward: the model's forward as a function of the tensors ``inputs``.
        inputs: an example ``[b, ...]`` each, on the model's device.
        names: names of the inputs.

    Raises:
        NormCallError: a batch norm is called as a function.
    """
    # The same modules and tensors, with another forward.
    exported_model = copy.copy(model)
    vars(exported_model)["forward"] = forward
    # A dimension of 1 would be taken for a constant.
    several_rows = []
    for tensor in inputs:
        if len(tensor) == 1:
            tensor = torch.cat([tensor, tensor])
        several_rows.append(tensor)
    dynamic_rows = ({0: torch.export.Dim.DYNAMIC},) * len(inputs)
    # Strict mode would run Dynamo, which allows less of Python.
    with _without_graphs():
        program = torch.export.export(
            exported_model,
            tuple(several_rows),
            dynamic_shapes=(dynamic_rows,),
            strict=False,
        )
    exported = program.module(check_guards=False)
    return _Rewriter(model, exported, names, inputs).run()


@contextmanager
def _without_graphs() -> Iterator[None]:
    """Discard what torch.export prints of a model that it cannot export: hundreds of lines.

    What the model itself prints in a successful export is printed as usual.
    """
    out, err = io.StringIO(), io.StringIO()
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    earlier_levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            yield
        print(out.getvalue(), end="")
        print(err.getvalue(), end="", file=sys.stderr)
    finally:
        for logger, level in zip(loggers, earlier_levels, strict=True):
            logger.setLevel(level)


class _Rewriter:
    """Copies an exported graph: layers for batch norms, and neither assertions nor devices."""

    def __init__(
        self,
        model: nn.Module,
        exported: fx.GraphModule,
        names: list[str],
        inputs: Inputs,
    ) -> None:
        self.model = model
        self.exported = exported
        self.names = iter(names)
        self.inputs = iter(inputs)
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, Any] = {}
        self.attributes: dict[str, Any] = {}
        self.device: fx.Node | None = None

    def run(self) -> fx.GraphModule:
        """Return the copy."""
        for node in self.exported.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "output":
                self.graph.output(tuple(map(self._copied, node.args[0])))
            elif (
                node.op != "get_attr" and not _asserts(node) and not self._counts(node)
            ):
                self.copies[node] = (
                    self._norm(node) or self._layer(node) or self._operation(node)
                )
        return fx.GraphModule(self.attributes, self.graph, type(self.model).__name__)

    def _placeholder(self, node: fx.Node) -> None:
        name = next(self.names)
        shape = tuple(next(self.inputs).shape[1:])
        # The graph has the example's lengths as constants, so inputs of another shape are refused.
        placed = self.graph.call_function(
            of_shape, (self.graph.placeholder(name), name, shape)
        )
        self.copies[node] = placed
        if self.device is None:
            self.device = self.graph.call_function(getattr, (placed, "device"))

    def _copied(self, node: Any) -> fx.Node:
        """Return a node's copy; attributes are read right before their first use."""
        if node not in self.copies:
            assert node.op == "get_attr", f"{node} has no copy"
            self._share(str(node.target))
            self.copies[node] = self.graph.node_copy(node)
        copied_node: fx.Node = self.copies[node]
        return copied_node

    def _share(self, name: str) -> None:
        """Take an attribute from the model, or from the exported graph if the model lacks it."""
        get_attribute = operator.attrgetter(name)
        try:
            self.attributes[name] = get_attribute(self.model)  # the very parameter
        except AttributeError:  # a constant, or a part of the graph
            self.attributes[name] = get_attribute(self.exported)

    def _operation(self, node: fx.Node) -> fx.Node:
        """Return a copy of an operation on the device of the inputs."""
        copied = self.graph.node_copy(node, self._copied)

        def placed(value: Any) -> Any:
            return self.device if isinstance(value, torch.device) else value

        copied.args = tuple(map(placed, copied.args))
        if node.target in (_aten.view.default, _aten.reshape.default):
            copied.args = (copied.args[0], _reshaped_sizes(node, copied.args[1]))
        if node.target is _aten.expand.default:
            copied.args = (copied.args[0], _expanded_sizes(node, copied.args[1]))
        copied.kwargs = {key: placed(value) for key, value in copied.kwargs.items()}
        return copied

    def _counts(self, node: fx.Node) -> bool:
        """Return whether a node counts the batches of a batch norm, as its layer does."""
        first_argument = node.args[0] if node.args else None
        return (
            isinstance(first_argument, fx.Node)
            and first_argument.op == "get_attr"
            and str(first_argument.target).endswith("num_batches_tracked")
        )

    def _norm(self, node: fx.Node) -> fx.Node | None:
        """Return a call of the layer in place of a batch norm by its batch; None for others."""
        # Argument 5 is `training`.
        if node.target is not _aten.batch_norm.default or not node.args[5]:
            return None
        paths = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
        # The innermost module is the last.
        place = paths[-1] if paths else "its forward"
        layer = self.model.get_submodule(place) if paths else None
        forward_module = (
            type(layer).forward.__module__ if isinstance(layer, _BatchNorm) else ""
        )
        if not forward_module.startswith("torch."):
            raise NormCallError(
                f"calls batch_norm as a function in {place}, which would mix micro-batches: use"
                " torch.nn's batch norm modules"
            )
        self.attributes[place] = layer
        call = self.graph.call_module(place, (self._copied(node.args[0]),))
        call.meta = dict(node.meta)
        return call

    def _layer(self, node: fx.Node) -> fx.Node | None:
        """Return a call of the linear layer or embedding that computes ``node``; else None.

        Tools that change layers by their hooks, such as torch's plans, find them so.
        """
        paths = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
        position = _WEIGHT_ARGUMENTS.get(node.target)
        if position is None or not paths:
            return None
        weight: Any = node.args[position]
        # The innermost module is the last; another one may read its weight, too. A weight with
        # other uses is tied, and read by one node for all of them.
        place = paths[-1]
        if weight.target != f"{place}.weight" or len(weight.users) > 1:
            return None
        # A subclass, a parametrization, a hook or a forward of its own computes something else, or
        # more, and the graph has that already.
        layer = self.model.get_submodule(place)
        is_changed = layer._forward_hooks or layer._forward_pre_hooks
        if type(layer) not in _LAYERS or is_changed or "forward" in vars(layer):
            return None
        self.attributes[place] = layer
        call = self.graph.call_module(place, (self._copied(node.args[1 - position]),))
        call.meta = dict(node.meta)
        return call


_LAYERS = (nn.Linear, nn.Embedding)
# Where torch's operations take the weight of such a layer.
_WEIGHT_ARGUMENTS: dict[Any, int] = {
    _aten.linear.default: 1,
    _aten.embedding.default: 0,
}


def of_shape(x: Tensor, name: str, shape: tuple[int, ...]) -> Tensor:
    """Return ``x`` ``[b, *shape]``; UserError if it has another shape."""
    if tuple(x.shape[1:]) != shape:
        expected = ", ".join(map(str, ("b", *shape)))
        raise UserError(
            f"{name}: got shape {list(x.shape)}; expected [{expected}], as in the example of"
            " partition. Pad every batch to one length"
        )
    return x


def _asserts(node: fx.Node) -> bool:
    """Return whether a node only checks sizes."""
    return "_assert" in str(node.target) or "sym_constrain" in str(node.target)


# Sizes that torch.export has fixed are those of whole tensors. A device that shares a stage has
# fewer heads, so one size of each operation is left to torch::
#
#     whole     [b, 8, 32]  view [b, 8, 4, 8]     a device: [b, 8, 16]  view [b, 8, -1, 8]


def _reshaped_sizes(node: fx.Node, sizes: Any) -> Any:
    """Return the sizes of a view or reshape, with -1 first where it splits or joins dimensions."""
    before = _shape(node.args[0])
    after = _shape(node)
    # What the operation keeps at both ends is no matter.
    n_first = 0
    while before and after and before[0] == after[0]:
        before.pop(0)
        after.pop(0)
        n_first += 1
    while before and after and before[-1] == after[-1]:
        before.pop()
        after.pop()
    splits_or_joins = after and 1 in (len(before), len(after))
    if -1 in sizes or not splits_or_joins or type(sizes[n_first]) is not int:
        return sizes
    return [*sizes[:n_first], -1, *sizes[n_first + 1 :]]


def _shape(node: Any) -> list[Any]:
    return list(node.meta["val"].shape)


def _expanded_sizes(node: fx.Node, sizes: Any) -> Any:
    """Return the sizes of an expand, with -1 for each that it keeps."""
    before = _shape(node.args[0])
    n_new = len(sizes) - len(before)
    expanded_sizes = list(sizes)
    for index, size in enumerate(before):
        if type(size) is int and sizes[n_new + index] == size:
            expanded_sizes[n_new + index] = -1
    return expanded_sizes
