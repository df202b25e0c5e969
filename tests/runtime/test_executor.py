"""Executor: how messages travel changes no result; compression, errors, and what is left alive."""

import gc
import itertools
import threading
import weakref
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.runtime import models
from tests.runtime.conform import sgd
from tests.runtime.models import name_of
from toolkit.errors import UserError
from toolkit.model import partition
from toolkit.runtime import Distributed, join, launch, report
from toolkit.runtime.dataflow import Dataflow
from toolkit.runtime.executor import Executor
from toolkit.runtime.message_transfer import Transfer
from toolkit.runtime.rank import Rank
from toolkit.schedule import STATES, Action, catalog

SCHEDULES = [
    catalog.data_parallel(2),
    catalog.data_parallel(2, state="sharded"),
    catalog.cyclic(2, 1),
    catalog.cyclic(2, "freshest", state="sharded"),
    catalog.one_f_one_b(2, 3),
]
WAYS = {
    "in order": {"overlap": False},
    "tiny chunks": {"chunk_mb": 3e-4},
    "paced": {"pacing": True, "chunk_mb": 1e-3},
    "in order and paced": {"overlap": False, "pacing": True},
}
SHARED = [
    catalog.cyclic(2, 1),
    catalog.cyclic(2, 1, state="sharded"),
    catalog.data_parallel(2, state="sharded"),
    catalog.cyclic(2, 1, chains="rotated"),
]
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LR = 0.1
N_SMALL_STEPS = 30


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))


def small_batches(steps):
    """Micro-batches of 4, for 2 ranks."""
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(8, 6, generator=generator),
            torch.randint(3, (8,), generator=generator),
        )
        for _ in range(steps)
    ]


def plain_sgd(parameters):
    return torch.optim.SGD(parameters, lr=LR)


# What each rank does


def job():
    """Reports all that it finds, and ends by an error of rank 1."""
    world = join(device="cpu")
    found = {
        "same": {
            (k, way): _trained(world, k, **WAYS.get(way, {})) for k, way in _runs()
        },
        "compressed": {
            (compression, k): _compressed(world, schedule, compression)
            for compression in TYPES
            for k, schedule in enumerate([*SHARED, catalog.data_parallel(2)])
        },
        "alive": _messages_alive(world),
    }
    found["ranks"] = _ranks_alive(world)
    found["ahead"] = {state: _ahead(world, state) for state in STATES}
    found["abandoned"] = _abandon(world)
    report(found)
    try:
        _fail(world)
    except ValueError:
        report({"failed": _threads()})
        raise


def _runs():
    return itertools.product(range(len(SCHEDULES)), ("usual", *WAYS))


def _trained(world, k, **options):
    """State and losses of a run of steps that overlap and one alone."""
    schedule = SCHEDULES[k]
    stages = models.cut(models.residual(), schedule)
    runtime = Distributed(
        stages, schedule, sgd, F.cross_entropy, world=world, **options
    )
    batches = models.make_batches(schedule.n_microbatches, 4)
    results = [*runtime.run(batches[:3]), runtime.step(*batches[3])]
    assert not _threads()
    losses = {f"losses {result.step}": result.losses for result in results}
    return runtime.module().state_dict() | losses


def _small_runtime(world, schedule, loss=F.cross_entropy, **options):
    stages = partition(small_model(), 2, torch.zeros(4, 6), ["1"])
    return Distributed(stages, schedule, plain_sgd, loss, world=world, **options)


def _compressed(world, schedule, compression):
    """State and losses, and every version that this rank's forwards have read."""
    read = {}
    execute = Rank.execute

    def spy(self, i):
        if i.action == Action.FORWARD:
            weights = self.weights[i.stage, i.version]
            read[i.stage, i.version] = {name: x.clone() for name, x in weights.items()}
        execute(self, i)

    with mock.patch.object(Rank, "execute", spy):
        runtime = _small_runtime(world, schedule, compression=compression)
        results = list(runtime.run(small_batches(4)))
    return runtime.module().state_dict(), [result.losses for result in results], read


