"""Schedules that follow one another in one run: every order follows the reference, and resumes."""

import copy

import pytest
import torch

from tests.runtime import models
from tests.runtime.models import assert_same, cut, make_batches, residual, runtime_for
from tests.runtime.reference import sgd, trajectory
from toolkit.errors import UserError
from toolkit.runtime import ORDERS
from toolkit.schedule import Phase, after, catalog

DP, V1, V2 = catalog.data_parallel(3), catalog.cyclic(3, 1), catalog.cyclic(3)
LATE = catalog.data_parallel(3, delay=[0, 2, 3])
PREDICTED = catalog.cyclic(3, 1, correction="extrapolate")
# Schedules with their first steps, and the delays at each step: [step][stage], the same for every
# micro-batch; or [step][stage][microbatch].
FRESH, ONE = (0, 0, 0), (1, 1, 1)
CASES = {
    "synchronous start": ([(DP, 2)], V1, [FRESH, FRESH, FRESH, ONE, ONE, ONE]),
    "a delay grows": (
        [(DP, 1)],
        LATE,
        [FRESH, FRESH, (0, 1, 1), (0, 2, 2), (0, 2, 3), (0, 2, 3)],
    ),
    # What is held is read: each stage's newest but one.
    "older versions are held": (
        [(V1, 3)],
        LATE,
        [FRESH, ONE, ONE, (0, 1, 1), (0, 2, 2), (0, 2, 3)],
    ),
    "back to synchronous": (
        [(DP, 1), (V1, 3)],
        DP,
        [FRESH, FRESH, ONE, ONE, FRESH, FRESH],
    ),
    "to a pipeline": (
        [(V1, 3)],
        catalog.gpipe(3, 3),
        [FRESH, ONE, ONE, FRESH, FRESH, FRESH],
    ),
}


def expected(model, rows, batches):
    at = models.stage_of(cut(model, V1))

    def delays(step):
        return [[late] * 3 for late in rows[step]]

    return trajectory(model, at, delays, batches, sgd)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("saved", [None, 1, 2, 3, 4])
def test_follows_the_reference_and_resumes(case, order, saved):
    phases, last, rows = CASES[case]
    model, batches = residual(), make_batches(3, len(rows))
    states = expected(model, rows, batches)
    schedule = after(phases, last)
    runtime = runtime_for(copy.deepcopy(model), schedule, order)
    if saved is None:
        list(runtime.run(batches))
    else:
        for batch, state in zip(batches[:saved], states, strict=False):
            runtime.step(*batch)
            assert_same(runtime.module().state_dict(), state)
        resumed = runtime_for(copy.deepcopy(model), schedule, order)
        resumed.load_state_dict(runtime.state_dict())
        list(resumed.run(batches[saved:]))
        runtime = resumed
    assert_same(runtime.module().state_dict(), states[-1])
    assert runtime.schedule.staleness == last.staleness


@pytest.mark.parametrize("order", ORDERS)
def test_a_prediction_begins_once_there_are_two_versions(order):
    """As at the start of a training: theta_{c-1} is theta_c at the change."""
    model, batches = residual(), make_batches(3)
    runtime = runtime_for(copy.deepcopy(model), after([(DP, 2)], PREDICTED), order)
    list(runtime.run(batches[:4]))
    plain = runtime_for(copy.deepcopy(model), after([(DP, 2)], V1), order)
    list(plain.run(batches[:4]))
    assert_same(runtime.module().state_dict(), plain.module().state_dict())
    for one in (runtime, plain):
        one.step(*batches[4])
    assert models.differ(runtime.module().state_dict(), plain.module().state_dict())


def test_batches_of_unknown_number_end_anywhere():
    model, batches = residual(), make_batches(3, 5)
    for n in range(6):
        runtime = runtime_for(
            copy.deepcopy(model), after([(DP, 2), (V2, 2)], V1), "grouped"
        )
        assert [result.step for result in runtime.run(iter(batches[:n]))] == [*range(n)]
        assert runtime.steps_done == n


def test_lengths_in_epochs_are_given_in_steps_first():
    schedule = after([Phase(DP, epochs=0.5)], V1)
    with pytest.raises(UserError, match="in_steps"):
        runtime_for(residual(), schedule, "grouped")
    runtime_for(residual(), schedule.in_steps(4), "grouped")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("order", ORDERS)
def test_switching_equals_the_same_phases_to_the_bit_and_resumes(order, dtype):
    model, batches = residual().to(dtype), make_batches(3, 7)
    batches = [(inputs.to(dtype), targets) for inputs, targets in batches]
    runtime = runtime_for(copy.deepcopy(model), DP, order)
    list(runtime.run(batches[:2]))
    runtime.switch(V1)
    list(runtime.run(batches[2:5]))
    saved, schedule_plan = runtime.state_dict(), runtime.schedule_plan
    list(runtime.run(batches[5:6]))
    runtime.switch(LATE)
    list(runtime.run(batches[6:]))
    phased = runtime_for(copy.deepcopy(model), after([(DP, 2), (V1, 4)], LATE), order)
    list(phased.run(batches))
    expected = phased.module().state_dict()
    assert_same(runtime.module().state_dict(), expected, rtol=0, atol=0)
    resumed = runtime_for(copy.deepcopy(model), DP, order)
    resumed.set_schedule(schedule_plan)
    resumed.load_state_dict(saved)
    list(resumed.run(batches[5:6]))
    resumed.switch(LATE)
    list(resumed.run(batches[6:]))
    assert_same(resumed.module().state_dict(), expected, rtol=0, atol=0)


def test_a_switch_that_is_refused_changes_nothing():
    runtime = runtime_for(residual(), DP, "grouped")
    list(runtime.run(make_batches(3, 1)))
    with pytest.raises(UserError, match="n_microbatches"):
        runtime.switch(catalog.cyclic(4, n_stages=3))
    assert runtime.schedule_plan is DP
