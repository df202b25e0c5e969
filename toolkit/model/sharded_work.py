"""Work, messages and memory of one of the devices that share a stage, from meta tensors.

The stage runs on DTensors over a process group that moves nothing. DTensor turns each operation
into kernels on local shards and collectives, and this module records both::

    stage(DTensors)  -->  DTensor  -->  kernels on local shards   listed by _KernelLog
                                   -->  collectives                listed by _KernelLog
                                        new and freed tensors      counted by _LocalMemory
"""

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from toolkit.errors import UserError
from toolkit.model.gathered_weights import GatheredWeight, local_of
from toolkit.model.kernel_work import Work, reads_memory, storage_of, tensors_in
from toolkit.model.loss_parallel import REDUCTIONS, is_loss_parallel
from toolkit.model.node_costs import meta_copy
from toolkit.model.peak_memory import LiveMemory, peaks_beside_kept
from toolkit.model.precision import HALVES, as_trained
from toolkit.model.sharded_module import ShardedModule, Sharding, parallelized
from toolkit.model.tensor_parallel import Parallelize

_COLLECTIVE = "_c10d_functional"  # torch's namespace
_COLLECTIVES = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
}


@dataclass(frozen=True)
class Exchange:
    """A collective among the devices of a rank.

    Attributes:
        action: ``all_reduce``, ``all_gather`` or ``reduce_scatter``.
        bytes: of the whole tensor; each device has a shard of it, or a term.
    """

    action: str
    bytes: float


@dataclass(frozen=True)
class DeviceWork:
    """What one device does for a stage on one micro-batch.

    Attributes:
        kernels: work of each kernel of the forward.
        backward_kernels: work of each kernel of the backward.
        exchanges: collectives of the forward; of the last stage also of its loss, if devices share
            the classes.
        backward_exchanges: collectives of the backward.
        activation_bytes: saved for the backward, without parameters and stage inputs.
        input_bytes: of the tensors that the device receives.
        output_bytes: of the tensors that it sends on.
        unkept_bytes: of the outputs that the device does not keep for its own backward.
        parameter_bytes: of its trained weights.
        forward_working_bytes: peak of the forward besides what it keeps.
        backward_working_bytes: peak of the backward besides what the forward has kept.
    """

    kernels: tuple[Work, ...]
    backward_kernels: tuple[Work, ...]
    exchanges: tuple[Exchange, ...]
    backward_exchanges: tuple[Exchange, ...]
    activation_bytes: int
    input_bytes: int
    output_bytes: int
    unkept_bytes: int
    parameter_bytes: int
    forward_working_bytes: int
    backward_working_bytes: int


