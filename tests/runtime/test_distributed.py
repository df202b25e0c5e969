"""Conformance: on many processes a schedule does what it does in one, and what was predicted."""

import copy
import operator
import sys

import pytest
import torch
from torch.nn import functional as F

from tests.runtime import conform, models, test_single_process
from tests.runtime.models import assert_same, name_of
from tests.thorough import more
from toolkit.cost import UNIT, profile, simulate
from toolkit.errors import UserError
from toolkit.runtime import Distributed, SingleProcess, StepOptions, launch
from toolkit.schedule import catalog
from toolkit.schedule.instruction import Action, Buffer

# Processes, and the numbers of ranks that run on them.
POOLS = more({4: (2, 3)}, {4: (1, 2, 3, 4), 6: (6,)})
CASES = [
    pytest.param(size, k, schedule, id=f"{size}-{name_of(schedule)}")
    for sizes in POOLS.values()
    for size in sizes
    for k, schedule in enumerate(conform.schedules(size))
]


@pytest.fixture(scope="module")
def trained():
    """Every method on its ranks; processes start once."""
    found, tiers = {}, {}
    for n_processes, sizes in POOLS.items():
        for schedule in [s for size in sizes for s in conform.schedules(size)]:
            models.cut(models.residual(), schedule)  # once, before all ranks would
        of_pool, in_tiers = launch(conform.all_methods, n_processes, sizes)[0]
        found |= of_pool
        tiers |= in_tiers
    return found | {"tiers": tiers}


@pytest.fixture(scope="module")
def odd_jobs():
    return launch(conform.odd_jobs, 2)


@pytest.mark.parametrize(("size", "k", "schedule"), CASES)
def test_follows_the_single_process(trained, size, k, schedule):
    """Which follows the reference: step by step, parameter by parameter, loss by loss."""
    found = trained[size][k]
    found.assert_follows(*conform.by_itself(schedule))
    assert found.steps == [list(range(conform.STEPS))] * size


@pytest.mark.parametrize(("size", "k", "schedule"), CASES)
def test_holds_and_sends_what_was_predicted(trained, size, k, schedule):
    """Activations of each rank, to the byte, and the bytes of all of its messages."""
    peaks, sent = conform.predicted(schedule)
    assert list(trained[size][k].peaks) == peaks
    assert trained[size][k].sent == pytest.approx(sent, rel=1e-12)


@pytest.mark.parametrize(("size", "k", "schedule"), CASES)
def test_weights_held_while_messages_overlap(trained, size, k, schedule):
    """Bytes of all versions: at most those predicted, and just those if weights do not travel."""
    found = trained[size][k]
    assert all(map(operator.le, found.weights, found.most_weights))
    moves = {(i.action, i.buffer) for order in schedule.lower(2).ranks for i in order}
    in_place = (
        schedule.state == "replicated" and (Action.SEND, Buffer.WEIGHTS) not in moves
    )
    if in_place and schedule.max_staleness == 0:
        assert found.weights == found.most_weights


@pytest.mark.parametrize(
    "schedule", [catalog.cyclic(2, 1), catalog.one_f_one_b(2, 3)], ids=name_of
)
def test_awkward_models(odd_jobs, schedule):
    """Dropout, AdamW, a learning-rate schedule, frozen parameters, whole numbers that cross."""
    stages = models.cut_awkward(models.awkward(), schedule)
    given = stages, schedule, conform.adamw, F.cross_entropy
    runtime = SingleProcess(*given, lr_scheduler=conform._decay, seed=3)
    list(runtime.run(models.id_batches(schedule.n_microbatches)))
    for found in odd_jobs:  # the model is whole on every rank
        assert_same(found[f"awkward {schedule.name}"], runtime.module().state_dict())
        assert (
            found[f"rates {schedule.name}"]
            == models.learning_rates(runtime)
            == [0.0025, 0.0025]
        )


@pytest.mark.parametrize("by_hand", [False, True])
def test_dictionaries_and_stages_by_hand(odd_jobs, by_hand):
    stages = models.masked_stages(models.masked(), by_hand)
    runtime = SingleProcess(
        stages, catalog.cyclic(2), conform.adamw, models.scores_loss
    )
    list(runtime.run(models.masked_batches(2)))
    for found in odd_jobs:
        assert_same(found[f"masked {by_hand}"], runtime.module().state_dict())


