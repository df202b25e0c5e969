"""Loops as scripts have them: what they change, read and save counts, as under torch's DDP."""

import copy

import pytest
import torch
from torch.nn import functional as F

from tests.runtime import loop_jobs, reference, token_losses
from tests.runtime.models import assert_same
from toolkit.model import partition
from toolkit.runtime import SingleProcess, StepOptions, launch
from toolkit.schedule import catalog

RULES = ("dp", "cdp_v1", "cdp_v2")


@pytest.fixture(scope="module")
def found():
    return launch(loop_jobs.two_processes, 2)


def single(schedule, n_steps, size=4, **options):
    """The weights after each step of a single process, on both ranks' samples."""
    example = torch.randn(size, 6, dtype=torch.float64)
    stages = partition(loop_jobs.net(), schedule.n_stages, example)
    runtime = SingleProcess(
        stages,
        schedule,
        lambda parameters: torch.optim.SGD(parameters, lr=0.2, momentum=0.9),
        F.cross_entropy,
        **options,
    )
    states = []
    for step in range(n_steps):
        shares = [loop_jobs.share(step, size, rank) for rank in (0, 1)]
        inputs, targets = map(torch.cat, zip(*shares, strict=True))
        runtime.step(inputs, targets)
        states.append(copy.deepcopy(dict(runtime.module().named_parameters())))
    return states


def schedule_of(rule):
    return {
        "dp": catalog.data_parallel(2),
        "cdp_v1": catalog.cyclic(2, 1),
        "cdp_v2": catalog.cyclic(2),
        "sharded": catalog.cyclic(2, state="sharded"),
    }[rule]


@pytest.mark.parametrize(
    "change",
    [*(change.__name__ for change in loop_jobs.CHANGES), "unfrozen", "evaluated norm"],
)
def test_what_a_loop_changes_on_the_model(found, change):
    for of_rank in found:
        ours, of_ddp = of_rank["changed"][change]
        assert_same(ours, of_ddp, 1e-12, 1e-13)


@pytest.mark.parametrize("name", ["groups", "counting", "prodigy", "schedule-free"])
def test_optimizers(found, name):
    for of_rank in found:
        weights, _ = of_rank["optimizers"]
        assert_same(*weights[name], 1e-12, 1e-13)


def test_optimizers_that_average_evaluate_with_averages(found):
    for of_rank in found:
        weights, (ours, of_ddp) = of_rank["optimizers"]
        assert_same(ours, of_ddp, 1e-12, 1e-13)
        trained = weights["schedule-free"][0]
        assert any((ours[name] - trained[name]).abs().max() > 1e-3 for name in ours)


@pytest.mark.parametrize(
    "case", ["state and scheduler", "added group", "its own parameters"]
)
def test_finished_optimizers(found, case):
    for of_rank in found:
        assert_same(*of_rank["continued"][case], 1e-12, 1e-13)


@pytest.mark.parametrize("rule", RULES)
def test_a_checkpoint_with_a_scheduler_continues(found, rule):
    for of_rank in found:
        assert_same(*of_rank["resumed"][rule], 0, 0)


def test_states_go_from_ddp_to_here_and_back(found):
    for of_rank in found:
        (ours, then), again, at_end, refused = of_rank["of_ddp"]
        assert_same(ours, then, 1e-12, 1e-13)
        assert_same(again, at_end, 1e-12, 1e-13)
        assert "[6]" in refused


@pytest.mark.parametrize("rule", [*RULES, "sharded"])
def test_one_rank_reads_alone(found, rule):
    """Each way has the newest weights, at every step, and changes nothing."""
    seen, newest, final = found[0]["alone"][rule]
    expected = single(schedule_of(rule), 4)
    assert_same(final, expected[-1], 1e-10, 1e-12)
    for ways, weights, of_single in zip(seen, newest, expected, strict=True):
        assert_same(weights, of_single, 1e-10, 1e-12)
        for way in ("state", "module", "copy", "average", "parameters", "own", "file"):
            assert_same(ways[way], weights, 0, 0)
        assert torch.equal(ways["output"], ways["called"])
    assert found[1]["alone"][rule][0] == []


@pytest.mark.parametrize("rule", ["cdp_v1", "cdp_v2"])
def test_one_rank_reads_alone_between_programs(found, rule):
    """Others may wait for it at the start of the next one."""
    expected = single(schedule_of(rule), 7)
    seen = found[0]["between programs"][rule]
    assert sorted(seen) == [1, 3, 5]
    for step, weights in seen.items():
        assert_same(weights, expected[step], 1e-10, 1e-12)


@pytest.mark.parametrize("way", ["wrapper", "module"])
def test_clipping_by_the_norm_of_the_model(found, way):
    """Where a rank has all gradients in time: under DP each, under CDP-v1 the updating one."""
    of_ddp, norms, _ = found[0]["clipped"][None][way]
    for of_rank in found:
        ours, our_norms, n_warned = of_rank["clipped"]["dp"][way]
        assert_same(ours, of_ddp, 1e-12, 1e-13)
        assert our_norms == pytest.approx(norms, rel=1e-12)
        assert n_warned == 0
    options = StepOptions(clip=0.1, clip_by="model")
    late = single(schedule_of("cdp_v1"), 4, options=options)[-1]
    for of_rank in found:
        assert_same(of_rank["clipped"]["cdp_v1"][way][0], late, 1e-10, 1e-12)
    updating = schedule_of("cdp_v1").owners[0]
    assert all(norm > 0.1 for norm in found[updating]["clipped"]["cdp_v1"][way][1])


