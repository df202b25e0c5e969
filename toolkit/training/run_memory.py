"""Predict the memory of a training run, and check that several fit on one GPU."""

import gc
from dataclasses import dataclass, field

import torch

from toolkit.cost import UNIT, Costs, profile, recomputing, simulate
from toolkit.errors import UserError, first_line
from toolkit.format import GIB, size
from toolkit.model import partition
from toolkit.runtime import SingleProcess
from toolkit.training.run_with_checkpoints import rollback_schedule
from toolkit.training.training_run import TrainingRun

PROCESS_BYTES = 1.0 * GIB
"""Memory of a process on a GPU besides its tensors: the context, libraries, unused blocks."""

_STATE = 2  # numbers of optimizer state of a parameter, at most: Adam's
_STEPS = 3  # by then all versions of the weights are there


def predict_peak(run: TrainingRun) -> float:
    """Return an upper estimate of the peak bytes of tensors of ``run`` on one device.

    Raises:
        UserError: the model runs but cannot be analysed.
    """
    options = run.options
    example = run.samples.form.example(options.batch, "meta")
    with torch.device("meta"):
        model = run.build_model()
    stages = partition(model, run.schedule.n_stages, example, options.partition)
    costs = recomputing(
        profile(stages, example, precision=options.precision), options.checkpoint
    )
    peak_bytes = _peak_grouped(run, costs)
    if getattr(run.runtime, "order", "grouped") == "scheduled":
        state_bytes = [_STATE * cost.parameter_bytes for cost in costs]
        peak_bytes = simulate(
            run.schedule.lower(_STEPS, 1), costs, UNIT, state_bytes
        ).peak_memory()
    average_bytes = (
        sum(cost.parameter_bytes for cost in costs) if options.ema is not None else 0
    )
    return peak_bytes + average_bytes + getattr(run.samples, "device_bytes", 0)


def _peak_grouped(run: TrainingRun, costs: Costs) -> float:
    """Return the peak bytes of the order "grouped".

    It keeps the activations of all micro-batches, and a gradient of each weight version.
    """
    n_microbatches = run.schedule.n_microbatches
    # Late weights, and a sum of gradients for each version that micro-batches have read.
    n_versions = 1 + run.schedule.max_staleness
    parameter_bytes = sum(cost.parameter_bytes for cost in costs)
    weight_bytes = n_versions * parameter_bytes
    gradient_bytes = n_versions * parameter_bytes
    activation_bytes = n_microbatches * sum(
        cost.kept_bytes + cost.extra_input_bytes for cost in costs
    )
    # As if all micro-batches ran as one batch, which those that read one version do.
    workspace_bytes = n_microbatches * max(max(cost.working_bytes) for cost in costs)
    return (
        weight_bytes
        + gradient_bytes
        + _STATE * parameter_bytes
        + activation_bytes
        + workspace_bytes
    )


def check_fits(n_runs: int, run_bytes: float, free_bytes: float) -> None:
    """Raise UserError unless ``n_runs`` processes, each with ``run_bytes`` of tensors, fit.

    Args:
        n_runs: number of runs at the same time.
        run_bytes: predicted bytes of the tensors of one.
        free_bytes: free memory of the device.
    """
    process_bytes = run_bytes + PROCESS_BYTES
    n_fit = int(free_bytes // process_bytes)
    if n_runs <= n_fit:
        return
    way_out = (
        f"parallel={n_fit} is the most that fits" if n_fit > 1 else "leave parallel out"
    )
    raise UserError(
        f"parallel={n_runs} needs {size(n_runs * process_bytes)} of the GPU's memory,"
        f" {size(process_bytes)} for each run by prediction, and {size(free_bytes)} are free:"
        f" {way_out}"
    )


@dataclass
class MemoryCheck:
    """Checks that ``n_runs`` of several runs fit on their device at the same time.

    Memory of the CPU is not checked.
    """

    n_runs: int
    _peaks: list[float] = field(default_factory=list)
    _unknown: list[str] = field(default_factory=list)
    _device: torch.device | None = None

    def add(self, run: TrainingRun) -> None:
        """Check the options of a run that will train, and predict its memory on a GPU."""
        rollback_schedule(run)
        if run.device.type != "cuda" or not isinstance(run.runtime, SingleProcess):
            return
        self._device = run.device
        try:
            self._peaks.append(predict_peak(run))
        except (ValueError, RuntimeError) as error:
            # What can run cannot always be analysed.
            self._unknown.append(first_line(error))

    def notes(self) -> list[str]:
        """Return sentences on what could not be predicted, once all runs have been added.

        Raises:
            UserError: the free memory of the device is too small.
        """
        if self._device is not None and self._peaks:
            gc.collect()  # the runs that were added
            torch.cuda.empty_cache()
            free_bytes, _ = torch.cuda.mem_get_info(self._device)
            check_fits(self.n_runs, max(self._peaks), free_bytes)
        return [
            f"whether {self.n_runs} runs fit into memory is unknown: {reason}"
            for reason in dict.fromkeys(self._unknown)
        ]
