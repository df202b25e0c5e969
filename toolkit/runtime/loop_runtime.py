"""The runtime under a custom training loop: the loop runs passes, the executor all the rest."""

from collections.abc import Collection, Generator, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.runtime.distributed import WINDOW, Distributed
from toolkit.runtime.executor import Executor
from toolkit.runtime.message_layout import Layouts
from toolkit.runtime.microbatches import Shape
from toolkit.runtime.process_group.columns import Column
from toolkit.runtime.rank import MicrobatchSource, Rank
from toolkit.runtime.rank_compression import ranks_state
from toolkit.runtime.row_executor import RowExecutor
from toolkit.runtime.state import local_state_of
from toolkit.runtime.updater import Weights
from toolkit.schedule import Action, Instruction, Program

# Ops of the training steps that are lowered at first, as a caller waits.
FIRST_WINDOW = 5_000


class Pause(NamedTuple):
    """Where the caller's code acts: after the op that ends a forward or a backward of a pass."""

    rank: Rank
    op: Instruction


class LoopRuntime(Distributed):
    """A ``Distributed`` whose forwards and backwards begin when the caller asks for them.

    :meth:`passes` pauses where the caller's code acts. In between, the executor's threads run
    messages and updates, also while the caller's code runs::

        caller      outputs -> loss -> gradients |       loss, optimizer.step()   |
        main thread                               backward                         forward
        threads     receive weights ..................... send gradients, update .............

    Attributes:
        updates_wait: whether updates of a training step wait for :meth:`allow_updates`. Set it
            before :meth:`passes`.
    """

    def __post_init__(self) -> None:
        if isinstance(self.world, Column):
            self.world = self.world.everyone  # it finds its column itself
        super().__post_init__()
        self._keep_for_readers()
        self.updates_wait = False
        self._executor: Executor | None = None  # of the present program
        self._rank: Rank | None = None  # its memory
        self._kept_buffers: dict[str, Tensor] = {}  # as they were before an evaluation

    def passes(
        self, microbatches: MicrobatchSource, shape: Shape, *, counted: bool = False
    ) -> Generator[Pause, bool | None, None]:
        """Train without a loss and without known end; pause after each forward and backward.

        After the forward of a micro-batch the caller takes its outputs from the rank, and gives
        their gradients; see :class:`Rank`. ``send(True)``, on all ranks after the same training
        step, completes that and ends.

        Args:
            microbatches: inputs of this rank's micro-batches.
            shape: shape and type of each input of the first.
            counted: whether counts of the loss come with the gradients.
        """
        self._check_ended()
        layouts = self._find_layouts(shape)
        if counted:
            layouts = layouts.with_counts()
        # A short program at first, since the caller waits for it; then longer ones, since the
        # pipeline drains at the end of each.
        window = FIRST_WINDOW
        ends = False
        while not ends:
            self._use_schedule_of(self.steps_done)
            program = self._next_program(window)
            window = min(2 * window, WINDOW)
            ends = yield from self._passes_of(program, microbatches, layouts)
        self.world.watch.at("between programs")

    def _next_program(self, window: int) -> Program:
        """Lower the next steps, of about ``window`` ops, by one schedule."""
        n_steps = max(1, window // len(self.schedule.timing.starts))
        change = self.schedule_plan.next_change(self.steps_done)
        if change is not None:
            n_steps = min(n_steps, change - self.steps_done)
        return self.schedule.lower(n_steps, self.steps_done).verify()

    def _passes_of(
        self, program: Program, microbatches: MicrobatchSource, layouts: Layouts
    ) -> Generator[Pause, bool | None, bool]:
        """Pause after each pass of ``program``; return whether the caller has ended it."""
        ends = False
        with self._messages(layouts) as messages:
            rank = self._begin(program, microbatches, messages, None)
            rank.next_step = program.first_step  # what is read from there on is kept
            rank.is_read_alone = True
            make = Executor if self._row is None else RowExecutor
            executor = make(
                rank,
                messages,
                program,
                None,
                overlap=self.overlap,
                stepwise=True,
                update_limit=program.first_step - 1 if self.updates_wait else inf,
            )
            self._rank = rank
            self._executor = executor
            for op in executor.run(_ends_of_passes(program.ranks[self.rank])):
                # The end of each step may be the end of the program, and the next one reads its
                # versions.
                if op.action != Action.FORWARD:
                    rank.next_step = cast(int, op.step) + 1
                ends = bool((yield Pause(rank, op)))
                if ends:
                    executor.end_here()
        self.steps_done = rank.next_step
        return ends

    # Between training steps.

    def allow_updates(self, step: int) -> None:
        """Let the updates of training step ``step`` begin; see ``updates_wait``."""
        if self._executor is not None:
            limit = inf
            if self.updates_wait:
                limit = step
                # The loop may have clipped the gradients in place. On a GPU that is only queued, on
                # another stream than that of the thread that updates.
                self.world.finish_computing()
            self._executor.allow_updates(step, limit)

    def await_updates(self, steps_done: int) -> None:
        """Wait until this rank has made the updates of the first ``steps_done`` steps."""
        if self._executor is not None:
            self._executor.await_updates(steps_done - 1)
            self.world.finish_computing()

    @property
    def has_whole_gradients(self) -> bool:
        """Whether this rank has the gradients of all stages before their updates."""
        updates_all = len(self.updated_stages) == len(self.stages)
        has_whole_stages = self._row is None
        return self.overlap and self.updates_wait and updates_all and has_whole_stages

    def check_norm_of_model(self) -> None:
        """Raise UserError if a loop cannot clip by the norm of the model, as torch does."""
        if self._row is not None:
            raise UserError(
                f"parameters(): got a call after the last backward of {self.schedule.name} with"
                f" width={self._row.row.width}; expected none, since each device has a part of the"
                " gradients. Use options=StepOptions(clip=...) to clip"
            )

    def whole_gradients(
        self, step: int
    ) -> list[tuple[dict[str, nn.Parameter], Weights]]:
        """Return each stage's parameters, and their gradients at ``step``, by name.

        Gradients may be changed in place. A parameter may have none.

        Waits for all ranks' parts; see :attr:`has_whole_gradients`.
        """
        assert self._executor is not None
        assert self._rank is not None
        self._executor.await_sums(step)
        gradients = []
        for stage, runner in enumerate(self._runners):
            total = self._rank.sums[stage, step]
            total.divide_by_count(runner.masters)
            of_masters = {
                name: gradient
                for name, gradient in total.tensors.items()
                if name in runner.masters
            }
            gradients.append((runner.masters, of_masters))
        # So that an update, on another thread's stream, may read them.
        self.world.finish_computing()
        return gradients

    # Compressed messages.

    @property
    def is_compressed(self) -> bool:
        """Whether ranks keep what messages of codes lost."""
        return bool(self._compressors)

    def _keep_for_readers(self) -> None:
        """Keep for other ranks what their states have of this rank's messages."""
        newest = {stage: self._runners[stage].newest() for stage in self.updated_stages}
        for compressor in self._compressors.values():
            # A rank that is further ahead would need weights to which the reader's own gradients
            # have still to be added.
            compressor.follow_loop(self.schedule.max_staleness, newest)

    def _load(self, state: Mapping[str, Any]) -> None:
        super()._load(state)
        self._keep_for_readers()

    def _exact_weights(self, stage: int) -> Weights:
        """Return the newest weights of a stage, if passes read rounded ones in their place."""
        compressor = self._compressors.get(self.rank)
        if compressor is None:
            return {}
        return compressor.weights.newest.get(stage, {})

    # The newest weights, for a script that reads them. Threads of other ranks' questions call
    # these methods, too, while the next training step may be under way. So they read versions,
    # which are never changed in place, and not the parameters.

    def has_version(self, steps_done: int) -> bool:
        """Whether this rank has updated its stages ``steps_done`` times."""
        return all(
            steps_done in versions for versions in self._weight_store.versions.values()
        )

    def newest_weights(
        self, stages: Collection[int], *, averaged: bool
    ) -> dict[int, Weights]:
        """Return the newest weights, frozen weights and buffers of stages that this rank updates.

        Their number of updates is :meth:`has_version`'s. ``averaged``: with the averages of their
        optimizers, such as schedule-free's, in place of the weights that are trained.
        """
        self.world.finish_computing()
        newest = {}
        for stage in stages:
            weights = self._weight_store.newest(stage) | self._exact_weights(stage)
            for name, buffer in self._kept_buffers.items():
                if name in weights:
                    weights[name] = buffer
            if averaged:
                weights |= self._runners[stage].optimizer_averages(weights)
            newest[stage] = weights
        return newest

    def show_updated(self, *, averaged: bool) -> None:
        """Put the newest weights of the stages that this rank updates into the model."""
        newest = self.newest_weights(self.updated_stages, averaged=averaged)
        for stage, weights in newest.items():
            for name, master in self._runners[stage].masters.items():
                master.data = weights[name]

    def show_whole(self) -> None:
        """Put whole weights into the model, in place of this device's shards.

        The devices of a rank call it together, after :meth:`show_received` and
        :meth:`show_updated`. The latter puts shards back.
        """
        if self._row is not None:
            self._row.show(self._runners)

    def show_received(self, newest: Mapping[int, Weights]) -> None:
        """Put weights and buffers of stages that other ranks update into the model."""
        for stage, weights in newest.items():
            self._weight_store.take(stage, weights)

    def whole_weights(self) -> Weights:
        """Return copies of all tensors of the whole model, by name. Every rank calls it."""
        return {
            name: tensor.detach().clone()
            for name, tensor in self.module().state_dict().items()
        }

    def release_received(self) -> None:
        """Free the memory of :meth:`show_received`; buffers stay."""
        self._weight_store.forget()
        self._kept_buffers = {}

    def keep_buffers(self) -> None:
        """Copy the buffers: other ranks get the copies, whatever the script changes here."""
        if not self._kept_buffers:
            buffers = {}
            for stage in self.updated_stages:
                for name, buffer in self.stages[stage].named_buffers():
                    buffers[name] = buffer.clone()
            self._kept_buffers = buffers  # at once: another thread may read them

    def local_state_after(self, steps_done: int) -> dict[str, Any]:
        """Return what this rank alone adds to the state after ``steps_done`` steps."""
        self.world.finish_computing()
        versions = {}
        for stage in self.updated_stages:
            # A version that is still to be freed, or to be read by a step under way, may be there.
            oldest = self.schedule.oldest_version(stage, steps_done)
            versions[stage] = {
                version: weights
                # A copy, since the executor's threads may add versions meanwhile.
                for version, weights in dict(self._weight_store.versions[stage]).items()
                if oldest <= version <= steps_done
            }
        state = local_state_of(
            steps_done,
            self.stages,
            self._runners,
            versions,
            self._owned_stages(),
            is_rank_zero=self.rank == 0,
        )
        for name in state["fixed"]:
            if name in self._kept_buffers:
                state["fixed"][name] = self._kept_buffers[name]
        if self._row is None:
            return state
        from toolkit.runtime.device_rows import shards_of

        # As shards: a thread that answers another rank must not exchange with the row, whose other
        # device may be elsewhere.
        return cast(dict[str, Any], shards_of(state))

    def whole_states(
        self, local_states: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Return the :meth:`local_state_after` of several ranks with whole tensors.

        The devices of a rank call it together, each with the states of its own column.
        """
        if self._row is None:
            return [*local_states]
        from toolkit.runtime.device_rows import dtensors_of

        return [
            self._row.whole_state(dtensors_of(state, self._row.row))
            for state in local_states
        ]

    def messages_after(self, steps_done: int) -> dict[str, Any]:
        """Return what this rank keeps of compressed messages after ``steps_done`` steps.

        Only once the owners of all stages have made the updates of these steps: the sums have then
        passed every rank.
        """
        self.world.finish_computing()
        return ranks_state(self._compressors, steps_done)

    # Names, by which a state is independent of the stages.

    @property
    def trained(self) -> list[list[str]]:
        """The names of the trained weights of each stage."""
        return [[*runner.masters] for runner in self._runners]

    def averaged_names(self, j: int) -> list[str]:
        """Return the names of what averages of stage ``j`` follow; see ``options.ema``."""
        return [*self._runners[j].averaged()]


def _ends_of_passes(order: Sequence[Instruction]) -> set[int]:
    """Return the positions of each micro-batch's last forward and last backward in each step."""
    last_positions: dict[tuple, int] = {}
    for position, i in enumerate(order):
        if i.action.computes:
            # A pass runs through all stages of a micro-batch; the last op of each direction
            # replaces those before.
            last_positions[i.action == Action.FORWARD, i.step, i.microbatch] = position
    return {*last_positions.values()}
