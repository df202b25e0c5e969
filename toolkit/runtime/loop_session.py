"""A custom loop's training by one runtime: from its start until the model or a state changes."""

from collections.abc import Generator, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.errors import UserError
from toolkit.model.node_costs import differentiable
from toolkit.runtime.loop_runtime import LoopRuntime, Pause
from toolkit.runtime.loop_settings import LoopSettings
from toolkit.runtime.losses import SUM_SCALE, LossValue
from toolkit.runtime.pass_order import PassOrder
from toolkit.runtime.process_group.peer_requests import PeerRequests
from toolkit.runtime.process_group.watch import SCRIPT_END
from toolkit.runtime.stage import Values
from toolkit.runtime.stage_optimizers import StageOptimizers, on_cpu
from toolkit.runtime.state import join_states
from toolkit.runtime.training_state import TrainingState
from toolkit.runtime.watched_module import ScriptCalls


class LoopSession:
    """Runs a loop's passes, and answers other ranks' questions about weights and states.

    Every rank makes one at the same time. Three kinds of threads meet here: the script's runs
    passes, and asks; the executor's run messages and updates; that of the questions answers other
    ranks, also while the script is in a later training step.

    Args:
        runtime: what trains, ready to begin.
        passes: the order of the loop's calls.
        script: distinguishes the script's calls from others.
        counted: whether losses are sums with a count.
    """

    def __init__(
        self,
        runtime: LoopRuntime,
        passes: PassOrder,
        script: ScriptCalls,
        *,
        counted: bool,
    ) -> None:
        self.runtime = runtime
        self.world = runtime.world
        self._passes = passes
        self._script = script
        self._counted = counted
        self._pauses: Generator[Pause, bool | None, None] | None = None
        self._inputs: Values = ()
        # Makes every output differentiable.
        self._anchor = torch.zeros((), requires_grad=True)
        # Steps and averages that the model shows.
        self._shown: tuple[int, bool] | None = None
        self._requests = PeerRequests(self.world, runtime.has_version, self._answer)
        # Others may still need what this rank has when its script ends.
        self.world.watch.exit_hooks.append(self._leave)

    # Passes.

    def forward(self, inputs: Values) -> Any:
        """Run the stages' forwards of a pass; return what the model returns."""
        self._inputs = tuple(tensor.to(self.world.device) for tensor in inputs)
        pause = self._run_to_pause()
        self._passes.end_forward()
        outputs = _Seam.apply(
            self, pause, self._anchor, *pause.rank.take_outputs(pause.op)
        )
        return self.runtime.stages.results.restore(outputs)

    def run_backward(self, pause: Pause, gradients: Sequence[Tensor | None]) -> None:
        """Run the stages' backwards; called by that of the outputs."""
        if self._passes.next_call != "backward":
            raise UserError(
                "a second backward through one model(x), whose activations are gone: add losses"
                " up, and call backward() once"
            )
        count = self._passes.count
        if self._counted and count is None:
            raise UserError(
                "loss.backward(): got a model with counted=True; expected model.backward(loss,"
                " count) with the sum of the losses and its count"
            )
        # The executor adds the gradients of all ranks. Means are weighed alike here; sums are
        # divided by the total count at the update.
        factor = self.runtime.options.scale
        if self._counted:
            factor *= SUM_SCALE
        else:
            factor *= 1 / self.world.size
        scaled = tuple(
            None if gradient is None else gradient * factor for gradient in gradients
        )
        pause.rank.give_gradients(pause.op, scaled, count)
        self._run_to_pause()
        self._passes.end_backward()

    def pass_zeros(self) -> None:
        """Take part in a pass of the others, with the last inputs and gradients of zero."""
        pause = self._run_to_pause()
        outputs = pause.rank.take_outputs(pause.op)
        self._passes.end_forward()
        if self._counted:
            self._passes.count = torch.zeros(
                (), dtype=torch.float64, device=self.world.device
            )
        zeros = [
            torch.zeros_like(output) if differentiable(output) else None
            for output in outputs
        ]
        self.run_backward(pause, zeros)
        self._passes.count = None

    def _run_to_pause(self) -> Pause:
        """Carry out the program to the end of a pass's forward, or of its backward."""
        if self._pauses is None:
            shape = tuple(
                (tuple(tensor.shape), tensor.dtype) for tensor in self._inputs
            )
            self._pauses = self.runtime.passes(self, shape, counted=self._counted)
        pause = next(self._pauses)
        self.world.watch.at("the training script", pause.op.step)
        return pause

    def microbatch(self, step: int, m: int) -> tuple[Values, Tensor]:
        """Return the inputs of this pass, which the program asks for."""
        return self._inputs, self._anchor

    def finished(
        self, step: int, microbatch: int, loss: LossValue, output: Tensor
    ) -> None:
        """Never called: losses are the caller's."""

    # The newest weights.

    def show_newest(self, *, averaged: bool) -> None:
        """Complete this rank's updates, and bring the newest weights to its model.

        Args:
            averaged: whether those that the optimizers average.
        """
        steps_done = self._passes.steps_done
        if self._shown == (steps_done, averaged):
            return
        self._passes.check("forward", "the end of training", between_steps=True)
        with self._script.inside():
            self.runtime.await_updates(steps_done)
            subject = "averages" if averaged else "weights"
            stages_of: dict[int, list[int]] = {}  # by owner
            for stage, owner in enumerate(self.runtime.schedule.owners):
                if stage not in self.runtime.updated_stages:
                    stages_of.setdefault(owner, []).append(stage)
            # One question for each owner: it answers for all of its stages at once.
            for owner, stages in stages_of.items():
                question = " ".join([subject, *map(str, stages)])
                newest = self._requests.ask(owner, question, steps_done)
                self.runtime.show_received(newest)
            self.runtime.show_updated(averaged=averaged)
            self.runtime.show_whole()
        self._shown = steps_done, averaged

    def show_training(self) -> None:
        """Let the model be as the runtime trains it."""
        if self._shown is not None:
            self.runtime.show_updated(averaged=False)
            self.runtime.release_received()
            self._shown = None

    def show_gradients(self) -> None:
        """Let the parameters have their gradients, which the updates will use."""
        step = self._passes.steps_done
        with self._script.inside():
            self.runtime.await_updates(step)
            for weights, gradients in self.runtime.whole_gradients(step):
                for name, parameter in weights.items():
                    parameter.grad = gradients.get(name)

    def training_state(
        self, optimizers: StageOptimizers, settings: LoopSettings
    ) -> TrainingState:
        """Return the state of all ranks after the last step. A rank may call it alone."""
        self._passes.check("forward", "the end of training", between_steps=True)
        steps_done = self._passes.steps_done
        self.runtime.await_updates(steps_done)
        with self._script.inside():
            rank_states = [self.runtime.local_state_after(steps_done)]
            for owner in sorted({*self.runtime.schedule.owners, 0} - {self.world.rank}):
                rank_states.append(self._requests.ask(owner, "state", steps_done))
            rank_states = self.runtime.whole_states(rank_states)
            if self.runtime.is_compressed:
                # Not before: an owner that has answered has received the sums of all these steps,
                # so that no rank, this one included, has still to compress one.
                rank_states.append(self.runtime.messages_after(steps_done))
                for rank in range(self.world.size):
                    if rank != self.world.rank:
                        rank_states.append(
                            self._requests.ask(rank, "messages", steps_done)
                        )
        return TrainingState.of_stages(
            join_states(on_cpu(rank_states)),
            self.runtime.trained,
            optimizers,
            settings.of_steps,
            settings.changed_options(),
        )

    def _answer(self, subject: str, steps_done: int) -> Any:
        """Answer another rank; called by the thread of the questions."""
        kind, *stages = subject.split()
        if kind == "state":
            return on_cpu(self.runtime.local_state_after(steps_done))
        if kind == "messages":
            return on_cpu(self.runtime.messages_after(steps_done))
        averaged = kind == "averages"
        return on_cpu(
            self.runtime.newest_weights([*map(int, stages)], averaged=averaged)
        )

    # The end.

    def end_messages(self) -> None:
        """Complete this rank's part of all steps."""
        if self._pauses is None:
            return
        self._passes.check("forward", "the end of training", between_steps=True)
        pauses = self._pauses
        self._pauses = None
        with self._script.inside(), suppress(StopIteration):
            pauses.send(True)

    def close(self) -> None:
        """End the session. Every rank calls it, after :meth:`show_newest`."""
        self.end_messages()
        self._requests.leave()
        self.world.watch.exit_hooks.remove(self._leave)

    def _leave(self) -> None:
        """Give other ranks what they still wait for, as this one's script ends."""
        if self._passes.between_steps and dist.is_initialized():
            self.end_messages()
            self.world.watch.at(SCRIPT_END)
            self._requests.leave()
        else:
            # Within a step messages cannot end: it needs further passes of the script.
            self._requests.leave(waits=False)


class _Seam(torch.autograd.Function):
    """The outputs of the stages, whose backward is that of the stages.

    ::

        the stages' graphs, by the executor     seam     the script's graph
        x -> forwards -> outputs, detached  ----------->  outputs -> loss
             backwards <- run_backward()    <-----------  gradients <- loss.backward()
    """

    @staticmethod
    def forward(ctx: Any, session: LoopSession, pause: Pause, *tensors: Tensor) -> Any:
        ctx.session = session
        ctx.pause = pause
        # The first is the anchor.
        outputs = tuple(output.detach() for output in tensors[1:])
        ctx.mark_non_differentiable(
            *(output for output in outputs if not differentiable(output))
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.session.run_backward(ctx.pause, gradients)
        # For session, pause, anchor and outputs: the stages' backwards have run already.
        return (None,) * (3 + len(gradients))
