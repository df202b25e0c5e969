"""A wrapper for training loops of the user's own, in place of DistributedDataParallel.

A pass of the loop carries out ops of the schedule's program: ``model(x)`` the forwards of this
rank's micro-batch, ``loss.backward()`` its backwards. The executor runs messages and updates
concurrently, as for :class:`~toolkit.runtime.Distributed`.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from inspect import signature
from itertools import repeat
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from toolkit.errors import UserError, check_choice
from toolkit.model import Stages, partition
from toolkit.model.analysis import differentiable
from toolkit.model.by_hand import Chain
from toolkit.model.structure import filled, tensors_of
from toolkit.runtime.distributed import Distributed, Pause
from toolkit.runtime.process_group.join import World, join
from toolkit.runtime.stage import Values
from toolkit.runtime.step_optimizer import FollowsSettings, Settings, StepOptimizer, made_alike
from toolkit.runtime.updater import MakeOptimizer
from toolkit.schedule import Kind, Op, Schedule, catalog
from toolkit.schedule.plain_values import build

_TIMEOUT = 300.0  # seconds; a rank's own code, such as saving a file, may take a while

_RULES = [name for name, m in catalog.METHODS.items() if "n" in signature(m.factory).parameters]


class CyclicDataParallel(nn.Module):
    """Trains ``model`` by a schedule, in a loop that was written for DistributedDataParallel.

    ::

        model = CyclicDataParallel(model, optimizer=lambda p: SGD(p, lr=0.1), rule="cdp_v2")
        for x, y in loader:
            loss = criterion(model(x), y)
            loss.backward()
            model.optimizer.step()

    Every rank makes it with the same arguments, and trains on its own share of each batch, as many
    batches as the others; shares may differ in size. The gradient is the mean over ranks, as in
    DistributedDataParallel, and the trajectory that of :class:`SingleProcess`. In training mode
    ``model(x)`` is one pass of a training step. In ``eval()``, or without gradients, it computes
    with the newest weights; the first time after a step every rank calls it.

    Args:
        model: the module, on this process's device; or a list of modules, one for each stage, each
            called on what the one before returns (see :func:`toolkit.model.partition`).
        stages: number of stages, or what :func:`toolkit.model.partition` takes as ``by``, the names
            of the modules that begin the second and later stages; or stages. None: as many as
            ranks, or as the schedule has.
        optimizer: function from a list of parameters to their optimizer, called for each stage.
            Mark one that takes pairs of name and parameter by :func:`toolkit.runtime.by_name`.
        rule: ``dp``, ``cdp_v1``, ``cdp_v2`` or another method of the catalogue in which every rank
            has the whole model; or a schedule.
        accumulate: passes of each rank in a training step; all but the last may be in
            :meth:`no_sync`.
        world: the ranks; those of this job by default.
        **options: further arguments of the schedule, such as ``state="sharded"`` or ``groups=2``;
            others are those of :class:`Distributed`, such as ``seed``, ``compression`` or
            ``options=StepOptions(clip=1.0)``.

    Attributes:
        module: ``model``. Between steps and :meth:`synchronize` its parameters may be empty or old.
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
        optimizer: MakeOptimizer,
        rule: str | Schedule = "cdp_v2",
        accumulate: int = 1,
        world: World | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.register_state_dict_pre_hook(lambda *_: self.synchronize())
        if isinstance(model, list | tuple) and all(isinstance(part, nn.Module) for part in model):
            model, stages = Chain(*model), len(model)
        if isinstance(model, CyclicDataParallel) or not isinstance(model, nn.Module):
            raise UserError(f"model: got a {type(model).__name__}; expected a module to train")
        on = {parameter.device.type for parameter in model.parameters()}
        self.world = world or join(device="cpu" if on <= {"cpu"} else "auto", timeout=_TIMEOUT)
        taken = {k: options.pop(k) for k in [*options] if k not in Distributed.__dataclass_fields__}
        self.module = model
        self.schedule = _schedule(rule, stages, self.world.size, accumulate, taken)
        self._stages, self._options = stages, options
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._known: dict[int, Settings] = {}
        self._make = made_alike(optimizer, trained)
        self.optimizer = StepOptimizer(self, self._make(trained))
        self._runtime: Distributed | None = None
        self._pauses: Generator[Pause, bool | None, None] | None = None
        self.steps_done = 0
        self._saved: Mapping[str, Any] | None = None  # a state for the runtime's start
        self._inputs: Values = ()
        self._form: Any = None  # of the first arguments
        self._n_passes, self._awaited = 0, "forward"
        self._anchor = (torch.zeros((), requires_grad=True),)  # makes every output differentiable

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on this rank's micro-batch: tensors ``[b, ...]``, or structures of some.

        Raises:
            UserError: it is not the turn of a forward, or arguments differ in kind from the first.
        """
        if not (self.training and torch.is_grad_enabled()):
            self.synchronize()
            return self.module(*args, **kwargs)
        self._check("forward", "model(x)")
        given = _by_name(self.module.forward, *args, **kwargs) if kwargs else args
        inputs = tensors_of(given)
        if any(tensor.requires_grad for tensor in inputs):
            raise UserError("an input requires a gradient: make what computes it part of the model")
        form = filled(given, repeat(Tensor))
        if self._runtime is None:
            self._runtime, self._form = self._start(given), form
        elif form != self._form:
            raise UserError(f"model(x): got {form}; expected {self._form}, as in the first call")
        if not self._n_passes:
            self._note_settings()
        self._inputs = tuple(tensor.to(self.world.device) for tensor in inputs)
        pause = self._go_on()
        self._awaited = "backward"
        outputs = _Seam.apply(self, pause, *self._anchor, *pause.rank.take_outputs(pause.op))
        return self._runtime.stages.results.restore(outputs)

    def _start(self, example: Any) -> Distributed:
        stages, model = self._stages, self.module
        if not isinstance(stages, Stages):
            by = "flops" if isinstance(stages, int | None) else stages
            parts = [*model] if isinstance(model, Chain) else model
            # Ranks run each micro-batch by itself, so the model may mix its samples.
            stages = partition(parts, self.schedule.n_stages, example, by=by, check=False)
        runtime = Distributed(
            stages,
            self.schedule,
            self._make,
            _not_called,
            lr_scheduler=lambda made: cast(Any, FollowsSettings(made, self._known)),
            world=self.world,
            **self._options,
        )
        if self._saved is not None:
            runtime.module()  # all weights, on every rank
            self._load(runtime, self._saved)
        self.world.watch.farewells.append(self._leave)
        return runtime

    # What the program asks for.

    def microbatch(self, step: int, m: int) -> tuple[Values, Tensor]:
        """Return the inputs of this pass."""
        return self._inputs, self._anchor[0]

    def finished(self, step: int, microbatch: int, loss: Tensor, output: Tensor) -> None:
        """Never called: losses are the caller's."""

    def _go_on(self) -> Pause:
        """Carry out the program to the end of a pass's forward, or of its backward."""
        assert self._runtime is not None
        if self._pauses is None:
            shape = tuple((tuple(x.shape), x.dtype) for x in self._inputs)
            self._pauses = self._runtime.stepwise(self, shape)
        pause = next(self._pauses)
        self.world.watch.at("the training script", pause.op.step)
        return pause

    def _note_settings(self) -> None:
        """Note the optimizer's options for the update of the training step that begins."""
        groups, step = self.optimizer.param_groups, self.steps_done
        self._known[step] = [{k: x for k, x in g.items() if k != "params"} for g in groups]
        self._known.pop(step - self.schedule.max_staleness - 3, None)  # no update reads it again

    def run_backward(self, pause: Pause, gradients: Sequence[Tensor | None]) -> None:
        """Run the stages' backwards; called by that of the outputs."""
        if self._awaited != "backward":
            raise UserError(
                "a second backward through one model(x), whose activations are gone: add losses"
                " up, and call backward() once"
            )
        assert self._runtime is not None
        factor = self._runtime.options.scale / self.world.size
        pause.rank.give_gradients(
            pause.op, tuple(None if x is None else x * factor for x in gradients)
        )
        self._go_on()
        self._n_passes += 1
        self._awaited = "step" if self._n_passes == self.schedule.accumulate else "forward"

    def end_step(self) -> None:
        """End a training step; called by ``optimizer.step()``."""
        self._check("step", "optimizer.step()")
        self._n_passes, self._awaited = 0, "forward"
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

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context of the passes of a training step before the last, as in DDP.

        Raises:
            UserError: each training step is one pass.
        """
        if self.schedule.accumulate == 1:
            raise UserError("no_sync: got accumulate=1; give accumulate=, the passes of a step")
        yield

    def synchronize(self) -> None:
        """Complete all updates, and bring the newest weights to every rank.

        Every rank calls it after the same step, unless no step has begun since the last time.
        ``eval()``, ``state_dict()`` and the like do.

        Raises:
            UserError: a training step has begun and not ended.
        """
        if self._end_messages() and self._runtime is not None:
            self._runtime.module()

    def _end_messages(self) -> bool:
        """Complete this rank's part of all steps; return whether there was any."""
        if self._pauses is None:
            return False
        self._check("forward", "the end of training", between_steps=True)
        pauses, self._pauses = self._pauses, None
        with suppress(StopIteration):
            pauses.send(True)
        return True

    def _leave(self) -> None:
        """Give other ranks what they still wait for, as this one's script ends."""
        between_steps = self._awaited == "forward" and not self._n_passes
        if between_steps and dist.is_initialized():
            self._end_messages()

    # State.

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As of any module, but only between training steps.

        Raises:
            UserError: within a step, where ``clip_grad_norm_`` would find no gradients, and a
                penalty in the loss would have none.
        """
        if self._awaited != "forward" or self._n_passes:
            raise UserError(
                "parameters(): got a call within a training step; expected one between steps, since"
                " passes compute with versions of their own. Clip by options=StepOptions(clip=1.0),"
                " and decay weights by the optimizer"
            )
        return super().named_parameters(*args, **kwargs)

    def train(self, mode: bool = True) -> "CyclicDataParallel":
        """Set the mode; ``eval()`` also calls :meth:`synchronize`."""
        if not mode:
            self.synchronize()
        super().train(mode)
        return self

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Take over weights; late ones that the schedule reads next are the same."""
        self.synchronize()
        found = super().load_state_dict(state_dict, strict, assign)
        if self._runtime is not None:
            self._load(self._runtime, self._runtime.state_dict() | {"versions": None})
        return found

    def optimizer_state(self) -> dict[str, Any]:
        """Return what the next steps depend on beside the newest weights. Every rank calls it."""
        self.synchronize()
        if self._runtime is None:
            return dict(self._saved or {})
        state, newest = self._runtime.state_dict(), self.steps_done
        del state["model"]
        late = [{v: w for v, w in known.items() if v < newest} for known in state["versions"]]
        return state | {"versions": late, "settings": dict(self._known)}

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`optimizer_state` with the weights that ``module`` has."""
        self.synchronize()
        self._saved = state or None
        self._known.update(state.get("settings", {}))
        self.steps_done = state.get("steps_done", 0)
        if self._runtime is not None and state:
            self._load(self._runtime, state)

    def _load(self, runtime: Distributed, state: Mapping[str, Any]) -> None:
        """Continue from ``state`` with the weights of ``module``: late ones too, if it has none."""
        step, model = state["steps_done"], self.module.state_dict()
        model = {name: tensor.detach().clone() for name, tensor in model.items()}
        versions = []
        for j, names in enumerate(runtime.trained):
            newest = {name: model[name] for name in names}
            late = state["versions"]
            known = late[j] if late else dict.fromkeys(self.schedule.versions(j, step), newest)
            versions.append(known | {step: newest})
        given = {"steps_done": step, "model": model, "versions": versions}
        runtime.load_state_dict(given | {"stages": state["stages"]})
        runtime.module()


class _Seam(torch.autograd.Function):
    """The outputs of the stages, whose backward is that of the stages."""

    @staticmethod
    def forward(ctx: Any, model: CyclicDataParallel, pause: Pause, *tensors: Tensor) -> Any:
        ctx.model, ctx.pause = model, pause
        outputs = tuple(x.detach() for x in tensors[1:])
        ctx.mark_non_differentiable(*(x for x in outputs if not differentiable(x)))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.model.run_backward(ctx.pause, gradients)
        return (None,) * (3 + len(gradients))


def _by_name(function: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return all arguments of a call by name, as ``partition`` takes them."""
    found = signature(function).bind(*args, **kwargs)
    others = [p.name for p in found.signature.parameters.values() if p.kind == p.VAR_KEYWORD]
    given = dict(found.arguments)
    rest = given.pop(others[0], {}) if others else {}
    return given | rest


