"""Stages by hand: a list of modules, each called on what the one before returns, untraced."""

import keyword
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map_only

from toolkit.errors import UserError
from toolkit.model.node_costs import meta_copy
from toolkit.model.structure import (
    Results,
    arguments,
    filled,
    input_names,
    named_tensors,
    tensors_of,
)
from toolkit.model.trace import refused


class ModuleChain(nn.Sequential):
    """Modules in a row; a tuple is passed on as several arguments, a dictionary as keywords."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call each module on what the one before returns."""
        value: Any = None
        for index, module in enumerate(self):
            if index:
                args, kwargs = arguments(value)
            value = module(*args, **kwargs)
        return value


def chain_modules(
    modules: Sequence[nn.Module], n_stages: int, example: Any
) -> tuple[ModuleChain, fx.GraphModule]:
    """Return ``modules`` as one module, and a graph with one call of each.

    What they return is found by running them on the meta device. ``meta["modules"]`` of the graph
    are their names.

    Raises:
        UserError: they are not as many modules as stages, or cannot be called on one another.
    """
    if (
        not all(isinstance(module, nn.Module) for module in modules)
        or len(modules) != n_stages
    ):
        kinds = ", ".join(type(module).__name__ for module in modules)
        raise UserError(
            f"model: got a list of {len(modules)} ({kinds}); expected {n_stages} modules, one for"
            " each stage"
        )
    for module in modules:
        if not module.training:
            module.train()
    chain = ModuleChain(*modules)
    # The value and the nodes of its tensors go from module to module::
    #
    #     example --module 0--> value on meta --module 1--> ...
    #     placeholders --call--> getitem of each tensor --call--> ...
    graph = fx.Graph()
    value = example
    names = input_names(name for name, _ in named_tensors(example))
    nodes = [graph.placeholder(name) for name in names]
    for name, module in chain.named_children():
        args, kwargs = arguments(value)
        _check_keywords(name, module, kwargs)
        remaining_nodes = iter(nodes)
        node_args = tuple(filled(item, remaining_nodes) for item in args)
        node_kwargs = {
            key: filled(item, remaining_nodes) for key, item in kwargs.items()
        }
        call = graph.call_module(name, node_args, node_kwargs)
        value = _result_on_meta(module, value)
        nodes = _tensors(graph, call, value)
    results, result_tensors = Results.of(
        value, lambda leaf: isinstance(leaf, Tensor), "the last stage"
    )
    # A tensor that is returned twice is one node.
    node_of_tensor = {
        id(tensor): node for tensor, node in zip(tensors_of(value), nodes, strict=True)
    }
    graph.output(tuple(node_of_tensor[id(tensor)] for tensor in result_tensors))
    traced = fx.GraphModule(chain, graph, "ModuleChain")
    traced.meta |= {
        "evaluated": tuple(
            name for name, module in chain.named_modules() if not module.training
        ),
        "results": results,
        "modules": [name for name, _ in chain.named_children()],
    }
    return chain, traced


def _result_on_meta(module: nn.Module, value: Any) -> Any:
    """Return what ``module`` returns for ``value``, on the meta device; or raise UserError."""
    with refused(module, tensors_of(value)), torch.no_grad():
        meta_args, meta_kwargs = tree_map_only(
            Tensor,
            lambda item: torch.empty_like(item, device="meta"),
            arguments(value),
        )
        return meta_copy(module)(*meta_args, **meta_kwargs)


def _check_keywords(name: str, module: nn.Module, keywords: Mapping[str, Any]) -> None:
    """Raise UserError if the graph's code cannot name one of the keyword arguments."""
    for key in keywords:
        if not key.isidentifier() or keyword.iskeyword(key):
            raise UserError(
                f"model: module {name} ({type(module).__name__}) takes a dictionary as keyword"
                f" arguments: got the key {key!r}; expected a name such as 'x'. Rename it, or put"
                " the dictionary into a tuple, as one argument"
            )


def _tensors(graph: fx.Graph, node: fx.Node, value: Any) -> list[fx.Node]:
    """Return the nodes of the tensors in ``value``, which ``node`` returns."""
    if isinstance(value, Tensor):
        return [node]
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        # Sorted, as in :func:`toolkit.model.structure.named_tensors`.
        items = [(key, value[key]) for key in sorted(value, key=str)]
    elif isinstance(value, tuple | list):
        items = enumerate(value)
    tensor_nodes = []
    for key, item in items:
        if not isinstance(item, bool | int | float | str | None):
            item_node = graph.call_function(operator.getitem, (node, key))
            tensor_nodes += _tensors(graph, item_node, item)
    return tensor_nodes
