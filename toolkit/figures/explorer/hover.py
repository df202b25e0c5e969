"""What each op waits for and what it frees, read off the instructions of its program."""

from collections.abc import Iterator, Mapping

from toolkit.schedule import Action, Buffer, Instruction, Kind, Op, Program
from toolkit.schedule.dependencies import dependencies, needs

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
