"""The largest stable learning rate by training, beside the certified one.

SingleProcess trains in float64 with the same batch at every step. The search starts at the
certified rate and ends when a stable rate and an unstable one are 1 % apart (networks: 10 %). On a
quadratic loss that couples S stages equally the two agree. On networks the certificate knows only
the curvature and the steepest direction of the first weights: near a minimum, or of a random
start, from which the curvature changes while the network trains.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, repeat
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit.errors import check_choice
from toolkit.model import Stages, partition
from toolkit.model.gpt import gpt
from toolkit.plan.curvature import largest_curvature
from toolkit.plan.stability import coupling_of, largest_stable_rate
from toolkit.runtime import SingleProcess
from toolkit.schedule import Schedule, catalog

MOMENTA = (("heavy ball", 0.9, False), ("Nesterov", 0.9, True))
_SAMPLES = 64
_PRECISION, _ROUGHLY = 1.01, 1.1  # of a rate on the quadratic, and on networks
_STEPS = 200  # on networks
# Steps on the quadratic, and those whose largest loss is compared.
_LONG, _WINDOW = 1000, 100

Loss = Callable[[Tensor, Tensor], Tensor]
Row = dict[str, Any]


def rules(n: int) -> list[Schedule]:
    """Return the update rules that are measured, of ``n`` stages and micro-batches."""
    schedules = [catalog.data_parallel(n)]
    for delay in (1, "freshest"):
        for correction in ("none", "extrapolate"):
            schedules.append(catalog.cyclic(n, delay, correction=correction))
    for delay in (2, 4):
        schedules.append(catalog.data_parallel(n, delay=delay))
    return schedules


def measured_rates(models: str, n: int, seed: int) -> Iterator[Row]:
    """Yield a row for each model, start, rule and momentum; ``n`` stages and micro-batches.

    ``models``: ``quadratic`` or ``networks``.
    """
    check_choice("models of measured", models, ("quadratic", "networks"))
    for case in [_quadratic(n)] if models == "quadratic" else _networks(n, seed):
        yield from _rows(case, rules(n))


def summary(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return a row for each model and start: found over certified rates, and their correlation."""
    from scipy.stats import spearmanr

    summaries = []
    for (model, start), group in groupby(
        rows, lambda row: (row["model"], row["start"])
    ):
        pairs = [(row["found"], row["certified"]) for row in group]
        ratios = [trained / certified for trained, certified in pairs]
        correlation = spearmanr(*zip(*pairs, strict=True))[0]
        summaries.append(
            {
                "model": model,
                "start": start,
                "rates": len(pairs),
                "found / certified, least": round(min(ratios), 3),
                "largest": round(max(ratios), 3),
                "rank correlation": round(float(correlation), 3),
            }
        )
    return summaries


@dataclass(frozen=True)
class _Case:
    """A model, and how its training is judged."""

    name: str
    start: str
    model: nn.Module
    loss: Loss
    batch: tuple[Tensor, Tensor]
    is_stable: Callable[[Iterator[float]], bool]  # of the losses of endless steps
    # Ratio of an unstable rate to a stable one at which the search ends.
    precision: float
    partition: str | list[str]  # how it is cut into stages


