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
from math import isfinite
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
_LONG, _WINDOW = 1000, 100  # steps on the quadratic, and those whose largest loss is compared

Loss = Callable[[Tensor, Tensor], Tensor]
Row = dict[str, Any]


def rules(n: int) -> list[Schedule]:
    """The update rules that are measured, of ``n`` stages and micro-batches."""
    cyclic, dp = catalog.cyclic, catalog.data_parallel
    kinds = ("none", "extrapolate")
    delayed = [cyclic(n, d, correction=kind) for d in (1, "freshest") for kind in kinds]
    return [dp(n), *delayed, *(dp(n, delay=late) for late in (2, 4))]


def measured_rates(models: str, n: int, seed: int) -> Iterator[Row]:
    """Yield a row for each model, start, rule and momentum; ``n`` stages and micro-batches.

    ``models``: ``quadratic`` or ``networks``.
    """
    check_choice("models of measured", models, ("quadratic", "networks"))
    for case in [_quadratic(n)] if models == "quadratic" else _networks(n, seed):
        yield from _rows(case, rules(n))


def summary(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row for each model and start: found over certified rates, and their rank correlation."""
    from scipy.stats import spearmanr

    found = []
    for (model, start), group in groupby(rows, lambda row: (row["model"], row["start"])):
        pairs = [(row["found"], row["certified"]) for row in group]
        ratios = [trained / certified for trained, certified in pairs]
        found.append(
            {
                "model": model,
                "start": start,
                "rates": len(pairs),
                "found / certified, least": round(min(ratios), 3),
                "largest": round(max(ratios), 3),
                "rank correlation": round(float(spearmanr(*zip(*pairs, strict=True))[0]), 3),
            }
        )
    return found


@dataclass(frozen=True)
class _Case:
    name: str
    start: str
    model: nn.Module
    loss: Loss
    batch: tuple[Tensor, Tensor]
    stable: Callable[[Iterator[float]], bool]
    precision: float
    by: str | list[str]  # how it is cut into stages


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
        windows, first = list[float](), 0.0
        while len(windows) < _LONG // _WINDOW:
            windows.append(max(next(losses) for _ in range(_WINDOW)))
            first = first or windows[0]
            if not windows[-1] < 1e4 * first:
                return False
            if windows[-1] < 1e-6 * first:
                return True
        return windows[-1] < windows[len(windows) // 4]

    zeros = torch.zeros(n, 1, dtype=torch.float64)
    model, cuts = nn.Sequential(*(_Shift() for _ in range(n))), [str(j) for j in range(1, n)]
    return _Case("quadratic", "", model, loss, (zeros, zeros), stable, _PRECISION, cuts)


def _networks(n: int, seed: int) -> Iterator[_Case]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images[:_SAMPLES], dtype=torch.float64)[:, None] / 16 - 0.5
    classes = torch.tensor(digits.target[:_SAMPLES])
    generator = torch.Generator().manual_seed(seed)
    follow = torch.randint(16, (16, 2), generator=generator)  # each token has two successors
    tokens = [torch.randint(16, (_SAMPLES,), generator=generator)]
    for _ in range(8):
        tokens.append(follow[tokens[-1], torch.randint(2, (_SAMPLES,), generator=generator)])
    text = torch.stack(tokens, 1)
    torch.manual_seed(seed)
    layers = [m for _ in range(3) for m in (nn.Linear(32, 32), nn.Tanh())]
    mlp = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), *layers, nn.Linear(32, 10))
    conv = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(8, 8, 3, stride=2), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(16, 10)),
    )
    decoder = gpt(16, 8, layers=2, width=16, heads=2)
    for name, model, batch in (
        ("MLP, digits", mlp, (images, classes)),
        ("convolutions, digits", conv, (images, classes)),
        ("decoder, synthetic text", decoder, (text[:, :-1], text[:, 1:])),
    ):
        model.double()
        for start in ("random", "minimum"):
            if start == "minimum":
                _to_minimum(model, *batch)
            first = float(_cross_entropy(model(batch[0]), batch[1]).detach())
            stable = _falls(first)
            given = copy.deepcopy(model), _cross_entropy, batch, stable, _ROUGHLY
            yield _Case(name, start, *given, by="parameters")


def _cross_entropy(out: Tensor, targets: Tensor) -> Tensor:
    # Smoothed labels keep the minimum finite.
    return F.cross_entropy(out.flatten(0, -2), targets.flatten(), label_smoothing=0.1)


def _falls(first: float) -> Callable[[Iterator[float]], bool]:
    """Whether the loss stays finite and ends below its first value."""

    def stable(losses: Iterator[float]) -> bool:
        last: list[float] = []
        for _ in range(_STEPS):
            last = [*last[-_STEPS // 10 :], next(losses)]
            if not (isfinite(last[-1]) and last[-1] < 10 * first + 1):
                return False
        return max(last) < first

    return stable


def _to_minimum(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    """Train to a minimum, and move slightly away from it."""
    parameters = [*model.parameters()]

    def closure() -> Tensor:
        for parameter in parameters:
            parameter.grad = None
        loss = _cross_entropy(model(inputs), targets)
        loss.backward()
        return loss

    adam = torch.optim.Adam(parameters, lr=3e-3)
    for _ in range(500):
        closure()
        adam.step()
    torch.optim.LBFGS(parameters, max_iter=500, line_search_fn="strong_wolfe").step(closure)
    with torch.no_grad():
        for parameter in parameters:
            size = float(parameter.square().mean().sqrt())
            parameter.add_(torch.randn_like(parameter), alpha=1e-2 * size)


def _rows(case: _Case, schedules: Sequence[Schedule]) -> Iterator[Row]:
    n = schedules[0].n_stages
    micro = [*zip(*(part.split(len(part) // n) for part in case.batch), strict=True)]
    curved = largest_curvature(case.model, case.loss, micro, tolerance=1e-3, shares=True)
    stages = partition(case.model, n, micro[0][0], by=case.by)
    shares = [sum(curved.shares[name] for name, _ in part.named_parameters()) for part in stages]
    for schedule in schedules:
        for word, momentum, nesterov in MOMENTA:
            certify = partial(largest_stable_rate, schedule, momentum=momentum, nesterov=nesterov)
            equal, own = certify(), certify(coupling=coupling_of(shares))
            options = {"momentum": momentum, "nesterov": nesterov}
            stable = partial(_stable, stages, schedule, case, options)
            found = _largest(stable, own.rate(curved.value), case.precision)
            yield {
                "model": case.name,
                "start": case.start,
                "rule": schedule.name,
                "momentum": word,
                "curvature": curved.value,
                "certified": own.rate(curved.value),
                "certified, stages coupled equally": equal.rate(curved.value),
                "found": found,
            }


def _stable(
    stages: Stages, schedule: Schedule, case: _Case, options: Mapping[str, Any], rate: float
) -> bool:
    """Whether training by SGD with ``options`` is stable at ``rate``."""
    runtime = SingleProcess(
        copy.deepcopy(stages),
        schedule,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate, **options),
        loss=case.loss,
    )
    steps = runtime.run(repeat(case.batch))
    return case.stable(float(result.loss) for result in steps)


def _largest(stable: Callable[[float], bool], near: float, precision: float) -> float:
    """Search from the rate ``near``, up or down in growing steps, and bisect."""
    small, factor = near / precision**0.5, precision
    up = stable(small)
    while stable(large := small * factor) if up else not stable(large := small / factor):
        small, factor = large, factor**2
    small, large = sorted((small, large))
    while large > small * precision:
        middle = (small * large) ** 0.5
        small, large = (middle, large) if stable(middle) else (small, middle)
    return small
