"""The benchmark of links: its network, its windows, its table and what it refuses."""

import os
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from tests.experiments.command import assert_figures, complete, rows
from tests.experiments.test_link_methods import asleep, task
from tests.thorough import thorough
from toolkit.cli import settings
from toolkit.errors import UserError
from toolkit.model import build

_LACKS = sys.platform != "linux" or os.geteuid() != 0 or not (shutil.which("tc"))
needs_root = pytest.mark.skipif(
    _LACKS, reason="makes network namespaces: Linux, root, ip and tc"
)


@pytest.fixture
def bench(benchmark_module):
    return benchmark_module("links")


def test_windows_interpolate_between_samples(bench):
    moments = np.array([0.0, 0.02, 0.04, 0.05])
    sent = np.array([[0, 5], [200, 5], [200, 5], [300, 7]], float)
    windows = bench.network.in_windows(moments, sent, 0.005, 0.045)
    np.testing.assert_allclose(windows, [[100, 0], [50, 0], [0, 0], [50, 1]])
    assert bench.network.peak_over_mean(windows) == pytest.approx(100 / (201 / 4))


def test_sampler_reads_what_ports_have_received(bench):
    counters = (
        b"Inter-|   Receive                  |  Transmit\n"
        b" face |bytes    packets errs drop|bytes    packets\n"
        b"port10:  77 1 0 0 1 1\n port1: 123 1 0 0 456 1\n port0:89 2 0 0 1 1\n"
    )
    assert bench.network.received(counters, 2) == [89, 123]


def test_rows_get_predictions(bench, capsys):
    at = bench.Link(2, 0.25, 64.0, 2.4, 0.6)
    rows = bench.table([ran(bench, "CDP-v1", 2.5, ratio=0.25)], [at])
    bench.add_predictions(rows, [asleep()], [at])
    assert (rows[0]["predicted (s)"], rows[0]["error (%)"]) == (
        pytest.approx(2.4),
        -4.0,
    )
    assert "within 5 % of measured: 1 of 1" in capsys.readouterr().out


def test_a_folder_is_continued_with_the_same_options_only(bench, tmp_path):
    assert bench.earlier(tmp_path, {"steps": 8}) == ([], [])
    links, runs = (
        [link(bench), bench.Link(2, 0.0, None, 1.0, 0.1)],
        [ran(bench, "DDP", 2.0)],
    )
    bench.write_csv(tmp_path / "links.csv", [asdict(each) for each in links])
    bench.write_csv(tmp_path / "trainings.csv", [asdict(each) for each in runs])
    assert bench.earlier(tmp_path, {"steps": 8}) == (links, runs)
    with pytest.raises(UserError, match="choose another"):
        bench.earlier(tmp_path, {"steps": 9})


def test_rates_follow_from_the_time_of_computing(bench):
    """On links that carry a tenth less than their rate, after a computation of two seconds."""
    rates, steps = [], [[0, 9, 11, 13, 15.0], [0, 9, 10, 11, 12.0]]

    def send(n_bytes, target):
        assert target == 1
        return 0.01 if rates[-1] is None else 8 * n_bytes / (0.9 * rates[-1])

    half, free = bench.calibrate(
        task(ratios=[0.5, 0]), 1000, rates.append, lambda method: steps, send
    )
    assert half.compute == free.compute == 2
    assert rates == [8000, None]
    assert (half.mbit, half.one_way) == pytest.approx((0.008, 1 / 0.9))
    assert (free.mbit, free.one_way) == (None, pytest.approx(0.01))


def ran(bench, method, seconds, number=0, ratio=1.0, peak=2.0, workers=2):
    return bench.Run(workers, ratio, number, method, seconds, peak, 44.7)


def link(bench, ratio=1.0, workers=2):
    return bench.Link(workers, ratio, 100.0, 1.0, 0.99)


def test_rows_are_medians_and_ratios(bench):
    times = {
        "DDP": (2.0, 4.0, 3.0),
        "CDP-v1": (1.0, 3.0, 2.4),
        "DDP tuned": (2.0, 2.0, 2.0),
    }
    runs = [
        ran(bench, name, seconds, number)
        for name, series in times.items()
        for number, seconds in enumerate(series)
    ]
    ddp, tuned, cdp = bench.table(runs, [link(bench)])
    assert [row["method"] for row in (ddp, tuned)] == ["DDP", "DDP tuned"]
    assert cdp == {
        "workers": 2, "link": "M = C", "method": "CDP-v1", "M/C": 0.99,
        "step (s)": 2.4, "min": 1.0, "max": 3.0, "/ DDP": 0.8, "/ tuned": 1.2,
        "least": 0.5, "paired": 0.75, "most": 0.8, "peak/mean": 2.0, "MB sent": 44.7,
    }  # fmt: skip