@pytest.mark.parametrize("way", ["wrapper", "module"])
def test_clipping_by_the_norms_of_stages(found, way):
    """Where updates precede the end of a step; with one warning on rank 0."""
    expected = single(schedule_of("cdp_v2"), 4, options=StepOptions(clip=0.1))[-1]
    for rank, of_rank in enumerate(found):
        weights, norms, n_warned = of_rank["clipped"]["cdp_v2"][way]
        assert_same(weights, expected, 1e-10, 1e-12)
        assert all(norm != norm for norm in norms)  # nan: not known yet
        assert n_warned == (rank == 0)


def test_refusals(found):
    for of_rank in found:
        assert of_rank["refusals"] == [
            "parameters()",
            "parameters()",
            "gradients",
            "gradients",
            "the end of training",
            "model.module(x)",
            "GradScaler",
            "process_group",
            "device_ids",
            "optimizer",
            "backward(loss, count)",
            "model",
        ]


def test_uneven_inputs(found):
    """Ranks with 3 and 5 batches: as under DDP, or with gradients of zero where one has none."""
    for of_rank in found:
        weights, steps_done = of_rank["uneven"]["dp"]
        assert steps_done == 5
        assert_same(weights, of_rank["uneven"][None], 1e-12, 1e-13)
        for rule in ("cdp_v1", "cdp_v2"):
            assert_same(
                of_rank["uneven"][rule][0], _late_and_uneven(rule), 1e-10, 1e-12
            )


def _late_and_uneven(rule):
    """From the update rule: from step 3 on, rank 0 gives zeros."""
    schedule = schedule_of(rule)
    example = torch.randn(4, 6, dtype=torch.float64)
    stages = partition(loop_jobs.net(), schedule.n_stages, example)
    stage_of = {
        name: j
        for j, stage in enumerate(stages)
        for name, _ in stage.named_parameters()
    }
    batches = []
    for step in range(5):
        shares = [loop_jobs.share(min(step, 2 + 2 * rank), 4, rank) for rank in (0, 1)]
        inputs, targets = zip(*shares, strict=True)
        flags = torch.tensor([float(step < 3), 1.0]).repeat_interleave(4)
        batches.append((torch.cat(inputs), torch.stack([torch.cat(targets), flags], 1)))

    def loss_of(outputs, targets):
        return F.cross_entropy(outputs, targets[:, 0].long()) * targets[0, 1]

    def make_optimizer(parameters, previous):
        optimizer = torch.optim.SGD(parameters, lr=0.2, momentum=0.9)
        if previous is not None:
            optimizer.load_state_dict(previous.state_dict())
        return optimizer

    states = reference.trajectory(
        loop_jobs.net(),
        stage_of.__getitem__,
        schedule.staleness,
        batches,
        make_optimizer,
        loss_of=loss_of,
    )
    names = {name for name, _ in loop_jobs.net().named_parameters()}
    return {name: x for name, x in states[-1].items() if name in names}


def test_counted_shares_of_three_ranks():
    """Shares of 1, 2 and 4 sequences, one without a token, weigh by their tokens."""
    found = launch(loop_jobs.counted_shares, 3)
    steps = loop_jobs.token_shares()
    for rule, schedule in (
        ("dp", catalog.data_parallel(3)),
        ("cdp_v1", catalog.cyclic(3, 1)),
        ("cdp_v2", catalog.cyclic(3)),
    ):
        expected = _counted_reference(schedule, steps)
        for of_rank in found:
            assert_same(of_rank[rule], expected, 1e-12, 1e-13)


def _counted_reference(schedule, steps):
    """Each worker's gradient on the versions that the schedule gives it, by the total count."""
    example = torch.zeros(2, token_losses.LENGTH, dtype=torch.int64)
    stages = partition(token_losses.model(), schedule.n_stages, example)
    stage_of = {
        name: j
        for j, stage in enumerate(stages)
        for name, _ in stage.named_parameters()
    }
    past = [token_losses.model()]
    optimizer = None
    for step, (inputs, targets) in enumerate(steps):
        total, count = {}, 0
        for rank in range(3):
            worker = token_losses.model()
            with torch.no_grad():
                for name, parameter in worker.named_parameters():
                    late = schedule.staleness[stage_of[name]][rank]
                    parameter.copy_(past[max(0, step - late)].get_parameter(name))
            loss, n = token_losses.token_loss(worker(inputs[rank]), targets[rank])
            loss.backward()
            count += n
            for name, parameter in worker.named_parameters():
                total[name] = total.get(name, 0) + parameter.grad
        newest = copy.deepcopy(past[-1])
        made = token_losses.sgd(newest.parameters())
        if optimizer is not None:
            made.load_state_dict(optimizer.state_dict())
        optimizer = made
        for name, parameter in newest.named_parameters():
            parameter.grad = total[name] / count
        optimizer.step()
        past.append(newest)
    return past[-1].state_dict()
