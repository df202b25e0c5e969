"""What a plan chooses from: methods, stages, micro-batches, cuts and recomputed activations."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import isqrt

from toolkit.cost.worker_forms import BUCKETS
from toolkit.errors import UserError
from toolkit.files import started_by
from toolkit.format import count
from toolkit.model import Features, InputSpec, Sequences
from toolkit.model.partition import MEASURES
from toolkit.schedule import CHAINS, Schedule, ScheduleSpec
from toolkit.schedule.catalog import METHODS, Method
from toolkit.schedule.method_sizes import pipeline_sizes, takes, worker_sizes
from toolkit.training.data.tokens import BYTES

_ROUNDS = 1, 2, 4  # micro-batches of a worker, or of a pipeline by its ranks
# Of a model that each worker has whole, or a few more: as many for each worker.
_STAGES = 8
_IN_FLIGHT = 2, 4, 8  # micro-batches on one device
MAX_OPS = 512  # stages times micro-batches: a second of simulation
_CHECKPOINTS = "none", "all"
OWN_DATA = "data=MY_DATA"


@dataclass(frozen=True)
class Candidate:
    """A schedule, and how its stages are made.

    Attributes:
        spec: the method, its sizes and options.
        batch: samples of a micro-batch.
        partition: measure that the stages share equally; or ``buckets``, where the schedule is that
            of torch's DistributedDataParallel.
        checkpoint: ``none`` or ``all``: stages that compute their forward twice.
        within: share of a step that the fresher weights of an affordable delay may cost; None: the
            delay is that of the spec.
        width: devices of a rank, which share its stages.
        compression: of messages of gradients and weights, as ``runtime.compression``.
    """

    spec: ScheduleSpec
    batch: int
    partition: str = "flops"
    checkpoint: str = "none"
    within: float | None = None
    width: int = 1
    compression: str = "none"

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule; built anew in another process."""
        return self.spec.build()

    @property
    def n_devices(self) -> int:
        """Devices of all ranks."""
        return self.schedule.n_ranks * self.width

    @property
    def is_plain(self) -> bool:
        """Whether stages share the arithmetic equally and keep their activations."""
        return (
            self.partition in (MEASURES[0], BUCKETS)
            and self.checkpoint == _CHECKPOINTS[0]
        )

    @property
    def name(self) -> str:
        """The schedule's name, with its placement unless that is usual."""
        schedule = self.schedule
        method = METHODS.get(self.spec.method)
        name = "searched rank orders"
        if method is not None:
            name = schedule.name
        # A delay that was searched for has no short name.
        if self.within is not None:
            # It is a matrix. The schedule's own name would say only that it has one.
            name = f"CDP affordable {schedule.chains}"
        if method is not None and method.kind != "pipeline":
            placement = f" {schedule.placement}".replace("_", " ")
            name += placement.replace(" per microbatch", "")
        if self.partition == BUCKETS:
            # The schedule is plain data parallelism; its messages are torch's buckets.
            name = name.replace("DP", "DDP", 1)
        return name

    @property
    def stages_in_words(self) -> str:
        """The number of stages, and what they share equally."""
        if self.partition == BUCKETS:
            return "25 MB buckets"
        return f"{self.schedule.n_stages} by {self.partition}"

    @property
    def label(self) -> str:
        """The schedule and what differs from plain stages, in words."""
        stages = f"{count(self.schedule.n_stages, 'stage')} by {self.partition}"
        if self.partition == BUCKETS:
            stages = "buckets of 25 MB"
        words = [self.name, stages, f"micro-batches of {self.batch}"]
        if self.checkpoint != "none":
            words.append("recomputed")
        if self.width > 1:
            words.append(f"{self.width} devices a rank")
        if self.compression != "none":
            words.append(f"{self.compression} messages")
        return ", ".join(words)

    def options(self) -> str:
        """Options of ``experiments/simulate.py`` and ``train.py`` that make it."""
        if self.partition == BUCKETS:
            overrides = replace(self.spec, stages=1).overrides()
            return f"{overrides} batch={self.batch} checkpoint={self.checkpoint}"
        overrides = self.spec.overrides()
        if self.within is not None:
            # The command searches for the delay again, since a matrix is too long for a command
            # line.
            overrides = replace(self.spec, delay=None).overrides()
            overrides += f" 'schedule.delay={{within: {self.within:g}}}'"
        return (
            f"{overrides} batch={self.batch} partition={self.partition}"
            f" checkpoint={self.checkpoint}"
        )

    def command(self, more_options: str) -> str:
        """Return a command line that trains so; ``more_options`` are its other options."""
        n_ranks = self.schedule.n_ranks
        runtime_option = "runtime.order=scheduled"
        if self.partition == BUCKETS:
            runtime_option = "runtime=ddp"
        elif self.width > 1:
            runtime_option = f"runtime=distributed runtime.width={self.width}"
        elif n_ranks > 1:
            runtime_option = "runtime=distributed"
        if self.compression != "none":
            runtime_option += f" runtime.compression={self.compression}"
        start = started_by("train", self.n_devices)
        return f"{start} {runtime_option} {self.options()} {more_options}"


