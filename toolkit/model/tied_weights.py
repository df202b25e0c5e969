"""Tied weights in a graph: each becomes one value, which all of its uses read.

A language model often multiplies by its embedding again at its end. The first stage that uses such
a weight owns it, and sends it to the others with the micro-batch. So all uses of a micro-batch read
the same version, and autograd adds their gradients up where the weight is.
"""

from collections import defaultdict

from torch import fx, nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized

from toolkit.model.node_costs import parameters_of
from toolkit.model.traceable import HOOKS


def share_tied_weights(model: nn.Module, traced: fx.GraphModule) -> None:
    """Let each trained weight of ``traced`` with several uses be read by one node.

    Calls of nn.Linear and nn.Embedding become calls of functions. A weight that another kind of
    module reads stays as it is: no cut will separate its uses.

    Args:
        model: the model, whose names the weights keep.
        traced: its graph, which is changed.
    """
    if "modules" in traced.meta:
        return  # a list of modules, which were not traced
    # A tied weight has the first of its names: torch lists each parameter once.
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    readers: defaultdict[int, list[fx.Node]] = defaultdict(list)
    for node in traced.graph.nodes:
        for parameter in parameters_of(traced, node):
            if parameter.requires_grad:
                readers[id(parameter)].append(node)
    tied_names = []
    calls: set[fx.Node] = set()  # of layers that read a tied weight
    for key, nodes in readers.items():
        # A weight with one use needs no sharing, and layers stay layers where they can.
        has_several_uses = len(nodes) > 1 or weight_is_shared(traced, nodes[0])
        if key not in names or not has_several_uses:
            continue
        if all(_can_be_function(traced, node) for node in nodes):
            tied_names.append(names[key])
            calls.update(node for node in nodes if node.op == "call_module")
    # A copy of the list, since the loop replaces nodes of the graph.
    for node in [*traced.graph.nodes]:
        if node in calls:
            _call_function(traced, node)
    for name in tied_names:
        _read_once(model, traced, name)
    traced.graph.lint()
    traced.recompile()


def weight_is_shared(traced: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether ``node`` reads a trained weight that several nodes use."""
    if node.op != "get_attr" or len(node.users) < 2:
        return False
    return any(parameter.requires_grad for parameter in parameters_of(traced, node))


def _can_be_function(traced: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether a node reads its weights as an attribute, or a function can replace it."""
    if node.op != "call_module":
        return True
    module = traced.get_submodule(str(node.target))
    has_hooks = any(getattr(module, hooks) for hooks in HOOKS)
    if has_hooks or is_parametrized(module) or "forward" in vars(module):
        return False
    if isinstance(module, nn.Linear):
        return type(module).forward is nn.Linear.forward
    if isinstance(module, nn.Embedding):
        has_special_options = (
            module.max_norm is not None or module.sparse or module.scale_grad_by_freq
        )
        return type(module).forward is nn.Embedding.forward and not has_special_options
    return False


def _call_function(traced: fx.GraphModule, node: fx.Node) -> None:
    """Replace the call of a layer by one of its function, under the same name."""
    path = str(node.target)
    module = traced.get_submodule(path)
    graph = traced.graph
    # Linear and Embedding take one argument, by place or by name.
    (input_node,) = (*node.args, *node.kwargs.values())
    with graph.inserting_before(node):
        weight = graph.get_attr(f"{path}.weight")
        if isinstance(module, nn.Embedding):
            call = graph.call_function(
                F.embedding, (input_node, weight, module.padding_idx)
            )
        elif module.bias is None:
            call = graph.call_function(F.linear, (input_node, weight))
        else:
            call = graph.call_function(
                F.linear, (input_node, weight, graph.get_attr(f"{path}.bias"))
            )
    # Messages name the module and the line of the user's code by these.
    call.meta = dict(node.meta)
    call.stack_trace = node.stack_trace
    node.replace_all_uses_with(call)
    name = node.name
    graph.erase_node(node)
    call.name = name


def _read_once(model: nn.Module, traced: fx.GraphModule, name: str) -> None:
    """Merge the nodes that read the weight ``name`` into one, right before its first use."""
    weight = model.get_parameter(name)
    reading_nodes = []
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            reads_weight = any(
                parameter is weight for parameter in parameters_of(traced, node)
            )
            if reads_weight:
                reading_nodes.append(node)
    weight_node, *duplicates = reading_nodes
    for duplicate in duplicates:
        duplicate.replace_all_uses_with(weight_node)
        traced.graph.erase_node(duplicate)
    _assign(traced, name, weight)
    weight_node.target = name
    for node in traced.graph.nodes:
        if node in weight_node.users:
            # Right before its first use: between the two no cut is allowed, so the stage that owns
            # the weight computes with it.
            node.prepend(weight_node)
            return


def _assign(traced: fx.GraphModule, name: str, weight: nn.Parameter) -> None:
    """Let ``traced`` have ``weight`` under the name that it has in the model."""
    path, _, attribute = name.rpartition(".")
    module: nn.Module = traced
    for submodule_name in path.split(".") if path else ():
        if not hasattr(module, submodule_name):
            module.add_module(submodule_name, nn.Module())
        module = getattr(module, submodule_name)
    if not hasattr(module, attribute):
        module.register_parameter(attribute, weight)
