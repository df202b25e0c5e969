"""A small trial of a user's model: is cyclic data parallelism worth it on their machines?"""

from toolkit.plan.advice import Advice, advise
from toolkit.plan.findings import Findings, RuleFindings, TrainingFindings
from toolkit.plan.pilot import Pilot, pilot

__all__ = ["Advice", "Findings", "Pilot", "RuleFindings", "TrainingFindings", "advise", "pilot"]
