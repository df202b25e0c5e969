"""What a choice costs: its program, steady state and predicted timeline, all by the toolkit."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

from toolkit.figures.explorer.choice import Choice
from toolkit.format import duration
from toolkit.schedule import Program, Schedule, SteadyState, steady_state
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
