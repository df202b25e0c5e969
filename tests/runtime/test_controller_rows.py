"""A controller whose ranks are several devices."""

import os
import signal

import pytest

from tests.runtime import device_rows
from tests.runtime.models import assert_same
from tests.thorough import more
from toolkit.errors import UserError
from toolkit.runtime import Controller
from toolkit.schedule import catalog

CASES = {
    "CDP-v2": (catalog.cyclic(2), device_rows.adamw, device_rows.CLIPPED),
    "1F1B": (catalog.one_f_one_b(2, 4), device_rows.sgd, device_rows.CLIPPED),
}
PLANS = {
    "CDP-v2": device_rows.by_columns_and_rows,
    "1F1B": device_rows.by_sequence,
}


@pytest.fixture(scope="module")
def controller():
    """Four processes: two ranks of two devices."""
    with Controller(ranks=4) as found:
        yield found


def training(controller, name, **options):
    schedule, optimizer, step_options = CASES[name]
    return controller.train(
        device_rows.cut(device_rows.blocks(), schedule),
        schedule,
        optimizer,
        device_rows.F.mse_loss,
        device_rows.batches(schedule.n_microbatches),
        options=step_options,
        **{"width": 2, "parallelize": PLANS[name]} | options,
    )


def expected(name):
    """The single process after its steps, and the mean loss of each."""
    schedule, optimizer, options = CASES[name]
    runtime = device_rows.single(schedule, optimizer, options)
    results = list(runtime.run(device_rows.batches(schedule.n_microbatches)))
    return runtime, [float(result.loss) for result in results]


@pytest.mark.parametrize("name", CASES)
def test_follows_the_single_process(controller, name):
    losses = [float(result.loss) for result in training(controller, name)]
    runtime, expected_losses = expected(name)
    assert losses == pytest.approx(expected_losses, abs=1e-10)
    assert_same(controller.module().state_dict(), runtime.module().state_dict())
    assert_same(controller.runtime.averages(), runtime.averages())
    devices = [(row["rank"], row["device"]) for row in controller.status()]
    assert devices == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert "<th>device</th>" in controller._repr_html_()


def test_its_state_is_that_of_one_device_a_rank(controller):
    list(training(controller, "CDP-v2", n_steps=2))
    alone = device_rows.single(*CASES["CDP-v2"])
    alone.load_state_dict(controller.state_dict())
    list(alone.run(device_rows.batches(2)[2:]))
    runtime, _ = expected("CDP-v2")
    assert_same(alone.module().state_dict(), runtime.module().state_dict())


@pytest.mark.parametrize("name", more(["CDP-v2"], CASES))
def test_training_continues_when_a_device_is_lost(controller, name):
    losses = []
    for result in training(controller, name, keep_every=2):
        losses.append(float(result.loss))
        if len(losses) == 3:
            # The second device of the second rank.
            os.kill(controller.processes.process_ids[3], signal.SIGKILL)
    runtime, expected_losses = expected(name)
    assert losses == pytest.approx(expected_losses, abs=1e-10)
    assert_same(controller.module().state_dict(), runtime.module().state_dict())
    # The device may have finished its steps before the signal came.
    (recovery,) = controller.runtime.recoveries
    assert recovery.restart in (2, 4)
    assert 0 <= recovery.step - recovery.restart <= 2


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"width": 3}, "ranks=6"),
        ({"width": 0}, "width"),
        ({"parallelize": None}, "parallelize"),
    ],
)
def test_refuses_what_does_not_fit(controller, options, named):
    with pytest.raises(UserError, match=named):
        list(training(controller, "CDP-v2", **options))
