"""How the devices of a rank share the stages of our decoder and of torchvision's ViT.

A block of the decoder on two devices, with sequence parallelism (Korthikanti et al., arXiv
2205.05198). Each device has some tokens of ``s``, some heads or hidden units of ``h``, and all of
``|``::

    s -norm- s -all-gather- | -attend- h -attention- h -gather, reduce-scatter- s
    s -norm- s -all-gather- | -widen-- h -gelu------ h -narrow, reduce-scatter- s

ViT's blocks have whole activations between them, and an all-reduce instead (Shoeybi et al., arXiv
1909.08053).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.nn import functional as F

from toolkit.errors import UserError
from toolkit.model.gathered_weights import shard_parameters, sharded_dimension
from toolkit.model.gpt import is_block
from toolkit.model.loss_parallel import LossParallel
from toolkit.model.random_draws import seed_layer

Parallelize = Callable[[nn.Module, DeviceMesh], None]
"""Shards a stage's modules in place."""

_WHOLE = Replicate()

# Rows of queries, keys and values follow each other, and each of the three is shared by heads.
_HEADS = _StridedShard(0, split_factor=3)


def default_parallelize(
    model: nn.Module, width: int, *, share_loss: bool = False
) -> Parallelize | LossParallel:
    """Return how devices share stages of ``model``: by its plan, or by shards of its weights.

    Args:
        model: any model. A decoder and ViT have a plan, by which devices share the work, too; see
            :func:`tensor_parallel`. Others take
            :func:`toolkit.model.gathered_weights.shard_parameters`.
        width: number of devices.
        share_loss: likewise of :func:`tensor_parallel`.

    Raises:
        UserError: as :func:`tensor_parallel`, or the devices can share no weight.
    """
    if _blocks_of(model) or _is_vit(model):
        return tensor_parallel(model, width, share_loss=share_loss)
    for parameter in model.parameters():
        if sharded_dimension(parameter, width) is not None:
            return shard_parameters
    raise UserError(
        f"width={width}: got a {type(model).__name__} without a weight that {width} devices can"
        f" share; expected a matrix with {width} rows or columns or more. Use width=1"
    )


def tensor_parallel(
    model: nn.Module, width: int, *, share_loss: bool = False
) -> Parallelize | LossParallel:
    """Return the function by which ``width`` devices share stages of ``model``.

    Args:
        model: a decoder of :func:`toolkit.model.gpt`, or torchvision's ``VisionTransformer``.
        width: number of devices.
        share_loss: whether a decoder's scores stay sharded by tokens of the vocabulary: see
            :class:`toolkit.model.loss_parallel.LossParallel`. Few classes are whole everywhere.

    Raises:
        UserError: there is no plan for the model, or the width does not divide its heads, its
            hidden units or, for a decoder, the length of its sequences.
    """
    blocks = _blocks_of(model)
    if blocks:
        _check_divides(width, "model.heads", blocks[0].heads)
        _check_divides(
            width, "the length of sequences", model.get_parameter("embed.places")
        )
        if share_loss:
            return LossParallel(partial(_share_decoder, scores=Shard(-1)))
        return _share_decoder
    if _is_vit(model):
        attentions = _attentions_of(model)
        _check_divides(width, "the number of heads", attentions[0].num_heads)
        if attentions[0].dropout:
            raise UserError(
                f"width={width}: got attention_dropout={attentions[0].dropout}; expected 0, since"
                " heads of several devices would draw alike"
            )
        return _share_vit
    raise UserError(
        f"width={width}: got a {type(model).__name__}; expected a model with a plan, such as gpt or"
        " vit_b_16. shard_parameters of toolkit.model.gathered_weights takes any model"
    )


def _blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a decoder of ours; none of another model."""
    return [module for module in model.modules() if is_block(module)]


def _attentions_of(model: nn.Module) -> list[nn.MultiheadAttention]:
    return [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]


def _is_vit(model: nn.Module) -> bool:
    return type(model).__name__ == "VisionTransformer" and bool(_attentions_of(model))


def _check_divides(width: int, name: str, size: Any) -> None:
    n_parts = len(size) if isinstance(size, Tensor) else int(size)
    if n_parts % width:
        raise UserError(
            f"width={width} does not divide {name}, {n_parts}: choose a divisor of it"
        )


def _share_decoder(
    stage: nn.Module, mesh: DeviceMesh, scores: Placement = _WHOLE
) -> None:
    by_tokens = Shard(1)
    # By name, which layers take what, and what they return, as in the picture above.
    styles: dict[str, ParallelStyle] = {
        "tokens": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=by_tokens, use_local_output=False
        ),
        "norm": SequenceParallel(use_local_output=False),
        "norm_1": SequenceParallel(use_local_output=False),
        "norm_2": SequenceParallel(use_local_output=False),
        "attend": _SharedHeads(),
        "gather": RowwiseParallel(output_layouts=by_tokens, use_local_output=False),
        "widen": ColwiseParallel(input_layouts=by_tokens, use_local_output=False),
        "narrow": RowwiseParallel(output_layouts=by_tokens, use_local_output=False),
        "head": ColwiseParallel(
            input_layouts=by_tokens, output_layouts=scores, use_local_output=False
        ),
    }
    _apply(stage, mesh, styles)
    for module in stage.modules():
        places = module._parameters.get("places")
        if places is not None:
            replicated = distribute_tensor(places.data, mesh, [Replicate()])
            module.register_parameter(
                "places", nn.Parameter(replicated, places.requires_grad)
            )
    _attend_to_own_heads(cast(fx.GraphModule, stage), mesh)


def _share_vit(stage: nn.Module, mesh: DeviceMesh) -> None:
    styles: dict[str, ParallelStyle] = {
        "mlp.0": ColwiseParallel(use_local_output=False),
        "mlp.3": RowwiseParallel(),
        "self_attention": _SharedAttention(),
    }
    _apply(stage, mesh, styles)


def _apply(
    stage: nn.Module, mesh: DeviceMesh, styles: dict[str, ParallelStyle]
) -> None:
    """Shard each module whose name ends as one of ``styles``."""
    for name, module in [*stage.named_modules()]:
        for ending, style in styles.items():
            if name == ending or name.endswith(f".{ending}"):
                parallelize_module(module, mesh, style)


class _SharedHeads(ParallelStyle):
    """Shards a linear layer of queries, keys and values by heads; its input comes by tokens.

    Its output is this device's part, a plain tensor.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _shard_parameters(module, device_mesh, {"weight": _HEADS, "bias": _HEADS})
        module.forward = partial(_project, cast(nn.Linear, module), device_mesh)
        return module


