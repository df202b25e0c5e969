"""Predict when every instruction of a program runs, from stage costs and hardware.

Time: each rank has a compute lane, an optimizer and a full-duplex port that work in parallel; ranks
of a machine share its port to others. Ops run in program order, each when the previous op has ended
and its inputs have arrived. A weight prediction runs before the op that reads it; a stage updates
when its gradient is complete. A message starts when its content is ready, both ports are free and
both ranks are within the schedule's lookahead; of those that can start, the first in the program
does; or, if ``hardware.shared_ports``, messages of different pairs share the bandwidth of a port. A
collective takes both ports of all its ranks, in program order. Only a rank that begins with
stage 0 waits for a clock, so that workers keep their stagger.

Memory: see :mod:`toolkit.cost.memory_changes`. A recomputing stage holds its activations during its
backward (its first half, if split), which takes longer by one forward.

Cost: one event per instruction, in order of time: see :mod:`toolkit.cost.event_queue`.
"""

from collections.abc import Sequence
from functools import cached_property

from toolkit.cost.hardware import Hardware, check_hardware
from toolkit.cost.program_links import ProgramLinks
from toolkit.cost.simulation import Simulation
from toolkit.cost.stage_costs import Costs
from toolkit.cost.timeline import Timeline
from toolkit.errors import UserError
from toolkit.schedule import Program
from toolkit.schedule.instruction import collector_paused


def simulate(
    program: Program,
    costs: Costs,
    hardware: Hardware,
    optimizer_bytes: Sequence[float] = (),
) -> Timeline:
    """Return the predicted timeline of ``program``.

    Args:
        program: a verified program.
        costs: one entry per stage.
        hardware: seconds of messages, and of kernels that were not measured.
        optimizer_bytes: optimizer state in bytes, by stage, held by the ranks that update it and
            read and written by each update. Empty: no memory, and the time of one momentum.

    Raises:
        UserError: wrong types, or entries that do not match the program's stages and ranks.
    """
    return Simulator(program).timeline(costs, hardware, optimizer_bytes)


class Simulator:
    """Predicts timelines of one program on several costs or machines.

    What instructions wait for is found once.

    Args:
        program: a verified program.

    Raises:
        UserError: it is no program.
    """

    def __init__(self, program: Program) -> None:
        if not isinstance(program, Program):
            raise UserError(
                f"simulate takes a Program: got a {type(program).__name__}; lower the schedule with"
                " schedule.lower(n_steps).verify()"
            )
        self._program = program

    @cached_property
    def _links(self) -> ProgramLinks:
        return ProgramLinks(self._program)

    def timeline(
        self, costs: Costs, hardware: Hardware, optimizer_bytes: Sequence[float] = ()
    ) -> Timeline:
        """Return the predicted timeline; see :func:`simulate`."""
        _check(self._program, costs, hardware, optimizer_bytes)
        with collector_paused():
            simulation = Simulation(self._links, costs, hardware, optimizer_bytes)
            simulation.run()
        return simulation.timeline()


def _check(
    program: Program, costs: Costs, hardware: Hardware, optimizer_bytes: Sequence[float]
) -> None:
    check_hardware(hardware)
    n_stages = program.schedule.n_stages
    n_ranks = len(program.ranks)
    for name, entries, n_expected, unit in (
        # Further entries of speeds and memories are fine: a machine may have more ranks than the
        # program.
        ("costs", costs, n_stages, "stages"),
        ("optimizer_bytes", optimizer_bytes or costs, n_stages, "stages"),
        (
            "hardware.speeds",
            hardware.speeds[:n_ranks] or program.ranks,
            n_ranks,
            "ranks",
        ),
        (
            "hardware.memories",
            hardware.memories[:n_ranks] or program.ranks,
            n_ranks,
            "ranks",
        ),
    ):
        if len(entries) != n_expected:
            raise UserError(
                f"{name} needs an entry for each of {n_expected} {unit}: got {len(entries)}"
            )
