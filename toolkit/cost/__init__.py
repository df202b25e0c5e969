"""What a schedule costs on a machine: stage costs, hardware, the simulator, and its timelines."""

from toolkit.cost.costs import Costs, StageCost, profile, recomputing, unit_costs
from toolkit.cost.curve import AXES, MemoryCurve, memory_curve
from toolkit.cost.hardware import UNIT, Hardware
from toolkit.cost.observed import observed, predict_observed
from toolkit.cost.simulate import simulate
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
    "memory_curve",
    "observed",
    "predict_observed",
    "profile",
    "recomputing",
    "simulate",
    "unit_costs",
]