@contextmanager
def _quietly() -> Iterator[None]:
    """Suppress torch's warnings about a mesh of CPUs: here it moves no values."""
    logger = logging.getLogger("torch.distributed.tensor._collective_utils")
    level = logger.level
    logger.setLevel(logging.ERROR)  # all-to-all on CPUs
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "DTensor random operators", UserWarning)
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def mesh_without_messages(width: int) -> Iterator[DeviceMesh]:
    """Yield a mesh of ``width`` devices that moves nothing. This process is the first of them.

    Raises:
        UserError: this process is one of a job.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise UserError(
            f"width={width}: got a process of a job, expected one of its own. Predict before"
            " init_process_group, or in another process"
        )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=width)
    try:
        yield DeviceMesh("cpu", range(width), mesh_dim_names=("tensor",))
    finally:
        dist.destroy_process_group()


def device_works(
    stages: Sequence[fx.GraphModule],
    example: Sequence[Tensor],
    parallelize: Parallelize,
    width: int,
    precision: str = "fp32",
    mesh: DeviceMesh | None = None,
    *,
    by_message: bool = False,
) -> list[DeviceWork]:
    """Return what the first of ``width`` devices does for each stage.

    Args:
        stages: of a partitioned model, with whole weights.
        example: inputs of a micro-batch; shapes, types and the device (meta: a GPU) matter.
        parallelize: shards the modules of a stage.
        width: devices that share each stage.
        precision: one of :data:`toolkit.model.precision.PRECISIONS`.
        mesh: of ``width`` devices, that moves nothing; None: :func:`mesh_without_messages`.
        by_message: whether stages receive shards by messages, which are contiguous.
    """
    device = example[0].device
    inputs = tuple(torch.empty_like(tensor, device="meta") for tensor in example)
    shardings: Sequence[Sharding | None] = ()
    works = []
    new_mesh = mesh_without_messages(width) if mesh is None else nullcontext(mesh)
    with new_mesh as mesh, _quietly():
        for index, stage in enumerate(stages):
            module = parallelized(meta_copy(stage), mesh, parallelize)  # type: ignore[arg-type]
            is_last = index == len(stages) - 1
            shares_loss = is_last and is_loss_parallel(parallelize)
            sharded = ShardedModule(module, mesh, gathers=is_last and not shares_loss)
            sharded.inputs = shardings
            work, outputs = _analyse(sharded, inputs, device, precision)
            if shares_loss:
                work = replace(
                    work, exchanges=(*work.exchanges, *_exchanges_of_loss(outputs))
                )
            works.append(work)
            shardings = sharded.outputs
            inputs = _received(outputs, by_message=by_message)
    return works


def _received(outputs: Sequence[Tensor], *, by_message: bool) -> tuple[Tensor, ...]:
    """Return the local shards that a stage receives from one that returns ``outputs``."""
    received = []
    for output in outputs:
        tensor = output.detach()
        if by_message:
            tensor = tensor.contiguous()
        received.append(tensor.requires_grad_(output.is_floating_point()))
    return tuple(received)


def _exchanges_of_loss(outputs: Sequence[Tensor]) -> list[Exchange]:
    """Return the collectives of a loss of scores ``[..., n_classes]``, in 32 bits."""
    exchanges = []
    for scores in outputs:
        n_samples = scores.numel() // scores.shape[-1]
        n_bytes = float(n_samples * torch.float32.itemsize)
        exchanges += [Exchange("all_reduce", n_bytes)] * REDUCTIONS
    return exchanges


def _analyse(
    stage: ShardedModule,
    inputs: tuple[Tensor, ...],
    device: torch.device,
    precision: str,
) -> tuple[DeviceWork, tuple[Tensor, ...]]:
    """Return the work of a stage, and the local shards that it sends on."""
    weights = {}
    for name, parameter in stage.module.named_parameters():
        weights[name] = (
            local_of(parameter).detach().requires_grad_(parameter.requires_grad)
        )
    # Two runs: this one keeps all that autograd saves, so the next one, which counts living memory,
    # must be without it.
    saved = _SavedTensors([*weights.values(), *stage.module.buffers(), *inputs])
    with (
        as_trained(device, precision),
        saved_tensors_hooks(saved.save, lambda tensor: tensor),
    ):
        outputs = stage(weights, inputs)

    log = _KernelLog()

    def forward() -> tuple[Tensor, ...]:
        results = stage(weights, inputs)
        log.end_forward()
        return results

    with _LocalMemory() as memory, log:
        working_bytes = peaks_beside_kept(
            forward, memory, as_trained(device, precision)
        )
    work = DeviceWork(
        kernels=tuple(log.forward_kernels),
        backward_kernels=tuple(log.kernels),
        exchanges=tuple(log.forward_exchanges),
        backward_exchanges=tuple(log.exchanges),
        activation_bytes=saved.bytes,
        input_bytes=sum(tensor.nbytes for tensor in inputs),
        output_bytes=sum(tensor.nbytes for tensor in outputs),
        unkept_bytes=sum(tensor.nbytes for tensor in outputs if not saved.has(tensor)),
        parameter_bytes=sum(
            weight.untyped_storage().nbytes()
            for weight in weights.values()
            if weight.requires_grad
        ),
        forward_working_bytes=working_bytes[0],
        backward_working_bytes=working_bytes[1],
    )
    return work, outputs


class _SavedTensors:
    """Counts the storages that autograd saves, except those of ``tensors_before``."""

    def __init__(self, tensors_before: Sequence[Tensor]) -> None:
        # Storages are identified by address: keep them alive so that none is reused.
        self._alive = [*map(local_of, tensors_before)]
        self._storages = {storage_of(tensor) for tensor in self._alive}
        self.bytes = 0

    def save(self, tensor: Tensor) -> Tensor:
        """Count a tensor that autograd saves, and return it."""
        local = local_of(tensor)
        if storage_of(local) not in self._storages:
            self._storages.add(storage_of(local))
            self._alive.append(local)
            self.bytes += local.untyped_storage().nbytes()
        return tensor

    def has(self, tensor: Tensor) -> bool:
        """Whether the memory of ``tensor`` is kept."""
        return storage_of(local_of(tensor)) in self._storages


def _are_shared(types: Sequence[type]) -> bool:
    """Whether an operation is on tensors that devices share, whose kernels follow."""
    return any(issubclass(kind, DTensor | GatheredWeight) for kind in types)


def _finds_shapes(tensors: Sequence[Tensor]) -> bool:
    """Whether DTensor runs an operation only to find the shapes of its outputs.

    DTensor does so on fake tensors, once for each kind of operation. It is no work of the device.
    """
    return any(isinstance(tensor, FakeTensor) for tensor in tensors)


class _LocalMemory(LiveMemory):
    """Counts the bytes of living local tensors."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if isinstance(func, HigherOrderOperator):
            return func(*args, **(kwargs or {}))
        if _are_shared(types):
            return NotImplemented  # kernels on local tensors come here next
        output = func(*args, **(kwargs or {}))
        arguments = tensors_in((args, kwargs))
        if _finds_shapes([*arguments, *tensors_in(output)]):
            return output
        if (
            func.namespace == _COLLECTIVE
            and func._overloadpacket.__name__ not in _COLLECTIVES
        ):
            # The op that waits for a collective returns its result. On meta tensors it returns a
            # copy, which would count as a second tensor.
            for argument in arguments:
                self._forget(storage_of(argument))
        self._count(output, arguments)
        return output