def candidates(
    n_ranks: int,
    batch: int,
    stages: int = MAX_OPS,
    buckets: int | None = None,
    width: int = 1,
) -> list[Candidate]:
    """Return all candidates for ``n_ranks``, the plainest data parallelism first.

    Args:
        n_ranks: ranks; a method that arranges them in a triangle or a square may leave some.
        batch: samples of a training step; candidates have micro-batches of equal size.
        stages: of workers that have the whole model, at most, or twice as many.
        buckets: of DistributedDataParallel, which then takes the place of data parallelism with a
            message per stage.
        width: devices of a rank.
    """
    all_candidates: list[Candidate] = []
    specs = [*_specs(n_ranks, stages)]
    if buckets is not None and n_ranks > 1:
        # DDP sends a message per bucket, not per stage, so cuts into stages would only repeat it.
        specs = [spec for spec in specs if not _is_ddp(spec)]
        all_candidates += _ddp_candidates(n_ranks, batch, buckets)
    for spec in specs:
        microbatches_per_step = spec.microbatches * (spec.accumulate or 1)
        # The time to simulate grows with the ops. Many ranks need that many ops in any case.
        is_small = spec.stages * microbatches_per_step <= max(MAX_OPS, n_ranks**2)
        if is_small and batch % microbatches_per_step == 0 and _exists(spec):
            microbatch_size = batch // microbatches_per_step
            for partition, checkpoint in product(MEASURES, _CHECKPOINTS):
                all_candidates.append(
                    Candidate(spec, microbatch_size, partition, checkpoint, width=width)
                )
    return all_candidates


def of_microbatch(
    all_candidates: list[Candidate], samples: int, n_ranks: int, batch: int
) -> list[Candidate]:
    """Return the candidates with micro-batches of ``samples``.

    Raises:
        UserError: a training step of ``batch`` samples has no such micro-batches on all ranks.
    """
    if batch not in (n_rounds * n_ranks * samples for n_rounds in _ROUNDS):
        # Other batches would have micro-batches of other sizes, whose costs nobody has measured.
        batches = [str(n_rounds * n_ranks * samples) for n_rounds in _ROUNDS]
        raise UserError(
            f"costs were measured with micro-batches of {samples}, so that a step on"
            f" {count(n_ranks, 'rank')} has {', '.join(batches)} samples: got batch={batch}"
        )
    return [candidate for candidate in all_candidates if candidate.batch == samples]


def _is_ddp(spec: ScheduleSpec) -> bool:
    """Whether a spec is data parallelism with the whole model on each of several ranks."""
    method = METHODS[spec.method]
    is_replicated = method.kind == "data_parallel" and "state" not in method.options
    return is_replicated and takes(method, "placement") and spec.placement is None


def _ddp_candidates(n_ranks: int, batch: int, buckets: int) -> list[Candidate]:
    """Return DistributedDataParallel for each number of accumulated micro-batches."""
    ddp_candidates = []
    for n_rounds in _ROUNDS:
        if batch % (n_rounds * n_ranks) == 0:
            accumulate = n_rounds if n_rounds > 1 else None
            spec = ScheduleSpec("dp", buckets, n_ranks, accumulate=accumulate)
            for checkpoint in _CHECKPOINTS:
                samples = batch // (n_rounds * n_ranks)
                ddp_candidates.append(Candidate(spec, samples, BUCKETS, checkpoint))
    return ddp_candidates


def _exists(spec: ScheduleSpec) -> bool:
    """Whether a spec is possible, and gains from its late weights if it has any.

    Late weights let staggered ops run earlier. Plain data parallelism has no such ops.
    """
    with suppress(UserError):
        max_staleness = spec.build().max_staleness
        return not max_staleness or METHODS[spec.method].kind != "data_parallel"
    return False


