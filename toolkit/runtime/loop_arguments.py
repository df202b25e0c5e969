"""Arguments of a wrapped training: of torch's DistributedDataParallel, a rule, an optimizer."""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from toolkit.cost import Hardware
from toolkit.cost.compression import MESSAGE_CODES
from toolkit.cost.hardware import check_hardware
from toolkit.cost.worker_forms import ModelCosts, best_rule
from toolkit.errors import UserError, check_choice
from toolkit.model import Stages
from toolkit.model.loss_parallel import is_loss_parallel
from toolkit.model.node_costs import meta_copy
from toolkit.model.partition import MEASURES
from toolkit.model.structure import filled, tensors_of
from toolkit.runtime.make_optimizer import MakeOptimizer, takes_names
from toolkit.runtime.process_group.columns import width_of
from toolkit.runtime.stage_optimizers import StageOptimizers
from toolkit.schedule import Kind, Op, Schedule, ScheduleSpec, catalog

# Rules are methods whose size is a number of workers; a pipeline's is a number of stages.
_RULES = [
    name
    for name, m in catalog.METHODS.items()
    if "n" in signature(m.factory).parameters
]

_WITHOUT_MEANING = (
    "bucket_cap_mb",
    "broadcast_buffers",
    "find_unused_parameters",
    "forward_sync_buffers",
    "gradient_as_bucket_view",
    "init_sync",
    "output_device",
    "static_graph",
)
"""Arguments of DistributedDataParallel that change nothing here.

Messages are whole stages, a weight may go without a gradient, and buffers are averaged.
"""

_ELSEWHERE = {
    "process_group": "give world=, of toolkit.runtime.join()",
    "device_mesh": "give world=, of toolkit.runtime.join()",
    "mixed_precision": "give options=StepOptions(precision='bf16'), or use torch.autocast",
}
"""Where else to say what other arguments of DistributedDataParallel say."""


def finished_optimizer(optimizer: MakeOptimizer | Optimizer, model: nn.Module) -> Any:
    """Return an optimizer of the whole model."""
    if isinstance(optimizer, Optimizer) or not callable(optimizer):
        return optimizer
    trained = [pair for pair in model.named_parameters() if pair[1].requires_grad]
    if takes_names(optimizer):
        return optimizer(trained)
    return optimizer([parameter for _, parameter in trained])


def take_arguments_of_ddp(options: dict[str, Any], model: nn.Module) -> None:
    """Take out arguments of DistributedDataParallel; refuse those that would change something."""
    for name in _WITHOUT_MEANING:
        options.pop(name, None)
    device_ids = options.pop("device_ids", None) or []
    devices = {parameter.device for parameter in model.parameters()}
    chosen = {_device(number) for number in device_ids}
    if chosen and chosen != devices:
        raise UserError(
            f"device_ids: got {device_ids}; expected the device of the model,"
            f" {', '.join(map(str, devices))}. Move it first, by model.to(device)"
        )
    for name, way_out in _ELSEWHERE.items():
        if options.pop(name, None) is not None:
            raise UserError(
                f"{name}: an argument of DistributedDataParallel only; {way_out}"
            )


def _device(number: Any) -> torch.device:
    """Return the device of an entry of DDP's ``device_ids``."""
    if isinstance(number, int):
        return torch.device("cuda", number)
    return torch.device(number)