def _schedule(
    rule: str | Schedule,
    stages: int | Stages | Sequence[str] | None,
    n_ranks: int,
    accumulate: int,
    options: Mapping[str, Any],
) -> Schedule:
    if isinstance(rule, Schedule):
        if options:
            raise UserError(f"unknown argument {next(iter(options))!r}, as rule is a schedule")
        schedule = rule
    else:
        n = len(stages) if isinstance(stages, Stages) else stages
        n = n if isinstance(n, int) else n_ranks if n is None else len(n) + 1
        sizes = {"n": n_ranks, "n_stages": n, "accumulate": accumulate}
        check_choice("rule", rule, _RULES)
        schedule = build(rule, **sizes, **options)
    if schedule.n_ranks != n_ranks or not schedule.layout.has_whole_models:
        raise UserError(
            f"rule: {schedule.name} has {schedule.n_ranks} ranks, each with"
            f" {'the whole model' if schedule.layout.has_whole_models else 'a part of the model'};"
            f" expected {n_ranks}, each with the whole model. Use dp, cdp_v1 or cdp_v2"
        )
    timing, n = schedule.timing, schedule.n_workers
    for m in range(n, schedule.n_microbatches):
        if timing.starts[Op(Kind.FORWARD, 0, m)] < timing.gradient_end(0, m - n):
            raise UserError(
                f"rule: {schedule.name} begins micro-batch {m} before the backward of micro-batch"
                f" {m - n}; a loop's passes follow one another. Use accumulate=1"
            )
    return schedule


def _not_called(outputs: Tensor, targets: Tensor) -> Tensor:
    raise AssertionError("losses are the caller's")
