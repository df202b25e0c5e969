"""The sizes in which each method of the catalogue exists on a number of ranks.

Tables, plans and the conformance suite build their schedules from these sizes, so that a new method
of :data:`toolkit.schedule.catalog.METHODS` appears in all of them.
"""

from inspect import signature
from typing import Any

from toolkit.errors import UserError
from toolkit.schedule.catalog import Method

Sizes = dict[str, Any]
"""Arguments of a :class:`ScheduleSpec` besides the method: sizes, and options of these sizes."""


def takes(method: Method, option: str) -> bool:
    """Whether the schedules of ``method`` differ in ``option``, such as ``accumulate``."""
    return option in signature(method.factory).parameters


def pipeline_sizes(method: Method, n_ranks: int, n_microbatches: int) -> Sizes:
    """Return the sizes of a pipeline: of CDP with a rank for each stage, if ``method`` is cyclic.

    Args:
        method: a pipeline, or a cyclic method.
        n_ranks: devices; each has ``method.stages_per_rank`` stages.
        n_microbatches: of a training step.

    Raises:
        UserError: ``method`` does not exist in these sizes.
    """
    if method.kind == "cyclic":
        n_rounds = _rounds(n_ranks, n_microbatches)
        sizes = {"stages": n_ranks, "microbatches": n_ranks}
        return {**sizes, "placement": "per_stage", "accumulate": n_rounds}
    sizes = {"stages": n_ranks * method.stages_per_rank, "microbatches": n_microbatches}
    if "n_ranks" in method.options:
        sizes["n_ranks"] = n_ranks
    return sizes


def worker_sizes(
    method: Method, n_ranks: int, n_microbatches: int, n_stages: int
) -> Sizes:
    """Return the sizes of a method whose ranks run whole models.

    Args:
        method: any method but a pipeline.
        n_ranks: devices, with a worker each; one that runs all micro-batches if ``method`` is for
            one device.
        n_microbatches: of a training step.
        n_stages: parts of the model.

    Raises:
        UserError: ``method`` does not exist in these sizes.
    """
    if not takes(method, "placement"):  # one device
        return {"stages": n_stages, "microbatches": n_microbatches}
    n_rounds = _rounds(n_ranks, n_microbatches)
    sizes = {"stages": n_stages, "microbatches": n_ranks}
    if takes(method, "accumulate"):
        return {**sizes, "accumulate": n_rounds}
    if n_rounds > 1:
        raise UserError(
            f"each worker has one micro-batch: got {n_microbatches} for {n_ranks} ranks"
        )
    return sizes


def _rounds(n_ranks: int, n_microbatches: int) -> int:
    """Return the micro-batches of each worker in a training step."""
    if n_microbatches % n_ranks:
        raise UserError(
            f"workers take as many micro-batches each: got {n_microbatches} for {n_ranks} ranks"
        )
    return n_microbatches // n_ranks
