"""What candidates of a plan may take, and which of them are tried."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from toolkit.errors import UserError, whole
from toolkit.model.tensor_parallel import default_parallelize
from toolkit.plan.predictions import Limits, Predictor


@dataclass(frozen=True)
class PlanOptions:
    """What candidates of a plan may take, and how far it looks for them.

    Args:
        limits: what a candidate may take.
        precision: as for :func:`toolkit.cost.profile`.
        optimizer_words: numbers that an optimizer keeps of each parameter: 1, momentum; 2, Adam's.
        search_seconds: for a search of rank orders that the catalogue lacks, on the stages of its
            fastest pipeline: see :func:`toolkit.plan.search`. 0: none.
        jobs: processes; by default as many as CPUs.
        command_options: options of a command line that describe the model, its samples and the
            machines.
        widths: devices of a rank, to choose from.
        width_efficiency: as for :class:`toolkit.cost.tensor_width.Width`.
        compressions: of messages, which candidates may have; ``none`` is always tried.
    """

    limits: Limits = field(default_factory=Limits)
    precision: str = "fp32"
    optimizer_words: float = 1.0
    search_seconds: float = 0.0
    jobs: int | None = None
    command_options: str = ""
    widths: Sequence[int] = (1,)
    width_efficiency: float = 1.0
    compressions: Sequence[str] = ("none",)


DEFAULT_PLAN_OPTIONS = PlanOptions()


def checked_widths(
    options: PlanOptions, n_devices: int, predictor: Predictor, model: nn.Module
) -> list[int]:
    """Return the numbers of devices of a rank, the least first.

    Args:
        options: of a plan.
        n_devices: that a plan may take.
        predictor: knows where the devices of a rank share links.
        model: that they share.

    Raises:
        UserError: a width is above the number of devices, or the model or the machines cannot have
            it.
    """
    widths = sorted({whole(width, "widths", 1) for width in options.widths})
    if not widths:
        raise UserError("widths are numbers of devices, such as [1,2]: got none")
    for width in widths:
        if width > n_devices:
            raise UserError(
                f"widths={width} needs {width} devices for each rank, and a plan takes at most"
                f" ranks={n_devices} devices: lower the one or raise the other"
            )
        predictor.width(width)
        if width > 1:
            default_parallelize(model, width)
    return widths
