"""The training of a wrapped model: what its optimizer, its parameters and its states lead to."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.model import Stages, partition
from toolkit.model.by_hand import ModuleChain
from toolkit.runtime.loop_arguments import check_state_of_row
from toolkit.runtime.loop_runtime import LoopRuntime
from toolkit.runtime.loop_session import LoopSession
from toolkit.runtime.loop_settings import LoopSettings
from toolkit.runtime.model_changes import traits
from toolkit.runtime.pass_order import PassOrder
from toolkit.runtime.pending_gradients import pending_parameter
from toolkit.runtime.process_group.world import World
from toolkit.runtime.stage import Values
from toolkit.runtime.stage_optimizers import StageOptimizers
from toolkit.runtime.step_optimizer import FollowsSettings, Settings, StepOptimizer
from toolkit.runtime.step_options import allows_whole_steps
from toolkit.runtime.training_state import TrainingState
from toolkit.runtime.uneven_inputs import UnevenInputs
from toolkit.runtime.watched_module import ScriptCalls, watch
from toolkit.schedule import Schedule


class LoopTraining:
    """Trains the model of a :class:`CyclicDataParallel`, session by session.

    A session begins with a first pass, since the model is traced on its inputs. It ends where the
    script changes what the graphs depend on, loads weights or a state, or adds parameters; the next
    one continues from the state that is kept in between.

    Args:
        module: the user's model.
        cut: stages, a measure that they share equally, or the names that begin the later ones.
        schedule: a schedule in which every rank has the whole model.
        optimizers: what makes the stages' optimizers.
        world: the ranks.
        options: further arguments of ``Distributed``.
        counted: whether losses are sums with a count.

    Attributes:
        passes: the order of the loop's calls.
        optimizer: that of the loop.
        uneven: what ranks with inputs of different length let each other know, in ``join()``.
    """

    def __init__(
        self,
        module: nn.Module,
        cut: Stages | str | Sequence[str],
        schedule: Schedule,
        optimizers: StageOptimizers,
        world: World,
        options: Mapping[str, Any],
        *,
        counted: bool,
    ) -> None:
        self.module = module
        self.schedule = schedule
        self.world = world
        self.passes = PassOrder(schedule.accumulate)
        self.optimizer = StepOptimizer(self, optimizers.optimizer)
        self.uneven: UnevenInputs | None = None
        self._cut = cut
        self._optimizers = optimizers
        self._options = options
        self._counted = counted
        # Whether an op of another rank may read an update before this rank's step ends.
        self._updates_follow_sums = not allows_whole_steps(schedule)
        self._script = ScriptCalls()
        self._settings = LoopSettings(self.optimizer)
        self._loop_clips = False  # or has had the parameters for it
        self._session: LoopSession | None = None
        self._saved: TrainingState | None = None  # for the session's start
        self._traits: Mapping[str, Any] = {}  # of the model as it was traced
        self._form: Any = None  # of the first arguments
        self._averaged = False  # whether evaluation uses the optimizer's averages
        self._warned: set[str] = set()

    # Passes.

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model with the newest weights."""
        self.synchronize()
        if self.module.training and self._session is not None:
            # Its norms move their statistics; slower ranks may still ask for those before.
            self._session.runtime.keep_buffers()
        with self._script.inside():
            return self.module(*args, **kwargs)

    def run_forward(self, arguments: Any, inputs: Values, form: Any) -> Any:
        """Run the forward of a pass.

        Args:
            arguments: those of the model.
            inputs: the tensors among them.
            form: the arguments, without the tensors.
        """
        if self._session is not None and form != self._form:
            raise UserError(
                f"model(x): got {form}; expected {self._form}, as in the first call"
            )
        with self._script.inside():
            if self.passes.between_steps:
                self._form = form
                self._begin_step(arguments)
            assert self._session is not None
            return self._session.forward(inputs)

    def _begin_step(self, example: Any) -> None:
        """Prepare the first pass of a training step."""
        if self._session is not None and self._traits != traits(self.module):
            # What the loop has changed, such as a frozen layer or a rate of dropout, is in no graph
            # of before. Every rank runs the same script, so all come here at this step.
            if isinstance(self._cut, Stages):
                raise UserError(
                    "model: got a change, such as of a mode or an attribute, after it was"
                    " partitioned; expected none. Give the number of stages in place of stages"
                )
            self._saved = self._training_state()
            self._stop()
        if self._session is None:
            self._session = self._start(example)
        # Another model of this script may still have messages under way.
        self.world.use(self, self._end_messages)
        self._session.show_training()
        self._note_settings()
        if self.uneven is not None:
            step = self.passes.steps_done
            self.uneven.begin(step, self._settings.of_steps[step])

    def _start(self, example: Any) -> LoopSession:
        """Partition the model, and continue from the saved state, if any."""
        # 1. The stages.
        stages = self._cut
        if not isinstance(stages, Stages):
            modules = (
                [*self.module] if isinstance(self.module, ModuleChain) else self.module
            )
            # Ranks run each micro-batch by itself, so the model may mix its samples.
            stages = partition(
                modules, self.schedule.n_stages, example, by=stages, check=False
            )

        # 2. The runtime. Optimizers of stages begin with the options that the loop has set by now.
        if self._saved is None:
            check_state_of_row(self._optimizers, self._options)
            self._settings.note_base()
        self._optimizers.note_options()
        runtime = LoopRuntime(
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

        # 3. The state. Weights are cloned: the runtime loads into the tensors that it reads.
        if self._saved is not None:
            weights = runtime.whole_weights()
            runtime.load_state_dict(
                self._saved.for_runtime(runtime, self._optimizers, weights)
            )
            runtime.module()
            self._saved = None

        # 4. The session. From here on the script's reads of the model bring the newest weights.
        self.optimizer.forget_state()
        session = LoopSession(runtime, self.passes, self._script, counted=self._counted)
        watch(self.module, self)
        self._traits = traits(self.module)
        return session

    def _note_settings(self) -> None:
        """Note what the loop has set for the update of the training step that begins."""
        step = self.passes.steps_done
        oldest = step - self.schedule.max_staleness - 3  # no update reads those before
        self._settings.note(
            step, oldest=oldest, clips_as_before=self._updates_follow_sums
        )

    def end_step(self) -> None:
        """End a training step; called by ``optimizer.step()``."""
        self.passes.check("step", "optimizer.step()")
        assert self._session is not None
        runtime = self._session.runtime
        if runtime.updates_wait:
            self._settings.clip_update(self.passes.steps_done)
        if self._updates_follow_sums:
            # From the second step on an update follows the sum of its gradients at once, since
            # another rank may need it before this rank's script comes here.
            runtime.updates_wait = False
        runtime.allow_updates(self.passes.steps_done)
        self.passes.end_step()

    # The steps of the others, where inputs end on one rank before another.

    def complete_step(self) -> None:
        """Complete a training step that has begun, with gradients of zero."""
        if self._session is None:
            raise UserError(
                f"join: rank {self.world.rank} has had no pass; give it an input"
            )
        while self.passes.n_passes:
            self._pass_zeros(self._session)

    def step_of_zeros(self, settings: Settings) -> None:
        """Take part in a training step of the others with gradients of zero.

        Args:
            settings: what the loop of another rank has set for the step.
        """
        if self._loop_clips:
            raise UserError(
                "join: got a loop that clips gradients, which a rank whose inputs have"
                " ended does not; expected options=StepOptions(clip=...)"
            )
        assert self._session is not None
        self._session.show_training()
        self._settings.of_steps[self.passes.steps_done] = settings
        for _ in range(self.schedule.accumulate):
            self._pass_zeros(self._session)

    def _pass_zeros(self, session: LoopSession) -> None:
        self.passes.check("forward", "the end of join()")
        with self._script.inside():
            session.pass_zeros()
        if self.passes.next_call == "step":
            self.end_step()

    # Weights, for whoever reads them.

    def parameters_by_name(
        self, read: Callable[[], Iterator[tuple[str, nn.Parameter]]]
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Return ``read()`` as the script may have them now.

        See :meth:`CyclicDataParallel.named_parameters`.
        """
        if not self._script.is_script or self._session is None:
            return read()
        if self.passes.between_steps:
            self.synchronize()
            return read()
        if self.passes.next_call != "step":
            raise UserError(
                "parameters(): got a call within a training step; expected one between steps, or"
                " after the last backward, since passes compute with versions of their own. Decay"
                " weights by the optimizer, and clip after backward()"
            )
        self._loop_clips = True
        runtime = self._session.runtime
        one_owner = len({*self.schedule.owners}) == 1
        # torch can clip where this rank has all gradients, whole and unscaled, before its updates.
        by_model = (
            one_owner and not self._updates_follow_sums and runtime.options.scale == 1
        )
        if by_model and runtime.has_whole_gradients:
            self._session.show_gradients()
            return read()
        if by_model:
            runtime.check_norm_of_model()
        else:
            self._warn(
                f"clip_grad_norm_ under {self.schedule.name}: each stage is clipped by its own"
                " norm, not by the model's, since stages are updated at different times; the norm"
                " that it returns is nan, and a new largest norm may count from the next step"
            )
        note_clip = self._settings.note_clip
        return (
            (name, pending_parameter(parameter, note_clip))
            for name, parameter in read()
        )

    def _warn(self, message: str) -> None:
        """Warn once, on rank 0."""
        if self.world.rank == 0 and message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=3)

    def before_reading(self) -> None:
        """Bring the newest weights to the model if the script is about to read it."""
        if self._script.is_script:
            self.synchronize()

    def before_calling(self) -> None:
        """Bring the newest weights to the model if the script is about to call it."""
        if self._script.is_script and self._session is not None:
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
        if self._session is not None:
            self._session.show_newest(averaged=self._averaged)

    def evaluate_averages(self, averaged: bool) -> None:
        """Set whether evaluation uses the weights that the optimizer averages, if it has any."""
        self._averaged = averaged and self._optimizers.averages

    # State.

    def load_weights(self, load: Callable[[], Any]) -> Any:
        """Call ``load``, which changes the model's weights, and train from these."""
        if not self._script.is_script or self._session is None:
            return load()
        state = self._training_state()
        self._stop()
        result = load()
        # Without late versions: TrainingState then takes the loaded weights for them.
        self._saved = replace(state, versions={})
        return result

    def optimizer_state(self) -> dict[str, Any]:
        """Return what the next steps depend on besides the newest weights."""
        state = self._training_state()
        optimizer_state = self._optimizers.as_torch(state.optimizer)
        return optimizer_state | {"cyclic": state.beside_optimizer()}

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`optimizer_state` with the weights that ``module`` has.

        Also from the state of an optimizer under torch's own DDP: that is a new beginning.
        """
        # Before the session ends: a state that is refused leaves the training as it is.
        parameter_states, options = self._optimizers.from_torch(state)
        self._stop()
        self._settings.of_steps.clear()
        if "cyclic" in state:
            self._saved = TrainingState.of_saved(parameter_states, state["cyclic"])
            self._settings.of_steps.update(self._saved.settings)
            self.passes.steps_done = self._saved.steps_done
        else:
            self._saved = None
            self.passes.steps_done = 0
            self._optimizers.adopt(parameter_states, options)

    def options_loaded(self) -> None:
        """Follow the options that the saved loop had changed; stages have the others."""
        self._settings.note_base(
            self._saved.followed if self._saved is not None else ()
        )

    def parameter_groups_changed(self) -> None:
        """Train by the parameter groups that the optimizer has now. Every rank calls it."""
        self._settings.extend_base()
        if self._session is not None:
            self._saved = self._training_state()
            self._stop()
        self._optimizers = StageOptimizers(self._optimizers.optimizer, self.module)

    def _training_state(self) -> TrainingState:
        """Return the state of all ranks after the last step. A rank may call it alone."""
        if self._session is not None:
            return self._session.training_state(self._optimizers, self._settings)
        return self._saved or TrainingState(
            self.passes.steps_done, self._optimizers.state()
        )

    def _stop(self) -> None:
        """End the session, with all weights in the model. Every rank calls it."""
        if self._session is not None:
            # Weights of other ranks come as answers to questions, which end with the session.
            self.synchronize()
            self._session.close()
            self._session = None

    def _end_messages(self) -> None:
        if self._session is not None:
            self._session.end_messages()


def _not_called(outputs: Tensor, targets: Tensor) -> Tensor:
    raise AssertionError("losses are the caller's")
