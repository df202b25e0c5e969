"""The paper's comparison of data parallelism with cyclic data parallelism, setting by setting.

N stages, N micro-batches. Each row is a schedule, and the closed form of its footprint, against
which the one counted from its program is held. Source: table 1 of arXiv 2403.08837, section 4; the
forms of traffic count messages of this toolkit's programs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

from toolkit.errors import whole
from toolkit.schedule import catalog
from toolkit.schedule.footprint import Footprint, footprint
from toolkit.schedule.schedule import Schedule

RULES = ("DP", "CDP-v1", "CDP-v2")


@dataclass(frozen=True)
class Row:
    """One setting under one rule: what the closed form says, and what the program does."""

    setting: str
    rule: str
    schedule: Schedule
    formula: dict[str, Fraction]
    counted: Footprint

    @property
    def differences(self) -> dict[str, tuple[Fraction, Fraction]]:
        """(formula, counted), by quantity, where they differ."""
        pairs = {name: (value, getattr(self.counted, name)) for name, value in self.formula.items()}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def compare(n: int) -> list[Row]:
    """Every setting under every rule, for ``n`` workers.

    Raises:
        UserError: fewer than 2 workers, who have nothing to share.
    """
    n = whole(n, "the number of workers of a comparison", 2)
    rows = []
    for setting, make in SETTINGS.items():
        for rule in RULES:
            schedule = make(rule, n)
            formula = _FORMULAS[setting](rule, n)
            rows.append(Row(setting, rule, schedule, formula, footprint(schedule)))
    return rows


def schedule_of(
    rule: str,
    n_workers: int,
    placement: str,
    state: str = "replicated",
    *,
    n_stages: int | None = None,
) -> Schedule:
    """The schedule of a rule; as a pipeline, DP is GPipe.

    Args:
        rule: one of :data:`RULES`.
        n_stages: as many as workers unless given.
    """
    if rule != "DP":
        delay = 1 if rule == "CDP-v1" else "freshest"
        return catalog.cyclic(n_workers, delay, placement, state, n_stages=n_stages)
    if placement == "per_stage":
        return catalog.gpipe(n_workers if n_stages is None else n_stages, n_workers)
    return catalog.data_parallel(n_workers, placement, state, n_stages=n_stages)


SETTINGS: dict[str, Callable[[str, int], Schedule]] = {
    "one device": partial(schedule_of, placement="one"),
    "multi-device": partial(schedule_of, placement="per_microbatch"),
    "with model parallelism": partial(schedule_of, placement="per_stage_and_microbatch"),
    "pipeline": partial(schedule_of, placement="per_stage"),
    "ZeRO": partial(schedule_of, placement="per_microbatch", state="sharded"),
}
"""How each setting of the paper is scheduled under a rule, for N workers."""


def _form(
    ranks: int,
    activations: Fraction | int,
    total: Fraction | int,
    parameters: Fraction | int,
    sent: Fraction | int = 0,
    slot: Fraction | int = 0,
    rounds: int = 0,
    size: Fraction | int = 1,
) -> dict[str, Fraction]:
    """``sent`` by all ranks together in a step and ``slot`` by one in a slot, in models.

    ``size`` is that of a message.
    """
    return {
        "ranks": Fraction(ranks),
        "activations": Fraction(activations),
        "total_activations": Fraction(total),
        "parameters": Fraction(parameters),
        "traffic": Fraction(sent, ranks),
        "messages": Fraction(sent, ranks) / size,
        "traffic_in_slot": Fraction(slot),
        "rounds": Fraction(rounds),
    }


def _half(rule: str, n: int) -> Fraction:
    """Activations of all workers together."""
    return Fraction(n) if rule == "DP" else Fraction(n + 1, 2)


def _one(rule: str, n: int) -> dict[str, Fraction]:
    return _form(1, _half(rule, n), _half(rule, n), 1)


def _multi(rule: str, n: int) -> dict[str, Fraction]:
    slot = Fraction(2 * (n - 1), n * n) if rule == "DP" else Fraction(1, n)
    rounds = 2 * (n - 1) if rule == "DP" else 1
    size = Fraction(1, n * n if rule == "DP" else n)
    return _form(n, 1, _half(rule, n), 1, 2 * (n - 1), slot, rounds, size)


def _model_parallel(rule: str, n: int) -> dict[str, Fraction]:
    share = Fraction(1, n)
    if rule == "DP":
        slot = Fraction(2 * (n - 1), n * n)
        return _form(n * n, share, n, share, 2 * (n - 1), slot, 2 * (n - 1), share * share)
    rounds = 2 if rule == "CDP-v2" and n > 2 else 1
    return _form(n * (n + 1) // 2, share, _half(rule, n), share, n - 1, share, rounds, share)


def _pipelined(rule: str, n: int) -> dict[str, Fraction]:
    return _form(n, 1, _half(rule, n), Fraction(1, n))


def _zero(rule: str, n: int) -> dict[str, Fraction]:
    share, log = Fraction(1, n), (n - 1).bit_length()
    least = Fraction((3 * n - 1) * (n - 1), n)
    if rule == "DP":
        return _form(n, 1, n, share, least, (log + 1) * share, 2 * log, share)
    total = _half(rule, n)
    if rule == "CDP-v1":
        return _form(n, 1, total, share, 3 * (n - 1), min(n, 3) * share, 1 + n % 2, share)
    return _form(n, 1, total, share, least, min(n - 1, 2) * share, 1, share)


_FORMULAS: dict[str, Callable[[str, int], dict[str, Fraction]]] = {
    "one device": _one,
    "multi-device": _multi,
    "with model parallelism": _model_parallel,
    "pipeline": _pipelined,
    "ZeRO": _zero,
}
