"""The benchmark of links: its network, its windows, its table and what it refuses."""

import os
import shutil
import subprocess
import sys
import time
from contextlib import closing, suppress
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from tests.experiments.command import EXPERIMENTS, assert_figures, rows, run
from tests.thorough import thorough
from toolkit.cli import settings
from toolkit.errors import UserError

_LACKS = sys.platform != "linux" or os.geteuid() != 0 or not (shutil.which("tc"))
needs_root = pytest.mark.skipif(_LACKS, reason="makes network namespaces: Linux, root, ip and tc")


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    from benchmarks import links, links_rank, network

    return SimpleNamespace(links=links, rank=links_rank, network=network)


def test_windows_interpolate_between_samples(bench):
    moments = np.array([0.0, 0.02, 0.04, 0.05])
    sent = np.array([[0, 5], [200, 5], [200, 5], [300, 7]], float)
    windows = bench.network.in_windows(moments, sent, 0.005, 0.045)
    np.testing.assert_allclose(windows[:, 0], [100, 50, 0, 50])
    np.testing.assert_allclose(windows[:, 1], [0, 0, 0, 1])
    assert bench.network.peak_over_mean(windows) == pytest.approx(100 / (201 / 4))


def test_sampler_reads_what_ports_have_received(bench):
    counters = (
        b"Inter-|   Receive                  |  Transmit\n"
        b" face |bytes    packets errs drop|bytes    packets\n"
        b"port10:  77 1 0 0 1 1\n port1: 123 1 0 0 456 1\n port0:89 2 0 0 1 1\n"
    )
    assert bench.network.received(counters, 2) == [89, 123]


def task(**changes):
    usual = {"workers": 2, "model": "resnet8", "image_size": 8, "batch": 2, "stages": 3, "seed": 3}
    return SimpleNamespace(**usual | {"ratios": [1], "skip": 1} | changes)


@pytest.mark.parametrize(
    ("method", "name", "staleness"), [("DDP", "DP", {0}), ("CDP-v1", "CDP-v1 rotated", {1})]
)
def test_schedules(bench, method, name, staleness):
    schedule = bench.rank.schedule_of(task(), method)
    assert (schedule.name, schedule.n_stages, schedule.n_microbatches) == (name, 3, 2)
    assert {late for stage in schedule.staleness for late in stage} == staleness


def test_methods_begin_with_the_same_weights_and_images(bench):
    first, again = (bench.rank.fresh_model(task()).state_dict() for _ in range(2))
    images, images_again = (bench.rank.images_of(task()) for _ in range(2))
    assert images[0].shape == (4, 3, 8, 8)
    torch.testing.assert_close([images, first], [images_again, again], rtol=0, atol=0)


def ran(bench, method, seconds, number=0, ratio=1.0, peak=2.0, workers=2):
    return bench.links.Run(workers, ratio, number, method, seconds, peak, 44.7)


def link(bench, ratio=1.0, workers=2):
    return bench.rank.Link(workers, ratio, 100.0, 1.0, 0.99)


def test_step_time_is_of_the_slowest_rank_after_the_first_steps(bench):
    assert bench.rank.step_time([[0, 5, 6, 7, 8], [0, 1, 2, 4, 8]], skip=1) == 7 / 3


def test_rates_are_corrected_by_what_is_measured(bench):
    """On links that carry a tenth less than their rate, after a computation of two seconds."""
    rates, steps = [], [[0, 9, 11, 13, 15.0], [0, 9, 10, 11, 12.0]]

    def send(n_bytes):
        return 0.01 if rates[-1] is None else 8 * n_bytes / (0.9 * rates[-1])

    half, free = bench.rank.calibrate(
        task(ratios=[0.5, 0]), 1000, rates.append, lambda method: steps, send
    )
    assert half.compute == free.compute == 2
    assert rates == [8000, pytest.approx(8000 / 0.9), None]
    assert half.mbit == pytest.approx(0.008 / 0.9)
    assert half.one_way == pytest.approx(1)
    assert (free.mbit, free.one_way) == (None, pytest.approx(0.01))


def test_rows_are_medians_and_ratios(bench):
    times = {"DDP": (2.0, 4.0, 3.0), "CDP-v1": (1.0, 3.0, 2.4), "DDP tuned": (2.0, 2.0, 2.0)}
    runs = [
        ran(bench, name, seconds, number)
        for name, series in times.items()
        for number, seconds in enumerate(series)
    ]
    ddp, tuned, cdp = bench.links.table(runs, [link(bench)])
    assert [row["method"] for row in (ddp, tuned, cdp)] == ["DDP", "DDP tuned", "CDP-v1"]
    assert (cdp["step (s)"], cdp["min"], cdp["max"]) == (2.4, 1.0, 3.0)
    assert (cdp["least"], cdp["paired"], cdp["most"]) == (0.5, 0.75, 0.8)
    assert (cdp["/ DDP"], cdp["/ tuned"]) == (0.8, 1.2)
    assert (cdp["link"], cdp["M/C"]) == ("M = C", 0.99)
    assert (cdp["peak/mean"], cdp["MB sent"]) == (2.0, 44.7)


