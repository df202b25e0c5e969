"""What a choice costs: its program, steady state and predicted timeline, all by the toolkit."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

from toolkit.figures.explorer.choice import Choice
from toolkit.format import duration
from toolkit.schedule import (
    Action,
    Buffer,
    Instruction,
    Kind,
    Program,
    Schedule,
    SteadyState,
    steady_state,
)
from toolkit.schedule.dependencies import dependencies, needs
from toolkit.schedule.steady import steps_to_time
from toolkit.schedule.traffic import units_sent

if TYPE_CHECKING:
    from toolkit.cost import Hardware, StageCost, Timeline

_PREDICTED = 3  # training steps that are simulated
_TIMED = 2  # steps of a longer simulation whose mean time counts

_WEIGHTS = ("models", "held at once: all versions, and what is predicted from them")
_ALIVE = ("micro-batches", "in the steady state; 1 is all that a micro-batch keeps of the model")
_SENT = ("stage-parameters", "weights and gradients that all ranks send, in the steady state")


class Number(NamedTuple):
    """One key number: its name, value and unit as text, and what it counts."""

    name: str
    value: str
    unit: str
    meaning: str


@dataclass(frozen=True)
class Analysis:
    """A schedule, and programs of it.

    Attributes:
        choice: what was chosen.
        schedule: the schedule that it makes.
        drawn: a program of the training steps that are drawn.
        predicted: a program to simulate where messages take no time.
        steady: one period in the steady state.
    """

    choice: Choice
    schedule: Schedule
    drawn: Program
    predicted: Program
    steady: SteadyState

    @cached_property
    def settled(self) -> Program:
        """A program to simulate where messages take time, long enough to reach a steady state."""
        return self.schedule.lower(steps_to_time(self.schedule, _TIMED))

    @cached_property
    def activations(self) -> tuple[Fraction, ...]:
        """All ranks' activations in each drawn slot, in micro-batches."""
        return tuple(map(self._models, self.drawn.total_activations()))

    @cached_property
    def traffic(self) -> tuple[Fraction, ...]:
        """What all ranks send in each drawn slot, in stage-parameters."""
        return units_sent(self.drawn.traffic())

    @property
    def peak(self) -> Fraction:
        """Peak activations of all ranks together, in micro-batches, in the steady state."""
        return self._models(self.steady.peak_activations)

    @property
    def weights(self) -> Fraction:
        """Most weights that a rank holds, in models: all versions, and predictions."""
        return self._models(max(self.steady.weights))

    @property
    def most_sent(self) -> Fraction:
        """Most that all ranks send in a slot of the steady state, in stage-parameters."""
        return max(self.steady.units_by_slot)

    def _models(self, stages: int) -> Fraction:
        return Fraction(stages, self.schedule.n_stages)

    def numbers(self, timeline: "Timeline", *, in_slots: bool) -> list[Number]:
        """The key numbers; times are in slots, or else in seconds."""
        schedule, sent = self.schedule, self.steady.units_by_slot
        slots = "slots, half a backward 0.5" if schedule.splits_backward else "slots"
        time = (f"{timeline.step_time:.4g}", slots) if in_slots else duration(timeline.step_time)
        fullest = self._models(max(map(max, self.steady.activations)))
        mean_sent, idle = sum(sent) / len(sent), f"{100 * timeline.idle_share:z.1f}"
        late = "steps", "training steps by which the weights read are late"
        return [
            Number("ranks", str(schedule.n_ranks), "", "devices"),
            Number("peak activations", _text(self.peak), *_ALIVE),
            Number("of the fullest rank", _text(fullest), *_ALIVE),
            Number("weights of the fullest rank", _text(self.weights), *_WEIGHTS),
            Number("mean staleness", f"{schedule.mean_staleness:.3g}", *late),
            Number("largest staleness", str(schedule.max_staleness), *late),
            Number("mean sent in a slot", _text(mean_sent), *_SENT),
            Number("most sent in a slot", _text(self.most_sent), *_SENT),
            Number("step time", *time, "of the simulated timeline"),
            Number("idle", idle, "%", "of all ranks' time, simulated"),
        ]


@lru_cache(maxsize=16)
def analyse(choice: Choice, n_steps: int) -> Analysis:
    """Lower ``choice``.

    Raises:
        UserError: it is impossible; the message may end with a grid.
    """
    schedule = choice.build()
    predicted = schedule.lower(_PREDICTED)
    drawn = predicted if n_steps == _PREDICTED else schedule.lower(n_steps)
    return Analysis(choice, schedule, drawn, predicted, steady_state(schedule))


def predict(analysis: Analysis, costs: "Sequence[StageCost]", hardware: "Hardware") -> "Timeline":
    """Simulate a few training steps.

    Raises:
        UserError: the costs or the hardware do not fit the schedule.
    """
    from toolkit.cost import UNIT, simulate

    program = analysis.predicted if hardware == UNIT else analysis.settled
    return simulate(program, costs, hardware)


