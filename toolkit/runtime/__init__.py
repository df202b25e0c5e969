"""Runtimes: they execute a schedule's program, in one process or in many."""

from toolkit.runtime.distributed import Distributed
from toolkit.runtime.processes.child import report
from toolkit.runtime.processes.launch import RankError, launch
from toolkit.runtime.processes.watch import JobFailedError
from toolkit.runtime.processes.world import World, join, leave
from toolkit.runtime.recipe import Recipe
from toolkit.runtime.result import StepResult
from toolkit.runtime.single_process import ORDERS, SingleProcess
from toolkit.runtime.updater import by_name

__all__ = [
    "ORDERS",
    "Distributed",
    "JobFailedError",
    "RankError",
    "Recipe",
    "SingleProcess",
    "StepResult",
    "World",
    "by_name",
    "join",
    "launch",
    "leave",
    "report",
]
