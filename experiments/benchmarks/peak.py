"""Peak memory of one GPU that runs the micro-batches of N workers by the slots of a schedule.

Order "scheduled" on one device holds what all workers of the schedule hold together. CUDA's own
allocator measures it. The table compares it with the peak of the lowered program, from the stages'
costs: of tensors alone, and with the workspace that libraries take within an operation.
"""

import gc
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm

from toolkit.cli.check_options import check_counts
from toolkit.cost import Costs, profile, recomputing, simulate
from toolkit.cost.hardware import UNIT
from toolkit.cost.library_workspace import CudaMemory, add_library_workspace
from toolkit.cost.timeline import WEIGHTS
from toolkit.errors import UserError
from toolkit.format import GIB
from toolkit.model import Stages, build, partition
from toolkit.model.peak_memory import MemoryMeter
from toolkit.runtime import SingleProcess, StepOptions
from toolkit.runtime.microbatches import GlobalBatch
from toolkit.runtime.step_options import allow_tf32
from toolkit.schedule import Schedule, catalog

_STEPS = 3
_CLASSES = 1000


class Peak(NamedTuple):
    """Peak bytes of training steps above what stays between them."""

    allocated: int  # by the allocator, with what fills its blocks
    requested: int  # from the allocator
    tensors: int  # requested, at the ends of operations: without workspaces


def run(config: DictConfig, device: torch.device, seed: int) -> list[dict[str, Any]]:
    """Return a row for each model, number of workers and rule; sizes in GiB, at rest excluded.

    *asked for*: without what the allocator adds to fill its blocks. *tensors*: also without what
    libraries take and return within an operation. *program*: predicted for tensors. *with
    workspace*: predicted from stages that this device has run once.
    """
    if device.type != "cuda":
        raise UserError(
            f"bench=peak needs a GPU: got device={device}; for a CPU use"
            " experiments/communication.py measured=true"
        )
    check_counts(config, "batch", "image_size", of="bench.")
    options = StepOptions(config.precision, checkpoint=config.checkpoint)
    allow_tf32(options.precision == "tf32")
    rows: list[dict[str, Any]] = []
    settings = [*product(config.models, config.workers)]
    for name, n in tqdm(settings, unit="setting", leave=False):
        torch.manual_seed(seed)
        images = torch.randn(
            config.batch, 3, config.image_size, config.image_size, device=device
        )
        # Predicted twice: from tensors alone, and with what libraries take on this device.
        costs = meta_costs(name, n, images, options, config.partition)
        device_costs = measured_costs(name, costs, images, options, config.partition)
        for schedule in (
            catalog.data_parallel(n, "one"),
            catalog.cyclic(n, 1, "one"),
            catalog.cyclic(n, "freshest", "one"),
        ):
            peak = measure_peak(name, schedule, images, options, config.partition)
            tensors = predict_peak(schedule, costs)
            with_workspace = predict_peak(schedule, device_costs)
            row = {"model": name, "workers": n, "rule": schedule.name}
            for column, n_bytes in (
                ("measured", peak.allocated),
                ("asked for", peak.requested),
                ("tensors", peak.tensors),
            ):
                row[column] = round(n_bytes / GIB, 3)
                row[f"{column} / program"] = round(n_bytes / tensors, 3)
            row["program"] = round(tensors / GIB, 3)
            row["with workspace"] = round(with_workspace / GIB, 3)
            row["asked for / with workspace"] = round(
                peak.requested / with_workspace, 3
            )
            rows.append(row)
    return rows


class PeakAtOpEnds(TorchDispatchMode):
    """Record the most bytes in use at the end of an operation.

    By then an operation has returned its workspace, and its results are allocated.
    """

    def __init__(self, memory: MemoryMeter) -> None:
        super().__init__()
        self.memory = memory
        self.bytes = memory.bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        self.bytes = max(self.bytes, self.memory.bytes)
        return output


def in_order(
    schedule: Schedule, stages: Stages, images: Tensor, options: StepOptions
) -> tuple[SingleProcess, GlobalBatch]:
    """Return a runtime that carries out ``schedule`` slot by slot, and a batch for it.

    Args:
        schedule: the schedule; this device runs all of its ranks.
        stages: the model.
        images: those of each micro-batch.
        options: of a step.
    """
    runtime = SingleProcess(
        stages,
        schedule,
        partial(torch.optim.SGD, lr=0.01),
        F.cross_entropy,
        "scheduled",
        options=options,
    )
    inputs = images.repeat(schedule.n_microbatches, 1, 1, 1)
    return runtime, (inputs, inputs.new_zeros(len(inputs), dtype=torch.long))


def measure_peak(
    name: str,
    schedule: Schedule,
    images: Tensor,
    options: StepOptions,
    by: str = "flops",
) -> Peak:
    """Return the peak of a training step of model ``name`` on micro-batches like ``images``."""
    device = images.device
    model = build(name, _CLASSES, images.shape[-1]).to(device)
    stages = partition(model, schedule.n_stages, images, by)
    runtime, batch = in_order(schedule, stages, images, options)
    # What this first step leaves allocated counts as at rest.
    runtime.step(*batch)
    # What waits in cycles would count as at rest, and might be freed during the steps.
    gc.collect()
    memory = CudaMemory(device)
    memory.restart()
    at_rest = torch.cuda.memory_stats(device)
    with PeakAtOpEnds(memory) as op_ends:
        for result in runtime.run([batch] * _STEPS):
            # A result that stays alive would count as memory of the next step.
            del result
    statistics = torch.cuda.memory_stats(device)
    requested_at_rest = at_rest["requested_bytes.all.current"]
    return Peak(
        allocated=statistics["allocated_bytes.all.peak"]
        - at_rest["allocated_bytes.all.current"],
        requested=statistics["requested_bytes.all.peak"] - requested_at_rest,
        tensors=op_ends.bytes - requested_at_rest,
    )


def meta_costs(
    name: str, n_stages: int, images: Tensor, options: StepOptions, by: str = "flops"
) -> Costs:
    """Return the costs of the stages of model ``name``, from meta tensors."""
    example = images.to("meta")
    with torch.device("meta"):
        model = build(name, _CLASSES, images.shape[-1])
    stages = partition(model, n_stages, example, by)
    costs = profile(stages, example, precision=options.precision)
    return recomputing(costs, options.checkpoint)


def measured_costs(
    name: str, costs: Costs, images: Tensor, options: StepOptions, by: str = "flops"
) -> Costs:
    """Return ``costs`` with the workspace of libraries on the device of ``images``."""
    model = build(name, _CLASSES, images.shape[-1]).to(images.device)
    stages = partition(model, len(costs), images, by)
    return add_library_workspace(costs, stages, images, options.precision)


def predict_peak(
    schedule: Schedule, costs: Costs, n_steps: int = _STEPS, first_step: int = 1
) -> float:
    """Return the peak bytes of the program above the weights that stay between training steps."""
    # After a first step, as in the measurement.
    timeline = simulate(schedule.lower(n_steps, first_step), costs, UNIT)
    (_, at_rest), *_ = timeline.memory(kind=WEIGHTS)
    return timeline.peak_memory() - at_rest
