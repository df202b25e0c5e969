"""What a choice costs: its program, steady state and predicted timeline, all by the toolkit."""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch

from toolkit.cost import (
    UNIT,
    Costs,
    Hardware,
    Timeline,
    affordable_delay,
    profile,
    simulate,
)
from toolkit.errors import UserError, whole
from toolkit.format import count, duration, size
from toolkit.model import Images, build, partition
from toolkit.schedule import (
    Action,
    Buffer,
    Instruction,
    Program,
    Schedule,
    SteadyState,
    steady_state,
)
from toolkit.schedule.choice import Choice
from toolkit.schedule.dependencies import dependencies, needs
from toolkit.schedule.program import units_sent
from toolkit.schedule.steady_state import steps_to_time

LARGEST = 32  # stages or micro-batches in a drawing
_STEPS = 3  # training steps that are simulated where messages take no time
AFFORDABLE = "affordable"
"""The delay of :func:`toolkit.cost.affordable_delay`."""
_SEARCHED = 64  # stages times micro-batches: seconds
_BATCH = 32  # images of a micro-batch
_NOTHING = 2**20  # bytes: less is no saving
_TIMED = 2  # steps of a longer simulation, at least, whose mean time counts
_ALIVE = "micro-batches", "in the steady state; 1 is all that a micro-batch keeps of the model"
_HELD = "simulated; without the optimizer's state"
_SENT = "stage-parameters", "weights and gradients that all ranks send, in the steady state"


class Number(NamedTuple):
    """One key number: its name, value and unit as text, and what it counts."""

    name: str
    value: str
    unit: str
    meaning: str


@dataclass(frozen=True, eq=False)
class Analysis:
    """A schedule, a program of the training steps that are drawn, and the steady state."""

    choice: Choice
    schedule: Schedule
    drawn: Program
    steady: SteadyState

    @cached_property
    def activations(self) -> tuple[float, ...]:
        """All ranks' activations in each drawn slot, in micro-batches."""
        return tuple(x / self.schedule.n_stages for x in self.drawn.total_activations())

    @cached_property
    def traffic(self) -> tuple[float, ...]:
        """What all ranks send in each drawn slot, in stage-parameters."""
        return tuple(map(float, units_sent(self.drawn.traffic())))

    @property
    def peak(self) -> float:
        """Peak activations of all ranks together, in micro-batches, in the steady state."""
        return self.steady.peak_activations / self.schedule.n_stages

    @property
    def most_sent(self) -> float:
        """Most that all ranks send in a slot of the steady state, in stage-parameters."""
        return float(max(self.steady.units_by_slot))

    @cached_property
    def late(self) -> float:
        """Share of the ops that read late weights."""
        found = [late > 0 for row in self.schedule.staleness for late in row]
        return sum(found) / len(found)

    def numbers(self, timeline: Timeline, *, in_slots: bool) -> list[Number]:
        """The key numbers; times are in slots, or else in seconds."""
        schedule, steady, n = self.schedule, self.steady, self.schedule.n_stages
        time, unit = duration(timeline.step_time)
        if in_slots:
            time = f"{timeline.step_time:.4g}"
            unit = "slots, half a backward 0.5" if schedule.splits_backward else "slots"
        fullest = max(map(max, steady.activations)) / n
        weights = max(steady.weights) / n
        sent = float(sum(steady.units_by_slot)) / len(steady.units_by_slot)
        held = "models", "held at once: all versions, and what is predicted from them"
        late = "steps", "training steps by which the weights read are late"
        idle = f"{100 * timeline.idle_share:z.1f}"
        memory = []
        if not in_slots:
            for of, peak in (("all ranks", timeline.peak_memory()),
                             ("the fullest rank", fullest_rank(timeline))):  # fmt: skip
                value, in_unit = size(peak).split()
                memory.append(Number(f"memory of {of}", value, in_unit, _HELD))
        return [
            Number("ranks", str(schedule.n_ranks), "", "devices"),
            Number("peak activations", f"{self.peak:.4g}", *_ALIVE),
            Number("of the fullest rank", f"{fullest:.4g}", *_ALIVE),
            *memory,
            Number("weights of the fullest rank", f"{weights:.4g}", *held),
            Number("mean staleness", f"{schedule.mean_staleness:.3g}", *late),
            Number("largest staleness", str(schedule.max_staleness), *late),
            Number("mean sent in a slot", f"{sent:.4g}", *_SENT),
            Number("most sent in a slot", f"{self.most_sent:.4g}", *_SENT),
            Number("step time", time, unit, "of the simulated timeline"),
            Number("idle", idle, "%", "of all ranks' time, simulated"),
        ]