class _Shift(nn.Module):
    """A stage of one coordinate, added to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


def _quadratic(n: int) -> _Case:
    def loss(out: Tensor, _: Tensor) -> Tensor:
        return out.square().mean() / (2 * n)  # 1/2 theta^T H theta, H = 1/S 1 1^T

    def stable(losses: Iterator[float]) -> bool:
        # Losses under momentum and delay oscillate: the largest of each window counts.
        largest_losses: list[float] = []  # of each window
        while len(largest_losses) < _LONG // _WINDOW:
            largest_losses.append(max(next(losses) for _ in range(_WINDOW)))
            ratio = largest_losses[-1] / largest_losses[0] if largest_losses[0] else inf
            # Also true of NaN. A loss that stays within both bounds is judged by its last window
            # and the third of ten, since the first ones have the transients of the start.
            if not ratio < 1e4:
                return False
            if ratio < 1e-6:
                return True
        return largest_losses[-1] < largest_losses[len(largest_losses) // 4]

    zeros = torch.zeros(n, 1, dtype=torch.float64)
    return _Case(
        name="quadratic",
        start="",
        model=nn.Sequential(*(_Shift() for _ in range(n))),
        loss=loss,
        batch=(zeros, zeros),
        is_stable=stable,
        precision=_PRECISION,
        partition=[str(stage) for stage in range(1, n)],
    )


def _networks(n: int, seed: int) -> Iterator[_Case]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (
        torch.tensor(digits.images[:_SAMPLES], dtype=torch.float64)[:, None] / 16 - 0.5
    )
    classes = torch.tensor(digits.target[:_SAMPLES])
    generator = torch.Generator().manual_seed(seed)
    # A text that can be learned in part: each token is followed by one of two others.
    successors = torch.randint(16, (16, 2), generator=generator)  # two of each token
    tokens = [torch.randint(16, (_SAMPLES,), generator=generator)]
    for _ in range(8):
        choices = torch.randint(2, (_SAMPLES,), generator=generator)
        tokens.append(successors[tokens[-1], choices])
    text = torch.stack(tokens, 1)
    torch.manual_seed(seed)
    hidden_layers: list[nn.Module] = []
    for _ in range(3):
        hidden_layers += [nn.Linear(32, 32), nn.Tanh()]
    mlp = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), *hidden_layers, nn.Linear(32, 10)
    )
    convolutions = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 10),
    )
    decoder = gpt(16, 8, layers=2, width=16, heads=2)
    for name, model, batch in (
        ("MLP, digits", mlp, (images, classes)),
        ("convolutions, digits", convolutions, (images, classes)),
        ("decoder, synthetic text", decoder, (text[:, :-1], text[:, 1:])),
    ):
        model.double()
        # In this order: the second start is the first model, trained.
        for start in ("random", "minimum"):
            if start == "minimum":
                _to_minimum(model, *batch)
            first_loss = float(_cross_entropy(model(batch[0]), batch[1]).detach())
            yield _Case(
                name=name,
                start=start,
                model=copy.deepcopy(model),
                loss=_cross_entropy,
                batch=batch,
                is_stable=_falls(first_loss),
                precision=_ROUGHLY,
                partition="parameters",
            )


def _cross_entropy(out: Tensor, targets: Tensor) -> Tensor:
    # Smoothed labels keep the minimum finite.
    return F.cross_entropy(out.flatten(0, -2), targets.flatten(), label_smoothing=0.1)


def _falls(first_loss: float) -> Callable[[Iterator[float]], bool]:
    """Return a function that says whether losses stay finite and end below the first."""

    def is_stable(losses: Iterator[float]) -> bool:
        last_losses: list[float] = []
        for _ in range(_STEPS):
            loss = next(losses)
            # Their largest counts, since losses oscillate.
            last_losses = [*last_losses[-_STEPS // 10 :], loss]
            # So far above the first loss it counts as diverged, without further steps.
            if not (isfinite(loss) and loss < 10 * first_loss + 1):
                return False
        return max(last_losses) < first_loss

    return is_stable


def _to_minimum(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    """Train to a minimum, and move slightly away from it."""
    parameters = [*model.parameters()]

    def closure() -> Tensor:
        for parameter in parameters:
            parameter.grad = None
        loss = _cross_entropy(model(inputs), targets)
        loss.backward()
        return loss

    # Adam comes near a minimum, and L-BFGS finds it: there the gradient vanishes, and the curvature
    # is that of all further steps.
    adam = torch.optim.Adam(parameters, lr=3e-3)
    for _ in range(500):
        closure()
        adam.step()
    torch.optim.LBFGS(parameters, max_iter=500, line_search_fn="strong_wolfe").step(
        closure
    )
    with torch.no_grad():
        for parameter in parameters:
            size = float(parameter.square().mean().sqrt())
            parameter.add_(torch.randn_like(parameter), alpha=1e-2 * size)


def _rows(case: _Case, schedules: Sequence[Schedule]) -> Iterator[Row]:
    n = schedules[0].n_stages
    inputs, targets = case.batch
    size = len(inputs) // n
    microbatches = [*zip(inputs.split(size), targets.split(size), strict=True)]
    curvature = largest_curvature(
        case.model, case.loss, microbatches, tolerance=1e-3, shares=True
    )
    stages = partition(case.model, n, microbatches[0][0], by=case.partition)
    stage_shares = [
        sum(curvature.shares[name] for name, _ in stage.named_parameters())
        for stage in stages
    ]
    for schedule in schedules:
        for momentum_name, momentum, nesterov in MOMENTA:
            certify = partial(
                largest_stable_rate, schedule, momentum=momentum, nesterov=nesterov
            )
            certified = certify(coupling=coupling_of(stage_shares)).rate(
                curvature.value
            )
            options = {"momentum": momentum, "nesterov": nesterov}
            is_stable = partial(_is_stable, stages, schedule, case, options)
            yield {
                "model": case.name,
                "start": case.start,
                "rule": schedule.name,
                "momentum": momentum_name,
                "curvature": curvature.value,
                "certified": certified,
                "certified, stages coupled equally": certify().rate(curvature.value),
                "found": _largest(is_stable, certified, case.precision),
            }


def _is_stable(
    stages: Stages,
    schedule: Schedule,
    case: _Case,
    options: Mapping[str, Any],
    rate: float,
) -> bool:
    """Return whether training by SGD with ``options`` is stable at ``rate``."""
    runtime = SingleProcess(
        copy.deepcopy(stages),
        schedule,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate, **options),
        loss=case.loss,
    )
    steps = runtime.run(repeat(case.batch))
    return case.is_stable(float(result.loss) for result in steps)


def _largest(
    is_stable: Callable[[float], bool], start: float, precision: float
) -> float:
    """Return the largest stable rate: search from ``start``, in growing steps, and bisect."""
    # If `start` is right, the first two rates lie on both sides of it, one `precision` apart, and
    # the search is over. Otherwise the factor grows until one is stable and the next is not.
    rate = start / precision**0.5
    factor = precision
    start_is_stable = is_stable(rate)
    while True:
        next_rate = rate * factor if start_is_stable else rate / factor
        if is_stable(next_rate) != start_is_stable:
            break
        rate = next_rate
        factor = factor**2
    stable, unstable = sorted((rate, next_rate))
    while unstable > stable * precision:
        middle = (stable * unstable) ** 0.5
        if is_stable(middle):
            stable = middle
        else:
            unstable = middle
    return stable