def arguments_by_name(
    function: Callable[..., Any], *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """Return all arguments of a call by name, as ``partition`` takes them."""
    bound = signature(function).bind(*args, **kwargs)
    arguments = dict(bound.arguments)
    for parameter in bound.signature.parameters.values():
        # **kwargs: those within by their names, too.
        if parameter.kind == parameter.VAR_KEYWORD:
            arguments |= arguments.pop(parameter.name, {})
    return arguments


def choose_rule(
    model: nn.Module,
    example: Any,
    hardware: Hardware | str | None,
    n_ranks: int,
    accumulate: int,
) -> tuple[Schedule, str]:
    """Return the schedule for ``rule="auto"``, and what its stages share equally.

    Args:
        model: the module.
        example: arguments of one pass.
        hardware: the machines, or the name of a preset.
        n_ranks: number of ranks.
        accumulate: passes of each rank in a training step.

    Raises:
        UserError: the hardware or the example is missing, or the model cannot be cut.
    """
    if hardware is None or example is None:
        missing = "hardware" if hardware is None else "example"
        raise UserError(
            f"rule='auto': got no {missing}; give hardware=, such as 'ethernet_10', and example=,"
            " the arguments of one pass"
        )
    if isinstance(hardware, str):
        hardware = Hardware.preset(hardware)
    # There is nothing to send, so no form is faster; the model is not traced.
    if n_ranks == 1:
        return catalog.data_parallel(1, accumulate=accumulate), MEASURES[0]
    # On the meta device: costs follow from shapes, without memory or values.
    tensors = [
        torch.empty_like(tensor, device="meta") for tensor in tensors_of(example)
    ]
    costs_of = ModelCosts(meta_copy(model), filled(example, iter(tensors)))
    form = best_rule(costs_of, check_hardware(hardware), n_ranks, accumulate)
    return form.schedule, str(form.partition)


def warn_of_slow_links(schedule: Schedule, width: int = 1) -> None:
    """Warn where ranks are on several machines that a form was chosen without their links.

    Args:
        schedule: late weights make its form matter.
        width: devices of a rank, a process each.
    """
    n_processes = schedule.n_ranks * width
    # Launchers such as torchrun set it to the number of processes on this machine.
    n_here = int(os.environ.get("LOCAL_WORLD_SIZE", n_processes))
    if schedule.max_staleness == 0 or n_here >= n_processes:
        return
    if width == 1:
        ways_out = (
            "rule='auto' with hardware= and example= finds the fastest form;"
            " partition='parameters' makes messages equal"
        )
    else:
        # An automatic rule takes no width. Devices send shards; what a plan leaves whole is small.
        ways_out = (
            f"simulate width={width} finds the fastest form; partition='parameters' makes the"
            " messages of each device about equal"
        )
    warnings.warn(
        f"{schedule.name} with chains in order and stages of equal FLOPs may be slow on the"
        f" links between machines: {ways_out}",
        stacklevel=3,
    )


def schedule_of_rule(
    rule: str | Schedule,
    stages: int | Stages | Sequence[str] | None,
    n_ranks: int,
    accumulate: int,
    options: Mapping[str, Any],
) -> Schedule:
    """Return the schedule of a rule, for passes that follow one another on each rank.

    Args:
        rule: a method's name, or a schedule.
        stages: number of stages, stages, or the names that begin the later ones; None: as ranks.
        n_ranks: number of ranks.
        accumulate: passes of each rank in a training step.
        options: further arguments of the method.

    Raises:
        UserError: they do not fit, or a rank would not have the whole model.
    """
    if isinstance(rule, Schedule):
        if options:
            raise UserError(
                f"unknown argument {next(iter(options))!r}, as rule is a schedule"
            )
        schedule = rule
    else:
        if stages is None:
            n_stages = n_ranks
        elif isinstance(stages, int):
            n_stages = stages
        elif isinstance(stages, Stages):
            n_stages = len(stages)
        else:  # the first stage begins with no name
            n_stages = len(stages) + 1
        sizes = {"n": n_ranks, "n_stages": n_stages, "accumulate": accumulate}
        check_choice("rule", rule, _RULES)
        schedule = ScheduleSpec.from_call(rule, {**sizes, **options}).build()
    if schedule.n_ranks != n_ranks or not schedule.layout.has_whole_models:
        share = "a part of the model"
        if schedule.layout.has_whole_models:
            share = "the whole model"
        raise UserError(
            f"rule: {schedule.name} has {schedule.n_ranks} ranks, each with {share};"
            f" expected {n_ranks}, each with the whole model. Use dp, cdp_v1 or cdp_v2"
        )
    # Micro-batches m, m + n_workers, ... are a worker's passes.
    timing = schedule.timing
    for microbatch in range(schedule.n_workers, schedule.n_microbatches):
        previous = microbatch - schedule.n_workers
        if timing.starts[Op(Kind.FORWARD, 0, microbatch)] < timing.gradient_end(
            0, previous
        ):
            raise UserError(
                f"rule: {schedule.name} begins micro-batch {microbatch} before the backward"
                f" of micro-batch {previous}; a loop's passes follow one another. Use"
                " accumulate=1"
            )
    return schedule


def check_row(
    model: nn.Module,
    width: int,
    rule: str | Schedule,
    optimizers: StageOptimizers,
    options: Mapping[str, Any],
) -> None:
    """Raise UserError if ranks of ``width`` devices cannot train so in a loop."""
    # Only here: to import torch's DTensors takes a second.
    from torch.distributed.tensor import DTensor

    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise UserError(
            f"model: got DTensors with width={width}; expected whole weights. Give parallelize=,"
            " which shards each stage"
        )
    parallelize = options.get("parallelize")
    if parallelize is not None and is_loss_parallel(parallelize):
        raise UserError(
            "parallelize: got a LossParallel; expected scores that are whole on every device, since"
            " the loss is the loop's own. Use Distributed, or leave out LossParallel"
        )
    if rule == "auto":
        raise UserError(
            f"rule: got 'auto' with width={width}; expected a method, since costs are of ranks of"
            " one device. Use dp, cdp_v1 or cdp_v2"
        )
    if optimizers.averages:
        raise UserError(
            f"optimizer: got {type(optimizers.optimizer).__name__} with width={width}, which"
            " evaluates with weights of its own; expected one that does not, such as AdamW"
        )
    if options.get("compression") in MESSAGE_CODES:
        raise UserError(
            f"width={width} takes no compression={options['compression']}: use bf16"
        )


def check_state_of_row(optimizers: StageOptimizers, options: Mapping[str, Any]) -> None:
    """Raise UserError if optimizers of local shards would begin with a state of whole weights."""
    width = width_of(options.get("width", 1))
    if width > 1 and optimizers.state():
        raise UserError(
            f"optimizer: got one that has trained, with width={width}; expected a new one, or a"
            " state that CyclicDataParallel saved"
        )
