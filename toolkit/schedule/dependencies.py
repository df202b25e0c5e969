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

    A sum of gradients is used when everything before its use has been added; a received part is
    added when it is used. A weight version is freed after its last use, and comes again only after
    that.
    """
    found = _Needs(rank)
    return [tuple(sorted(found.waits_for(p, i))) for p, i in enumerate(instructions)]


class _Needs:
    """Positions that make, use and free each buffer of the rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.made: dict[tuple, int] = {}  # weights and boundaries
        self.freed: dict[tuple, int] = {}  # weights
        self.uses: defaultdict[tuple, list[int]] = defaultdict(list)  # of weights
        self.parts: defaultdict[tuple, list[int]] = defaultdict(list)  # of sums
        self.kept: dict[tuple, list[int]] = {}  # ops of a stage on a micro-batch

    def waits_for(self, position: int, i: Instruction) -> set[int]:
        if i.action.computes:
            return self._computes(position, i)
        if i.action.communicates:
            return self._communicates(position, i)
        if i.action == Action.UPDATE:
            found = set(self.parts.pop((i.stage, i.step), ()))
            if i.step is not None:  # it begins with the version before
                found |= self._uses(position, (i.stage, i.step))
            self.made[i.stage, i.version] = position
            return found
        if i.action == Action.PREDICT:
            self.made[i.weights] = position
            late, before = i.predicted_from
            return self._uses(position, late) | self._uses(position, before)
        if i.buffer == Buffer.ACTIVATION:
            return set(self.kept.pop((i.stage, i.microbatch, i.step), ()))
        self.freed[i.weights] = position
        return set(self.uses.pop(i.weights, ())) | self._takes(i.weights)

    def _computes(self, position: int, i: Instruction) -> set[int]:
        key = (i.stage, i.microbatch, i.step)
        found = self._uses(position, i.weights)
        if i.action == Action.FORWARD:
            found |= self._takes((Buffer.ACTIVATION, i.stage - 1, i.microbatch, i.step))
            self.made[(Buffer.ACTIVATION, *key)] = position
            self.kept[key] = []
        else:
            if i.action != Action.BACKWARD_WEIGHT:
                later = (Buffer.ACTIVATION_GRADIENT, i.stage + 1, i.microbatch, i.step)
                found |= self._takes(later)
                self.made[(Buffer.ACTIVATION_GRADIENT, *key)] = position
            found |= set(self.kept.get(key, ()))
        if key in self.kept:
            self.kept[key].append(position)
        if i.action != Action.BACKWARD_INPUT:  # a forward adds the statistics of norms
            self.parts[i.stage, i.step].append(position)
        return found

    def _communicates(self, position: int, i: Instruction) -> set[int]:
        if i.buffer == Buffer.WEIGHTS:
            if not i.leaves(self.rank):
                return self._uses(position, i.weights)
            self.made[i.weights] = position
            return {self.freed[i.weights]} if i.weights in self.freed else set()
        if i.buffer == Buffer.GRADIENT:
            gives = i.action != Action.RECV
            found = set(self.parts.pop((i.stage, i.step), ())) if gives else set()
            if i.leaves(self.rank):
                self.parts[i.stage, i.step].append(position)
            return found
        boundary = (i.buffer, i.stage, i.microbatch, i.step)
        if i.action == Action.SEND:
            return self._takes(boundary)
        self.made[boundary] = position
        return set()

    def _uses(self, position: int, key: tuple) -> set[int]:
        self.uses[key].append(position)
        return {self.made[key]} if key in self.made else set()

    def _takes(self, key: tuple) -> set[int]:
        """The position that made a buffer; empty if it existed before the program."""
        return {self.made.pop(key)} if key in self.made else set()
