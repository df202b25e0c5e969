"""The unit of work: one kind of computation of one stage on one micro-batch."""

from enum import IntEnum
from typing import NamedTuple


class Kind(IntEnum):
    """What an op computes.

    ``BACKWARD`` is the whole backward of a stage. A schedule may split it into
    ``BACKWARD_INPUT`` (gradient with respect to the stage's input) and ``BACKWARD_WEIGHT``
    (gradient with respect to its parameters).
    """

    FORWARD = 0
    BACKWARD = 1
    BACKWARD_INPUT = 2
    BACKWARD_WEIGHT = 3

    @property
    def letter(self) -> str:
        """The one-letter form of torch.distributed.pipelining's compute format."""
        return "FBIW"[self]


class Op(NamedTuple):
    """One kind of computation of ``stage`` on ``microbatch``; both count from 0."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.letter}{self.microbatch}"
