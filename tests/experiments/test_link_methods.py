"""Methods that the benchmark of links compares: schedules, trainings and predicted times."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from toolkit.errors import UserError
from toolkit.schedule import catalog


@pytest.fixture
def bench(benchmark_module):
    return benchmark_module("link_methods")


def task(**changes):
    usual = {
        "workers": 2,
        "model": "resnet8",
        "image_size": 8,
        "batch": 2,
        "stages": 3,
        "seed": 3,
    }
    usual["ranks_per_machine"] = 1
    return SimpleNamespace(**usual | {"ratios": [1], "skip": 1, "sleep": 0.0} | changes)


def asleep(**changes):
    """Eight stages of 0.5 MB, which take 0.1 s for a forward and 0.2 s for a backward."""
    return task(
        **{"stages": 8, "sleep": 2.4, "megabytes": 4.0, "steps": 4, "batch": 1}
        | changes
    )


def test_stages_sleep_for_their_seconds_and_have_gradients(bench):
    model = bench.fresh_model(asleep(stages=2, sleep=6.0, megabytes=0.8))
    inputs, classes = bench.images_of(asleep())
    with mock.patch("time.sleep") as sleep:
        outputs = bench.slept.cut(model, 2).modules[0](inputs)[0]
        torch.nn.functional.cross_entropy(outputs, classes).backward()
    assert [call.args for call in sleep.call_args_list] == [(1.0,), (2.0,)]
    assert model[0].weight.grad.shape == (400, 250)
    torch.testing.assert_close(outputs, inputs + model[0].weight.mean())


def test_ddp_is_predicted_to_send_buckets_during_the_backward(bench):
    """Four buckets of 1 MB: 0.5 s each at 2 MB/s, a bucket every 0.4 s, the first 0.4 s late."""
    at = bench.Link(2, 1.0, 16.0, 2.4, 2.0)
    assert bench.predicted(asleep(), at, "DDP") == pytest.approx(0.8 + 0.4 + 4 * 0.5)
    assert bench.predicted(
        asleep(), bench.Link(2, 0.0, None, 2.4, 0.0), "DDP"
    ) == pytest.approx(2.4)


@pytest.mark.parametrize(
    ("method", "bytes_of_number"),
    [("DDP 16-bit", 2), ("DDP 8-bit", 1 + 4 / 256), ("DDP 4-bit", 0.5 + 4 / 256)],
)
def test_smaller_messages_are_predicted_to_take_less_time(
    bench, method, bytes_of_number
):
    """Four buckets again, which take 4 s each as they are: the links are always busy."""
    at = bench.Link(2, 8.0, 2.0, 2.4, 16.0)
    seconds = 0.8 + 0.4 + bytes_of_number / 4 * 4 * 4.0
    assert bench.predicted(asleep(), at, method) == pytest.approx(seconds, rel=1e-3)


def test_low_rank_is_predicted_to_send_its_factors(bench):
    """A bucket of 2 matrices of 500 x 250: 2 x 4 x 750 of 250,000 numbers."""
    at = bench.Link(2, 40.0, 0.4, 2.4, 80.0)
    seconds = 0.8 + 0.4 + 4 * 20.0 * 6000 / 250_000
    assert bench.predicted(asleep(), at, "DDP rank 4") == pytest.approx(seconds)


def test_the_last_bucket_of_the_largest_numbers_is_predicted_to_be_waited_for(bench):
    """16 of 256 numbers, with their places and a scale; a bucket takes 4 s as it is."""
    at = bench.Link(2, 8.0, 2.0, 2.4, 16.0)
    seconds = 2.4 + (4 + 2 * 16) / (256 * 4) * 4.0
    found = bench.predicted(asleep(), at, "DDP top-k")
    assert found == pytest.approx(seconds, rel=1e-3)


@pytest.mark.parametrize("method", ["CDP-v1 4-bit", "CDP-v1 top-k", "CDP-v2 8-bit"])
def test_late_weights_with_small_messages_are_predicted_to_hide_them(bench, method):
    at = bench.Link(2, 1.0, 16.0, 2.4, 2.4)
    assert bench.predicted(asleep(), at, method) == pytest.approx(2.4)


@pytest.mark.parametrize("method", ["delayed all-reduce", "CDP-v1"])
def test_delays_hide_messages_that_are_short(bench, method):
    at = bench.Link(2, 0.25, 64.0, 2.4, 0.6)
    assert bench.predicted(asleep(), at, method) == pytest.approx(2.4)


@pytest.mark.parametrize(
    ("method", "name", "staleness"),
    [
        ("DDP", "DP", {0}),
        ("CDP-v1", "CDP-v1 rotated", {1}),
        ("CDP-v2", "CDP-v2", {0, 1}),
    ],
)
def test_schedules(bench, method, name, staleness):
    schedule = bench.schedule_of(task(workers=4), method)
    assert (schedule.name, schedule.n_stages, schedule.n_microbatches) == (name, 3, 4)
    assert {late for stage in schedule.staleness for late in stage} == staleness


def test_slower_links_afford_staler_weights(bench):
    late = [
        bench.schedule_of(asleep(workers=4), bench.AFFORDABLE, at)
        for ratio in (0.1, 1.0, 3.0)
        for at in [bench.Link(4, ratio, None, 2.4, 2.4 * ratio)]
    ]
    assert [schedule.chains for schedule in late] == ["in_order", "rotated", "rotated"]
    assert late[0].staleness == catalog.cyclic(4, n_stages=8).staleness
    means = [schedule.mean_staleness for schedule in late]
    assert means[0] < means[1] <= 1
    assert means[0] < means[2] <= 1


def test_groups_of_two(bench):
    at = bench.Link(4, 1.0, 16.0, 2.4, 2.4, local=0.024)
    schedule = bench.schedule_of(
        asleep(workers=4, ranks_per_machine=2), "groups of 2", at
    )
    assert schedule.timing == catalog.cyclic(4, n_stages=8, groups=2).timing
    with pytest.raises(UserError, match="divides the 3 workers"):
        bench.schedule_of(asleep(workers=3), "groups of 2", at)


def test_only_cdp_is_predicted_to_know_machines(bench):
    """Two machines of two: groups send half of what four machines would."""
    at = bench.Link(4, 1.0, 16.0, 2.4, 2.4, local=0.024)
    together = asleep(workers=4, ranks_per_machine=2)
    for method, saves in (
        ("DDP", False),
        ("delayed all-reduce", False),
        ("groups of 2", True),
    ):
        alone = bench.predicted(asleep(workers=4), at, method)
        assert (bench.predicted(together, at, method) < 0.7 * alone) == saves


def test_methods_begin_with_the_same_weights_and_images(bench):
    first, again = (
        [bench.fresh_model(task()).state_dict(), bench.images_of(task())]
        for _ in range(2)
    )
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert first[1][0].shape == (4, 3, 8, 8)


def test_step_time_is_of_the_slowest_rank_after_the_first_steps(bench):
    assert bench.step_time([[0, 5, 6, 7, 8], [0, 1, 2, 4, 8]], skip=1) == 7 / 3