def fullest_rank(timeline: Timeline) -> float:
    """Peak bytes of the rank that holds the most."""
    return max(map(timeline.peak_memory, range(timeline.n_ranks)))


def verdict(
    first: tuple[Analysis, Timeline], second: tuple[Analysis, Timeline], *, in_slots: bool
) -> str:
    """What the first schedule gains and costs beside the second, as one sentence."""
    (a, of_a), (b, of_b) = first, second
    ratio = of_a.step_time / of_b.step_time
    found = ["a step takes as long" if 0.995 < ratio < 1.005 else f"a step takes {ratio:.3g} times"
             " as long"]  # fmt: skip
    if a.schedule.n_ranks != b.schedule.n_ranks:
        found.append(f"{a.schedule.n_ranks} ranks instead of {b.schedule.n_ranks}")
    if in_slots:
        found.append(f"{a.peak:.4g} micro-batches' activations instead of {b.peak:.4g}")
    else:
        for saved, where in (
            (fullest_rank(of_b) - fullest_rank(of_a), "on the fullest rank"),
            (of_b.peak_memory() - of_a.peak_memory(), "on all ranks together"),
        ):
            words = f"{size(abs(saved))} {'saved' if saved > 0 else 'more'}"
            found.append(f"{words if abs(saved) >= _NOTHING else 'no memory saved'} {where}")
    most = a.schedule.max_staleness
    late = f"{a.late:.0%} of ops read weights up to {count(most, 'step')} late"
    found.append(late if most else "all weights are fresh")
    return f"{a.schedule.name} beside {b.schedule.name}: {'; '.join(found)}."


@lru_cache(maxsize=64)
def costs_of(model: str, n_stages: int) -> Costs:
    """Costs of a model of the zoo, on micro-batches of 32 images of 224 x 224 pixels."""
    images = Images(3, 224, 224, 1000)
    with torch.device("meta"):
        net = build(model, **images.arguments)
    example = images.example(_BATCH, "meta")
    return profile(partition(net, n_stages, example, by="flops"), example)


def drawable(choice: Choice) -> Schedule:
    """Build ``choice``; raise UserError if it is impossible, or too large to draw."""
    check_sizes(choice.stages, choice.microbatches, choice.accumulate)
    built = choice.build()
    check_sizes(built.n_stages, built.n_workers, built.accumulate)
    return built


def check_sizes(stages: int, microbatches: int, accumulate: int | None = None) -> None:
    """Raise UserError unless stages, and the micro-batches of all rounds, are from 1 to 32."""
    total = whole(microbatches, "microbatches", 1)
    if accumulate is not None:
        total *= whole(accumulate, "accumulate", 1)
    sizes = {"stages": whole(stages, "stages", 1), "microbatches x accumulate": total}
    for name, value in sizes.items():
        if value > LARGEST:
            raise UserError(f"{name} is at most {LARGEST} in a drawing: got {value}")


@lru_cache(maxsize=16)
def analyse(choice: Choice, n_steps: int) -> Analysis:
    """Lower ``choice``; raise UserError if it is impossible."""
    schedule = drawable(choice)
    return Analysis(choice, schedule, schedule.lower(n_steps), steady_state(schedule))


