"""Columns and rows of a job in which each rank of a schedule is several devices.

With a width of 2, process ``rank * 2 + t`` is device t of a rank::

                 device 0    device 1
    rank 0      process 0   process 1     a row shares the stages of a rank
    rank 1      process 2   process 3
                 a column carries out the schedule's program among itself
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from toolkit.errors import UserError, whole
from toolkit.runtime.process_group.shared_status import Record
from toolkit.runtime.process_group.watch import Watch
from toolkit.runtime.process_group.world import World, backend_timeout

Parallelize = Callable[[nn.Module, DeviceMesh], Any]
"""Shards a stage's modules in place over a mesh, or returns the sharded module.

Such as ``lambda stage, mesh: parallelize_module(stage, mesh, plan)``. Modules of a stage have their
names in the whole model. It is called on copies of the stage on the meta device.
"""

DIMENSIONS = ("schedule", "tensor")
"""Names of the dimensions of a mesh over all processes: ranks of a schedule, devices of a rank."""


@dataclass(frozen=True)
class Row:
    """The devices of one rank, seen from one of them.

    Attributes:
        width: number of devices.
        device_index: number of this device, from 0.
        compute: mesh of the collectives within ops.
        update: mesh of the collectives within updates, which run while ops do.
        trace: mesh whose collectives move nothing, for runs that only find shapes.
        group: process group of the row, for objects and whole tensors between runs.
    """

    width: int
    device_index: int
    compute: DeviceMesh
    update: DeviceMesh
    trace: DeviceMesh
    group: dist.ProcessGroup


@dataclass(eq=False)
class Column(World):
    """One device of every rank: a world whose ranks are those of the schedule.

    Attributes:
        everyone: all processes of the job.
        row: the devices of this process's rank.
    """

    everyone: World = cast(World, None)
    row: Row = cast(Row, None)

    @property
    def shares_ranks(self) -> bool:
        """Whether each rank is several processes: it is."""
        return True

    def process(self, rank: int) -> int:
        """Return the number of the process of ``rank`` in this column."""
        return rank * self.row.width + self.row.device_index

    def _new_group(self, ranks: Iterable[int]) -> dist.ProcessGroup:
        # Every process makes the groups of all columns, in one order, as torch asks for.
        own_group = None
        for device_index in range(self.row.width):
            processes = [rank * self.row.width + device_index for rank in ranks]
            group = self.everyone._new_group(processes)
            if device_index == self.row.device_index:
                own_group = group
        return cast(dist.ProcessGroup, own_group)

    def part(self, n_ranks: int) -> World | None:
        """Raise UserError: a column has no parts."""
        raise UserError(
            "part: got ranks of several devices; take a part of the job instead"
        )

    def use(self, user: Any, end: Callable[[], None]) -> None:
        """Let ``user`` send messages; see :meth:`World.use`."""
        self.everyone.use(user, end)

    def total(self, values: Tensor) -> Tensor:
        """Return the sum over all ranks, the same on every process; see :meth:`World.total`.

        Devices of a rank may differ in what only the processor knows, such as a signal: theirs is
        the mean.
        """
        # This sum has each rank once a device.
        total = self.everyone.total(values)
        if values.is_floating_point():
            return total / self.row.width
        return total // self.row.width

    def first(self, value: Any) -> Any:
        """Return the value of the job's first process; see :meth:`World.first`."""
        return self.everyone.first(value)

    def agree(self, check: Callable[[], None]) -> None:
        """Check something on every process of the job; see :meth:`World.agree`."""
        self.everyone.agree(check)

    @contextmanager
    def within_op(self, activity: object, step: int | None) -> Iterator[None]:
        """Exchange with the row within; an error of the backend ends the job."""
        first = self.rank * self.row.width
        with self.everyone.watch.waiting(
            activity, range(first, first + self.row.width), step
        ):
            yield


class ColumnWatch(Watch):
    """The watch of a process, to which ranks of the schedule are processes of one column."""

    def __init__(self, watch: Watch, process: Callable[[int], int]) -> None:
        # Not Watch's own: there is one record and one thread a process, those of ``watch``.
        self._watch = watch
        self._process = process
        self.store = watch.store
        self.timeout = watch.timeout
        self.exit_hooks = watch.exit_hooks

    @property
    def record(self) -> Record:  # type: ignore[override]
        """Where the main thread of this process is."""
        return self._watch.record

    def at(
        self, activity: object, step: int | None = None, peers: Iterable[int] = ()
    ) -> None:
        """Note what the main thread does; see :meth:`Watch.at`."""
        self._watch.at(activity, step, map(self._process, peers))

    @contextmanager
    def waiting(
        self, activity: object, peers: Iterable[int], step: int | None = None
    ) -> Iterator[None]:
        """Wait for other ranks within; see :meth:`Watch.waiting`."""
        with self._watch.waiting(activity, [*map(self._process, peers)], step):
            yield

    def fail(self, cause: BaseException | str) -> Any:
        """End the job; see :meth:`Watch.fail`."""
        self._watch.fail(cause)

    def start(self) -> None:
        """Start the watch of this process."""
        self._watch.start()

    def stop(self) -> None:
        """Stop the watch of this process."""
        self._watch.stop()


