"""CyclicDataParallel: a loop as for DDP follows the single process, on every whole-model method."""

import copy

import pytest
import torch
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR

from tests.runtime import conform, models, train_by_loop
from tests.runtime.models import assert_same, name_of
from tests.runtime.train_by_loop import STEPS
from tests.stages import in_loops
from toolkit.cost.worker_forms import ModelCosts, best_rule
from toolkit.errors import UserError
from toolkit.model import partition
from toolkit.runtime import (
    CyclicDataParallel,
    JobFailedError,
    SingleProcess,
    StepOptions,
    launch,
)
from toolkit.runtime.process_group.world import World
from toolkit.schedule import catalog

SCHEDULES = [*train_by_loop.schedules()]
CASES = [pytest.param(k, s, id=f"{k} {name_of(s)}") for k, s in enumerate(SCHEDULES)]


@pytest.fixture(scope="module")
def trained():
    return launch(in_loops(train_by_loop.all_methods), 4)


@pytest.fixture(scope="module")
def odd_jobs():
    return launch(in_loops(train_by_loop.odd_jobs), 4)


@pytest.fixture(scope="module")
def as_scripts_do():
    return launch(train_by_loop.as_scripts_do, 2)


def states(schedule, model=None, **options):
    """Those after each step, in a single process."""
    stages = models.cut(model or models.residual(), schedule)
    runtime = SingleProcess(stages, schedule, conform.sgd, F.cross_entropy, **options)
    batches = models.make_batches(schedule.n_microbatches, STEPS)
    if model is not None:
        batches = [(x.float(), y) for x, y in batches]
    return [
        copy.deepcopy((runtime.step(*batch), runtime.module().state_dict())[1])
        for batch in batches
    ]


@pytest.mark.parametrize(("k", "schedule"), CASES)
def test_follows_the_single_process(trained, k, schedule):
    """Parameter by parameter, whichever step training pauses after; on every rank."""
    expected = states(schedule)
    for found in trained:
        assert_same(found[k][0], expected[STEPS - 2], 1e-10, 1e-10)
        assert_same(found[k][1], expected[STEPS - 1], 1e-10, 1e-10)


def test_learning_rates_change_as_the_loop_says(odd_jobs):
    """Those that the loop sets between steps, in updates and in what is predicted from them."""
    schedule = catalog.cyclic(4, 1, correction="optimizer_step")
    expected = states(schedule, lr_scheduler=lambda made: StepLR(made, 2, 0.5))
    for job in ("changing_rates", "resumed_rates"):
        assert_same(odd_jobs[0][job], expected[-1], 1e-10, 1e-10)
    constant = states(schedule)[-1]
    assert any((x - expected[-1][k]).abs().max() > 1e-4 for k, x in constant.items())


def test_options_are_those_of_the_runtimes(odd_jobs):
    expected = states(catalog.cyclic(4), options=StepOptions(clip=0.05))[-1]
    assert_same(odd_jobs[1]["clipped"], expected, 1e-10, 1e-10)


