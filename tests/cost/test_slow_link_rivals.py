"""Compressed DDP and local SGD, priced: bytes, memory of errors and seconds by hand."""

from dataclasses import replace

import pytest

from toolkit.cost import Hardware, StageCost
from toolkit.cost.compression import accuracy_class
from toolkit.cost.slow_link_rivals import (
    ddp_costs,
    ddp_rival,
    local_sgd_rival,
    low_rank_numbers,
    rivals_on_slow_links,
)
from toolkit.cost.timeline_rows import summary
from toolkit.cost.worker_forms import DataParallelJob
from toolkit.errors import UserError

LINKS = Hardware(
    "links", flops=1.0, memory_bandwidth=1e12, link_bandwidth=1e3, link_latency=0.5
)
BUCKET = StageCost(
    0.0,
    0.0,
    parameter_bytes=40_400.0,
    forward_seconds=1.0,
    backward_seconds=2.0,
    matrices=((100, 100), (100, 1)),
)


def costs_of(n_stages, cut):
    return (BUCKET,)


def test_powersgd_sends_what_torch_does():
    assert low_rank_numbers([(100, 100)], 2) == 2 * 200
    assert low_rank_numbers([(100, 1), (10, 10)], 2) == 100 + 2 * 20
    assert low_rank_numbers([(8, 8)], 2) == 64  # it would not become half as large
    (cost,), links = ddp_costs((BUCKET,), LINKS, 4, "powersgd", low_rank=2)
    assert cost.sent_gradient_bytes == 4 * (2 * 200 + 100)
    assert cost.error_bytes == 40_400
    # At one operation a second.
    _, backward = cost.seconds(LINKS)
    assert backward == pytest.approx(2 + 12 * 10_100)
    assert links.link_latency == 1.5


def test_rivals_take_the_seconds_of_their_messages():
    job = DataParallelJob(costs_of, LINKS, 4)
    plain = ddp_rival(job, "none")
    assert plain.seconds == job.form().seconds
    assert plain.seconds == pytest.approx(3 + 6 * (0.5 + 40_400 / 4 / 1e3), rel=1e-3)
    quantized = ddp_rival(job, "int8")
    n_bytes = 10_100 + 40 * 4
    assert quantized.seconds == pytest.approx(
        3 + 6 * (0.5 + n_bytes / 4 / 1e3), rel=1e-3
    )
    quantized_timeline = quantized.form.timeline
    assert max(quantized_timeline.bytes_a_step()) == pytest.approx(1.5 * n_bytes)
    error_bytes = quantized_timeline.peak_memory(0) - plain.form.timeline.peak_memory(0)
    assert error_bytes == pytest.approx(1.25 * 40_400)


def test_codes_of_ddp_take_time():
    (cost,), _ = ddp_costs((BUCKET,), LINKS, 4, "int8")
    slow = replace(LINKS, memory_bandwidth=1e3)
    _, backward = cost.seconds(slow)
    # A rank encodes its gradient and the means of its quarter of it.
    n_passes = 30.1 * 5 / 4 + 2 * 5.3 + 3
    assert backward == pytest.approx(2 + n_passes * 40.4)


def test_local_steps_send_nothing_and_share_their_average():
    job = DataParallelJob(costs_of, LINKS, 4)
    plain = ddp_rival(job, "none")
    local = local_sgd_rival(job, period=2)
    assert local.form.timeline.bytes_a_step() == (0, 0, 0, 0)
    assert local.seconds == pytest.approx(3 + (plain.seconds - 3) / 2, rel=1e-3)
    assert local.averaging is not None
    assert local.averaging.sent_bytes == max(plain.form.timeline.bytes_a_step()) / 2


def test_a_row_counts_averages_and_the_memory_of_each_rank():
    job = DataParallelJob(costs_of, LINKS, 2)
    local = local_sgd_rival(job, period=2)
    row = summary(local.form.timeline, 6, LINKS, averaging=local.averaging)
    assert row["ms a step"] == pytest.approx(local.seconds * 1e3)
    assert row["samples/s"] == round(6 / local.seconds, 1)
    busy_share = local.form.seconds / local.seconds
    assert row["idle"] == f"{1 - busy_share:.1%}"
    assert row["MB a step, busiest rank"] == round(40_400 / 2 / 1e6, 2)
    assert row["fits"] == "yes"
    # 5 copies while it averages; steps of this model hold fewer.
    for memories, fits in (((1e9, 202_000.0), "yes"), ((1e9, 201_999.0), "no")):
        small = replace(LINKS, memories=memories)
        row = summary(local.form.timeline, 6, small, averaging=local.averaging)
        assert row["fits"] == fits


def test_rivals_and_how_they_train():
    rivals = rivals_on_slow_links(DataParallelJob(costs_of, LINKS, 2), "int8")
    named = {rival.name: rival.accuracy for rival in rivals}
    assert [*named] == [
        "DDP int8",
        "DDP powersgd rank 4",
        "DDP powersgd rank 2",
        "local SGD every 8",
    ]
    assert named["DDP powersgd rank 4"].startswith("rank 4")
    assert len({*named.values()}) == 4
    assert accuracy_class("none", is_late=False) == "exact"
    assert accuracy_class("int4", is_late=True).count("4") == 1
    with pytest.raises(UserError, match="int2"):
        ddp_costs((BUCKET,), LINKS, 2, "int2")
