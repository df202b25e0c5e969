"""What all runtimes do alike: abandoned runs, and errors in runs."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from tests.runtime.models import (
    assert_same,
    make_batches,
    name_of,
    residual,
    runtime_for,
)
from toolkit.errors import UserError
from toolkit.runtime import ORDERS, SingleProcess
from toolkit.schedule import catalog


def runtimes(schedule, order="scheduled"):
    """Two runtimes of one model."""
    return [runtime_for(residual(), schedule, order) for _ in range(2)]


@pytest.mark.parametrize("n_steps", [1, 2])
@pytest.mark.parametrize(
    "schedule", [catalog.data_parallel(2, delay=1), catalog.cyclic(3)], ids=name_of
)
def test_an_abandoned_run_is_refused_until_a_state_is_loaded(schedule, n_steps):
    """Where steps overlap. The abandoned run yields nothing more."""
    batches = make_batches(schedule.n_microbatches)
    left, whole = runtimes(schedule)
    state = left.state_dict()
    run = left.run(batches)
    for _ in range(n_steps):
        next(run)
    attempts = (
        *(left.module, left.averages, left.local_state, left.state_dict),
        lambda: left.step(*batches[0]),
        lambda: list(left.run(batches)),
    )
    for close in (lambda: None, run.close):
        close()
        for attempt in attempts:
            with pytest.raises(UserError, match=r"not exhausted.*load a state"):
                attempt()
        with pytest.raises(UserError, match=r"lacks .*'versions'"):
            left.load_state_dict({})
    left.load_state_dict(state)
    assert left.steps_done == 0
    list(left.run(batches))
    assert list(run) == []
    list(whole.run(batches))
    assert_same(left.module().state_dict(), whole.module().state_dict())


def test_a_run_can_be_exhausted_later():
    batches = make_batches(3)
    late, whole = runtimes(catalog.cyclic(3))
    for _ in (run := late.run(batches)):
        with pytest.raises(UserError, match="not exhausted"):
            late.module()
    assert list(run) == []
    list(whole.run(batches))
    assert_same(late.module().state_dict(), whole.module().state_dict())


@pytest.mark.parametrize("order", ORDERS)
def test_a_refused_run_leaves_no_trace(order):
    batches = make_batches(3)
    runtime, whole = runtimes(catalog.cyclic(3), order)
    with pytest.raises(UserError, match=r"\[7, 7\].*multiple of 3"):
        runtime.step(torch.zeros(7, 1, 6, 6), torch.zeros(7))
    with pytest.raises(UserError, match="n_steps=0"):
        list(runtime.run([], n_steps=1))
    if order == "scheduled":
        with pytest.raises(UserError, match="give n_steps"):
            list(runtime.run(iter(batches)))
    with pytest.raises(UserError, match=r"n_steps.*-1"):
        list(runtime.run(batches, n_steps=-1))
    assert list(runtime.run([])) == list(runtime.run(batches, 0)) == []
    list(runtime.run(batches))
    list(whole.run(batches))
    assert_same(runtime.module().state_dict(), whole.module().state_dict())


@pytest.mark.parametrize("order", ORDERS)
def test_after_an_error_in_a_step(order):
    """A step that overlaps no other leaves no trace; else a state must be loaded."""
    schedule, batches, calls = catalog.cyclic(3), make_batches(3), itertools.count()

    def loss(outputs, targets):
        if next(calls) == 7:  # of the third step
            raise RuntimeError("a bad sample")
        return F.cross_entropy(outputs, targets)

    failing, whole = runtimes(schedule, order)
    failing = SingleProcess(failing.stages, schedule, failing.optimizer, loss, order)
    state = failing.state_dict()
    with pytest.raises(RuntimeError, match="a bad sample"):
        list(failing.run(batches))
    if order == "scheduled":
        with pytest.raises(UserError, match="not exhausted"):
            failing.module()
        failing.load_state_dict(state)
    assert failing.steps_done == (0 if order == "scheduled" else 2)
    list(failing.run(batches[failing.steps_done :]))
    list(whole.run(batches))
    assert_same(failing.module().state_dict(), whole.module().state_dict())