def in_one_process(schedule, steps=5, **options):
    """A runtime that has trained ``steps`` steps."""
    stages = models.cut(models.residual(), schedule)
    runtime = SingleProcess(stages, schedule, conform.sgd, F.cross_entropy, **options)
    list(runtime.run(models.make_batches(schedule.n_microbatches)[:steps]))
    return runtime


def test_a_state_moves_between_runtimes(odd_jobs):
    """From ZeRO-CDP on two ranks to a single process, and to a pipeline."""
    schedule = catalog.cyclic(2, 1)
    whole, resumed = in_one_process(schedule), in_one_process(schedule, 0)
    resumed.load_state_dict(copy.deepcopy(odd_jobs[0]["state"]))
    list(resumed.run(models.make_batches(2)[3:]))
    assert_same(resumed.module().state_dict(), whole.module().state_dict())
    assert_same(odd_jobs[1]["resumed"], whole.module().state_dict())


def test_weights_are_extrapolated_and_late_on_every_rank(odd_jobs):
    runtime = in_one_process(catalog.cyclic(2, 1), 3)
    for found in odd_jobs:
        assert_same(found["extrapolated"], runtime.extrapolated())
        assert_same(found["late"], runtime.late_weights())


def test_ranks_of_stages_and_their_updates_change_with_the_schedule(odd_jobs):
    whole, resumed = (
        in_one_process(conform.CHANGING),
        in_one_process(conform.CHANGING, 0),
    )
    assert_same(odd_jobs[1]["changed"], whole.module().state_dict())
    resumed.load_state_dict(copy.deepcopy(odd_jobs[0]["changing"]))
    list(resumed.run(models.make_batches(2)[4:]))
    assert_same(resumed.module().state_dict(), whole.module().state_dict())


def test_all_ranks_start_with_the_weights_of_the_first(odd_jobs):
    runtime = in_one_process(catalog.cyclic(2))
    assert_same(odd_jobs[1]["unalike"], runtime.module().state_dict())


def test_weights_of_several_types_can_be_saved(odd_jobs):
    assert [found["not saved"] for found in odd_jobs] == [None, None]


def test_refuses_what_does_not_fit(odd_jobs):
    expected = (
        "world.part(3)",
        "record=STEPS",
        "give n_steps",
        "multiple of 2",
        "versions",
    )
    for found in odd_jobs:
        for message, words in zip(found["errors"], expected, strict=True):
            assert words in message


@pytest.mark.parametrize(
    ("program", "advice"),
    [
        ("ipykernel_launcher", "toolkit.runtime.launch(function, 2)"),
        ("mine.py", "torchrun --nproc-per-node 2 mine.py seed=1"),
        ("experiments/train.py", "torchrun --nproc-per-node 2 -m toolkit train seed=1"),
    ],
)
def test_a_rank_must_have_been_started(monkeypatch, program, advice):
    monkeypatch.setattr(sys, "argv", [program, "seed=1"])
    schedule = catalog.cyclic(2)
    stages = models.cut(models.residual(), schedule)
    with pytest.raises(UserError, match="RANK") as refused:
        Distributed(stages, schedule, torch.optim.SGD, F.cross_entropy)
    assert str(refused.value).endswith(advice)


WRONG = {
    "compression": ("fp8", None),
    "boundary_compression": ("topk", None),
    "chunk_mb": (0, -1.5, float("inf"), float("nan")),
    "per_machine": (-1,),
}


@pytest.mark.parametrize(
    ("name", "wrong"), [(k, x) for k, values in WRONG.items() for x in values]
)
def test_refuses_unknown_values(name, wrong):
    """Before the ranks meet."""
    schedule = catalog.cyclic(2)
    stages = models.cut(models.residual(), schedule)
    with pytest.raises(UserError, match=f"{name}.*{wrong}"):
        Distributed(stages, schedule, torch.optim.SGD, F.cross_entropy, **{name: wrong})