def _text(value: Fraction | float) -> str:
    return f"{float(value):.4g}"


def find(program: Program, wanted: str) -> str:
    """The text of an op of the first training step, or that there is no such op."""
    for rank, instructions in enumerate(program.ranks):
        for k, i in enumerate(instructions):
            if i.action.computes and i.step == program.first_step and str(i.op) == wanted:
                return texts(program, rank)[k]
    return f"there is no op {wanted}: write stage, kind (F, B, I or W) and micro-batch, such as 0F0"


def texts(program: Program, rank: int) -> dict[int, str]:
    """Text of each op of ``rank`` by its position: the op, what it waits for and what it frees."""
    instructions, schedule = program.ranks[rank], program.schedule
    needed = needs(instructions, rank)
    users: list[list[Instruction]] = [[] for _ in instructions]
    for user, positions in zip(instructions, needed, strict=True):
        for p in positions:
            users[p].append(user)
    found: dict[int, str] = {}
    before = None
    for k, i in enumerate(instructions):
        if not i.action.computes:
            continue
        makers = [instructions[p] for p in needed[k]]
        predictions = (p for p in needed[k] if instructions[p].action == Action.PREDICT)
        sources = makers + [instructions[q] for p in predictions for q in needed[p]]
        waits = [_weights_read(i, sources), *_inputs(schedule, i, makers)]
        if before is not None and not schedule.one_device:
            own = "" if before.step == i.step else f" of step {before.step}"
            waits.append(f"{before.op}{own}, before it on this rank")
        found[k] = "\n".join(
            [
                f"{i.op} of step {i.step}: {i.action.label} of stage {i.stage} on micro-batch"
                f" {i.microbatch}; rank {rank}, slot {_slot(schedule, i.tick)}",
                "waits for: " + "; ".join(waits),
                *_results(schedule, i, users[k]),
            ]
        )
        before = i
    return found


def _weights_read(i: Instruction, sources: Sequence[Instruction]) -> str:
    """The weights of an op, how late they are, and where that version comes from."""
    late = (i.step or 0) - (i.version or 0)
    fresh = "the newest" if not late else f"{late} step{'s' * (late > 1)} late"
    origin = "held from the start"
    for maker in sources:
        if maker.version == i.version and maker.action == Action.UPDATE:
            origin = "updated here"
        elif maker.version == i.version and maker.peers and maker.buffer == Buffer.WEIGHTS:
            how = "broadcast by" if maker.action == Action.BROADCAST else "from"
            origin = f"{how} rank {maker.peers[0]}"
    return f"{_weights(i)} ({fresh}; {origin})"


def _inputs(schedule: Schedule, i: Instruction, makers: Sequence[Instruction]) -> Iterator[str]:
    """The ops whose results an op needs, and the ranks that send them."""
    for op in dependencies(i.op, schedule.timing.starts, schedule.n_stages):
        gradient = op.kind != Kind.FORWARD
        if op.stage == i.stage:
            yield f"{op} ({'gradient of the output, kept' if gradient else 'activations'} here)"
            continue
        buffer = Buffer.ACTIVATION_GRADIENT if gradient else Buffer.ACTIVATION
        sent = [f"from rank {m.peers[0]}" for m in makers if m.peers and m.buffer == buffer]
        what = "gradient" if gradient else "activation"
        yield f"{op} ({what} {sent[0] if sent else 'made here'})"


def _results(schedule: Schedule, i: Instruction, users: Sequence[Instruction]) -> Iterator[str]:
    """What an op frees, keeps and sends."""
    freed = [user for user in users if user.action == Action.FREE]
    freed.sort(key=lambda user: user.buffer or Buffer.ACTIVATION)
    now = i.tick + schedule.timing.ticks_per_slot
    frees = [
        f"activations of {user.stage}F{user.microbatch}"
        if user.buffer == Buffer.ACTIVATION
        else _weights(user)
        for user in freed
        if user.tick == now
    ]
    yield "frees: " + ("; ".join(frees) or "nothing")
    for user in freed:
        if i.action == Action.FORWARD and user.buffer == Buffer.ACTIVATION:
            yield f"keeps its activations until slot {_slot(schedule, user.tick)}"
    for user in users:
        if user.action == Action.SEND and user.buffer != Buffer.GRADIENT:
            yield f"sends its result to rank {user.peers[0]}"


def _weights(i: Instruction) -> str:
    if i.buffer == Buffer.PREDICTION:
        return f"weights {i.step} of stage {i.stage} as predicted from {i.version}"
    return f"weights {i.version} of stage {i.stage}"


def _slot(schedule: Schedule, tick: int) -> str:
    return f"{tick / schedule.timing.ticks_per_slot:.4g}"
