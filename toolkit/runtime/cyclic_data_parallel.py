"""A wrapper for custom training loops, in place of DistributedDataParallel.

A pass of the loop carries out ops of the schedule's program: ``model(x)`` the forwards of this
rank's micro-batch, ``loss.backward()`` its backwards. The executor runs messages and updates
concurrently, as for :class:`~toolkit.runtime.Distributed`.
"""

import threading
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import repeat
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from toolkit.errors import UserError
from toolkit.model import Stages, partition
from toolkit.model.analysis import differentiable
from toolkit.model.by_hand import Chain
from toolkit.model.structure import filled, tensors_of
from toolkit.runtime.distributed import Distributed, Pause
from toolkit.runtime.loop_arguments import (
    arguments_by_name,
    finished_optimizer,
    schedule_of_rule,
    take_arguments_of_ddp,
)
from toolkit.runtime.loop_settings import LoopSettings
from toolkit.runtime.losses import SUM_SCALE, LossValue, as_count
from toolkit.runtime.model_changes import traits
from toolkit.runtime.pending_gradients import PendingGradient
from toolkit.runtime.process_group.join import World, join
from toolkit.runtime.process_group.peer_requests import PeerRequests
from toolkit.runtime.stage import Values
from toolkit.runtime.stage_optimizers import StageOptimizers, on_cpu
from toolkit.runtime.state import join_states
from toolkit.runtime.step_optimizer import FollowsSettings, StepOptimizer
from toolkit.runtime.step_options import allows_whole_steps
from toolkit.runtime.training_state import TrainingState
from toolkit.runtime.uneven_inputs import UnevenInputs
from toolkit.runtime.updater import MakeOptimizer
from toolkit.runtime.watched_module import watch
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
            has the whole model; or a schedule.
        accumulate: passes of each rank in a training step; all but the last may be in
            :meth:`no_sync`.
        counted: whether losses are sums with a count, given by :meth:`backward`.
        world: the ranks; those of this job by default.
        **options: further arguments of the schedule, such as ``state="sharded"`` or ``groups=2``;
            others are those of :class:`Distributed`, such as ``seed``, ``compression`` or
            ``options=StepOptions(clip=1.0)``. Arguments of DistributedDataParallel are taken if
            they change nothing here.

    Attributes:
        module: ``model``. Its methods ``state_dict``, ``parameters`` and ``load_state_dict``, its
            call, copies and pickles use the newest weights. A weight that is read otherwise within
            training, as an attribute, may be empty or old.
        optimizer: steps, and has the parameter groups that learning-rate schedulers change. What
            they hold when the first pass of a training step begins counts for its update.
        schedule: the schedule.
        steps_done: number of training steps so far.

    Raises:
        UserError: an argument does not fit, or the ranks of this job.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        stages: int | Stages | Sequence[str] | None = None,
        *,
        optimizer: MakeOptimizer | Optimizer,
        rule: str | Schedule = "cdp_v2",
        accumulate: int = 1,
        counted: bool = False,
        world: World | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self._script = threading.get_ident()  # the thread of the training script
        self._n_inside = 0  # calls of this class that the script is in
        self._warned: set[str] = set()
        self.register_state_dict_pre_hook(lambda *_: self.synchronize())
        if isinstance(model, list | tuple) and all(
            isinstance(module, nn.Module) for module in model
        ):
            model, stages = Chain(*model), len(model)
        if isinstance(model, CyclicDataParallel) or not isinstance(model, nn.Module):
            raise UserError(f"model: got a {type(model).__name__}; expected a module to train")
        take_arguments_of_ddp(options, model)
        device_types = {parameter.device.type for parameter in model.parameters()}
        self.world = world or join(
            device="cpu" if device_types <= {"cpu"} else "auto", timeout=_TIMEOUT
        )
        self.module = model
        finished = finished_optimizer(optimizer, model)
        self._optimizers = StageOptimizers(finished, model)
        if stages is None and not isinstance(rule, Schedule) and self._optimizers.couples():
            stages = 1
            self._warn(
                f"{type(finished).__name__} sets its steps by all parameters together, so the model"
                " stays one stage; with stages= each stage gets steps of its own"
            )
        schedule_options = {
            name: options.pop(name)
            for name in [*options]
            if name not in Distributed.__dataclass_fields__
        }
        self.schedule = schedule_of_rule(
            rule, stages, self.world.size, accumulate, schedule_options
        )
        self._stages = stages
        self._options = options
        self._counted = counted
        # Whether an op of another rank may read an update before this rank's step ends.
        self._updates_follow_sums = not allows_whole_steps(self.schedule)
        self.optimizer = StepOptimizer(self, finished)
        self._settings = LoopSettings(self.optimizer)
        self._loop_clips = False  # or has had the parameters for it
        self._runtime: Distributed | None = None
        self._requests: PeerRequests | None = None
        self._pauses: Generator[Pause, bool | None, None] | None = None
        self.steps_done = 0
        self._saved: TrainingState | None = None  # for the runtime's start
        self._traits: Mapping[str, Any] = {}  # of the model as it was traced
        self._inputs: Values = ()
        self._form: Any = None  # of the first arguments
        self._count: Tensor | None = None  # of the loss whose backward runs
        self._n_passes = 0
        self._awaited = "forward"
        self._shown: tuple[int, bool] | None = None  # steps and averages that the model shows
        self._averaged = False  # whether evaluation uses the optimizer's averages
        self._uneven: UnevenInputs | None = None
        self._anchor = (torch.zeros((), requires_grad=True),)  # makes every output differentiable

    # Passes.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on this rank's micro-batch: tensors ``[b, ...]``, or structures of some.

        Raises:
            UserError: it is not the turn of a forward, or arguments differ in kind from the first.
        """
        if not (self.training and torch.is_grad_enabled()):
            self.synchronize()
            if self.module.training and self._runtime is not None:
                # Its norms move their statistics; slower ranks may still ask for those before.
                self._runtime.keep_buffers()
            with self._inside():
                return self.module(*args, **kwargs)
        self._check("forward", "model(x)")
        arguments = arguments_by_name(self.module.forward, *args, **kwargs) if kwargs else args
        inputs = tensors_of(arguments)
        if any(tensor.requires_grad for tensor in inputs):
            raise UserError("an input requires a gradient: make what computes it part of the model")
        form = filled(arguments, repeat(Tensor))
        if self._runtime is not None and form != self._form:
            raise UserError(f"model(x): got {form}; expected {self._form}, as in the first call")
        with self._inside():
            if not self._n_passes:
                self._begin_step(arguments, form)
            self._inputs = tuple(tensor.to(self.world.device) for tensor in inputs)
            pause = self._go_on()
            self._awaited = "backward"
            outputs = _Seam.apply(self, pause, *self._anchor, *pause.rank.take_outputs(pause.op))
            assert self._runtime is not None
            return self._runtime.stages.results.restore(outputs)

    def _begin_step(self, example: Any, form: Any) -> None:
        """Prepare the first pass of a training step."""
        if self._runtime is not None and self._traits != traits(self.module):
            # What the loop has changed, such as a frozen layer or a rate of dropout, is in no graph
            # of before. Every rank runs the same script, so all come here at this step.
            if isinstance(self._stages, Stages):
                raise UserError(
                    "model: got a change, such as of a mode or an attribute, after it was"
                    " partitioned; expected none. Give the number of stages in place of stages"
                )
            self._saved = self._training_state()
            self._stop()
        if self._runtime is None:
            self._runtime, self._form = self._start(example), form
        self.world.use(self, self._end_messages)
        self._show_training()
        self._note_settings()
        if self._uneven is not None:
            self._uneven.begin(self.steps_done, self._settings.of_steps[self.steps_done])

    def _start(self, example: Any) -> Distributed:
        stages, model = self._stages, self.module
        if not isinstance(stages, Stages):
            by = "flops" if isinstance(stages, int | None) else stages
            modules = [*model] if isinstance(model, Chain) else model
            # Ranks run each micro-batch by itself, so the model may mix its samples.
            stages = partition(modules, self.schedule.n_stages, example, by=by, check=False)
        if self._saved is None:
            self._settings.note_base()
        self._optimizers.note_options()
        runtime = Distributed(
            stages,
            self.schedule,
            self._optimizers.make,
            _not_called,
            lr_scheduler=lambda stage_optimizer: cast(
                Any, FollowsSettings(stage_optimizer, self._settings.of_steps)
            ),
            world=self.world,
            **self._options,
        )
        # Until the script has said in a first step whether it clips, updates wait for its step().
        runtime.updates_wait = True
        if self._saved is not None:
            runtime.module()  # all weights, on every rank
            weights = {
                name: tensor.detach().clone() for name, tensor in self.module.state_dict().items()
            }
            runtime.load_state_dict(self._saved.of_runtime(runtime, self._optimizers, weights))
            runtime.module()
            self._saved = None
        self.optimizer.forget_state()
        self._requests = PeerRequests(self.world, self._is_ready, self._answer)
        self.world.watch.exit_hooks.append(self._leave)
        watch(model, self)
        self._traits = traits(model)
        return runtime

    def _note_settings(self) -> None:
        """Note what the loop has set for the update of the training step that begins."""
        oldest = self.steps_done - self.schedule.max_staleness - 3  # no update reads those before
        self._settings.note(
            self.steps_done, oldest=oldest, clips_as_before=self._updates_follow_sums
        )

    def _go_on(self) -> Pause:
        """Carry out the program to the end of a pass's forward, or of its backward."""
        assert self._runtime is not None
        if self._pauses is None:
            shape = tuple((tuple(tensor.shape), tensor.dtype) for tensor in self._inputs)
            self._pauses = self._runtime.stepwise(self, shape, counted=self._counted)
        pause = next(self._pauses)
        self.world.watch.at("the training script", pause.op.step)
        return pause

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
        self._count = as_count(count, self.world.device)
        try:
            loss.backward(**options)
        finally:
            self._count = None

    def run_backward(self, pause: Pause, gradients: Sequence[Tensor | None]) -> None:
        """Run the stages' backwards; called by that of the outputs."""
        if self._awaited != "backward":
            raise UserError(
                "a second backward through one model(x), whose activations are gone: add losses"
                " up, and call backward() once"
            )
        if self._counted and self._count is None:
            raise UserError(
                "loss.backward(): got a model with counted=True; expected model.backward(loss,"
                " count) with the sum of the losses and its count"
            )
        assert self._runtime is not None
        factor = self._runtime.options.scale * (SUM_SCALE if self._counted else 1 / self.world.size)
        scaled = tuple(None if gradient is None else gradient * factor for gradient in gradients)
        pause.rank.give_gradients(pause.op, scaled, self._count)
        self._go_on()
        self._n_passes += 1
        self._awaited = "step" if self._n_passes == self.schedule.accumulate else "forward"

    def end_step(self) -> None:
        """End a training step; called by ``optimizer.step()``."""
        self._check("step", "optimizer.step()")
        assert self._runtime is not None
        step = self.steps_done
        if self._runtime.updates_wait:
            self._settings.clip_update(step)
        if self._updates_follow_sums:
            self._runtime.updates_wait = False
        self._runtime.allow_updates(step)
        self._n_passes = 0
        self._awaited = "forward"
        self.steps_done += 1

    def _check(self, awaited: str, what: str, *, between_steps: bool = False) -> None:
        if self._awaited != awaited or (between_steps and self._n_passes):
            calls = {"forward": "model(x)", "backward": "loss.backward()"}
            raise UserError(
                f"{what}: expected {calls.get(self._awaited, 'optimizer.step()')}, after"
                f" {self._n_passes} of {self.schedule.accumulate} passes of training step"
                f" {self.steps_done}. Each pass is model(x) and loss.backward(), and the last is"
                " followed by optimizer.step(); accumulate= says how many there are, and eval() or"
                " torch.no_grad() computes without training"
            )

    @property
    def _between_steps(self) -> bool:
        return self._awaited == "forward" and not self._n_passes

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context of the passes of a training step before the last, as in DDP.

        Raises:
            UserError: each training step is one pass.
        """
        if self.schedule.accumulate == 1:
            raise UserError("no_sync: got accumulate=1; give accumulate=, the passes of a step")
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
        if not options.pop("divide_by_initial_world_size", True) or not options.pop("enable", True):
            raise UserError(
                "join: expected divide_by_initial_world_size=True and enable=True; make the model"
                " with counted=True to weigh samples alike"
            )
        self._uneven = uneven = UnevenInputs(self.world)
        try:
            yield
            if self._runtime is None:
                raise UserError(f"join: rank {self.world.rank} has had no pass; give it an input")
            while self._n_passes:  # the others complete their steps, too
                self._pass_zeros()
            uneven.end()
            while (settings := uneven.settings_of(self.steps_done)) is not None:
                if self._loop_clips:
                    raise UserError(
                        "join: got a loop that clips gradients, which a rank whose inputs have"
                        " ended does not; expected options=StepOptions(clip=...)"
                    )
                self._show_training()
                self._settings.of_steps[self.steps_done] = settings
                for _ in range(self.schedule.accumulate):
                    self._pass_zeros()
        finally:
            self._uneven = None

    def _pass_zeros(self) -> None:
        """Take part in a pass of the others, with the last inputs and gradients of zero."""
        self._check("forward", "the end of join()")
        with self._inside():
            pause = self._go_on()
            outputs = pause.rank.take_outputs(pause.op)
            self._awaited = "backward"
            if self._counted:
                self._count = torch.zeros((), dtype=torch.float64, device=self.world.device)
            zeros = [
                torch.zeros_like(output) if differentiable(output) else None for output in outputs
            ]
            self.run_backward(pause, zeros)
            self._count = None
        if self._awaited == "step":
            self.end_step()

    # What the program asks for.

    def microbatch(self, step: int, m: int) -> tuple[Values, Tensor]:
        """Return the inputs of this pass."""
        return self._inputs, self._anchor[0]

    def finished(self, step: int, microbatch: int, loss: LossValue, output: Tensor) -> None:
        """Never called: losses are the caller's."""

    # Gradients.

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As of any module; between training steps with the newest weights.

        After the last backward of a step they are for ``clip_grad_norm_``. If this rank has the
        gradients of all stages before it updates them, as in data parallelism, they are there.
        Otherwise each stage is clipped by its own norm, where it is updated.

        Raises:
            UserError: before the last backward of a step, where a penalty in the loss would have
                no gradient.
        """
        return self.parameters_by_name(lambda: nn.Module.named_parameters(self, *args, **kwargs))

    def parameters_by_name(
        self, own: Callable[[], Iterator[tuple[str, nn.Parameter]]]
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Return ``own()`` as the script may have them now; see :meth:`named_parameters`."""
        if not self._is_asked or self._runtime is None:
            return own()
        if self._between_steps:
            self.synchronize()
            return own()
        if self._awaited != "step":
            raise UserError(
                "parameters(): got a call within a training step; expected one between steps, or"
                " after the last backward, since passes compute with versions of their own. Decay"
                " weights by the optimizer, and clip after backward()"
            )
        self._loop_clips = True
        one_owner = len({*self.schedule.owners}) == 1
        by_model = one_owner and not self._updates_follow_sums and self._runtime.options.scale == 1
        if by_model and self._runtime.has_whole_gradients:
            self._show_gradients(self._runtime)
            return own()
        if not by_model:
            self._warn(
                f"clip_grad_norm_ under {self.schedule.name}: each stage is clipped by its own"
                " norm, not by the model's, since stages are updated at different times; the norm"
                " that it returns is nan, and a new largest norm may count from the next step"
            )
        return ((name, self._pending(parameter)) for name, parameter in own())

    def _show_gradients(self, runtime: Distributed) -> None:
        """Let the parameters have their gradients, which the updates will use."""
        with self._inside():
            runtime.await_updates(self.steps_done)
            for weights, gradients in runtime.whole_gradients(self.steps_done):
                for name, parameter in weights.items():
                    parameter.grad = gradients.get(name)

    def _pending(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return what stands for a parameter whose gradient is not known yet."""
        # Not the parameter itself, which an update may be changing.
        shape = parameter.shape if parameter.numel() else (1,)
        empty = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        twin = nn.Parameter(empty.expand(shape), requires_grad=parameter.requires_grad)
        if twin.requires_grad:
            twin.grad = PendingGradient.like(twin, self._settings.note_clip)
        return twin

    def _warn(self, message: str) -> None:
        """Warn once, on rank 0."""
        if self.world.rank == 0 and message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=3)

    # Weights, for whoever reads them between training steps.

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Context of this class's own use of the model, which asks for nothing."""
        self._n_inside += 1
        try:
            yield
        finally:
            self._n_inside -= 1

    @property
    def _is_asked(self) -> bool:
        """Whether the training script calls, and not a runtime or another thread."""
        return not self._n_inside and threading.get_ident() == self._script

    def before_reading(self) -> None:
        """Bring the newest weights to the model if the script is about to read it."""
        if self._is_asked:
            self.synchronize()

    def before_calling(self) -> None:
        """Bring the newest weights to the model if the script is about to call it."""
        if self._is_asked and self._runtime is not None:
            if self.module.training and torch.is_grad_enabled():
                raise UserError(
                    "model.module(x): got a call in training mode, whose gradients nobody would"
                    " use; call model(x), or use torch.no_grad()"
                )
            self.synchronize()

    def synchronize(self) -> None:
        """Complete this rank's updates, and bring the newest weights to its model.

        ``eval()``, ``state_dict()`` and the like do. A rank may call it alone.

        Raises:
            UserError: a training step has begun and not ended.
        """
        if self._runtime is None or self._shown == (self.steps_done, self._averaged):
            return
        self._check("forward", "the end of training", between_steps=True)
        with self._inside():
            self._runtime.await_updates(self.steps_done)
            self._runtime.take_newest(self._ask_for_newest(self._runtime))
            self._runtime.show_own(averaged=self._averaged)
        self._shown = self.steps_done, self._averaged

    def _ask_for_newest(self, runtime: Distributed) -> dict[int, dict[str, Tensor]]:
        """Return the newest weights of the stages that other ranks update."""
        assert self._requests is not None
        stages_of: dict[int, list[int]] = {}
        for stage, owner in enumerate(self.schedule.owners):
            if stage not in runtime.updated_stages:
                stages_of.setdefault(owner, []).append(stage)
        newest: dict[int, dict[str, Tensor]] = {}
        subject = "averages" if self._averaged else "weights"
        for owner, stages in stages_of.items():
            question = " ".join([subject, *map(str, stages)])
            newest |= self._requests.ask(owner, question, self.steps_done)
        return newest

    def _show_training(self) -> None:
        """Let the model be as the runtime trains it."""
        assert self._runtime is not None
        if self._shown is not None:
            self._runtime.show_own(averaged=False)
            self._runtime.release_newest()
            self._shown = None

    def evaluate_averages(self, averaged: bool) -> None:
        """Set whether evaluation uses the weights that the optimizer averages, if it has any."""
        self._averaged = averaged and self._optimizers.averages

    def _is_ready(self, steps_done: int) -> bool:
        """Whether this rank can answer questions about the state after ``steps_done`` steps."""
        return self._runtime is not None and self._runtime.has_version(steps_done)

    def _answer(self, subject: str, steps_done: int) -> Any:
        """Answer another rank; called by a thread of its own."""
        assert self._runtime is not None
        kind, *stages = subject.split()
        if kind == "state":
            return on_cpu(self._runtime.local_state_after(steps_done))
        averaged = kind == "averages"
        return on_cpu(self._runtime.newest_of([*map(int, stages)], averaged=averaged))

    def train(self, mode: bool = True) -> "CyclicDataParallel":
        """Set the mode; ``eval()`` also calls :meth:`synchronize`."""
        if not mode:
            self.synchronize()
        super().train(mode)
        return self

    # State.

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Take over weights; late ones that the schedule reads next are the same.

        Every rank calls it.
        """
        return self.load_weights(
            lambda: nn.Module.load_state_dict(self, state_dict, strict, assign)
        )

    def load_weights(self, load: Callable[[], Any]) -> Any:
        """Call ``load``, which changes the model's weights, and train from these."""
        if not self._is_asked or self._runtime is None:
            return load()
        state = self._training_state()
        self._stop()
        result = load()
        self._saved = replace(state, versions={})
        return result

    def optimizer_state(self) -> dict[str, Any]:
        """Return what the next steps depend on besides the newest weights."""
        state = self._training_state()
        as_torch = self._optimizers.as_torch(state.optimizer)
        return as_torch | {"cyclic": state.beside_optimizer()}

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`optimizer_state` with the weights that ``module`` has.

        Also from the state of an optimizer under torch's own DDP: that is a new beginning.
        """
        parameter_states, options = self._optimizers.from_torch(state)
        self._stop()
        self._settings.of_steps.clear()
        if "cyclic" in state:
            self._saved = TrainingState.of_saved(parameter_states, state["cyclic"])
            self._settings.of_steps.update(self._saved.settings)
            self.steps_done = self._saved.steps_done
        else:
            self._saved = None
            self.steps_done = 0
            self._optimizers.adopt(parameter_states, options)

    def options_loaded(self) -> None:
        """Follow the options that the saved loop had changed; stages have the others."""
        self._settings.note_base(self._saved.followed if self._saved is not None else ())

    def parameter_groups_changed(self) -> None:
        """Train by the parameter groups that the optimizer has now. Every rank calls it."""
        self._settings.extend_base()
        if self._runtime is not None:
            self._saved = self._training_state()
            self._stop()
        self._optimizers = StageOptimizers(self._optimizers.optimizer, self.module)

    def _training_state(self) -> TrainingState:
        """Return the state of all ranks after the last step. A rank may call it alone."""
        if self._runtime is None:
            initial_state = TrainingState(self.steps_done, self._optimizers.state())
            return self._saved or initial_state
        assert self._requests is not None
        self._check("forward", "the end of training", between_steps=True)
        self._runtime.await_updates(self.steps_done)
        with self._inside():
            rank_states = [self._runtime.local_state_after(self.steps_done)]
            for owner in sorted({*self.schedule.owners, 0} - {self.world.rank}):
                rank_states.append(self._requests.ask(owner, "state", self.steps_done))
        stage_states = join_states(on_cpu(rank_states))
        return TrainingState.of_stages(
            stage_states,
            self._runtime.trained,
            self._optimizers,
            self._settings.of_steps,
            self._settings.changed_options(),
        )

    def _stop(self) -> None:
        """End the runtime, with all weights in the model. Every rank calls it."""
        if self._runtime is None:
            return
        self.synchronize()
        self._end_messages()
        assert self._requests is not None
        self._requests.leave()
        self.world.watch.exit_hooks.remove(self._leave)
        self._runtime = self._requests = self._shown = None

    def _end_messages(self) -> None:
        """Complete this rank's part of all steps."""
        if self._pauses is None:
            return
        self._check("forward", "the end of training", between_steps=True)
        pauses, self._pauses = self._pauses, None
        with self._inside(), suppress(StopIteration):
            pauses.send(True)

    def _leave(self) -> None:
        """Give other ranks what they still wait for, as this one's script ends."""
        assert self._requests is not None
        if self._between_steps and dist.is_initialized():
            self._end_messages()
            self._requests.leave()
        else:
            self._requests.leave(waits=False)


class _Seam(torch.autograd.Function):
    """The outputs of the stages, whose backward is that of the stages."""

    @staticmethod
    def forward(ctx: Any, model: CyclicDataParallel, pause: Pause, *tensors: Tensor) -> Any:
        ctx.model = model
        ctx.pause = pause
        outputs = tuple(output.detach() for output in tensors[1:])
        ctx.mark_non_differentiable(*(output for output in outputs if not differentiable(output)))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.model.run_backward(ctx.pause, gradients)
        return (None,) * (3 + len(gradients))


def _not_called(outputs: Tensor, targets: Tensor) -> Tensor:
    raise AssertionError("losses are the caller's")
