"""What each op of a program waits for, as ops and in words."""

from operator import attrgetter

from toolkit.format import count
from toolkit.schedule import Action, Buffer, Instruction, Op, Program
from toolkit.schedule.dependencies import dependencies, needs


def waits(program: Program) -> dict[Instruction, list[Instruction]]:
    """Return the ops that each op of ``program`` waits for.

    These are the op before it on its rank, those that make its input, and the last backward before
    the update that makes its weights.
    """
    instruction_of_op: dict[tuple[Op, int | None], Instruction] = {}
    # Of a stage in a step.
    last_backward: dict[tuple[int, int | None], Instruction] = {}
    for rank in program.ranks:
        for instruction in rank:
            if instruction.action.computes:
                instruction_of_op[instruction.op, instruction.step] = instruction
    # In the order of time, so that the last backward of each stage overwrites those before it.
    for instruction in sorted(instruction_of_op.values(), key=attrgetter("tick")):
        last_backward[instruction.stage, instruction.step] = instruction
    ops_of_program = {op for op, _ in instruction_of_op}
    n_stages = program.schedule.n_stages
    has_own_rank = not program.schedule.layout.one_device
    awaited: dict[Instruction, list[Instruction]] = {}
    for rank in program.ranks:
        previous = None
        for instruction in rank:
            if not instruction.action.computes:
                continue
            inputs = dependencies(instruction.op, ops_of_program, n_stages)
            predecessors = [
                instruction_of_op.get((op, instruction.step)) for op in inputs
            ]
            # Version t is made by the update of step t - 1, once the last backward of that step has
            # ended.
            update_step = (instruction.version or 0) - 1
            predecessors.append(last_backward.get((instruction.stage, update_step)))
            # On one device ops run at once, so none waits for the one before it in the list.
            if has_own_rank:
                predecessors.append(previous)
            awaited[instruction] = [*dict.fromkeys(filter(None, predecessors))]
            previous = instruction
    return awaited


def texts(program: Program) -> dict[Instruction, str]:
    """Return a text for each op of ``program``: the op, what it waits for, and what it frees."""
    text_of_op: dict[Instruction, str] = {}
    slot = program.schedule.timing.ticks_per_slot
    for rank, instructions in enumerate(program.ranks):
        needed_positions = needs(instructions, rank)
        # The reverse of what each instruction needs: who needs it, such as the release of its
        # result.
        users: list[list[Instruction]] = [[] for _ in instructions]
        for user, positions in zip(instructions, needed_positions, strict=True):
            for position in positions:
                users[position].append(user)
        previous = ""
        for index, instruction in enumerate(instructions):
            if not instruction.action.computes:
                continue
            staleness = (instruction.step or 0) - (instruction.version or 0)
            version_text = (
                f"{count(staleness, 'step')} late" if staleness else "the newest"
            )
            awaited = [
                _words(instructions[position]) for position in needed_positions[index]
            ]
            if previous and not program.schedule.layout.one_device:
                awaited.append(previous)
            releases = [user for user in users[index] if user.action == Action.FREE]
            freed_here = [
                _words(user)
                for user in releases
                # A release is at the end of the op that uses the buffer last, a slot after its
                # start.
                if user.tick == instruction.tick + slot
            ]
            previous = _words(instruction)
            lines = [
                f"{previous}: {instruction.action.label} of stage {instruction.stage}"
                f" on micro-batch {instruction.microbatch}; rank {rank},"
                f" slot {instruction.tick / slot:.4g};"
                f" weights {instruction.version} ({version_text})",
                f"waits for: {'; '.join(dict.fromkeys(awaited)) or 'nothing'}",
                f"frees: {'; '.join(freed_here) or 'nothing'}",
            ]
            if instruction.action == Action.FORWARD:
                for user in releases:
                    if user.buffer == Buffer.ACTIVATION:
                        lines.append(
                            f"keeps its activations until slot {user.tick / slot:.4g}"
                        )
            text_of_op[instruction] = "\n".join(lines)
    return text_of_op


def _words(instruction: Instruction) -> str:
    """Return an instruction as its program prints it, without a message's or release's verb."""
    if instruction.action.computes:
        return f"{instruction.op} of step {instruction.step}"
    has_verb = instruction.action in (Action.SEND, Action.RECV, Action.FREE)
    return str(instruction).partition(" ")[2] if has_verb else str(instruction).lower()
