"""What a width does to stages: several devices share the stages of a rank.

Costs are then those of one device. Its kernels, shards and collectives are counted on the sharded
stages themselves: see :mod:`toolkit.model.sharded_work`. Collectives within an op follow its
kernels; nothing overlaps them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from toolkit.cost.hardware import Hardware
from toolkit.cost.profiling import profile
from toolkit.cost.stage_costs import StageCost
from toolkit.errors import UserError, whole
from toolkit.model import Stages
from toolkit.model.kernel_work import Work
from toolkit.model.sharded_work import DeviceWork, Exchange, device_works
from toolkit.model.structure import tensors_of
from toolkit.model.tensor_parallel import Parallelize


@dataclass(frozen=True)
class Width:
    """Devices of a rank, and the links between them.

    Args:
        devices: of a rank, which share its stages.
        hardware: the machines, device by device. Those of a rank share a machine.
        efficiency: rate of a device's arithmetic, whose matrix products are ``devices`` times
            smaller, divided by that of whole products. 1: the roofline of the smaller kernels.

    Raises:
        UserError: the width does not divide the devices of a machine, devices differ, or the
            efficiency is no share.
    """

    devices: int
    hardware: Hardware
    efficiency: float = 1.0

    def __post_init__(self) -> None:
        whole(self.devices, "width", 1)
        per_machine = self.hardware.ranks_per_machine
        if per_machine > 1 and per_machine % self.devices:
            raise UserError(
                f"width={self.devices} does not divide the {per_machine} devices of a machine,"
                " hardware.ranks_per_machine, whose links it takes: choose a divisor of it"
            )
        if self.devices > 1 and (self.hardware.speeds or self.hardware.memories):
            raise UserError(
                f"width={self.devices} takes devices that are alike: leave out hardware.speeds and"
                " hardware.memories"
            )
        if not 0 < self.efficiency <= 1:
            raise UserError(
                f"width_efficiency is a share above 0, to 1: got {self.efficiency}"
            )

    @property
    def hardware_of_ranks(self) -> Hardware:
        """The machines as one device of every rank sees them.

        A device sends what it has to the same device of other ranks. Devices of a machine share
        its port to others, and so the devices of a rank do.
        """
        per_machine = self.hardware.ranks_per_machine
        if self.devices == 1 or per_machine == 1:
            return self.hardware
        ranks_per_machine = per_machine // self.devices
        return replace(
            self.hardware,
            # All devices of a rank send at the same time, each its own shard.
            link_bandwidth=self.hardware.link_bandwidth / self.devices,
            ranks_per_machine=ranks_per_machine,
            local_bandwidth=self.hardware.local_bandwidth
            if ranks_per_machine > 1
            else inf,
        )

    def seconds(self, exchange: Exchange) -> float:
        """Return the seconds of a collective of the devices of a rank, over a ring."""
        # A ring of w devices: an all-gather or reduce-scatter has w-1 rounds of 1/w of the bytes,
        # and an all-reduce is one of each.
        n_rounds = self.devices - 1
        if exchange.action == "all_reduce":
            n_rounds *= 2
        is_local = self.hardware.ranks_per_machine > 1
        return n_rounds * self.hardware.message(
            exchange.bytes / self.devices, local=is_local
        )


def profile_width(
    stages: Stages,
    example: Any,
    parallelize: Parallelize,
    width: Width,
    precision: str = "fp32",
    mesh: DeviceMesh | None = None,
    *,
    by_message: bool = False,
) -> tuple[StageCost, ...]:
    """Return the costs of ``stages`` on one device of each rank.

    Args:
        stages: a partitioned model.
        example: a micro-batch on the meta device.
        parallelize: shards a stage, such as :func:`toolkit.model.tensor_parallel.tensor_parallel`.
        width: devices of a rank.
        precision: as for :func:`toolkit.cost.profile`.
        mesh: of as many devices, that moves nothing, for a process of a job; None: a new one.
        by_message: as for :func:`toolkit.cost.profile`.

    Raises:
        UserError: as :func:`toolkit.cost.profile`; or this process is one of a job, without
            ``mesh``.
    """
    whole_costs = profile(stages, example, precision=precision)
    works = device_works(
        stages,
        tensors_of(example),
        parallelize,
        width.devices,
        precision,
        mesh,
        by_message=by_message,
    )
    costs = []
    extra_input_bytes = 0.0
    for cost, work in zip(whole_costs, works, strict=True):
        costs.append(_device_cost(cost, work, width, extra_input_bytes))
        extra_input_bytes = float(work.unkept_bytes)
    return tuple(costs)


def _device_cost(
    cost: StageCost, work: DeviceWork, width: Width, extra_input_bytes: float
) -> StageCost:
    """Return the cost of a stage on one device."""
    _, backward_seconds = cost.seconds(width.hardware)
    # DTensor's kernels do not say which of them make gradients of weights. The share is that of the
    # whole stage, whose kernels do.
    weight_share = None
    if backward_seconds:
        weight_share = cost.weight_seconds(width.hardware) / backward_seconds
    return replace(
        cost,
        flops=sum(kernel.flops for kernel in work.kernels),
        backward_flops=sum(kernel.flops for kernel in work.backward_kernels),
        activation_bytes=work.activation_bytes,
        input_bytes=work.input_bytes,
        output_bytes=work.output_bytes,
        parameter_bytes=work.parameter_bytes,
        extra_input_bytes=extra_input_bytes,
        kernels=_slowed(work.kernels, width.efficiency),
        backward_kernels=_slowed(work.backward_kernels, width.efficiency),
        weight_kernels=(),
        weight_share=weight_share,
        forward_working_bytes=work.forward_working_bytes,
        backward_working_bytes=work.backward_working_bytes,
        exchange_seconds=sum(map(width.seconds, work.exchanges)),
        backward_exchange_seconds=sum(map(width.seconds, work.backward_exchanges)),
        exchange_bytes=_sent_bytes(
            [*work.exchanges, *work.backward_exchanges], width.devices
        ),
    )


def _slowed(kernels: Sequence[Work], efficiency: float) -> tuple[Work, ...]:
    """Return ``kernels`` whose arithmetic runs at ``efficiency`` of the hardware's rate."""
    if efficiency == 1:
        return tuple(kernels)
    return tuple(
        replace(kernel, flops=round(kernel.flops / efficiency)) for kernel in kernels
    )


def _sent_bytes(exchanges: Sequence[Exchange], n_devices: int) -> float:
    """Return the bytes that a device sends over a ring."""
    n_bytes = 0.0
    for exchange in exchanges:
        # An all-reduce is a reduce-scatter and an all-gather, each of (w-1)/w of the bytes.
        rounds = 2 if exchange.action == "all_reduce" else 1
        n_bytes += rounds * (n_devices - 1) / n_devices * exchange.bytes
    return n_bytes
