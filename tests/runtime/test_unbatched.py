"""Tied weights and scalars that cross the cuts follow the reference, in every runtime."""

import copy

import pytest
import torch

from tests.runtime import unbatched
from tests.runtime.models import assert_same, name_of, stage_of
from tests.runtime.reference import sgd, trajectory
from toolkit.model.traced_stage import one_by_one
from toolkit.runtime import ORDERS, SingleProcess, StepOptions, launch
from toolkit.runtime.stage_layouts import find_layouts
from toolkit.schedule import catalog


def schedules(n_stages):
    yield catalog.data_parallel(4, n_stages=n_stages)
    yield catalog.cyclic(4, 1, n_stages=n_stages)
    yield catalog.cyclic(4, n_stages=n_stages)
    yield catalog.gpipe(n_stages, 4)
    yield catalog.one_f_one_b(n_stages, 4)
    yield catalog.zero_bubble(n_stages, 4)


CASES = [
    pytest.param(name, schedule, id=f"{name}-{name_of(schedule)}")
    for name, sizes in {
        "tied": (1, 2, 3),
        "tied, exported": (2,),
        "judged": (2,),
        "judged, tied": (3,),
        "only loss": (2,),
        "routed": (3,),
        "early": (2, 3),
    }.items()
    for n_stages in sizes
    for schedule in schedules(n_stages)
]


def expected_states(name, schedule, steps=4):
    model, loss = unbatched.reference_of(name)
    home = stage_of(unbatched.stages_of(name, schedule.n_stages))
    batches = unbatched.id_batches(schedule.n_microbatches, steps)
    return trajectory(model, home, schedule.staleness, batches, sgd, loss_of=loss)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("name", "schedule"), CASES)
def test_follows_the_reference(name, schedule, order):
    runtime = unbatched.runtime_for(name, schedule, order)
    list(runtime.run(unbatched.batches_of(name, schedule.n_microbatches)))
    expected = expected_states(name, schedule)[-1]
    assert_same(runtime.module().state_dict(), expected, rtol=1e-12, atol=1e-12)
    assert_same(runtime.state_dict()["model"], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "options", [{"checkpoint": "all"}, {"clip": 0.1}, {"ema": 0.9}]
)
@pytest.mark.parametrize("name", ["tied, dropout", "judged, tied"])
def test_orders_agree_with_options(name, options):
    schedule = catalog.cyclic(4, n_stages=3)
    states = []
    for order in ORDERS:
        if "clip" in options:
            options = options | {"clip_by": "stage"}
        given = StepOptions(**options)
        runtime = unbatched.runtime_for(name, schedule, order, options=given)
        list(runtime.run(unbatched.batches_of(name, 4)))
        states.append(runtime.module().state_dict() | runtime.averages())
    assert_same(*states)


@pytest.mark.parametrize("order", ORDERS)
def test_a_state_holds_a_tied_weight_under_all_of_its_names(order):
    schedule = catalog.cyclic(3)
    whole = unbatched.runtime_for("tied", schedule, order)
    batches = unbatched.batches_of("tied", 3)
    list(whole.run(batches[:2]))
    state = whole.state_dict()
    newest = state["versions"][0][2]["embed.weight"]
    for name in ("embed.weight", "head.weight"):
        assert torch.equal(state["model"][name], newest)
    resumed = unbatched.runtime_for("tied", schedule, order)
    resumed.load_state_dict(state)
    assert resumed.module().head.weight is resumed.module().embed.weight
    for runtime in (whole, resumed):
        list(runtime.run(batches[2:]))
    assert_same(resumed.module().state_dict(), whole.module().state_dict(), 0, 0)


def test_a_tied_weight_has_one_owner_and_one_row():
    stages = unbatched.stages_of("tied", 3)
    owners = ["embed.weight" in dict(stage.named_parameters()) for stage in stages]
    assert owners == [True, False, False]
    assert sum(p.numel() for stage in stages for p in stage.parameters()) == sum(
        p.numel() for p in stages.model.parameters()
    )
    for boundary in stages.boundaries[1:]:
        (weight,) = (tensor for tensor in boundary if not tensor.batched)
        assert weight.shape == (1, 7, 6)
        assert boundary[0].batched  # the first tells the number of samples
    # The stage between passes it on, and need not run micro-batches one by one.
    assert [one_by_one(stage) for stage in stages] == [False, False, True]
    layouts = find_layouts(list(stages), (torch.zeros(2, 4, dtype=torch.long),))
    shapes = [
        {tensor.shape for tensor in layout.tensors} for layout in layouts.activations
    ]
    assert shapes == [{(2, 4, 6), (1, 7, 6)}] * 2 + [{(2, 7)}]
    shapes = [
        {tensor.shape for tensor in layout.tensors}
        for layout in layouts.activation_gradients
    ]
    assert shapes == [set(), *[{(2, 4, 6), (1, 7, 6)}] * 2]


def test_a_stage_that_passes_a_weight_on_copies_nothing():
    stages = unbatched.stages_of("tied, dropout", 3)
    runtime = SingleProcess(
        stages,
        catalog.data_parallel(4, n_stages=3),
        unbatched.optimizer,
        lambda x, y: x.mean(),
    )
    runner = runtime._runners[1]
    assert runner.one_by_one  # it draws
    weight = torch.randn(1, 7, 6, dtype=torch.float64).expand(4, 7, 6)
    inputs = [torch.randn(8, 4, 6, dtype=torch.float64)]
    inputs += [weight for boundary in stages.boundaries[1][1:]]
    *_, passed_on = runner.forward(runner.newest(), tuple(inputs), (0, 1, 2, 3), 0)
    assert passed_on is weight


@pytest.fixture(scope="module")
def on_ranks():
    return launch(unbatched.on_ranks, 2)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        pytest.param(name, schedule, id=f"{name}-{name_of(schedule)}")
        for name, of_model in unbatched.ON_RANKS.items()
        for schedule in of_model
    ],
)
def test_ranks_follow_the_reference(on_ranks, name, schedule):
    """The state after 2 steps, too, which a single process continues."""
    states = expected_states(name, schedule)
    batches = unbatched.batches_of(name, schedule.n_microbatches)
    for found in on_ranks:
        after, state, again = found[name, schedule.name, schedule.state]
        assert_same(after, states[3], rtol=1e-12, atol=1e-12)
        assert_same(again, states[3], rtol=1e-12, atol=1e-12)
        assert_same(state["model"], states[1], rtol=1e-12, atol=1e-12)
        single = unbatched.runtime_for(name, schedule)
        single.load_state_dict(copy.deepcopy(state))
        list(single.run(batches[2:]))
        assert_same(single.module().state_dict(), states[3], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("key", unbatched.BASELINES)
def test_other_systems_follow_the_reference(on_ranks, key):
    _, schedule, _ = unbatched.BASELINES[key]
    expected = expected_states("tied", schedule)[-1]
    for found in on_ranks:
        for state in found[key]:
            assert_same(state, expected, rtol=1e-12, atol=1e-12)


def test_a_system_that_frees_weights_refuses_to_send_them(on_ranks):
    for found in on_ranks:
        assert "stage 0 sends embed.weight to a later stage" in found["refused"]
        assert "set reshard=False" in found["refused"]