def test_with_nccl_a_rank_runs_its_stages_before_the_first_message(odd_jobs):
    """Loading a kernel later would wait for that message. The result is the same."""
    for job in odd_jobs:
        begun, state = job["warmed up"]
        assert begun[0] == "warm_up"
        assert {*begun[1:]} == {"receive", "send"}
        assert_same(state, odd_jobs[0]["awkward CDP-v1"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_gpus():
    """By NCCL where there are two; else two ranks share one, and gloo takes messages by host."""
    for found in launch(conform.on_gpus, 2):
        for schedule in (
            catalog.data_parallel(2),
            catalog.cyclic(2),
            catalog.cyclic(2, 1),
        ):
            expected = in_one_process(schedule).module().state_dict()
            assert_same(found[schedule.name], expected)


@pytest.mark.parametrize("per_machine", [1, 2, 3, 4])
def test_sums_in_tiers_are_the_same(trained, per_machine):
    states, _ = conform.by_itself(catalog.data_parallel(4))
    assert_same(trained["tiers"][per_machine], states[-1])


@pytest.mark.parametrize(
    ("name", "schedule", "options"),
    list(conform.option_cases()),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_step_options(odd_jobs, name, schedule, options):
    state, averages = odd_jobs[0]["options"][name]
    runtime = in_one_process(schedule, options=options)
    assert_same(state, runtime.module().state_dict())
    assert_same(averages, runtime.averages())


def held_in(precision):
    """The most bytes of activations that each rank of a pipeline holds at once, as predicted."""
    schedule = catalog.gpipe(2, 2)
    stages = models.cut(models.residual().float(), schedule)
    costs = profile(stages, torch.zeros(3, 1, 6, 6), repeats=1, precision=precision)
    timeline = simulate(schedule.lower(5), costs, UNIT)
    return tuple(timeline.peak_memory(rank, "activations") for rank in range(2))


def test_16_bits_are_sent_and_held(odd_jobs):
    """Under autocast what crosses a boundary has the type that was computed; all as predicted.

    The numbers are those of a single process that rounds micro-batch by micro-batch, too.
    """
    found = odd_jobs[0]["options"]
    assert found["bf16 sent"] * 2 == found["fp32 sent"]
    for precision in ("fp32", "bf16"):
        assert found[f"{precision} held"] == held_in(precision)
    assert found["bf16 held"] < found["fp32 held"]
    for precision in ("fp32", "bf16"):
        schedule, options = catalog.gpipe(2, 2), StepOptions(precision=precision)
        stages = models.cut(models.residual().float(), schedule)
        single = SingleProcess(
            stages, schedule, conform.sgd, F.cross_entropy, "scheduled", options=options
        )
        list(single.run([(x.float(), y) for x, y in models.make_batches(2)]))
        assert_same(
            found[precision], single.module().state_dict(), rtol=1e-5, atol=1e-6
        )


def test_baselines_take_what_they_can(odd_jobs):
    assert odd_jobs[0]["options"]["DDP bf16"] < 2


@pytest.mark.parametrize(
    ("name", "schedule", "options", "refused"),
    [
        ("DDP", catalog.data_parallel(2), {"clip": 1.0}, "ddp takes no clip=1.0"),
        ("FSDP", catalog.data_parallel(2), {"ema": 0.9}, "fsdp takes no ema=0.9"),
        (
            "DDP",
            catalog.data_parallel(2),
            {"precision": "fp16"},
            "ddp takes no precision=fp16",
        ),
        (
            "TorchPipelining",
            catalog.gpipe(2, 2),
            {"precision": "bf16"},
            "takes no precision=bf16",
        ),
    ],
)
def test_baselines_refuse_the_rest(name, schedule, options, refused):
    from toolkit.runtime import baselines  # slow to import

    stages = models.cut(models.residual(), schedule)
    given = stages, schedule, conform.sgd, F.cross_entropy
    with pytest.raises(UserError, match=f"{refused}.*runtime=distributed"):
        getattr(baselines, name)(*given, options=StepOptions(**options))


SUITES = {
    "one process": test_single_process._schedules,
    "many processes": lambda: [
        s for size in (1, 2, 3, 4) for s in conform.schedules(size)
    ],
}


@pytest.mark.parametrize("suite", SUITES)
def test_every_method_is_conformant(suite):
    """Both conformance suites have every method of the catalogue."""
    names = {schedule.name for schedule in SUITES[suite]()}
    assert {method.label for method in catalog.METHODS.values()} <= names
