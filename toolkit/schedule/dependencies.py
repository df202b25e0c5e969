"""What an op must wait for within its training step."""

from collections.abc import Collection, Container, Iterator

from toolkit.errors import UserError
from toolkit.schedule.op import Kind, Op


def dependencies(op: Op, ops: Container[Op], n_stages: int) -> Iterator[Op]:
    """The ops whose results ``op`` needs; ``ops`` tells whether a backward is split."""
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


def check_complete(ops: Collection[Op], n_stages: int, n_microbatches: int) -> None:
    """Every stage has a forward and a whole backward for every micro-batch.

    Raises:
        ValueError: one has not; or an index has been left out, as where a larger one is mistyped.
    """
    for what, attribute in (("stage", "stage"), ("micro-batch", "microbatch")):
        present = {getattr(op, attribute) for op in ops}
        absent = next(k for k in range(len(present) + 1) if k not in present)
        beyond = [op for op in ops if getattr(op, attribute) > absent]
        if beyond:
            op = min(beyond)
            raise UserError(
                f"{op} is of {what} {getattr(op, attribute)}, and no op is of {what} {absent}:"
                f" they count from 0, and none is left out; mend {op}, or add what is missing"
            )
    for j in range(n_stages):
        for m in range(n_microbatches):
            kinds = {kind for kind in Kind if Op(kind, j, m) in ops}
            if kinds not in _COMPLETE:
                found = ", ".join(kind.name.lower() for kind in sorted(kinds)) or "nothing"
                raise UserError(
                    f"stage {j} of micro-batch {m} needs a forward and either a backward or both"
                    f" of its halves: found {found}"
                )


_COMPLETE = (
    {Kind.FORWARD, Kind.BACKWARD},
    {Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT},
)