def test_an_automatic_rule_is_the_best_form_on_given_links(odd_jobs):
    """On slow ones that is late weights; the trajectory is that of the chosen form."""
    (x, _), *_ = models.make_batches(4, STEPS)
    costs_of = ModelCosts(models.residual().to("meta"), x[: len(x) // 4].to("meta"))
    form = best_rule(costs_of, train_by_loop.SLOW, 4)
    stages = partition(models.residual(), 4, x[:3], by=form.partition)
    runtime = SingleProcess(stages, form.schedule, conform.sgd, F.cross_entropy)
    for batch in models.make_batches(4, STEPS):
        runtime.step(*batch)
    for found in odd_jobs:
        (chains, staleness), state = found["automatic"]
        assert (chains, staleness) == (
            form.schedule.chains,
            form.schedule.max_staleness,
        )
        assert staleness == 1
        assert_same(state, runtime.module().state_dict(), 1e-10, 1e-10)


def test_a_saved_state_continues(odd_jobs):
    for found in odd_jobs:
        for resumed in found["resumed"]:
            assert_same(resumed, states(catalog.cyclic(4, 1))[-1], 1e-10, 1e-10)


def test_evaluation_is_that_of_the_newest_weights(odd_jobs):
    runtime = SingleProcess(
        models.cut(models.residual(), schedule := catalog.cyclic(4)),
        schedule,
        conform.sgd,
        F.cross_entropy,
    )
    batches = models.make_batches(4, STEPS)
    list(runtime.run(batches[:2]))
    expected = runtime.module().eval()(batches[0][0])
    for found in odd_jobs:
        assert_same({0: found["evaluated"][0]}, {0: expected}, 1e-10, 1e-10)


def test_autocast_is_the_loops_own(odd_jobs):
    """To the rounding of 16 bits, with micro-batches one by one."""

    def after(precision):
        options = StepOptions(precision=precision)
        model = models.residual().float()
        return states(catalog.cyclic(4), model, options=options, order="scheduled")[-1]

    found, expected, plain = odd_jobs[2]["autocast"], after("bf16"), after("fp32")
    assert_same(found, expected, 1e-5, 1e-6)
    assert any((x - plain[k]).abs().max() > 1e-4 for k, x in expected.items())


def test_keywords_dictionaries_and_shares_of_their_own_sizes(as_scripts_do):
    """Against the update rule in plain words: CDP-v1 reads the weights before the newest."""
    begun, *_ = as_scripts_do[0]
    shares = [found[2] for found in as_scripts_do]
    past = [begun, begun]
    for step in range(3):
        total = {name: torch.zeros_like(x) for name, x in begun.items()}
        for rank in (0, 1):
            model = train_by_loop.Masked().double()
            model.load_state_dict(past[-2])
            x, mask = shares[rank][step]
            found = model(x, mask=mask)
            (found["scores"].square().mean() + found["hidden"].abs().mean()).backward()
            for name, p in model.named_parameters():
                total[name] += p.grad / 2
        past.append({name: x - 0.1 * total[name] for name, x in past[-1].items()})
    for found in as_scripts_do:
        assert_same(found[1], past[-1], 1e-10, 1e-10)


def test_calls_out_of_turn_are_refused(as_scripts_do):
    """On the rank that makes them, and training goes on."""
    mistakes = [
        "optimizer.step()",
        "model(x)",
        "the end of training",
        "parameters()",
        "a second",
    ]
    for *_, refused in as_scripts_do:
        assert len(refused) == 3 * 5 + 3
        for k, (mistake, message) in enumerate(
            zip(mistakes * 3, refused, strict=False)
        ):
            assert message.startswith(mistake), k
        assert [message.split()[0] for message in refused[-3:]] == [
            "model(x)",
            "no_sync",
            "an",
        ]


def test_one_rank_and_an_awkward_model():
    schedule = catalog.cyclic(1, n_stages=2)
    stages = models.cut_awkward(models.awkward(), schedule)
    runtime = SingleProcess(stages, schedule, conform.adamw, F.cross_entropy, seed=3)
    list(runtime.run(models.id_batches(1)))
    (found,) = launch(train_by_loop.alone, 1)
    assert_same(found, runtime.module().state_dict())


def test_a_script_may_end_after_any_step(capfd):
    """What other ranks still wait for is sent; nothing is said."""
    assert launch(train_by_loop.ends_with_updates_under_way, 2) == [3, 3]
    assert capfd.readouterr() == ("", "")


def test_a_step_of_some_ranks_only_ends_the_job():
    with pytest.raises(JobFailedError, match=r"rank 0 .*rank 1|rank 1 .*rank 0"):
        launch(train_by_loop.leaves_a_step_out, 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"rule": "cdp"}, "unknown rule 'cdp'"),
        ({"rule": "gpipe"}, "unknown rule 'gpipe'"),
        ({"rule": catalog.cyclic(3)}, "3 ranks"),
        ({"rule": catalog.cyclic(2, placement="per_stage")}, "a part of the model"),
        (
            {"rule": catalog.weipipe(2, accumulate=2)},
            "micro-batch 2 before .* micro-batch 0",
        ),
        ({"rule": catalog.cyclic(2), "groups": 2}, "groups"),
        ({"model": F.relu}, "model: got a function"),
    ],
)
def test_unfit_arguments_are_refused(arguments, words):
    world = World(0, 2, torch.device("cpu"), "gloo", watch=None, store=None)
    given = {
        "model": models.residual(),
        "optimizer": conform.sgd,
        "world": world,
    } | arguments
    with pytest.raises(UserError, match=words):
        CyclicDataParallel(**given)