def column(world: World, width: int | DeviceMesh) -> Column:
    """Return the column of this process, and its row, in ``world``. Every process calls it.

    Args:
        world: all processes of the job.
        width: devices of a rank; or a mesh of all processes, of the dimensions "schedule" and
            "tensor".

    Raises:
        UserError: the width does not divide the number of processes, the mesh is another one, or
            ``world`` is a part of a job.
    """
    mesh = width if isinstance(width, DeviceMesh) else None
    n_devices = width_of(width)
    if world._is_part:
        raise UserError(
            f"width={n_devices} takes all processes of a job: start as many as it uses"
        )
    if world.size % n_devices:
        raise UserError(f"width={n_devices} does not divide the {world.size} processes")
    if mesh is not None and mesh.mesh.flatten().tolist() != [*range(world.size)]:
        raise UserError(
            f"mesh: got processes {mesh.mesh.tolist()}; expected rank * {n_devices} + device, as"
            f" init_device_mesh(device, ({world.size // n_devices}, {n_devices})) gives them"
        )
    if n_devices not in world.columns:
        row = _row(world, n_devices, mesh)
        world.columns[n_devices] = _make_column(world, row)
        world.watch.width = n_devices
    return cast(Column, world.columns[n_devices])


def width_of(width: int | DeviceMesh) -> int:
    """Return the number of devices of a rank.

    Raises:
        UserError: it is not a number from 1 on, or a mesh of other dimensions.
    """
    if not isinstance(width, DeviceMesh):
        return whole(width, "width", 1)
    if width.mesh_dim_names != DIMENSIONS:
        raise UserError(
            f"mesh: got dimensions {width.mesh_dim_names}; expected {DIMENSIONS}: give"
            f" mesh_dim_names={DIMENSIONS}"
        )
    return int(width.mesh.shape[1])


def _row(world: World, width: int, mesh: DeviceMesh | None) -> Row:
    """Make the process groups of every row; return this process's row."""
    # Registers the backend "fake", whose collectives return at once.
    import torch.testing._internal.distributed.fake_pg  # noqa: F401

    index, device_index = divmod(world.rank, width)
    device_type = world.device.type

    def new_groups(backend: str) -> dist.ProcessGroup:
        own_group = None
        # Every process makes the groups of all rows, as torch asks for.
        for first in range(0, world.size, width):
            with world.watch.waiting("new process group", range(world.size)):
                group = dist.new_group(
                    list(range(first, first + width)),
                    backend=backend,
                    timeout=backend_timeout(world.watch.timeout),
                )
            if first == index * width:
                own_group = group
        return cast(dist.ProcessGroup, own_group)

    # Each has a name of its own: meshes of the same processes and names are equal to torch, whose
    # caches of DTensor would then use the process group of one for another.
    def new_mesh(name: str, backend: str) -> DeviceMesh:
        return DeviceMesh.from_group(
            new_groups(backend), device_type, mesh_dim_names=(name,)
        )

    compute = (
        new_mesh(DIMENSIONS[1], world.backend) if mesh is None else mesh[DIMENSIONS[1]]
    )
    return Row(
        width=width,
        device_index=device_index,
        compute=compute,
        update=new_mesh("tensor_of_updates", world.backend),
        trace=new_mesh("tensor_of_shapes", "fake"),
        group=new_groups("gloo"),
    )


def _make_column(world: World, row: Row) -> Column:
    column_of_process = Column(
        rank=world.rank // row.width,
        size=world.size // row.width,
        device=world.device,
        backend=world.backend,
        watch=world.watch,
        store=dist.PrefixStore(f"column_{row.device_index}", world.store),
        script_made_group=world.script_made_group,
        _name=f"column_{row.width}",
        everyone=world,
        row=row,
    )
    column_of_process.watch = ColumnWatch(world.watch, column_of_process.process)
    all_ranks = range(column_of_process.size)
    column_of_process.group = column_of_process._new_group(all_ranks)
    column_of_process.object_group = column_of_process.group
    if world.backend == "nccl":
        object_group = None
        for device_index in range(row.width):
            processes = [rank * row.width + device_index for rank in all_ranks]
            group = dist.new_group(
                processes, backend="gloo", timeout=backend_timeout(world.watch.timeout)
            )
            if device_index == row.device_index:
                object_group = group
        column_of_process.object_group = cast(dist.ProcessGroup, object_group)
    return column_of_process


def gather_in_row(row: Row, value: Any) -> list[Any]:
    """Return ``value`` of each device of the row. Each of them calls it."""
    values: list[Any] = [None] * row.width
    dist.all_gather_object(values, value, group=row.group)
    return values
