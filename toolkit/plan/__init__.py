"""A small trial of a user's model: is cyclic data parallelism worth it on their machines?"""

from toolkit.plan.advice import Advice, advise
from toolkit.plan.findings import Pilot, RuleFindings, TrainingFindings
from toolkit.plan.pilot import pilot

__all__ = ["Advice", "Pilot", "RuleFindings", "TrainingFindings", "advise", "pilot"]