def _specs(n_ranks: int, max_stages: int) -> Iterator[ScheduleSpec]:
    """Yield the methods of the catalogue in all sizes that ``n_ranks`` allow."""
    # A multiple of the ranks, so that workers start whole slots apart.
    n_stages = min(n_ranks * -(-_STAGES // n_ranks), max_stages)
    for name, method in METHODS.items():
        if method.kind == "pipeline":
            if n_ranks > 1:
                for n_rounds in _ROUNDS:
                    yield ScheduleSpec(
                        name, **pipeline_sizes(method, n_ranks, n_ranks * n_rounds)
                    )
        elif not takes(method, "placement"):  # one device by nature
            if n_ranks == 1:
                for n_microbatches in (1, *_IN_FLIGHT):
                    yield ScheduleSpec(name, n_stages, n_microbatches)
        elif n_ranks == 1:
            for n_microbatches in _IN_FLIGHT:
                yield ScheduleSpec(name, n_stages, n_microbatches, placement="one")
        else:
            yield from _workers(name, method, n_ranks, n_stages)


def _workers(
    name: str, method: Method, n_ranks: int, n_stages: int
) -> Iterator[ScheduleSpec]:
    """Yield specs with a worker per rank, with a stage per rank, and with both."""
    groups: list[int | None] = [None]
    if takes(method, "groups"):
        groups += [
            n_groups for n_groups in range(2, n_ranks) if n_ranks % n_groups == 0
        ]
    chains = CHAINS if takes(method, "chains") else [None]
    rounds = _ROUNDS if takes(method, "accumulate") else [1]
    # Twice the stages make messages half as large, and each worker's first one leaves earlier.
    for stages, n_rounds, chain_order, n_groups in product(
        (n_stages, 2 * n_stages), rounds, chains, groups
    ):
        sizes = worker_sizes(method, n_ranks, n_rounds * n_ranks, stages)
        yield ScheduleSpec(name, **sizes, chains=chain_order, groups=n_groups)
    if method.kind == "cyclic":
        for n_rounds in rounds:
            yield ScheduleSpec(
                name, **pipeline_sizes(method, n_ranks, n_rounds * n_ranks)
            )

    # Model parallelism takes a square or a triangle of ranks: the largest that there is. n workers
    # take n^2 ranks; staggered ones share those of late stages, and take n (n + 1) / 2:
    #
    #     stage 0   * * *           n (n + 1) / 2 <= n_ranks, so that n < sqrt(2 n_ranks)
    #     stage 1   * *
    #     stage 2   *
    for n_workers in reversed(range(2, isqrt(2 * n_ranks) + 1)):
        spec = ScheduleSpec(
            name, n_workers, n_workers, placement="per_stage_and_microbatch"
        )
        if _exists(spec) and spec.build().n_ranks <= n_ranks:
            yield spec
            break


def late_methods() -> list[str]:
    """Return the names of the cyclic methods that data parallelism is compared with by default."""
    return [
        name
        for name, method in METHODS.items()
        if method.kind == "cyclic" and "state" not in method.options
    ]


def placeholder_note(command: str) -> str:
    """Return what a user puts in the place of :data:`OWN_DATA`; empty if it is not in a command."""
    if OWN_DATA not in command.split():
        return ""
    return (
        "MY_DATA is your data set: a file MY_FOLDER/data/MY_DATA.yaml with --config-dir=MY_FOLDER"
        " (conf/README.md, Data of your own)."
    )


def data_options(form: InputSpec, *, own: bool = False) -> str:
    """Return options of ``cyclic-dp train`` for samples like ``form``.

    Args:
        form: shape of the samples.
        own: the user's images, instead of random ones. Features are always the user's.
    """
    if isinstance(form, Sequences):
        if form.vocabulary == BYTES:
            return f"data=text data.root=MY_TEXT data.length={form.length}"
        size_options = f"data.length={form.length} data.vocabulary={form.vocabulary}"
        return f"data=tokens data.root=MY_TOKENS {size_options}"
    if isinstance(form, Features):
        return OWN_DATA
    if own:
        if form.channels != 3:
            return OWN_DATA
        return f"data=image_folder data.root=MY_IMAGES data.image_size={form.width}"
    size_options = f"data.image_size={form.width} data.in_channels={form.channels}"
    return f"data=synthetic {size_options} data.n_classes={form.n_classes}"
