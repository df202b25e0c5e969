"""Plans before a training: which schedule, a trial of it, and the largest stable learning rate."""

from toolkit.plan.advice import Advice, advise
from toolkit.plan.assign_by_speed import assign_by_speed
from toolkit.plan.cost_file_plan import plan_costs
from toolkit.plan.curvature import Curvature, largest_curvature
from toolkit.plan.findings import Pilot, RuleFindings, TrainingFindings
from toolkit.plan.offsets import Staggered, best_offsets
from toolkit.plan.one_device import LeastPeak, least_peak
from toolkit.plan.pilot import PilotOptions, pilot
from toolkit.plan.plan_options import PlanOptions
from toolkit.plan.plan_result import Plan
from toolkit.plan.planner import plan
from toolkit.plan.predictions import Limits, Prediction
from toolkit.plan.search import search
from toolkit.plan.search_space import SearchResult, SearchSpace
from toolkit.plan.stability import Certificate, largest_stable_rate
from toolkit.plan.steady_search import search_steady

__all__ = [
    "Advice",
    "Certificate",
    "Curvature",
    "LeastPeak",
    "Limits",
    "Pilot",
    "PilotOptions",
    "Plan",
    "PlanOptions",
    "Prediction",
    "RuleFindings",
    "SearchResult",
    "SearchSpace",
    "Staggered",
    "TrainingFindings",
    "advise",
    "assign_by_speed",
    "best_offsets",
    "largest_curvature",
    "largest_stable_rate",
    "least_peak",
    "pilot",
    "plan",
    "plan_costs",
    "search",
    "search_steady",
]