def _messages_alive(world):
    """How many messages are alive as each of many steps ends, and after the run, by schedule."""
    found, made = {}, []
    begin = Transfer.__init__

    def spy(self, *args):
        made.append(weakref.ref(self))
        begin(self, *args)

    def alive():
        return sum(one() is not None for one in made)

    with mock.patch.object(Transfer, "__init__", spy):
        for schedule in (catalog.cyclic(2, 1), catalog.one_f_one_b(2, 2)):
            made.clear()
            runtime = _small_runtime(world, schedule)
            counts = [alive() for _ in runtime.run(small_batches(N_SMALL_STEPS))]
            found[schedule.name] = len(made), counts, alive()
    return found


def _ranks_alive(world):
    """How many ranks' memories outlive their programs, where Python's collector does not run."""
    runtime = _small_runtime(world, catalog.cyclic(2, 1))
    gc.collect()
    gc.disable()
    try:
        list(runtime.run(small_batches(3)))
        return sum(type(found) is Rank for found in gc.get_objects())
    finally:
        gc.enable()


def _ahead(world, state):
    """By how many slots at most messages may begin before their place."""
    ticks, opened = [], []
    perform, open_until = Executor._perform, Dataflow.open_until

    def performing(self, position, i):
        ticks.append(i.tick)
        perform(self, position, i)

    def opening(self, tick):
        opened.append(tick - ticks[-1])
        open_until(self, tick)

    with (
        mock.patch.object(Executor, "_perform", performing),
        mock.patch.object(Dataflow, "open_until", opening),
    ):
        list(
            _small_runtime(world, catalog.cyclic(2, 1, state=state)).run(
                small_batches(3)
            )
        )
    return max(opened)


def _abandon(world):
    """The threads that an abandoned run leaves, and what is refused after it."""
    runtime = _small_runtime(world, catalog.cyclic(2, 1), pacing=True)
    state = runtime.state_dict()
    next(runtime.run(small_batches(5)))
    refused = []
    for attempt in (
        *(
            runtime.module,
            runtime.averages,
            runtime.local_state,
            runtime.state_dict,
            runtime.measurements,
        ),
        lambda: runtime.step(*small_batches(1)[0]),
        lambda: list(runtime.run(small_batches(5))),
        lambda: runtime.load_state_dict(state),
    ):
        with pytest.raises(UserError) as error:
            attempt()
        refused.append(str(error.value))
    return _threads(), refused


def _fail(world):
    """Rank 1 raises an error in the second step."""
    calls = itertools.count()

    def loss(outputs, targets):
        # The first call finds out what the loss returns.
        if world.rank == 1 and next(calls) == 2:
            raise ValueError("a bad micro-batch")
        return F.cross_entropy(outputs, targets)

    list(
        _small_runtime(world, catalog.cyclic(2, 1), loss, pacing=True).run(
            small_batches(4)
        )
    )


def _threads():
    names = (thread.name for thread in threading.enumerate())
    return sorted(name for name in names if name in ("messages", "pacer"))


@pytest.fixture(scope="module")
def ended():
    """What the ranks report, and the error."""
    reports = {0: {}, 1: {}}
    with pytest.raises(ValueError, match="a bad micro-batch") as raised:
        launch(job, 2, on_report=lambda rank, found: reports[rank].update(found))
    return reports, raised.value


@pytest.fixture(scope="module")
def found(ended):
    return ended[0]


# How messages travel


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "k", range(len(SCHEDULES)), ids=lambda k: name_of(SCHEDULES[k])
)
def test_the_way_changes_no_bit(found, k, way):
    for rank in (0, 1):
        same = found[rank]["same"]
        models.assert_same(same[k, way], same[k, "usual"], 0, 0)


# Compression


def by_the_definition(sent_as):
    """CDP-v1 on 2 ranks: the last one updates; what crosses between the two is rounded."""
    model = small_model()
    parameters = dict(model.named_parameters())
    versions = [{name: p.detach().clone() for name, p in parameters.items()}]
    losses = []

    def rounded(tensors):
        return {name: x.to(sent_as).float() for name, x in tensors.items()}

    def gradients(weights, inputs, targets):
        leaves = {name: x.clone().requires_grad_() for name, x in weights.items()}
        loss = F.cross_entropy(
            torch.func.functional_call(model, leaves, inputs), targets
        )
        found = torch.autograd.grad(loss / 2, list(leaves.values()))
        return loss.detach(), dict(zip(leaves, found, strict=True))

    for step, (inputs, targets) in enumerate(small_batches(4)):
        read = versions[max(0, step - 1)]
        (x, other_x), (y, other_y) = inputs.chunk(2), targets.chunk(2)
        loss, sent = gradients(rounded(read), x, y)
        other_loss, own = gradients(read, other_x, other_y)
        losses.append((loss, other_loss))
        total = {name: own[name] + rounded(sent)[name] for name in own}
        versions.append(
            {name: x - LR * total[name] for name, x in versions[-1].items()}
        )
    return versions[-1], losses


