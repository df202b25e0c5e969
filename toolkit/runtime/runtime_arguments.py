"""Checks of the arguments of runtimes."""

from typing import Any

from toolkit.cost.compression import MESSAGE_CODES
from toolkit.errors import UserError
from toolkit.model import Stages
from toolkit.model.partition import check_stages
from toolkit.runtime.make_optimizer import MakeOptimizer
from toolkit.runtime.step_options import Loss, StepOptions
from toolkit.schedule import Schedule


def check_arguments(
    stages: Stages,
    schedule: Schedule,
    optimizer: MakeOptimizer,
    loss: Loss,
    options: StepOptions,
) -> None:
    """Raise UserError if one is of a wrong kind, or the stages do not fit the schedule."""
    check_stages(stages)
    if not isinstance(schedule, Schedule):
        raise _wrong_kind("schedule", schedule, "catalog.cyclic(4)")
    if not isinstance(options, StepOptions):
        raise _wrong_kind("options", options, "StepOptions(clip=1.0)")
    if not callable(optimizer):
        example = "lambda p: torch.optim.SGD(p, lr=0.1)"
        raise _wrong_kind("optimizer", optimizer, example)
    if not callable(loss):
        raise _wrong_kind("loss", loss, "torch.nn.functional.cross_entropy")
    if len(stages) != schedule.n_stages:
        raise UserError(
            f"the schedule is for {schedule.n_stages} stages and the model has {len(stages)}:"
            f" partition it into {schedule.n_stages}"
        )
    if not any(parameter.requires_grad for parameter in stages.model.parameters()):
        name = type(stages.model).__name__
        raise UserError(
            f"{name} has no parameter to train: set requires_grad before partition()"
        )


def _wrong_kind(name: str, value: Any, example: str) -> UserError:
    """Return an error that shows ``value`` if it is short, or else its type."""
    kind = value if isinstance(value, str | None) else type(value)
    return UserError(f"{name}: got {kind!r}; try {example}")


def check_width(
    n_devices: int,
    compression: str,
    options: StepOptions,
    *,
    is_parallelized: bool,
) -> None:
    """Raise UserError if ranks of ``n_devices`` do not take the other arguments.

    Args:
        n_devices: number of devices of a rank.
        compression: of messages.
        options: how stages compute and update.
        is_parallelized: whether there is a function that shards a stage over the devices.
    """
    if n_devices == 1:
        return
    if compression in MESSAGE_CODES:
        raise UserError(
            f"width={n_devices} takes no compression={compression}: use bf16"
        )
    if not is_parallelized:
        raise UserError(
            f"width={n_devices} needs to know how devices share a stage: give"
            " parallelize=shard_parameters of toolkit.model.gathered_weights, or"
            " parallelize=lambda stage, mesh: parallelize_module(stage, mesh, plan)"
        )
    if options.compile != "none":
        raise UserError(
            f"width={n_devices} takes no compile={options.compile}: leave it"
        )
