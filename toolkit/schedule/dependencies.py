"""What an op, or an instruction of a lowered program, must wait for."""

from collections import defaultdict
from collections.abc import Container, Iterator, Sequence

from toolkit.schedule.instruction import Action, Buffer, Instruction, Kind, Op


def dependencies(op: Op, ops: Container[Op], n_stages: int) -> Iterator[Op]:
    """The ops whose results ``op`` needs; ``ops`` decides if a backward is split."""
    kind, j, m = op
    if kind == Kind.FORWARD:
        if j > 0:
            yield Op(Kind.FORWARD, j - 1, m)
    elif kind == Kind.BACKWARD_WEIGHT:
        yield Op(Kind.BACKWARD_INPUT, j, m)
    else:
        yield Op(Kind.FORWARD, j, m)
        if j < n_stages - 1:
            split = Op(Kind.BACKWARD_INPUT, j + 1, m)
            yield split if split in ops else Op(Kind.BACKWARD, j + 1, m)


def needs(instructions: Sequence[Instruction], rank: int) -> list[tuple[int, ...]]:
    """For each of the instructions of ``rank`` the positions of those that it waits for, ascending.

    A sum of gradients is used when all parts before have been added; a received part is added when
    the sum is used. A weight version is freed after its last use, and comes again only after that.
    """
    found = _Needs(rank)
    return [tuple(sorted(found.waits_for(p, i))) for p, i in enumerate(instructions)]


class _Needs:
    """Positions that make, use and free each buffer of the rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.made: dict[tuple, int] = {}  # weights and boundaries
        self.freed: dict[tuple, int] = {}  # weights
        self.uses: defaultdict[tuple, set[int]] = defaultdict(set)  # of weights
        self.parts: defaultdict[tuple, set[int]] = defaultdict(set)  # of sums
        self.kept: defaultdict[tuple, set[int]] = defaultdict(set)  # ops on a micro-batch

    def waits_for(self, position: int, i: Instruction) -> set[int]:
        if i.action.computes:
            return self._computes(position, i)
        if i.action.communicates:
            return self._communicates(position, i)
        if i.action == Action.UPDATE:
            found = self.parts.pop((i.stage, i.step), set())
            if i.step is not None:  # it begins with the version before
                found |= self._uses(position, (i.stage, i.step))
            self.made[i.stage, i.version] = position
            return found
        if i.action == Action.PREDICT:
            self.made[i.weights] = position
            return set().union(*(self._uses(position, weights) for weights in i.reads))
        if i.buffer == Buffer.ACTIVATION:
            return self.kept.pop((i.stage, i.microbatch, i.step), set())
        self.freed[i.weights] = position
        return self.uses.pop(i.weights, set()) | self._takes(i.weights)

    def _computes(self, position: int, i: Instruction) -> set[int]:
        key = (i.stage, i.microbatch, i.step)
        found = self.kept[key].union(*(self._uses(position, weights) for weights in i.reads))
        if i.action == Action.FORWARD:
            found |= self._takes((Buffer.ACTIVATION, i.stage - 1, i.microbatch, i.step))
            self.made[(Buffer.ACTIVATION, *key)] = position
        elif i.action != Action.BACKWARD_WEIGHT:
            later = (Buffer.ACTIVATION_GRADIENT, i.stage + 1, i.microbatch, i.step)
            found |= self._takes(later)
            self.made[(Buffer.ACTIVATION_GRADIENT, *key)] = position
        self.kept[key].add(position)
        if i.action != Action.BACKWARD_INPUT:  # a forward adds the statistics of norms
            self.parts[i.stage, i.step].add(position)
        return found

    def _communicates(self, position: int, i: Instruction) -> set[int]:
        if i.buffer == Buffer.WEIGHTS:
            if not i.leaves(self.rank):
                return self._uses(position, i.weights)
            self.made[i.weights] = position
            return {self.freed[i.weights]} if i.weights in self.freed else set()
        if i.buffer == Buffer.GRADIENT:
            gives = i.action != Action.RECV
            found = self.parts.pop((i.stage, i.step), set()) if gives else set()
            if i.leaves(self.rank):
                self.parts[i.stage, i.step].add(position)
            return found
        boundary = (i.buffer, i.stage, i.microbatch, i.step)
        if i.action == Action.SEND:
            return self._takes(boundary)
        self.made[boundary] = position
        return set()

    def _uses(self, position: int, key: tuple) -> set[int]:
        self.uses[key].add(position)
        return {self.made[key]} if key in self.made else set()

    def _takes(self, key: tuple) -> set[int]:
        """The position that made a buffer; empty if it existed before the program."""
        return {self.made.pop(key)} if key in self.made else set()