class _KernelLog(TorchDispatchMode):
    """Lists kernels on local tensors, and collectives.

    Attributes:
        kernels: work of each kernel of the forward, or of the backward after :meth:`end_forward`.
        exchanges: likewise the collectives.
        forward_kernels: those of the forward, once it has ended.
        forward_exchanges: likewise the collectives.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Work] = []
        self.exchanges: list[Exchange] = []
        self.forward_kernels: list[Work] = []
        self.forward_exchanges: list[Exchange] = []

    def end_forward(self) -> None:
        """List what follows as the backward."""
        self.forward_kernels, self.kernels = self.kernels, []
        self.forward_exchanges, self.exchanges = self.exchanges, []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return func(*args, **kwargs)
        if _are_shared(types):
            return NotImplemented  # kernels on local tensors come here next
        output = func(*args, **kwargs)
        operands = tensors_in((args, kwargs, output))
        if _finds_shapes(operands):
            return output
        name = func._overloadpacket.__name__
        if func.namespace == _COLLECTIVE:
            if name in _COLLECTIVES:
                # The largest of shard and whole: the output of an all-gather, the input of a
                # reduce-scatter.
                whole_bytes = max(operand.nbytes for operand in operands)
                self.exchanges.append(Exchange(_COLLECTIVES[name], float(whole_bytes)))
        elif reads_memory(func):
            flops = 0
            # Of elementwise operations torch counts no operations; their bytes cost time all the
            # same.
            if func._overloadpacket in flop_registry:
                flops = flop_registry[func._overloadpacket](
                    *args, **kwargs, out_val=output
                )
            n_bytes = sum(operand.nbytes for operand in operands)
            in_16_bits = any(operand.dtype in HALVES for operand in operands)
            self.kernels.append(Work(flops, n_bytes, in_16_bits))
        return output
