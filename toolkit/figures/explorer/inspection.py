"""What a choice costs: its program, steady state and predicted timeline, all by the toolkit."""

from collections.abc import Iterator, Mapping, Sequence
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
    Op,
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
_TIMED = 2  # of a longer simulation, those of which the time is the mean

_WEIGHTS = ("models", "held at once: all versions, and what is predicted from them")
_ALIVE = ("micro-batches", "in the steady state; 1 is all that a micro-batch keeps of the model")
_SENT = ("stage-parameters", "weights and gradients that all ranks send, in the steady state")
_LATE = "training steps by which the weights read are late"


class Number(NamedTuple):
    """One key number: what it is, its value and unit as text, and what that counts."""

    name: str
    value: str
    unit: str
    meaning: str


@dataclass(frozen=True)
class Analysis:
    """A schedule, and programs of it.

    Attributes:
        choice: what was asked for.
        schedule: what that is.
        drawn: a program of as many training steps as are drawn.
        predicted: one to simulate where messages take no time.
        steady: one period in the steady state.
    """

    choice: Choice
    schedule: Schedule
    drawn: Program
    predicted: Program
    steady: SteadyState

    @cached_property
    def settled(self) -> Program:
        """One to simulate where messages take time, until the first steps are felt no more."""
        return self.schedule.lower(steps_to_time(self.schedule, _TIMED))

    @cached_property
    def activations(self) -> tuple[Fraction, ...]:
        """All ranks' activations in each drawn slot, in micro-batches."""
        n_stages = self.schedule.n_stages
        return tuple(Fraction(alive, n_stages) for alive in self.drawn.total_activations())

    @cached_property
    def traffic(self) -> tuple[Fraction, ...]:
        """What all ranks send in each drawn slot, in stage-parameters."""
        return units_sent(self.drawn.traffic())

    @property
    def peak(self) -> Fraction:
        """The most activations of all ranks together, in micro-batches, in the steady state."""
        return Fraction(self.steady.peak_activations, self.schedule.n_stages)

    @property
    def fullest(self) -> Fraction:
        """The most activations of one rank, likewise."""
        return Fraction(max(map(max, self.steady.activations)), self.schedule.n_stages)

    @property
    def weights(self) -> Fraction:
        """The most weights of one rank, in models: all versions, and predictions."""
        return Fraction(max(self.steady.weights), self.schedule.n_stages)

    @property
    def most_sent(self) -> Fraction:
        """The most that all ranks send in a slot of the steady state, in stage-parameters."""
        return max(self.steady.units_by_slot)

    def numbers(self, timeline: "Timeline", *, in_slots: bool) -> list[Number]:
        """The key numbers; times are seconds, or slots."""
        schedule, sent = self.schedule, self.steady.units_by_slot
        slots = "slots, half a backward 0.5" if schedule.splits_backward else "slots"
        time = (f"{timeline.step_time:.4g}", slots) if in_slots else duration(timeline.step_time)
        return [
            Number("ranks", str(schedule.n_ranks), "", "devices"),
            Number("peak activations", _text(self.peak), *_ALIVE),
            Number("of the fullest rank", _text(self.fullest), *_ALIVE),
            Number("weights of the fullest rank", _text(self.weights), *_WEIGHTS),
            Number("mean staleness", f"{schedule.mean_staleness:.3g}", "steps", _LATE),
            Number("largest staleness", str(schedule.max_staleness), "steps", _LATE),
            Number("mean sent in a slot", _text(sum(sent) / len(sent)), *_SENT),
            Number("most sent in a slot", _text(self.most_sent), *_SENT),
            Number("step time", *time, "of the simulated timeline"),
            Number(
                "idle", f"{100 * timeline.idle_share:z.1f}", "%", "of all ranks' time, simulated"
            ),
        ]


@lru_cache(maxsize=16)
def analyse(choice: Choice, n_steps: int) -> Analysis:
    """Lower ``choice``.

    Raises:
        ValueError: it is impossible; the message may end with a grid.
    """
    schedule = choice.build()
    predicted = schedule.lower(_PREDICTED)
    drawn = predicted if n_steps == _PREDICTED else schedule.lower(n_steps)
    return Analysis(choice, schedule, drawn, predicted, steady_state(schedule))


def predict(analysis: Analysis, costs: "Sequence[StageCost]", hardware: "Hardware") -> "Timeline":
    """The simulated timeline of a few training steps.

    Raises:
        ValueError: the costs or the hardware do not fit the schedule.
    """
    from toolkit.cost import UNIT, simulate

    program = analysis.predicted if hardware == UNIT else analysis.settled
    return simulate(program, costs, hardware)


def _text(value: Fraction | float) -> str:
    return f"{float(value):.4g}"


_Key = tuple[int, int]  # rank, position among the rank's instructions