def test_links_and_workers_do_not_mix(bench):
    places = [(2, 0.5), (2, 0.0), (4, 0.5)]
    runs = [
        ran(bench, name, k + (name == "DDP"), ratio=ratio, workers=workers)
        for k, (workers, ratio) in enumerate(places, 1)
        for name in ("DDP", "CDP-v2")
    ]
    rows = bench.table(runs, [link(bench, ratio, n) for n, ratio in places])
    assert [(row["workers"], row["link"], row["/ DDP"]) for row in rows[1::2]] == [
        (2, "M = 0.5 C", 0.5),
        (2, "unshaped", 0.667),
        (4, "M = 0.5 C", 0.75),
    ]


def test_rows_without_ddp_have_no_ratio_and_compute_no_traffic(bench):
    (row,) = bench.table([ran(bench, "compute", 1.0, peak=float("nan"))], [link(bench)])
    names = ("/ DDP", "paired", "least", "most", "/ tuned", "peak/mean", "MB sent")
    assert [row[name] for name in names] == [None] * 7


@pytest.mark.parametrize(
    ("changes", "value"),
    [
        ({"steps": 4}, "bench.steps .* got 4"),
        ({"skip": -1}, "bench.skip .* got -1"),
        ({"rounds": 0}, "bench.rounds .* 0"),
        ({"methods": ["DDP", "FSDP"]}, "bench.methods .* 'FSDP'"),
        ({"methods": ["DDP", "DDP"]}, "bench.methods .*'DDP', 'DDP'"),
        ({"ratios": [1, -1]}, "bench.ratios .* -1"),
        ({"sleep": -1.0}, "bench.sleep .* -1"),
        ({"megabytes": 0.0}, "bench.megabytes .* 0"),
        ({"ratios": []}, r"bench.ratios .*\[\]"),
        ({"workers": [2, 2]}, r"bench.workers .*\[2, 2\]"),
        ({"workers": [1]}, "machines: got 1$"),
        (
            {"workers": [4, 3], "ranks_per_machine": 2},
            "bench.ranks_per_machine .* got 2",
        ),
        (
            {"sleep": 0.0, "methods": ["affordable delay"]},
            "bench.sleep is above 0 .* got 0",
        ),
    ],
)
def test_refuses(bench, changes, value):
    config = OmegaConf.merge(settings("bench", "bench=links").bench, changes)
    with pytest.raises(UserError, match=value):
        bench.check(config, torch.device("cpu"))
    with pytest.raises(UserError, match="got cuda; give device=cpu"):
        bench.check(config, torch.device("cuda"))


def namespaces():
    listed = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=True
    )
    return {line.split()[0] for line in listed.stdout.splitlines()}


@needs_root
def test_network_is_removed_after_an_exception(bench):
    with suppress(ZeroDivisionError), bench.network.network(2) as net:
        assert {*net.machines, net.hub} <= namespaces()
        raise ZeroDivisionError
    assert not {*net.machines, net.hub} & namespaces()


@thorough
@needs_root
def test_a_small_one(tmp_path):
    small = (
        "workers=[2]",
        "ratios=[1,0]",
        "rounds=1",
        "steps=4",
        "skip=1",
        "sleep=0",
        "model=resnet8",
    )
    more = ("image_size=8", "batch=2", "stages=3", "methods=[DDP,CDP-v1]", "timeout=60")
    options = [f"bench.{option}" for option in (*small, *more)]
    found = complete("bench", tmp_path, "bench=links", *options, "device=cpu")[
        "metrics"
    ]
    assert [(row["link"], row["method"]) for row in found] == [
        (link, method) for link in ("M = C", "unshaped") for method in ("DDP", "CDP-v1")
    ]
    assert all(row["step (s)"] > 0 and row["MB sent"] > 0 for row in found)
    assert {row["/ DDP"] for row in found[::2]} == {1}
    trainings = rows(tmp_path / "trainings.csv")
    assert len(trainings) == 4
    # The same command in the same folder has nothing left to train.
    again = complete("bench", tmp_path, "bench=links", *options, "device=cpu")
    assert again["metrics"] == found
    assert rows(tmp_path / "trainings.csv") == trainings
    limited, free = rows(tmp_path / "links.csv")
    sent = 4 * sum(
        parameter.numel() for parameter in build("resnet8", 10, 8).parameters()
    )
    expected = 8 * sent / (1e6 * float(limited["mbit"]))  # seconds
    # The processor may be busy; a bucket that is full lets the first bytes through at once.
    assert 0.5 * expected < float(limited["one_way"]) < 3 * expected
    assert not free["mbit"]
    assert_figures(tmp_path, "links_2")
    assert not any(name.startswith(f"cdp-{os.getpid()}-") for name in namespaces())
