"""Random draws, such as those of dropout, on the devices that share a stage."""

from typing import Any

from torch import fx
from torch.distributed.tensor import DTensor

from toolkit.model.random_draws import seed_layer
from toolkit.runtime.process_group.columns import Row


def seed_shards(stage: fx.GraphModule, row: Row) -> None:
    """Let each device draw differently where what a layer draws for is sharded.

    Where it is replicated all devices draw the same.
    """
    changed = False
    for node in stage.graph.nodes:
        if node.target is seed_layer:
            drawing = node.next
            if drawing.all_input_nodes:
                node.args = (node.args[0], drawing.all_input_nodes[0], row.device_index)
                node.target = _seed_shard
                changed = True
    if changed:
        stage.recompile()


def _seed_shard(name: str, value: Any, device_index: int) -> None:
    """Seed the draws of layer ``name`` for ``value``, a tensor that it draws for."""
    if isinstance(value, DTensor) and not _is_replicated(value):
        name = f"{name}/{device_index}"
    seed_layer(name)


def _is_replicated(tensor: DTensor) -> bool:
    return all(placement.is_replicate() for placement in tensor.placements)