def test_links_and_workers_do_not_mix(bench):
    places = [(2, 0.5), (2, 0.0), (4, 0.5)]
    runs = [
        ran(bench, name, k + (name == "DDP"), ratio=ratio, workers=workers)
        for k, (workers, ratio) in enumerate(places, 1)
        for name in ("DDP", "CDP-v2")
    ]
    rows = bench.links.table(runs, [link(bench, ratio, n) for n, ratio in places])
    assert [(row["workers"], row["link"], row["/ DDP"]) for row in rows[1::2]] == [
        (2, "M = 0.5 C", 0.5),
        (2, "unshaped", 0.667),
        (4, "M = 0.5 C", 0.75),
    ]


def test_rows_without_ddp_have_no_ratio_and_compute_no_traffic(bench):
    (row,) = bench.links.table([ran(bench, "compute", 1.0, peak=float("nan"))], [link(bench)])
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
        ({"ratios": []}, r"bench.ratios .*\[\]"),
        ({"workers": [2, 2]}, r"bench.workers .*\[2, 2\]"),
        ({"workers": [1]}, "ranks: got 1$"),
    ],
)
def test_refuses(bench, changes, value):
    config = OmegaConf.merge(settings("bench", "bench=links").bench, changes)
    with pytest.raises(UserError, match=value):
        bench.links.check(config, torch.device("cpu"))
    with pytest.raises(UserError, match="got cuda; give device=cpu"):
        bench.links.check(config, torch.device("cuda"))


RATE = 80e6  # bits a second
SIZE = 3_000_000  # bytes
RECEIVE = """
import socket, sys, time
listening = socket.create_server((sys.argv[1], 4000))
print("listens", flush=True)
connection, _ = listening.accept()
size = 0
while found := connection.recv(1 << 16):
    size += len(found)
print(size, time.monotonic(), flush=True)
"""
SEND = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 4000))
print(time.monotonic())
connection.sendall(bytes(int(sys.argv[2])))
"""


def there():
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return {line.split()[0] for line in listed.stdout.splitlines()}


def transferred(bench, net):
    """Seconds in which a rank gets ``SIZE`` bytes from another."""
    sending, receiving = (["ip", "netns", "exec", name, sys.executable, "-c"] for name in net.ranks)
    address = bench.network.address(1)
    with subprocess.Popen(
        [*receiving, RECEIVE, address], stdout=subprocess.PIPE, text=True
    ) as receiver:
        try:
            assert receiver.stdout.readline() == "listens\n"
            send = [*sending, SEND, address, str(SIZE)]
            begin = subprocess.run(send, check=True, timeout=30, stdout=subprocess.PIPE).stdout
            size, end = receiver.communicate(timeout=30)[0].split()
        finally:
            receiver.kill()
    assert int(size) == SIZE
    return float(end) - float(begin)


@needs_root
def test_links_have_the_rate_that_they_are_given(bench):
    with bench.network.network(2) as net, closing(bench.network.Traffic(net)) as traffic:
        start = time.monotonic()
        free = transferred(bench, net)
        net.shape(RATE)
        limited = transferred(bench, net)
        net.shape(None)
        assert transferred(bench, net) < limited
        moments, by_rank = traffic.samples(start, time.monotonic())
        assert traffic.samples(moments[-1], moments[-1])[0][0] >= moments[-2]  # the rest is dropped
    expected = 8 * SIZE / RATE
    assert free < 0.8 * expected < limited < 3 * expected  # the processor may be busy
    assert 3 * SIZE <= by_rank[-1][0] - by_rank[0][0] < 3.3 * SIZE
    assert not {*net.ranks, net.hub} & there()


@needs_root
def test_network_is_removed_after_an_exception(bench):
    with suppress(ZeroDivisionError), bench.network.network(2) as net:
        assert {*net.ranks, net.hub} <= there()
        raise ZeroDivisionError
    assert not {*net.ranks, net.hub} & there()


@thorough
@needs_root
def test_a_small_one(tmp_path):
    small = ("workers=[2]", "ratios=[1,0]", "rounds=1", "steps=4", "skip=1", "model=resnet8")
    more = ("image_size=8", "batch=2", "stages=3", "methods=[DDP,CDP-v1]", "timeout=60")
    options = [f"bench.{option}" for option in (*small, *more)]
    finished = run("bench", "bench=links", *options, "device=cpu", f"hydra.run.dir={tmp_path}")
    assert finished.status == 0, finished.err
    methods = rows(tmp_path / "bench.csv")
    assert [(row["link"], row["method"]) for row in methods] == [
        (link, method) for link in ("M = C", "unshaped") for method in ("DDP", "CDP-v1")
    ]
    assert all(float(row["step (s)"]) > 0 and float(row["MB sent"]) > 0 for row in methods)
    assert {float(row["/ DDP"]) for row in methods[::2]} == {1}
    assert len(rows(tmp_path / "runs.csv")) == 4
    limited, free = rows(tmp_path / "links.csv")
    assert float(limited["mbit"]) > 0
    assert not free["mbit"]
    assert_figures(tmp_path, "links_2")
    assert not any(name.startswith(f"cdp-{os.getpid()}-") for name in there())