def texts(program: Program) -> Mapping[_Key, str]:
    """``[rank, position]`` of every op: the op, what it waits for and what it frees, in lines."""
    found: dict[_Key, str] = {}
    for rank, instructions in enumerate(program.ranks):
        seen = _Rank(program, rank)
        ops = (k for k, i in enumerate(instructions) if i.action.computes)
        found |= {(rank, k): seen.text(k) for k in ops}
    return found


def find(program: Program, wanted: str) -> str:
    """The text of an op of the first training step, or that there is none such."""
    for rank, instructions in enumerate(program.ranks):
        for k, i in enumerate(instructions):
            if i.action.computes and i.step == program.first_step and str(i.op) == wanted:
                return _Rank(program, rank).text(k)
    return f"there is no op {wanted}: write stage, kind (F, B, I or W) and micro-batch, such as 0F0"


class _Rank:
    """What each instruction of a rank waits for, and what waits for it."""

    def __init__(self, program: Program, rank: int) -> None:
        self.schedule, self.rank = program.schedule, rank
        self.instructions = program.ranks[rank]
        self.needed = needs(self.instructions, rank)
        self.users: list[list[Instruction]] = [[] for _ in self.instructions]
        for user, needed in zip(self.instructions, self.needed, strict=True):
            for p in needed:
                self.users[p].append(user)
        ops = [i for i in self.instructions if i.action.computes]
        self.before = dict(zip(ops[1:], ops, strict=False))

    def text(self, position: int) -> str:
        i, users = self.instructions[position], self.users[position]
        tick = self.schedule.timing.ticks_per_slot
        head = f"{i.op} of step {i.step}: {i.action.label} of stage {i.stage}"
        head += f" on micro-batch {i.microbatch}; rank {self.rank}, slot {_slot(i.tick, tick)}"
        freed = sorted((user for user in users if user.action == Action.FREE), key=_buffer)
        frees = [_freed(user) for user in freed if user.tick == i.tick + tick]
        waits = self._waits(position)
        lines = [
            head,
            "waits for: " + "; ".join(waits),
            "frees: " + ("; ".join(frees) or "nothing"),
        ]
        for user in freed:
            if i.action == Action.FORWARD and user.buffer == Buffer.ACTIVATION:
                lines.append(f"keeps its activations until slot {_slot(user.tick, tick)}")
        for user in users:
            if user.action == Action.SEND and user.buffer != Buffer.GRADIENT:
                lines.append(f"sends its result to rank {user.peers[0]}")
        return "\n".join(lines)

    def _waits(self, position: int) -> Iterator[str]:
        i = self.instructions[position]
        late = (i.step or 0) - (i.version or 0)
        fresh = "the newest" if not late else f"{late} step{'s' * (late > 1)} late"
        yield f"{_weights(i)} ({fresh}; {self._origin(position)})"
        for op in dependencies(i.op, self.schedule.timing.starts, self.schedule.n_stages):
            yield self._input(op, position)
        before = self.before.get(i)
        if before is not None and not self.schedule.one_device:
            own = "" if before.step == i.step else f" of step {before.step}"
            yield f"{before.op}{own}, before it on this rank"

    def _origin(self, position: int) -> str:
        """Where the version that is read, or predicted from, has come from."""
        version = self.instructions[position].version
        for p in self.needed[position]:
            maker = self.instructions[p]
            if maker.action == Action.PREDICT:
                return self._origin(p)
            if maker.action == Action.UPDATE and maker.version == version:
                return "updated here"
            if maker.buffer == Buffer.WEIGHTS and maker.version == version:
                how = "broadcast by" if maker.action == Action.BROADCAST else "from"
                return f"{how} rank {maker.peers[0]}"
        return "held from the start"

    def _input(self, op: Op, position: int) -> str:
        """One op whose result is needed, and the rank that sends it."""
        gradient = op.kind != Kind.FORWARD
        if op.stage == self.instructions[position].stage:
            return f"{op} ({'gradient of the output, kept' if gradient else 'activations'} here)"
        buffer = Buffer.ACTIVATION_GRADIENT if gradient else Buffer.ACTIVATION
        makers = [self.instructions[p] for p in self.needed[position]]
        sent = [f"from rank {i.peers[0]}" for i in makers if i.peers and i.buffer == buffer]
        what = "gradient" if gradient else "activation"
        return f"{op} ({what} {sent[0] if sent else 'made here'})"


def _buffer(i: Instruction) -> int:
    return i.buffer or Buffer.ACTIVATION


def _weights(i: Instruction) -> str:
    if i.buffer == Buffer.PREDICTION:
        return f"weights {i.step} of stage {i.stage} as predicted from {i.version}"
    return f"weights {i.version} of stage {i.stage}"


def _freed(i: Instruction) -> str:
    if i.buffer == Buffer.ACTIVATION:
        return f"activations of {i.stage}F{i.microbatch}"
    return _weights(i)


def _slot(tick: int, ticks_per_slot: int) -> str:
    return f"{tick / ticks_per_slot:.4g}"