def _project(module: nn.Linear, mesh: DeviceMesh, x: Tensor) -> Tensor:
    # All-gather the tokens. In the backward each device has the gradient by its own heads alone:
    # `Partial` says that these are to be added.
    replicated = cast(DTensor, x).redistribute(mesh, [Replicate()])
    tokens = replicated.to_local(grad_placements=[Partial()])
    return _local_linear(tokens, module.weight, module.bias)


def _local_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the part of a linear layer that this device's rows of ``weight`` make."""
    # On plain tensors: DTensor would gather what lies in strides.
    local_bias = None if bias is None else cast(DTensor, bias).to_local()
    return F.linear(x, cast(DTensor, weight).to_local(), local_bias)


class _SharedAttention(ParallelStyle):
    """Shards self-attention by heads; its input and output are whole."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _shard_parameters(
            module, device_mesh, {"in_proj_weight": _HEADS, "in_proj_bias": _HEADS}
        )
        projection = cast(nn.Linear, module.out_proj)
        _shard_parameters(
            projection, device_mesh, {"weight": Shard(1), "bias": Replicate()}
        )
        # torch's own forward hands its weights to a function that takes no DTensors.
        module.forward = partial(
            _self_attention, cast(nn.MultiheadAttention, module), device_mesh
        )
        return module


def _self_attention(
    module: nn.MultiheadAttention,
    mesh: DeviceMesh,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    need_weights: bool = False,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend ``query`` ``[b, tokens, width]`` to itself, on this device's heads."""
    if (
        key is not query
        or value is not query
        or need_weights
        or not module.batch_first
        or options
    ):
        raise UserError(
            "width: expected self-attention with the batch first, without its weights"
        )
    replicated = DTensor.from_local(query, mesh, [Replicate()], run_check=False)
    x = replicated.to_local(grad_placements=[Partial()])
    projected = _local_linear(x, module.in_proj_weight, module.in_proj_bias)
    # From here on as in torch's own attention, with this device's heads.
    n_heads = module.num_heads // mesh.size()
    of_heads = projected.unflatten(-1, (3, n_heads, -1)).permute(2, 0, 3, 1, 4)
    dropout = module.dropout if module.training else 0.0
    attended = F.scaled_dot_product_attention(
        of_heads[0], of_heads[1], of_heads[2], dropout_p=dropout
    )
    of_hidden = attended.transpose(1, 2).flatten(2)
    hidden = DTensor.from_local(of_hidden, mesh, [Shard(2)], run_check=False)
    output = F.linear(hidden, module.out_proj.weight, module.out_proj.bias)
    return cast(DTensor, output).redistribute(mesh, [Replicate()]).to_local(), None


def _shard_parameters(
    module: nn.Module, mesh: DeviceMesh, placements: dict[str, Any]
) -> None:
    for name, placement in placements.items():
        parameter = module._parameters[name]
        if parameter is not None:
            sharded = distribute_tensor(parameter.data, mesh, [placement])
            module.register_parameter(
                name, nn.Parameter(sharded, parameter.requires_grad)
            )


def _attend_to_own_heads(stage: fx.GraphModule, mesh: DeviceMesh) -> None:
    """Let each device compute attention of its own heads, with random draws of its own."""
    for node in stage.graph.nodes:
        # The graph has the number of all heads as a constant.
        if node.op == "call_method" and node.target == "unflatten":
            tensor, dimension, (n_parts, n_heads, size) = node.args
            node.args = (tensor, dimension, (n_parts, n_heads // mesh.size(), size))
        before = node.prev
        if (
            node.target is F.scaled_dot_product_attention
            and before.target is seed_layer
        ):
            # Heads of different devices must not drop the same places.
            before.args = (f"{before.args[0]}/{mesh.get_local_rank()}",)
    stage.recompile()
