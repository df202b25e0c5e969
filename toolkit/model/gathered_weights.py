"""Sharded weights: each device of a row keeps a shard, and gathers the whole for each op.

Every device computes the same micro-batch, so results are those of one device, also those of batch
norms. Between ops a device has its shards alone, as in fully sharded data parallelism (Rajbhandari
et al., arXiv 1910.02054; Zhao et al., arXiv 2304.11277)::

    shard --all-gather--> whole weight --> op of the forward      the whole weight is freed
    shard --all-gather--> whole weight --> op of the backward     and gathered once more
    gradient's shard <--cut-- whole gradient, the same on each device: no message

What autograd keeps for the backward is the :class:`GatheredWeight`, and so the shard.
"""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from toolkit.errors import UserError

_CAST = torch.ops.aten._to_copy.default
_DETACH = torch.ops.aten.detach.default


class GatheredWeight(Tensor):
    """A weight that looks whole, and has only this device's shard.

    An op that reads it gathers the weight first. Every device of the row calls the same ops.
    Views of it, such as the transpose that a linear layer reads, gather nothing until an op reads
    them.

    Args:
        sharded: the weight, sharded over the row.
        views: what is still to be done to the whole weight: each op, with its further arguments.

    Attributes:
        sharded: likewise.
    """

    sharded: DTensor
    _views: tuple[tuple[OpOverload, Sequence[Any]], ...]

    @staticmethod
    def __new__(
        cls,
        sharded: DTensor,
        views: tuple[tuple[OpOverload, Sequence[Any]], ...] = (),
    ) -> Self:
        """Return the weight, with the shape of the whole one after ``views``."""
        # No mode may count this tensor, which only finds a shape.
        with _disable_current_modes():
            form = torch.empty(sharded.shape, dtype=sharded.dtype, device="meta")
            for view, arguments in views:
                form = view(form, *arguments)
        weight = Tensor._make_wrapper_subclass(
            cls,
            form.shape,
            strides=form.stride(),
            dtype=sharded.dtype,
            device=sharded.device,
        )
        weight.sharded = sharded
        weight._views = views
        return weight

    def __repr__(self) -> str:  # type: ignore[override]
        """Return the shape; the numbers would take an all-gather."""
        return f"{type(self).__name__}(shape={tuple(self.shape)})"

    # Python functions of torch see a plain tensor; only kernels meet this class.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the shard's storage: the memory that keeping this weight takes."""
        return local_of(self).untyped_storage()

    def whole(self) -> Tensor:
        """Return the whole weight, without autograd. Every device of the row calls it."""
        weight = self.sharded.full_tensor().contiguous()
        for view, arguments in self._views:
            weight = view(weight, *arguments)
        return weight

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call ``func``, which autograd has recorded, with whole weights."""
        kwargs = kwargs or {}
        weight = args[0] if args else None
        if isinstance(weight, GatheredWeight):
            if func._schema.is_mutable:
                raise UserError(
                    f"shard_parameters: got a stage that changes a weight in place ({func});"
                    " expected one that only reads it. Leave the weight's module out"
                )
            if func is _DETACH:
                return GatheredWeight(weight.sharded, weight._views)
            if func is _CAST:
                # Of the shard, so that fewer bytes travel.
                return GatheredWeight(func(weight.sharded, **kwargs), weight._views)
            if _returns_one_view(func) and not kwargs:
                return GatheredWeight(
                    weight.sharded, (*weight._views, (func, args[1:]))
                )
        args, kwargs = tree_map_only(
            GatheredWeight, GatheredWeight.whole, (args, kwargs)
        )
        return func(*args, **kwargs)


def _returns_one_view(func: OpOverload) -> bool:
    returned = func._schema.returns
    return func.is_view and len(returned) == 1 and str(returned[0].type) == "Tensor"


def shard_parameters(module: nn.Module, mesh: DeviceMesh) -> None:
    """Shard each weight of ``module`` over ``mesh``, and gather it while an op reads it.

    Give it as ``parallelize`` of a runtime with a ``width``. It takes any model, needs no plan, and
    saves the memory of weights, gradients and optimizer states; devices compute the same.

    A weight is cut along the first dimension that the number of devices divides; if there is none,
    along its longest, in unequal shards. Weights that stay whole on each device: vectors, such as
    biases and the weights of norms; tied weights; matrices that are smaller than the row.
    """
    n_names: dict[int, int] = {}
    for _, parameter in module.named_parameters(remove_duplicate=False):
        n_names[id(parameter)] = n_names.get(id(parameter), 0) + 1
    for owner in module.modules():
        for name, parameter in [*owner.named_parameters(recurse=False)]:
            dimension = sharded_dimension(parameter, mesh.size())
            if dimension is None or n_names[id(parameter)] > 1:
                continue
            # Without a source rank torch takes the tensor of this device, and sends nothing.
            sharded = distribute_tensor(
                parameter.data, mesh, [Shard(dimension)], src_data_rank=None
            )
            owner.register_parameter(
                name, nn.Parameter(GatheredWeight(sharded), parameter.requires_grad)
            )


def local_of(tensor: Tensor) -> Tensor:
    """Return this device's shard of a tensor that devices share; any other tensor as it is."""
    if isinstance(tensor, GatheredWeight):
        tensor = tensor.sharded
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def sharded_dimension(weight: Tensor, n_devices: int) -> int | None:
    """Return the dimension along which ``n_devices`` share ``weight``; None if they do not."""
    if weight.dim() < 2 or isinstance(weight, DTensor | GatheredWeight):
        return None
    for dimension, size in enumerate(weight.shape):
        if size and size % n_devices == 0:
            return dimension
    longest = max(range(weight.dim()), key=lambda dimension: weight.shape[dimension])
    return longest if weight.shape[longest] >= n_devices else None
