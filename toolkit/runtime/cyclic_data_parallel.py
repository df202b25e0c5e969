"""A wrapper for custom training loops, in place of DistributedDataParallel.

A pass of the loop carries out ops of the schedule's program: ``model(x)`` the forwards of this
rank's micro-batch, ``loss.backward()`` its backwards. The executor runs messages and updates
concurrently, as for :class:`~toolkit.runtime.Distributed`.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from toolkit.cost import Hardware
from toolkit.cost.boundary_compression import check_boundary_compression
from toolkit.cost.compression import COMPRESSIONS, MESSAGE_CODES
from toolkit.errors import UserError, check_choice
from toolkit.model import Stages
from toolkit.model.by_hand import ModuleChain
from toolkit.model.partition import MEASURES
from toolkit.model.structure import filled, tensors_of
from toolkit.runtime.distributed import Distributed
from toolkit.runtime.loop_arguments import (
    arguments_by_name,
    check_row,
    choose_rule,
    finished_optimizer,
    schedule_of_rule,
    take_arguments_of_ddp,
    warn_of_slow_links,
)
from toolkit.runtime.loop_training import LoopTraining
from toolkit.runtime.losses import as_count
from toolkit.runtime.make_optimizer import MakeOptimizer
from toolkit.runtime.process_group.columns import column, width_of
from toolkit.runtime.process_group.join import join
from toolkit.runtime.process_group.world import World
from toolkit.runtime.rank_compression import check_handed_on
from toolkit.runtime.stage_optimizers import StageOptimizers
from toolkit.runtime.uneven_inputs import UnevenInputs
from toolkit.schedule import Schedule

_TIMEOUT = 300.0  # seconds; a rank's own code, such as saving a file, may take a while


def prepare(
    model: nn.Module, optimizer: Optimizer, **options: Any
) -> "tuple[CyclicDataParallel, Optimizer]":
    """Wrap a model and its optimizer for a loop that was written for DistributedDataParallel.

    ::

        model, optimizer = prepare(model, optimizer, rule="cdp_v2")

    Args:
        model: the module, on this process's device.
        optimizer: an optimizer of its parameters, with any groups, options and state. Schedulers
            may follow it or the returned one.
        options: arguments of :class:`CyclicDataParallel`.

    Returns:
        The wrapped model, and the optimizer that ends its training steps.

    Raises:
        UserError: an argument does not fit.
    """
    wrapped = CyclicDataParallel(model, optimizer=optimizer, **options)
    return wrapped, wrapped.optimizer


class CyclicDataParallel(nn.Module):
    """Trains ``model`` by a schedule, in a loop that was written for DistributedDataParallel.

    ::

        model = CyclicDataParallel(model, optimizer=lambda p: SGD(p, lr=0.1), rule="cdp_v2")
        for x, y in loader:
            loss = criterion(model(x), y)
            loss.backward()
            model.optimizer.step()

    Every rank makes it with the same arguments, and trains on its own share of each batch, as many
    batches as the others, or within :meth:`join`; shares may differ in size. The gradient is the
    mean over ranks, as in DistributedDataParallel, and the trajectory that of
    :class:`SingleProcess`. In training mode ``model(x)`` is one pass of a training step. In
    ``eval()``, or without gradients, it computes with the newest weights. Between training steps a
    rank may do that alone, and read weights and states alone: the others answer its questions.

    Args:
        model: the module, on this process's device; or a list of modules, one for each stage, each
            called on what the one before returns (see :func:`toolkit.model.partition`).
        stages: number of stages, or what :func:`toolkit.model.partition` takes as ``by``, the names
            of the modules that begin the second and later stages; or stages. None: as many as
            ranks, or as the schedule has.
        optimizer: a finished optimizer of the model's parameters, or a function from the list of
            parameters to one. Each stage gets one like it. Mark a function that takes pairs of
            name and parameter by :func:`toolkit.runtime.by_name`.
        rule: ``dp``, ``cdp_v1``, ``cdp_v2`` or another method of the catalogue in which every rank
            has the whole model; a schedule; or ``auto``: of ``dp``, ``cdp_v1`` and ``cdp_v2``, with
            their chains and cut, the one that :func:`toolkit.cost.worker_forms.best_rule` takes.
        accumulate: passes of each rank in a training step; all but the last may be in
            :meth:`no_sync`. Gradients of passes add up, as under DDP: the loop divides the loss.
        counted: whether losses are sums with a count, given by :meth:`backward`.
        partition: what ``stages``, if they are a number, share equally: ``flops``, ``parameters``
            or ``activations``. On slow links ``parameters`` makes messages equal.
        hardware: the machines, for ``rule="auto"``: a Hardware, or the name of a preset, such as
            ``ethernet_10``.
        example: arguments of one pass, for ``rule="auto"``, as :func:`toolkit.model.partition`
            takes them.
        world: the ranks; those of this job by default.
        **options: further arguments of the schedule, such as ``state="sharded"`` or ``groups=2``;
            others are those of :class:`Distributed`, such as ``seed``, ``compression`` or
            ``options=StepOptions(clip=1.0)``. ``compression="int8"``, ``"int4"``, ``"topk"`` and
            ``"low_rank"`` follow the same trajectory as there; after a change of a stage's trained
            weights, its messages begin without what earlier ones lost. With ``width`` and
            ``parallelize`` a rank is several processes, and ``model`` whole on each of them. They
            train on the same inputs, those of ``world.rank``; what a rank may do alone they do
            together. Arguments of DistributedDataParallel are taken if they change nothing here.

    Attributes:
        module: ``model``. Its methods ``state_dict``, ``parameters`` and ``load_state_dict``, its
            call, copies and pickles use the newest weights. A weight that is read otherwise within
            training, as an attribute, may be empty or old.
        optimizer: steps, and has the parameter groups that learning-rate schedulers change. What
            they hold when the first pass of a training step begins counts for its update.
        schedule: the schedule.
        world: the schedule's ranks. With ``width`` a rank is several processes of the job.

    Raises:
        UserError: an argument does not fit, or the ranks of this job.
    """

    def __init__(  # noqa: PLR0913 - options, by keyword
        self,
        model: nn.Module | Sequence[nn.Module],
        stages: int | Stages | Sequence[str] | None = None,
        *,
        optimizer: MakeOptimizer | Optimizer,
        rule: str | Schedule = "cdp_v2",
        accumulate: int = 1,
        counted: bool = False,
        partition: str = "flops",
        hardware: Hardware | str | None = None,
        example: Any = None,
        world: World | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.register_state_dict_pre_hook(lambda *_: self.synchronize())
        if isinstance(model, list | tuple) and all(
            isinstance(module, nn.Module) for module in model
        ):
            stages = len(model)
            model = ModuleChain(*model)
        if isinstance(model, CyclicDataParallel) or not isinstance(model, nn.Module):
            raise UserError(
                f"model: got a {type(model).__name__}; expected a module to train"
            )
        take_arguments_of_ddp(options, model)
        device_types = {parameter.device.type for parameter in model.parameters()}
        self.world = world or join(
            device="cpu" if device_types <= {"cpu"} else "auto", timeout=_TIMEOUT
        )
        self.module = model

        finished = finished_optimizer(optimizer, model)
        optimizers = StageOptimizers(finished, model)
        width = width_of(options.get("width", 1))
        if width > 1:
            check_row(model, width, rule, optimizers, options)
            # From here on ranks are rows of processes: those of the schedule.
            self.world = column(self.world, options["width"])
        if stages is None and not isinstance(rule, Schedule) and optimizers.couples():
            stages = 1
            if self.world.rank == 0:
                warnings.warn(
                    f"{type(finished).__name__} sets its steps by all parameters together, so the"
                    " model stays one stage; with stages= each stage gets steps of its own",
                    stacklevel=2,
                )
        check_choice("partition", partition, MEASURES)
        if rule == "auto":
            rule, partition = choose_rule(
                model, example, hardware, self.world.size, accumulate
            )
            stages = None
        schedule_options = {
            name: options.pop(name)
            for name in [*options]
            if name not in Distributed.__dataclass_fields__
        }
        self.schedule = schedule_of_rule(
            rule, stages, self.world.size, accumulate, schedule_options
        )
        compression = options.get("compression", "none")
        check_choice("compression", compression, COMPRESSIONS)
        code = MESSAGE_CODES.get(compression)
        if code is not None:
            # Here and not only where the first pass makes the runtime.
            check_handed_on(self.schedule, code)
        if self.world.rank == 0 and partition == MEASURES[0] and not schedule_options:
            warn_of_slow_links(self.schedule, width)
        check_boundary_compression(
            options.get("boundary_compression", "none"), [self.schedule]
        )
        self._counted = counted
        cut = partition if isinstance(stages, int | None) else stages
        self._loop = LoopTraining(
            model, cut, self.schedule, optimizers, self.world, options, counted=counted
        )
        self.optimizer = self._loop.optimizer

    @property
    def steps_done(self) -> int:
        """Number of training steps so far."""
        return self._loop.passes.steps_done

    # Passes.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on this rank's micro-batch: tensors ``[b, ...]``, or structures of some.

        Raises:
            UserError: it is not the turn of a forward, or arguments differ in kind from the first.
        """
        if not (self.training and torch.is_grad_enabled()):
            return self._loop.evaluate(*args, **kwargs)
        self._loop.passes.check("forward", "model(x)")
        arguments: Any = args
        if kwargs:
            arguments = arguments_by_name(self.module.forward, *args, **kwargs)
        inputs = tensors_of(arguments)
        if any(tensor.requires_grad for tensor in inputs):
            raise UserError(
                "an input requires a gradient: make what computes it part of the model"
            )
        return self._loop.run_forward(
            arguments, inputs, filled(arguments, repeat(Tensor))
        )

    def backward(self, loss: Tensor, count: Any, **options: Any) -> None:
        """Run the backward of a sum and its count, in place of ``loss.backward()``.

        The gradient of the training step is that of the sum over all ranks and passes, divided by
        the total count::

            loss = cross_entropy(model(x), y, reduction="sum", ignore_index=-100)
            model.backward(loss, (y != -100).sum())

        Args:
            loss: the sum over this pass's tokens or samples, shape ``[]``.
            count: their number.
            options: arguments of ``loss.backward``.

        Raises:
            UserError: the model was made without ``counted=True``, or ``count`` is no number.
        """
        if not self._counted:
            raise UserError(
                "backward(loss, count): got a model that expects mean losses; make it with"
                " counted=True, or call loss.backward()"
            )
        self._loop.passes.count = as_count(count, self.world.device)
        try:
            loss.backward(**options)
        finally:
            self._loop.passes.count = None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context of the passes of a training step before the last, as in DDP.

        Raises:
            UserError: each training step is one pass.
        """
        if self.schedule.accumulate == 1:
            raise UserError(
                "no_sync: got accumulate=1; give accumulate=, the passes of a step"
            )
        yield

    @contextmanager
    def join(self, **options: Any) -> Iterator[None]:
        """Context of a loop whose number of passes differs between ranks, as in DDP.

        A rank whose loop has ended takes part in the steps of the others with gradients of zero.
        The mean is over all ranks; with ``counted=True`` it is over what has been counted. Batch
        norms' statistics count the rank's last pass again.

        Args:
            options: arguments of DDP's ``join``; only ``divide_by_initial_world_size=True``.

        Raises:
            UserError: the options are others, or this rank has had no pass at all.
        """
        if not options.pop("divide_by_initial_world_size", True) or not options.pop(
            "enable", True
        ):
            raise UserError(
                "join: expected divide_by_initial_world_size=True and enable=True; make the model"
                " with counted=True to weigh samples alike"
            )
        uneven = UnevenInputs(self.world)
        self._loop.uneven = uneven
        try:
            yield
            # 1. The step that this rank has begun: the others wait for its other passes.
            self._loop.complete_step()
            # 2. The steps of the others, until their inputs have ended, too.
            uneven.end()
            while (settings := uneven.settings_of(self.steps_done)) is not None:
                self._loop.step_of_zeros(settings)
        finally:
            self._loop.uneven = None

    # Weights and state.

    def named_parameters(
        self, *args: Any, **kwargs: Any
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As of any module; between training steps with the newest weights.

        After the last backward of a step they are for ``clip_grad_norm_``. If this rank has the
        gradients of all stages before it updates them, as in data parallelism, they are there.
        Otherwise each stage is clipped by its own norm, where it is updated.

        Raises:
            UserError: before the last backward of a step, where a penalty in the loss would have
                no gradient.
        """
        return self._loop.parameters_by_name(
            lambda: nn.Module.named_parameters(self, *args, **kwargs)
        )

    def synchronize(self) -> None:
        """Complete this rank's updates, and bring the newest weights to its model.

        ``eval()``, ``state_dict()`` and the like do. A rank may call it alone.

        Raises:
            UserError: a training step has begun and not ended.
        """
        self._loop.synchronize()

    def train(self, mode: bool = True) -> "CyclicDataParallel":
        """Set the mode; ``eval()`` also calls :meth:`synchronize`."""
        if not mode:
            self.synchronize()
        super().train(mode)
        return self

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Take over weights; late ones that the schedule reads next are the same.

        Every rank calls it.
        """
        return self._loop.load_weights(
            lambda: nn.Module.load_state_dict(self, state_dict, strict, assign)
        )
