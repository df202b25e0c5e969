"""A small trial of a user's model: is cyclic data parallelism worth it on their machines?"""

from toolkit.pilot.advice import Advice, advise
from toolkit.pilot.findings import Findings, RuleFindings, TrainingFindings
from toolkit.pilot.outcome import Pilot
from toolkit.pilot.run import pilot

__all__ = ["Advice", "Findings", "Pilot", "RuleFindings", "TrainingFindings", "advise", "pilot"]