@pytest.mark.parametrize("compression", TYPES)
def test_compression_follows_its_definition(found, compression):
    """The sum is made in float32, of a rounded part; the rank that updates keeps its weights."""
    expected, losses = by_the_definition(TYPES[compression])
    exact, _ = by_the_definition(torch.float32)
    for rank in (0, 1):
        state, own, _ = found[rank]["compressed"][compression, 0]
        models.assert_same(state, expected, 1e-6, 1e-7)
        for loss, pair in zip(own, losses, strict=True):
            torch.testing.assert_close(loss, pair[rank][None], rtol=1e-6, atol=0)
        assert models.differ(state, exact)  # so the comparison can fail


@pytest.mark.parametrize("compression", TYPES)
@pytest.mark.parametrize("k", range(len(SHARED)), ids=lambda k: name_of(SHARED[k]))
def test_all_read_what_the_owner_has_rounded(found, k, compression):
    pairs = []
    read = [found[rank]["compressed"][compression, k][2] for rank in (0, 1)]
    for stage, version in read[0].keys() & read[1].keys():
        owner = SHARED[k].owners[stage]
        there = read[1 - owner][stage, version]
        pairs += [(x, there[name]) for name, x in read[owner][stage, version].items()]
    assert all(
        torch.equal(other, x.to(TYPES[compression]).float()) for x, other in pairs
    )
    assert not all(torch.equal(other, x) for x, other in pairs)


@pytest.mark.parametrize("compression", TYPES)
def test_collectives_sum_in_the_type_that_travels(found, compression):
    """Data parallelism: of both ranks' rounded gradients, the rounded sum, on both ranks."""
    sent_as, model = TYPES[compression], small_model()
    parameters = list(model.parameters())
    for inputs, targets in small_batches(4):
        halves = zip(inputs.chunk(2), targets.chunk(2), strict=True)
        given = [
            torch.autograd.grad(F.cross_entropy(model(x), y) / 2, parameters)
            for x, y in halves
        ]
        with torch.no_grad():
            for p, one, other in zip(parameters, *given, strict=True):
                p -= (
                    LR
                    * (one.to(sent_as).float() + other.to(sent_as).float())
                    .to(sent_as)
                    .float()
                )
    key = compression, len(SHARED)
    (state, _, read), (_, _, others) = (
        found[rank]["compressed"][key] for rank in (0, 1)
    )
    models.assert_same(state, dict(model.named_parameters()), 1e-6, 1e-7)
    assert read.keys() == others.keys()
    for version, weights in read.items():
        models.assert_same(others[version], weights, 0, 0)


# What is left


def test_messages_do_not_accumulate(found):
    """Those of a few steps are alive, however many steps there are; and none in the end."""
    for rank in (0, 1):
        for made, counts, left in found[rank]["alive"].values():
            assert len(counts) == N_SMALL_STEPS
            assert made > 2 * N_SMALL_STEPS - 10
            assert max(counts) <= 24
            assert left == 0
        assert found[rank]["ranks"] == 0


def test_a_sharded_state_is_fetched_two_slots_ahead(found):
    for rank in (0, 1):
        assert found[rank]["ahead"] == {"replicated": 8, "sharded": 2, "circulating": 2}


def test_an_abandoned_run_is_refused(found):
    """Its threads end; some of its messages would be taken for those of the next run."""
    for rank in (0, 1):
        threads, refused = found[rank]["abandoned"]
        assert (threads, len(refused)) == ([], 8)
        assert all(
            "run()" in words and "start the ranks again" in words for words in refused
        )


def test_an_error_of_the_loss_surfaces(ended):
    """On the rank that has it, as it is; and its threads end."""
    reports, error = ended
    (note,) = error.__notes__
    assert "on rank 1, in step 1 at FORWARD stage 1 microbatch 1" in note
    assert reports[1]["failed"] == []
