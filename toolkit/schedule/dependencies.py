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
from functools import partial
from typing import TypeVar

from toolkit.schedule.instruction import (
    ACTIVATION,
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
    WeightsKey,
)

# Schedules of 2^17 forwards ask for the dependencies of each op several times: Op's constructor
# takes longer, and so do the members' names in their class.
_make_op = partial(tuple.__new__, Op)
_FORWARD, _BACKWARD, _BACKWARD_INPUT, _ = Kind

_LAST_BACKWARDS = (BACKWARD, BACKWARD_WEIGHT)

_MicrobatchKey = tuple[int, int | None, int | None]  # stage, micro-batch, step
_Key = TypeVar("_Key")


def dependencies(op: Op, ops: Container[Op], n_stages: int) -> Iterator[Op]:
    """Yield the ops whose results ``op`` needs; ``ops`` decides if a backward is split."""
    kind, stage, microbatch = op
    if kind == FORWARD:
        if stage > 0:
            yield _make_op((_FORWARD, stage - 1, microbatch))
    elif kind == BACKWARD_WEIGHT:
        yield _make_op((_BACKWARD_INPUT, stage, microbatch))
    else:
        yield _make_op((_FORWARD, stage, microbatch))
        if stage < n_stages - 1:
            # Each op may be split or whole: DualPipe splits some backwards of a stage only.
            split = _make_op((_BACKWARD_INPUT, stage + 1, microbatch))
            if split in ops:
                yield split
            else:
                yield _make_op((_BACKWARD, stage + 1, microbatch))


def needs(instructions: Sequence[Instruction], rank: int) -> list[tuple[int, ...]]:
    """For each of the instructions of ``rank`` the positions of those that it waits for, ascending.

    A sum of gradients is used when all contributions before have been added; a received one is
    added when the sum is used, and later ones after it was sent. A weight version is freed after
    its last use, and comes again only after that.
    """
    return [
        tuple(sorted(positions)) for positions in unsorted_needs(instructions, rank)
    ]


def unsorted_needs(
    instructions: Sequence[Instruction], rank: int
) -> Iterator[list[int]]:
    """Yield the positions of :func:`needs` in any order."""
    needs_of_action = _Needs(rank).by_action()
    for position, i in enumerate(instructions):
        yield needs_of_action[i.action](position, i)


class _Needs:
    """What instructions wait for: ``by_action()[action](position, instruction)``, in order.

    Attributes:
        maker: position of what made weights.
        outputs: position of what made, or received, the output of a stage.
        input_gradients: position of what made, or received, the gradient of a stage's input.
        last_free: position of the last free of weights.
        users: positions that use weights.
        contributions: positions that have added to a sum since it was last used.
        sent_sum: position that sent a sum.
        microbatch_ops: positions of a stage's ops on a micro-batch.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.maker: dict[WeightsKey, int] = {}
        self.outputs: dict[_MicrobatchKey, int] = {}
        self.input_gradients: dict[_MicrobatchKey, int] = {}
        self.last_free: dict[WeightsKey, int] = {}
        self.users: defaultdict[WeightsKey, list[int]] = defaultdict(list)
        self.contributions: defaultdict[tuple, list[int]] = defaultdict(list)
        self.sent_sum: dict[tuple, int] = {}
        self.microbatch_ops: defaultdict[_MicrobatchKey, list[int]] = defaultdict(list)

    def by_action(self) -> list[Callable[[int, Instruction], list[int]]]:
        """Return the methods by action, in the order of Action."""
        # Not kept here: bound methods of an object that it keeps make a reference cycle.
        return [
            *[self.op] * len(Kind),
            self.update,
            self.predict,
            *[self.communicate] * (FREE - SEND),
            self.free,
        ]

    def op(self, position: int, i: Instruction) -> list[int]:
        _, action, stage, microbatch, step, version, buffer, _ = i
        key = (stage, microbatch, step)
        # A backward needs the activations of its forward, and the second half those of the first.
        microbatch_ops = self.microbatch_ops[key]
        needed = [*microbatch_ops]
        microbatch_ops.append(position)
        for weights in i.reads if buffer else ((stage, version),):
            self._use(position, weights, needed)
        if action == FORWARD:
            _take(self.outputs, (stage - 1, microbatch, step), needed)
            self.outputs[key] = position
        elif action != BACKWARD_WEIGHT:
            _take(self.input_gradients, (stage + 1, microbatch, step), needed)
            self.input_gradients[key] = position
        if action in _LAST_BACKWARDS:
            # Before the sum is sent it must not grow, or the message could take this one along.
            if (stage, step) in self.sent_sum:
                needed.append(self.sent_sum[stage, step])
            self.contributions[stage, step].append(position)
        return needed

    def update(self, position: int, i: Instruction) -> list[int]:
        needed = self.contributions.pop((i.stage, i.step), [])
        if i.step is not None:  # it begins with the version before
            self._use(position, (i.stage, i.step), needed)
        self.maker[i.stage, i.version] = position
        return needed

    def predict(self, position: int, i: Instruction) -> list[int]:
        self.maker[i.weights] = position
        needed: list[int] = []
        for weights in i.reads:
            self._use(position, weights, needed)
        return needed

    def free(self, position: int, i: Instruction) -> list[int]:
        if i.buffer == ACTIVATION:
            return self.microbatch_ops.pop(i[2:5], [])
        # All users come before the free, and so does what made the weights if nobody used them.
        weights = i.weights
        self.last_free[weights] = position
        needed = self.users.pop(weights, [])
        _take(self.maker, weights, needed)
        return needed

    def communicate(self, position: int, i: Instruction) -> list[int]:
        _, action, stage, microbatch, step, _, buffer, _ = i
        needed: list[int] = []
        if microbatch is not None:
            boundaries = self.input_gradients
            if buffer == ACTIVATION:
                boundaries = self.outputs
            if action == SEND:
                _take(boundaries, (stage, microbatch, step), needed)
            else:
                boundaries[stage, microbatch, step] = position
            return needed
        if buffer == WEIGHTS:
            if not i.leaves(self.rank):
                self._use(position, i.weights, needed)
                return needed
            # A version that has been freed here may come again: never before the free.
            self.maker[i.weights] = position
            return (
                [self.last_free[i.weights]] if i.weights in self.last_free else needed
            )
        # What a received sum is added to may still be incomplete: only who uses it waits.
        if action != RECV:
            needed = self.contributions.pop((stage, step), needed)
        if i.leaves(self.rank):
            self.contributions[stage, step].append(position)
        elif action == SEND:
            self.sent_sum[stage, step] = position
        return needed

    def _use(self, position: int, weights: tuple, needed: list[int]) -> None:
        """Use weights; add the position that made them, unless they existed before the program."""
        self.users[weights].append(position)
        maker = self.maker.get(weights)
        if maker is not None:
            needed.append(maker)


def _take(maker: dict[_Key, int], key: _Key, needed: list[int]) -> None:
    """Take a buffer; add the position that made it, unless it existed before the program."""
    position = maker.pop(key, None)
    if position is not None:
        needed.append(position)
