"""What the delay of the weights does to the gradients."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan

import torch
from torch import Tensor

from toolkit.runtime.stage import StageRunner
from toolkit.runtime.updater import Weights
from toolkit.schedule import Schedule


@dataclass(frozen=True)
class StageDelay:
    """One stage at one training step, t.

    Attributes:
        step: t.
        stage: j.
        delay: steps by which the weights that it reads are late, the mean over micro-batches.
        cosine: between the gradient that the schedule sums and the fresh one, that of the newest
            weights of every stage on the same batch. 1 where nothing is late; nan where one of
            the gradients is 0.
        gradient: norm of the first of them.
        fresh_gradient: norm of the second.
        weights: norm of theta_t.
        moved: norm of theta_t - theta_{t-1}; nan at the first step.
    """

    step: int
    stage: int
    delay: float
    cosine: float
    gradient: float
    fresh_gradient: float
    weights: float
    moved: float


def compare_gradients(
    step: int,
    schedule: Schedule,
    runners: Sequence[StageRunner],
    versions: Sequence[Mapping[int, Weights]],
    delayed: Sequence[Weights],
    fresh: Sequence[Weights],
) -> tuple[StageDelay, ...]:
    """Compare each stage's delayed gradient at ``step`` with the fresh one.

    Args:
        step: t.
        schedule: whose delays they are.
        runners: of each stage.
        versions: ``versions[stage]``, of which ``step`` is the newest.
        delayed: ``delayed[stage]``, what the schedule sums.
        fresh: ``fresh[stage]``, what it would sum if every stage read ``step``.
    """
    found = []
    for runner, known in zip(runners, versions, strict=True):
        j, scale, newest = runner.index, runner.options.scale, _flat(known[step], runner.masters)
        used, new = (_flat(total[j], runner.masters) / scale for total in (delayed, fresh))
        late = [step - schedule.version(j, m, step) for m in range(schedule.n_microbatches)]
        lengths = used.norm() * new.norm()
        moved = nan
        if step - 1 in known:
            moved = float((newest - _flat(known[step - 1], runner.masters)).norm())
        found.append(
            StageDelay(
                step=step,
                stage=j,
                delay=sum(late) / len(late),
                cosine=float(used @ new / lengths) if lengths > 0 else nan,
                gradient=float(used.norm()),
                fresh_gradient=float(new.norm()),
                weights=float(newest.norm()),
                moved=moved,
            )
        )
    return tuple(found)


def _flat(tensors: Mapping[str, Tensor], names: Mapping[str, Tensor]) -> Tensor:
    """The named tensors as one, in double precision; what is missing counts as 0."""
    parts = [
        tensors[name].flatten() if name in tensors else like.new_zeros(like.numel())
        for name, like in names.items()
    ]
    return torch.cat(parts).double() if parts else torch.zeros(1, dtype=torch.float64)
