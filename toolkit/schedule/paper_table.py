"""The paper's comparison of data parallelism with cyclic data parallelism, setting by setting.

N stages, N micro-batches. Each row is a schedule, the closed form of its footprint, and the
footprint counted from its program. Source: table 1 of arXiv 2403.08837, section 4; the forms of
traffic count messages of this toolkit's programs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import product

from toolkit.errors import whole
from toolkit.schedule import catalog
from toolkit.schedule.schedule import Schedule
from toolkit.schedule.steady_state import Footprint, footprint

_METHODS = {
    catalog.METHODS[k].label: catalog.METHODS[k] for k in ("dp", "cdp_v1", "cdp_v2")
}
RULES = tuple(_METHODS)


@dataclass(frozen=True)
class PaperRow:
    """One setting under one rule: what the closed form says, and what the program does."""

    setting: str
    rule: str
    schedule: Schedule
    formula: dict[str, Fraction]
    counted: Footprint

    @property
    def differences(self) -> dict[str, tuple[Fraction, Fraction]]:
        """(formula, counted), by quantity, where they differ."""
        pairs = {}
        for name, value in self.formula.items():
            counted = getattr(self.counted, name)
            if counted != value:
                pairs[name] = (value, counted)
        return pairs


def compare(n: int) -> list[PaperRow]:
    """Return every setting under every rule, for ``n`` workers, 2 or more."""
    return [*each_row(n)]


def each_row(n: int) -> Iterator[PaperRow]:
    """Yield the rows of :func:`compare` one by one: with many workers it takes minutes."""
    n = whole(n, "the number of workers of a comparison", 2)
    for setting, rule in product(SETTINGS, RULES):
        schedule = SETTINGS[setting](rule, n)
        yield PaperRow(
            setting, rule, schedule, formula(setting, rule, n), footprint(schedule)
        )


def schedule_of(
    rule: str,
    n: int,
    placement: str,
    state: str = "replicated",
    *,
    n_stages: int | None = None,
) -> Schedule:
    """Return the schedule of one of :data:`RULES` for ``n`` workers; as a pipeline, DP is GPipe."""
    if rule == "DP" and placement == "per_stage":
        return catalog.gpipe(n if n_stages is None else n_stages, n)
    return _METHODS[rule](n, placement=placement, state=state, n_stages=n_stages)


SETTINGS: dict[str, Callable[[str, int], Schedule]] = {
    "one device": partial(schedule_of, placement="one"),
    "multi-device": partial(schedule_of, placement="per_microbatch"),
    "with model parallelism": partial(
        schedule_of, placement="per_stage_and_microbatch"
    ),
    "pipeline": partial(schedule_of, placement="per_stage"),
    "ZeRO": partial(schedule_of, placement="per_microbatch", state="sharded"),
}
"""How each setting of the paper is scheduled under a rule, for N workers."""


def formula(setting: str, rule: str, n: int) -> dict[str, Fraction]:
    """Return the closed form of a footprint without weights, by quantity, for ``n`` workers."""
    s = Fraction(1, n)  # a stage in models
    log = (n - 1).bit_length()  # rounds of a tree among n ranks
    # A sum to n - 1 others and the new weights back; rounds of an all-reduce.
    ring = 2 * (n - 1)
    # And weights a second time, but not the last stage's.
    gathered = ring + (n - 1) ** 2 * s
    total = Fraction(n) if rule == "DP" else Fraction(n + 1, 2)
    # ranks, activations, parameters; in models: sent by all ranks in a step, a message, the most
    # that one rank sends in a slot; rounds
    forms: dict[str, tuple[Fraction | int, ...]]
    if rule == "DP":
        forms = {
            "one device": (1, n, 1, 0, 1, 0, 0),
            "multi-device": (n, 1, 1, ring, s * s, ring * s * s, ring),
            "with model parallelism": (n * n, s, s, ring, s * s, ring * s * s, ring),
            "pipeline": (n, 1, s, 0, 1, 0, 0),
            "ZeRO": (n, 1, s, gathered, s, (log + 1) * s, 2 * log),
        }
    else:
        is_v1 = rule == "CDP-v1"
        zero: tuple[Fraction | int, ...]
        n_rounds = 1 if is_v1 or n == 2 else 2  # with model parallelism
        if is_v1:
            zero = (n, 1, s, 3 * (n - 1), s, min(n, 3) * s, 1 + n % 2)
        else:
            zero = (n, 1, s, gathered, s, min(n - 1, 2) * s, 1)
        forms = {
            "one device": (1, total, 1, 0, 1, 0, 0),
            "multi-device": (n, 1, 1, ring, s, s, 1),
            "with model parallelism": (n * (n + 1) // 2, s, s, n - 1, s, s, n_rounds),
            "pipeline": (n, 1, s, 0, 1, 0, 0),
            "ZeRO": zero,
        }
    ranks, activations, parameters, sent, message, slot, rounds = map(
        Fraction, forms[setting]
    )
    return {
        "ranks": ranks,
        "activations": activations,
        "total_activations": total,
        "parameters": parameters,
        "traffic": sent / ranks,
        "messages": sent / ranks / message,
        "traffic_in_slot": slot,
        "rounds": rounds,
    }
