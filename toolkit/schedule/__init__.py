"""Schedules as data: which op runs when, where and on which weights. Standard library only."""

from toolkit.schedule import catalog
from toolkit.schedule.correction import CORRECTIONS, Correction
from toolkit.schedule.grid import labels
from toolkit.schedule.instruction import Action, Buffer, Instruction, Kind, Op
from toolkit.schedule.phases import Phase, PhasedSchedule, after, switched
from toolkit.schedule.placement import PLACEMENTS, Assigned, Placement
from toolkit.schedule.program import Program
from toolkit.schedule.reduction_order import CHAINS
from toolkit.schedule.schedule import STATES, Schedule
from toolkit.schedule.spec import ScheduleSpec
from toolkit.schedule.staleness import FRESHEST, RandomDelay
from toolkit.schedule.steady_state import SteadyState, steady_state
from toolkit.schedule.timing import Timing

__all__ = [
    "CHAINS",
    "CORRECTIONS",
    "FRESHEST",
    "PLACEMENTS",
    "STATES",
    "Action",
    "Assigned",
    "Buffer",
    "Correction",
    "Instruction",
    "Kind",
    "Op",
    "Phase",
    "PhasedSchedule",
    "Placement",
    "Program",
    "RandomDelay",
    "Schedule",
    "ScheduleSpec",
    "SteadyState",
    "Timing",
    "after",
    "catalog",
    "labels",
    "steady_state",
    "switched",
]
