"""Comparison of a measured run with the simulator's prediction."""

from torch import nn

from toolkit.cost import Timeline, predict_calibrated, profile, recomputing
from toolkit.model import partition
from toolkit.model.input_spec import InputSpec
from toolkit.options import TrainingOptions
from toolkit.runtime.meters.measurements import Measurements


def beside_prediction(
    found: Measurements, model: nn.Module, form: InputSpec, options: TrainingOptions
) -> tuple[Timeline, Timeline]:
    """The measured timeline, and the simulated one of ops and messages that take as long.

    Args:
        found: measured with ``options``.
        model: the model, which is moved to the meta device.
        form: specification of the samples.
        options: options of the run.

    Raises:
        UserError: the model runs but cannot be analysed.
    """
    example = form.example(options.batch, "meta")
    stages = partition(model.to("meta"), found.schedule.n_stages, example, options.partition)
    costs = recomputing(profile(stages, example, precision=options.precision), options.checkpoint)
    timeline = found.timeline()
    return timeline, predict_calibrated(timeline, found.schedule, costs)
