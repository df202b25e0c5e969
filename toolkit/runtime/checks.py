"""What every runtime refuses."""

from typing import TYPE_CHECKING

from torch import Tensor

from toolkit.errors import UserError
from toolkit.model import Stages
from toolkit.model.partition import check_stages
from toolkit.runtime.grouped import Loss
from toolkit.runtime.step_options import PLAIN, StepOptions
from toolkit.runtime.updater import MakeOptimizer
from toolkit.schedule import Schedule

if TYPE_CHECKING:
    from toolkit.runtime.process_group.group import World


def check_fit(
    stages: Stages, schedule: Schedule, optimizer: MakeOptimizer, options: StepOptions = PLAIN
) -> None:
    """Refuse what is not of its kind, stages that the schedule is not for or that are frozen, and
    an optimizer that is made already."""
    check_stages(stages)
    if not isinstance(schedule, Schedule):
        raise UserError(
            f"schedule is one of toolkit.schedule, such as catalog.cyclic(4): got {_kind(schedule)}"
        )
    if not isinstance(options, StepOptions):
        raise UserError(
            "options must be a toolkit.runtime.StepOptions, such as StepOptions(clip=1.0):"
            f" got {_kind(options)}"
        )
    if len(stages) != schedule.n_stages:
        raise UserError(
            f"the schedule is for {schedule.n_stages} stages and the model has {len(stages)}:"
            f" partition it into {schedule.n_stages}"
        )
    if not any(parameter.requires_grad for parameter in stages.model.parameters()):
        raise UserError(
            f"{type(stages.model).__name__} has no parameter to train: leave requires_grad of some"
            " of them True, before partition()"
        )
    if not callable(optimizer):
        raise UserError(
            "optimizer makes an optimizer from a list of parameters: give a function, such as"
            f" lambda p: torch.optim.SGD(p, lr=0.1), not a {type(optimizer).__name__}"
        )


def checked_world(world: "World | None", stages: Stages, schedule: Schedule) -> "World":
    """``world``, or that of this job; refused with another number of ranks than the schedule has,
    and on another device than the model."""
    on = {tensor.device for tensor in stages.model.parameters()}
    if world is None:
        from toolkit.runtime.process_group.join import join

        on_cpu = all(device.type == "cpu" for device in on)
        world = join(schedule.n_ranks, device="cpu" if on_cpu else "auto")
    if world.size != schedule.n_ranks:
        raise UserError(
            f"the schedule has {schedule.n_ranks} ranks and the world {world.size}: give"
            f" world.part({schedule.n_ranks}), or a schedule for {world.size}"
        )
    if others := sorted(str(device) for device in on - {world.device}):
        raise UserError(
            f"rank {world.rank} computes on {world.device} and the model is on"
            f" {', '.join(others)}: move it with model.to(world.device) before partition()"
        )
    return world


def scalar(loss: Loss) -> Loss:
    """``loss``, refused if it gives anything but one number, or is no function at all."""
    if not callable(loss):
        raise UserError(
            "loss is a function of outputs and targets, such as torch.nn.functional.cross_entropy:"
            f" got {_kind(loss)}"
        )

    def checked(outputs: Tensor, targets: Tensor) -> Tensor:
        value = loss(outputs, targets)
        if not isinstance(value, Tensor) or value.dim() != 0:
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise UserError(
                f"the loss of a micro-batch is a scalar tensor: got {shape}; average it"
                ' (reduction="mean")'
            )
        return value

    return checked


def _kind(value: object) -> str:
    """What was given, as an error names it."""
    return repr(value) if value is None or isinstance(value, str) else f"a {type(value).__name__}"
