"""What a schedule costs on a machine: stage costs, hardware, the simulator, and its timelines."""

from toolkit.cost.activation_curve import AXES, MemoryCurve, memory_curve
from toolkit.cost.affordable_delay import affordable_delay, affordable_schedule
from toolkit.cost.boundary_compression import boundary_costs
from toolkit.cost.calibrate import calibrate, predict_calibrated
from toolkit.cost.chakra import write_chakra
from toolkit.cost.compression import compressed_costs
from toolkit.cost.hardware import UNIT, Hardware
from toolkit.cost.profiling import profile
from toolkit.cost.simulate import simulate
from toolkit.cost.stage_costs import Costs, StageCost, recomputing, unit_costs
from toolkit.cost.timeline import Change, Span, Timeline

__all__ = [
    "AXES",
    "UNIT",
    "Change",
    "Costs",
    "Hardware",
    "MemoryCurve",
    "Span",
    "StageCost",
    "Timeline",
    "affordable_delay",
    "affordable_schedule",
    "boundary_costs",
    "calibrate",
    "compressed_costs",
    "memory_curve",
    "predict_calibrated",
    "profile",
    "recomputing",
    "simulate",
    "unit_costs",
    "write_chakra",
]
