"""What was measured of a run, beside what the simulator makes of it."""

from omegaconf import DictConfig

from toolkit.cli.build import build_model
from toolkit.cost import Timeline, predict_calibrated, profile, recomputing
from toolkit.model import partition
from toolkit.model.input_spec import InputSpec
from toolkit.runtime.meters.measurements import Measurements


def beside_prediction(
    found: Measurements, config: DictConfig, form: InputSpec
) -> tuple[Timeline, Timeline]:
    """The measured timeline, and that of ops and messages which take as long as was measured.

    Args:
        found: measured under ``config``.
        config: from which the stages are made again, without ranks and memory.
        form: of its samples.

    Raises:
        UserError: what runs cannot be analysed.
    """
    example = form.example(config.batch, "meta")
    model = build_model(config.model, form).to("meta")
    stages = partition(model, found.schedule.n_stages, example, config.partition)
    costs = recomputing(profile(stages, example, precision=config.precision), config.checkpoint)
    timeline = found.timeline()
    return timeline, predict_calibrated(timeline, found.schedule, costs)
