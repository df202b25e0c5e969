"""Runtimes: they execute a schedule's program."""

from toolkit.runtime.result import StepResult
from toolkit.runtime.single_process import ORDERS, SingleProcess

__all__ = ["ORDERS", "SingleProcess", "StepResult"]
