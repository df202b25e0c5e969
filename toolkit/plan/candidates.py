"""What a plan chooses from: methods, stages, micro-batches, cuts and recomputed activations."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import isqrt
from typing import Any

from toolkit.errors import UserError
from toolkit.files import started_by
from toolkit.format import count
from toolkit.model import InputSpec, Sequences
from toolkit.model.partition import MEASURES
from toolkit.schedule import CHAINS, Schedule
from toolkit.schedule.catalog import METHODS, Method
from toolkit.schedule.choice import Choice, options_of
from toolkit.training.data.tokens import BYTES

_ROUNDS = 1, 2, 4  # micro-batches of a worker, or of a pipeline by its ranks
_STAGES = 8  # of a model that each worker has whole, or a few more: as many for each worker
_IN_FLIGHT = 2, 4, 8  # micro-batches on one device
LARGEST = 512  # stages times micro-batches: a second of simulation
_CHECKPOINTS = "none", "all"


@dataclass(frozen=True)
class Candidate:
    """A schedule, and how its stages are made.

    Attributes:
        choice: the method, its sizes and options.
        batch: samples of a micro-batch.
        partition: measure that the stages share equally.
        checkpoint: ``none`` or ``all``: stages that compute their forward twice.
        within: share of a step that the fresher weights of an affordable delay may cost; None: the
            delay is that of the choice.
    """

    choice: Choice
    batch: int
    partition: str = "flops"
    checkpoint: str = "none"
    within: float | None = None

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule; built anew in another process."""
        return self.choice.build()

    @property
    def is_plain(self) -> bool:
        """Whether stages share the arithmetic equally and keep their activations."""
        return self.partition == MEASURES[0] and self.checkpoint == _CHECKPOINTS[0]

    @property
    def label(self) -> str:
        """The schedule and what differs from plain stages, in words."""
        schedule, named = self.schedule, METHODS.get(self.choice.schedule)
        # A delay that was searched for has no short name.
        name = schedule.name if named else "searched rank orders"
        if self.within is not None:
            name = f"CDP affordable {schedule.chains}"
        placed = f" {schedule.placement}" if named and named.kind != "pipeline" else ""
        placed = placed.replace("_", " ").replace(" per microbatch", "")
        words = [name + placed, f"{count(schedule.n_stages, 'stage')} by {self.partition}"]
        words += [f"micro-batches of {self.batch}"]
        words += ["recomputed"] * (self.checkpoint != "none")
        return ", ".join(words)

    def options(self) -> str:
        """Options of ``experiments/simulate.py`` and ``train.py`` that make it."""
        found = self.choice.overrides()
        if self.within is not None:
            found = replace(self.choice, delay=None).overrides()
            found += f" 'schedule.delay={{within: {self.within:g}}}'"
        return f"{found} batch={self.batch} partition={self.partition} checkpoint={self.checkpoint}"

    def command(self, given: str) -> str:
        """Return a command line that trains so; ``given`` has its other options."""
        n_ranks = self.schedule.n_ranks
        how = "runtime=distributed" if n_ranks > 1 else "runtime.order=scheduled"
        return f"{started_by('train', n_ranks)} {how} {self.options()} {given}"


def candidates(n_ranks: int, batch: int, stages: int = LARGEST) -> list[Candidate]:
    """Return all candidates for ``n_ranks``, the plainest data parallelism first.

    Args:
        n_ranks: devices; a method that arranges them in a triangle or a square may leave some.
        batch: samples of a training step; candidates have micro-batches of equal size.
        stages: of workers that have the whole model, at most, or twice as many.
    """
    found: list[Candidate] = []
    for choice in _choices(n_ranks, stages):
        in_step = choice.microbatches * (choice.accumulate or 1)
        small = choice.stages * in_step <= max(LARGEST, n_ranks**2)
        if small and batch % in_step == 0 and _exists(choice):
            ways = product(MEASURES, _CHECKPOINTS)
            found += [Candidate(choice, batch // in_step, *way) for way in ways]
    return found


def _exists(choice: Choice) -> bool:
    """Whether a choice is possible, and late weights serve it: only staggered ops run earlier."""
    with suppress(UserError):
        late = choice.build().max_staleness
        return not late or METHODS[choice.schedule].kind != "data_parallel"
    return False


def _choices(n_ranks: int, most: int) -> Iterator[Choice]:
    usual = min(n_ranks * -(-_STAGES // n_ranks), most)
    for name, method in METHODS.items():
        takes = options_of(name)
        if method.kind == "pipeline":
            own = n_ranks if "n_ranks" in takes else None
            stages = n_ranks * method.stages_per_rank
            yield from (
                Choice(name, stages, n_ranks * k, n_ranks=own) for k in _ROUNDS if n_ranks > 1
            )
        elif "placement" not in takes:  # one device by nature
            yield from (Choice(name, usual, k) for k in (1, *_IN_FLIGHT) if n_ranks == 1)
        elif n_ranks == 1:
            yield from (Choice(name, usual, n, placement="one") for n in _IN_FLIGHT)
        else:
            yield from _workers(name, method, n_ranks, usual, takes)


def _workers(
    name: str, method: Method, n: int, usual: int, takes: dict[str, Any]
) -> Iterator[Choice]:
    """Choices with a worker a rank, with a stage a rank, and with both."""
    groups = [None, *(g for g in range(2, n) if n % g == 0)] if "groups" in takes else [None]
    chains = CHAINS if "chains" in takes else [None]
    rounds = _ROUNDS if "accumulate" in takes else [None]
    for stages, k, order, g in product((usual, 2 * usual), rounds, chains, groups):
        yield Choice(name, stages, n, accumulate=k, chains=order, groups=g)
    if method.kind == "cyclic":
        yield from (Choice(name, n, n, placement="per_stage", accumulate=k) for k in rounds)
    square = (
        Choice(name, s, s, placement="per_stage_and_microbatch") for s in range(2, isqrt(2 * n) + 1)
    )
    fitting = [choice for choice in square if _exists(choice) and choice.build().n_ranks <= n]
    yield from fitting[-1:]


def data_options(form: InputSpec, *, own: bool = False) -> str:
    """Return options of ``experiments/train.py`` for samples like ``form``.

    Args:
        form: shape of the samples.
        own: the user's images, instead of random ones.
    """
    if isinstance(form, Sequences):
        if form.vocabulary == BYTES:
            return f"data=text data.root=MY_TEXT data.length={form.length}"
        sizes = f"data.length={form.length} data.vocabulary={form.vocabulary}"
        return f"data=tokens data.root=MY_TOKENS {sizes}"
    if own:
        folder = f"data=image_folder data.root=MY_IMAGES data.image_size={form.width}"
        return folder if form.channels == 3 else "data=MY_DATA"
    sizes = f"data.image_size={form.width} data.in_channels={form.channels}"
    return f"data=synthetic {sizes} data.n_classes={form.n_classes}"
