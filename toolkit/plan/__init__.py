"""Plans before a training: which schedule, a trial of it, and the largest stable learning rate."""

from toolkit.plan.advice import Advice, advise
from toolkit.plan.curvature import Curvature, largest_curvature
from toolkit.plan.deal import deal
from toolkit.plan.findings import Pilot, RuleFindings, TrainingFindings
from toolkit.plan.offsets import Staggered, best_offsets
from toolkit.plan.one_device import LeastPeak, least_peak
from toolkit.plan.pilot import pilot
from toolkit.plan.plan import Plan, plan
from toolkit.plan.predictions import Limits, Prediction
from toolkit.plan.search import Found, search
from toolkit.plan.stability import Certificate, largest_stable_rate
from toolkit.plan.steady_search import search_steady

__all__ = [
    "Advice",
    "Certificate",
    "Curvature",
    "Found",
    "LeastPeak",
    "Limits",
    "Pilot",
    "Plan",
    "Prediction",
    "RuleFindings",
    "Staggered",
    "TrainingFindings",
    "advise",
    "best_offsets",
    "deal",
    "largest_curvature",
    "largest_stable_rate",
    "least_peak",
    "pilot",
    "plan",
    "search",
    "search_steady",
]
