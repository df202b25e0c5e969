"""Plans before a training: a trial of a user's model, its largest stable rate, searched orders."""

from toolkit.plan.advice import Advice, advise
from toolkit.plan.curvature import Curvature, largest_curvature
from toolkit.plan.findings import Pilot, RuleFindings, TrainingFindings
from toolkit.plan.offsets import Staggered, best_offsets
from toolkit.plan.pilot import pilot
from toolkit.plan.search import Found, search
from toolkit.plan.stability import Certificate, largest_stable_rate

__all__ = [
    "Advice",
    "Certificate",
    "Curvature",
    "Found",
    "Pilot",
    "RuleFindings",
    "Staggered",
    "TrainingFindings",
    "advise",
    "best_offsets",
    "largest_curvature",
    "largest_stable_rate",
    "pilot",
    "search",
]
