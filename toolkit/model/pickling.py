"""Pickle stages, to send them from one process to another of the same program."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
from torch import fx, nn
from torch.fx.node import map_aggregate, map_arg

from toolkit.errors import UserError


@dataclass(frozen=True)
class _Name:
    """A node, among the arguments of another."""

    of: str


def _name(node: fx.Node) -> Any:
    return _Name(node.name)


class _Pickler(cloudpickle.Pickler):
    """Pickles graph modules as they are.

    torch pickles their code, and traces it again when it is loaded: that loses a stage's ``meta``,
    and cannot trace what the toolkit's own tracer can.
    """

    def reducer_override(self, value: Any) -> Any:
        # Graphs with generated code of another kind, such as torch.export's, stay torch's matter.
        if (
            isinstance(value, fx.GraphModule)
            and type(value.graph._codegen) is fx.graph.CodeGen
        ):
            nodes = [
                (
                    node.op,
                    node.target,
                    map_arg(node.args, _name),
                    map_arg(node.kwargs, _name),
                    node.name,
                )
                for node in value.graph.nodes
            ]
            # Of a module's own attributes only those that hold its contents. The rest, such as the
            # generated forward, is made anew.
            kept_attributes = (
                "_parameters",
                "_buffers",
                "_non_persistent_buffers_set",
                "_modules",
                "training",
            )
            attributes = {
                name: attribute
                for name, attribute in vars(value).items()
                if name in kept_attributes or name[0] != "_"
            }
            return _graph_module, (type(value).__name__, attributes, nodes)
        if isinstance(value, torch._ops.OpOverload):
            return _overload, (value.namespace, value._opname, value._overloadname)
        return super().reducer_override(value)


def dumps(value: Any) -> bytes:
    """Return ``value``, pickled: functions of a notebook or a script by value.

    Raises:
        UserError: it cannot be pickled.
    """
    file = io.BytesIO()
    try:
        _Pickler(file).dump(value)
    except Exception as error:
        raise UserError(
            f"cannot pickle the function and its arguments: {error};"
            " open files and locks have to be made within the function"
        ) from error
    return file.getvalue()


def _graph_module(
    name: str, attributes: Mapping[str, Any], nodes: Sequence[tuple[Any, ...]]
) -> fx.GraphModule:
    """Build a graph module from what :class:`_Pickler` has written."""
    root, graph = nn.Module(), fx.Graph()
    root.__dict__.update(attributes)
    node_of_name: dict[str, fx.Node] = {}
    for op, target, args, kwargs, name_of_node in nodes:
        args, kwargs = map_aggregate(
            (args, kwargs),
            lambda argument: (
                node_of_name[argument.of] if isinstance(argument, _Name) else argument
            ),
        )
        node_of_name[name_of_node] = graph.create_node(
            op, target, args, kwargs, name_of_node
        )
    graph_module = fx.GraphModule(root, graph, name)
    for attribute_name in ("training", "meta"):
        if attribute_name in attributes:
            graph_module.__dict__[attribute_name] = attributes[attribute_name]
    return graph_module


def _overload(namespace: str, name: str, overload: str) -> Any:
    """Return one of torch's operations by its names."""
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)
