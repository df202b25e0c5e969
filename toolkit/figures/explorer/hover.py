"""What each op waits for and what it frees, read off the instructions of its program."""

from collections import defaultdict
from collections.abc import Mapping

from toolkit.schedule import Action, Buffer, Instruction, Kind, Op, Program
from toolkit.schedule.dependencies import dependencies
from toolkit.schedule.instruction import WeightsKey

_Key = tuple[int, int]  # rank, position among the rank's instructions


def texts(program: Program) -> Mapping[_Key, str]:
    """``[rank, position]`` of every op: the op, what it waits for and what it frees, in lines."""
    tick = program.schedule.timing.ticks_per_slot
    return {
        (rank, k): _text(program, tick, rank, i, seen)
        for rank, instructions in enumerate(program.ranks)
        for seen in (_Rank(instructions),)
        for k, i in enumerate(instructions)
        if i.action.computes
    }


def find(program: Program, wanted: str) -> str:
    """The text of an op of the first training step, or that there is none such."""
    for (rank, k), text in texts(program).items():
        i = program.ranks[rank][k]
        if i.step == program.first_step and text.startswith(f"{wanted} of"):
            return text
    return f"there is no op {wanted}: write stage, kind (F, B, I or W) and micro-batch, such as 0F0"


class _Rank:
    """Where a rank's buffers come from, when they go, and which op comes before which."""

    def __init__(self, instructions: tuple[Instruction, ...]) -> None:
        self.received: dict[tuple, tuple[int, ...]] = {}
        self.made: dict[tuple[int, int | None], str] = {}
        self.freed: dict[tuple[int, int | None, int | None], int] = {}
        self.weights: dict[WeightsKey, int] = {}
        self.sent: defaultdict[tuple, list[int]] = defaultdict(list)
        self.before: dict[Instruction, Instruction | None] = {}
        last: Instruction | None = None
        for i in instructions:
            if i.action.computes:
                self.before[i] = last
                last = i
            elif i.action == Action.FREE and i.buffer == Buffer.ACTIVATION:
                self.freed[i.stage, i.microbatch, i.step] = i.tick
            elif i.action == Action.FREE:
                self.weights[i.weights] = i.tick
            elif i.action == Action.UPDATE:
                self.made[i.stage, i.version] = "updated here"
            elif i.buffer == Buffer.WEIGHTS and i.action == Action.RECV:
                self.made[i.stage, i.version] = f"from rank {i.peers[0]}"
            elif i.buffer == Buffer.WEIGHTS and i.action == Action.BROADCAST:
                self.made.setdefault((i.stage, i.version), f"broadcast by rank {i.peers[0]}")
            elif i.action == Action.RECV:
                self.received[i.buffer, i.stage, i.microbatch, i.step] = i.peers
            elif i.action == Action.SEND and i.buffer != Buffer.GRADIENT:
                self.sent[i.buffer, i.stage, i.microbatch, i.step] += i.peers


def _text(program: Program, tick: int, rank: int, i: Instruction, seen: _Rank) -> str:
    schedule = program.schedule
    op = i.op
    key = (i.stage, i.microbatch, i.step)
    head = f"{op} of step {i.step}: {i.action.label} of stage {i.stage}"
    head += f" on micro-batch {i.microbatch}; rank {rank}, slot {_slot(i.tick, tick)}"

    late = (i.step or 0) - (i.version or 0)
    fresh = "the newest" if not late else f"{late} step{'s' * (late > 1)} late"
    origin = seen.made.get((i.stage, i.version), "held from the start")
    weights = f"weights {i.version} of stage {i.stage}"
    if i.buffer == Buffer.PREDICTION:
        weights = f"weights {i.step} of stage {i.stage} as predicted from {i.version}"
    waits = [f"{weights} ({fresh}; {origin})"]
    for needed in dependencies(op, schedule.timing.starts, schedule.n_stages):
        waits.append(_input(needed, i, seen))
    before = seen.before[i]
    if before is not None and not schedule.one_device:
        own = "" if before.step == i.step else f" of step {before.step}"
        waits.append(f"{before.op}{own}, before it on this rank")

    end = i.tick + tick
    gone = seen.freed.get(key)
    frees = [f"activations of {op.stage}F{op.microbatch}"] if gone == end else []
    if seen.weights.get(i.weights) == end:
        frees.append(weights)
    lines = [head, "waits for: " + "; ".join(waits), "frees: " + ("; ".join(frees) or "nothing")]
    if i.action == Action.FORWARD and gone is not None:
        lines.append(f"keeps its activations until slot {_slot(gone, tick)}")
    boundary = Buffer.ACTIVATION if i.action == Action.FORWARD else Buffer.ACTIVATION_GRADIENT
    if i.action != Action.BACKWARD_WEIGHT and (targets := seen.sent.get((boundary, *key))):
        lines.append(f"sends its result to rank {targets[0]}")
    return "\n".join(lines)


def _input(needed: Op, i: Instruction, seen: _Rank) -> str:
    """One op whose result is needed, and the rank that sends it."""
    buffer = Buffer.ACTIVATION if needed.kind == Kind.FORWARD else Buffer.ACTIVATION_GRADIENT
    source = seen.received.get((buffer, needed.stage, needed.microbatch, i.step))
    if needed.stage == i.stage:
        half = "gradient of the output, kept" if needed.kind != Kind.FORWARD else "activations"
        return f"{needed} ({half} here)"
    what = "activation" if buffer == Buffer.ACTIVATION else "gradient"
    return f"{needed} ({what} {f'from rank {source[0]}' if source else 'made here'})"


def _slot(tick: int, ticks_per_slot: int) -> str:
    return f"{tick / ticks_per_slot:.4g}"