def settle(choice: Choice, costs: Costs, hardware: Hardware) -> Choice:
    """Return ``choice`` with its affordable delay, as a matrix."""
    if (size := choice.stages * choice.microbatches) > _SEARCHED:
        raise UserError(
            f"the explorer finds the affordable delay of at most {_SEARCHED} stages times"
            f" micro-batches: got {size}; toolkit.cost.affordable_delay has no limit"
        )
    late = drawable(replace(choice, delay=1))
    return replace(choice, delay=affordable_delay(late, costs, hardware))


def predict(analysis: Analysis, costs: Costs, hardware: Hardware) -> Timeline:
    """Simulate a few training steps; more where messages take time, to reach a steady state."""
    schedule = analysis.schedule
    n_drawn = len(analysis.drawn.steps)
    n_steps = _STEPS if hardware == UNIT else steps_to_time(schedule, max(_TIMED, n_drawn))
    return simulate(
        analysis.drawn if n_steps == n_drawn else schedule.lower(n_steps), costs, hardware
    )


def waits(program: Program) -> dict[Instruction, list[Instruction]]:
    """By op of ``program`` the ops that it waits for: on its rank, for its input and weights."""
    ops = [[i for i in rank if i.action.computes] for rank in program.ranks]
    found = {(i.op, i.step): i for rank in ops for i in rank}
    named = {op for op, _ in found}
    last: dict[tuple[int, int | None], Instruction] = {}  # backward of a stage in a step
    for i in sorted(found.values(), key=lambda i: i.tick):
        last[i.stage, i.step] = i
    n_stages, alone = program.schedule.n_stages, not program.schedule.layout.one_device
    waited: dict[Instruction, list[Instruction]] = {}
    for rank in ops:
        for before, i in zip([None, *rank], rank, strict=False):
            inputs = [found.get((op, i.step)) for op in dependencies(i.op, named, n_stages)]
            updated = last.get((i.stage, (i.version or 0) - 1))
            several = (*inputs, updated, before if alone else None)
            waited[i] = [*dict.fromkeys(other for other in several if other)]
    return waited


def texts(program: Program) -> dict[Instruction, str]:
    """By op of ``program`` a text: the op, what it waits for, and what it frees."""
    found: dict[Instruction, str] = {}
    slot = program.schedule.timing.ticks_per_slot
    for rank, instructions in enumerate(program.ranks):
        needed = needs(instructions, rank)
        users: list[list[Instruction]] = [[] for _ in instructions]
        for user, positions in zip(instructions, needed, strict=True):
            for p in positions:
                users[p].append(user)
        before = ""
        for k, i in enumerate(instructions):
            if not i.action.computes:
                continue
            late = (i.step or 0) - (i.version or 0)
            fresh = f"{late} step{'s' * (late > 1)} late" if late else "the newest"
            waits = dict.fromkeys(_words(instructions[p]) for p in needed[k])
            if before and not program.schedule.layout.one_device:
                waits[before] = None
            freed = [user for user in users[k] if user.action == Action.FREE]
            now = [_words(user) for user in freed if user.tick == i.tick + slot]
            kept = [user.tick / slot for user in freed if user.buffer == Buffer.ACTIVATION]
            before = _words(i)
            lines = [
                f"{before}: {i.action.label} of stage {i.stage} on micro-batch {i.microbatch}; rank"
                f" {rank}, slot {i.tick / slot:.4g}; weights {i.version} ({fresh})",
                f"waits for: {'; '.join(waits) or 'nothing'}",
                f"frees: {'; '.join(now) or 'nothing'}",
            ]
            if i.action == Action.FORWARD:
                lines += [f"keeps its activations until slot {end:.4g}" for end in kept]
            found[i] = "\n".join(lines)
    return found


def _words(i: Instruction) -> str:
    """An instruction as its program prints it, without the verb of a message or a release."""
    if i.action.computes:
        return f"{i.op} of step {i.step}"
    plain = i.action in (Action.SEND, Action.RECV, Action.FREE)
    return str(i).partition(" ")[2] if plain else str(i).lower()
