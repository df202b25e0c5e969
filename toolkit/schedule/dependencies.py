"""What an op, or an instruction of a lowered program, must wait for.

Micro-batches are independent. Splits of a sequence (Seq1F1B, arXiv 2406.03488) are not: a split's
forward reads the keys and values of earlier splits at its stage, and its backward waits for the
gradients that later splits add to them. To take them, an op would name its split, and
:func:`dependencies` would yield the forward of the split before and the backward of the split
after. Activations would stay until the last reader's backward, on the rank of all splits, and
runtimes would hand a stage the keys and values that it kept, with their gradients.
"""

from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Sequence

from toolkit.schedule.instruction import (
    ACTIVATION,
    ACTIVATION_GRADIENT,
    BACKWARD,
    BACKWARD_WEIGHT,
    FORWARD,
    FREE,
    RECV,
    SEND,
    WEIGHTS,
    Instruction,
    Kind,
    Op,
)


def dependencies(op: Op, ops: Container[Op], n_stages: int) -> Iterator[Op]:
    """Yield the ops whose results ``op`` needs; ``ops`` decides if a backward is split."""
    kind, stage, microbatch = op
    if kind == Kind.FORWARD:
        if stage > 0:
            yield Op(Kind.FORWARD, stage - 1, microbatch)
    elif kind == Kind.BACKWARD_WEIGHT:
        yield Op(Kind.BACKWARD_INPUT, stage, microbatch)
    else:
        yield Op(Kind.FORWARD, stage, microbatch)
        if stage < n_stages - 1:
            split = Op(Kind.BACKWARD_INPUT, stage + 1, microbatch)
            yield split if split in ops else Op(Kind.BACKWARD, stage + 1, microbatch)


def needs(instructions: Sequence[Instruction], rank: int) -> list[tuple[int, ...]]:
    """For each of the instructions of ``rank`` the positions of those that it waits for, ascending.

    A sum of gradients is used when all parts before have been added; a received part is added when
    the sum is used, and later parts after it was sent. A weight version is freed after its last
    use, and comes again only after that.
    """
    return [tuple(sorted(positions)) for positions in unsorted_needs(instructions, rank)]


def unsorted_needs(instructions: Sequence[Instruction], rank: int) -> Iterator[list[int]]:
    """Yield the positions of :func:`needs` in any order."""
    do = _Needs(rank).do
    for position, i in enumerate(instructions):
        yield do[i.action](position, i)


class _Needs:
    """Positions that make, use and free each buffer of the rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.made: dict[tuple, int] = {}  # weights and boundaries
        self.freed: dict[tuple, int] = {}  # weights
        self.uses: defaultdict[tuple, list[int]] = defaultdict(list)  # of weights
        self.parts: defaultdict[tuple, list[int]] = defaultdict(list)  # of sums
        self.handed: defaultdict[tuple, list[int]] = defaultdict(list)  # sums sent
        self.kept: defaultdict[tuple, list[int]] = defaultdict(list)  # ops on a micro-batch
        self.do: list[Callable[[int, Instruction], list[int]]] = [
            *[self.op] * len(Kind),
            self.update,
            self.predict,
            *[self.communicate] * (FREE - SEND),
            self.free,
        ]

    def op(self, position: int, i: Instruction) -> list[int]:
        _, action, stage, microbatch, step, version, buffer, _ = i
        microbatch_ops = self.kept[stage, microbatch, step]
        needed = [*microbatch_ops]
        microbatch_ops.append(position)
        for weights in i.reads if buffer else ((stage, version),):
            needed += self._use(position, weights)
        if action == FORWARD:
            needed += self._take((ACTIVATION, stage - 1, microbatch, step))
            self.made[ACTIVATION, stage, microbatch, step] = position
        elif action != BACKWARD_WEIGHT:
            needed += self._take((ACTIVATION_GRADIENT, stage + 1, microbatch, step))
            self.made[ACTIVATION_GRADIENT, stage, microbatch, step] = position
        if action in (BACKWARD, BACKWARD_WEIGHT):
            needed += self.handed[stage, step]  # or the message could take this part along
            self.parts[stage, step].append(position)
        return needed

    def update(self, position: int, i: Instruction) -> list[int]:
        needed = self.parts.pop((i.stage, i.step), [])
        if i.step is not None:  # it begins with the version before
            needed += self._use(position, (i.stage, i.step))
        self.made[i.stage, i.version] = position
        return needed

    def predict(self, position: int, i: Instruction) -> list[int]:
        self.made[i.weights] = position
        return [maker for weights in i.reads for maker in self._use(position, weights)]

    def free(self, position: int, i: Instruction) -> list[int]:
        if i.buffer == ACTIVATION:
            return self.kept.pop((i.stage, i.microbatch, i.step), [])
        self.freed[i.weights] = position
        return self.uses.pop(i.weights, []) + self._take(i.weights)

    def communicate(self, position: int, i: Instruction) -> list[int]:
        _, action, stage, microbatch, step, _, buffer, _ = i
        if microbatch is not None:
            if action == SEND:
                return self._take((buffer, stage, microbatch, step))
            self.made[buffer, stage, microbatch, step] = position
            return []
        if buffer == WEIGHTS:
            if not i.leaves(self.rank):
                return self._use(position, i.weights)
            self.made[i.weights] = position
            return [self.freed[i.weights]] if i.weights in self.freed else []
        needed = [] if action == RECV else self.parts.pop((stage, step), [])
        if i.leaves(self.rank):
            self.parts[stage, step].append(position)
        elif action == SEND:
            self.handed[stage, step] = [position]
        return needed

    def _use(self, position: int, key: tuple) -> list[int]:
        self.uses[key].append(position)
        return [self.made[key]] if key in self.made else []

    def _take(self, key: tuple) -> list[int]:
        """Return the position that made a buffer; empty if it existed before the program."""
        maker = self.made.pop(key, None)
        return [] if maker is None else [maker]
