"""Runtimes: they execute a schedule's program, in one process or in many."""

from toolkit.runtime.controlled import Controlled
from toolkit.runtime.controller import Controller
from toolkit.runtime.cyclic_data_parallel import CyclicDataParallel, prepare
from toolkit.runtime.distributed import Distributed
from toolkit.runtime.make_optimizer import by_name
from toolkit.runtime.microbatch_losses import separable
from toolkit.runtime.microbatches import StepResult
from toolkit.runtime.process_group.join import join, leave
from toolkit.runtime.process_group.launch import launch
from toolkit.runtime.process_group.rank_process import RankError, report
from toolkit.runtime.process_group.watch import JobFailedError
from toolkit.runtime.process_group.world import World
from toolkit.runtime.single_process import ORDERS, SingleProcess
from toolkit.runtime.step_options import StepOptions
from toolkit.runtime.switching import SwitchDecision, Switching

__all__ = [
    "ORDERS",
    "Controlled",
    "Controller",
    "CyclicDataParallel",
    "Distributed",
    "JobFailedError",
    "RankError",
    "SingleProcess",
    "StepOptions",
    "StepResult",
    "SwitchDecision",
    "Switching",
    "World",
    "by_name",
    "join",
    "launch",
    "leave",
    "prepare",
    "report",
    "separable",
]
