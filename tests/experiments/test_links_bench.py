"""The benchmark of links: its network, its windows, its table and what it refuses."""

import os
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from tests.experiments.command import EXPERIMENTS, run
from tests.experiments.test_results import assert_figures, rows
from tests.thorough import thorough
from toolkit.cli import schema
from toolkit.errors import UserError
from toolkit.runtime import JobFailedError

_LACKS = sys.platform != "linux" or os.geteuid() != 0 or not (shutil.which("tc"))
needs_root = pytest.mark.skipif(_LACKS, reason="makes network namespaces: Linux, root, ip and tc")


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    from benchmarks import links, links_rank, network

    return SimpleNamespace(links=links, rank=links_rank, network=network)


# Traffic


def test_windows_take_bytes_to_come_evenly_between_samples(bench):
    moments = np.array([0.0, 0.02, 0.04, 0.05])
    sent = np.array([[0, 5], [200, 5], [200, 5], [300, 7]], float)
    windows = bench.network.in_windows(moments, sent, 0.005, 0.045)
    np.testing.assert_allclose(windows[:, 0], [100, 50, 0, 50])
    np.testing.assert_allclose(windows[:, 1], [0, 0, 0, 1])


def test_the_sampler_reads_what_ports_have_received(bench):
    table = (
        b"Inter-|   Receive                  |  Transmit\n"
        b" face |bytes    packets errs drop|bytes    packets\n"
        b"port10:  77 1 0 0 1 1\n port1: 123 1 0 0 456 1\n port0:89 2 0 0 1 1\n"
    )
    assert bench.network.received(table, 2) == [89, 123]


# Commands and orders


# Methods


def task(bench, **changes):
    usual = {"workers": 2, "model": "resnet8", "image_size": 8, "batch": 2, "stages": 3}
    usual |= {"partition": "parameters", "chunk_mb": None, "chains": None, "seed": 3}
    return bench.rank.Task(**usual | changes)


@pytest.mark.parametrize(
    ("method", "name", "staleness"), [("DDP", "DP", {0}), ("CDP-v1", "CDP-v1", {1})]
)
def test_schedules(bench, method, name, staleness):
    schedule = task(bench).schedule(bench.rank.METHODS[method])
    assert (schedule.name, schedule.n_stages, schedule.n_microbatches) == (name, 3, 2)
    assert {late for stage in schedule.staleness for late in stage} == staleness


def test_all_begin_with_the_same_weights_and_images(bench):
    (images, classes), first = task(bench).images(), task(bench).fresh_model()
    (images_again, classes_again), again = task(bench).images(), task(bench).fresh_model()
    for one, two in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)
    assert torch.equal(images, images_again)
    assert torch.equal(classes, classes_again)
    assert images.shape == (4, 3, 8, 8)


# The table


def ran(bench, method, seconds, number=0, ratio=1.0, peak=2.0, workers=2):
    return bench.links.Run(workers, ratio, number, method, seconds, peak, 44.7)


def link(bench, ratio=1.0, workers=2):
    return bench.links.Link(workers, ratio, 100.0, 1.0, 0.99)


def test_step_time_is_of_the_slowest_rank_after_the_first_steps(bench):
    answers = [[0, 5, 6, 7, 8], [0, 1, 2, 4, 8]]
    assert bench.links.step_time(answers, skip=1) == 7 / 3


def test_rates_are_corrected_by_what_is_measured(bench):
    """On links that carry a tenth less than their rate, after a computation of two seconds."""
    rates, steps = [], [[0, 9, 11, 13, 15.0], [0, 9, 10, 11, 12.0]]

    def order(do, **how):
        if do == "hello":
            return [1000, 1000]
        if do == "train":
            return steps
        seconds = 0.01 if rates[-1] is None else 8 * how["bytes"] / (0.9 * rates[-1])
        return [[5.0, 6.0, 7.0], [5 + seconds, 6 + seconds, 8.0]]

    net, ranks = SimpleNamespace(shape=rates.append), SimpleNamespace(order=order)
    half, free = bench.links.calibrate(config(ratios=[0.5, 0], skip=1), net, ranks, 2)
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
    assert cdp["failed"] is None


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


def measured(bench, ratio, peak=2.5, **seconds):
    names = {name.replace("_", " "): taken for name, taken in seconds.items()}
    names = {name.replace("CDP v", "CDP-v"): taken for name, taken in names.items()}
    runs = [ran(bench, name, taken, ratio=ratio, peak=peak) for name, taken in names.items()]
    return bench.links.table(runs, [link(bench, ratio)])


def test_bars_are_ratios_of_medians(bench):
    rows = measured(bench, 1.0, DDP=10.0, DDP_tuned=9.0, CDP_v1=7.1, CDP_v2=7.9)
    found = bench.links.bars(rows)
    assert [(row["method"], row["measured"], row["at most"], row["failed"]) for row in found] == [
        ("CDP-v1 / DDP", 0.71, 0.72, 0),
        ("CDP-v1 / DDP tuned", 0.789, 0.78, 1),
        ("CDP-v2 / DDP", 0.79, 0.78, 1),
    ]
    assert {(row["workers"], row["link"]) for row in found} == {(2, "M = C")}
    assert found[0].keys() == rows[0].keys()


def test_where_messages_cost_nothing_the_slowest_counts(bench):
    rows = measured(bench, 0.0, compute=50.0, DDP=10.0, CDP_v1=10.1, CDP_v1_paced=10.6)
    slowest, calm = bench.links.bars(rows)
    assert slowest["method"] == "slowest (CDP-v1 paced) / DDP"
    assert (slowest["measured"], slowest["failed"]) == (1.06, 1)
    assert calm["method"] == "peak/mean of CDP-v1 paced (DDP: 2.5)"
    assert (calm["measured"], calm["at most"], calm["failed"]) == (2.5, 3, 0)


def test_bars_are_those_of_two_workers_and_of_what_was_measured(bench):
    four = bench.links.table(
        [ran(bench, name, 1.0, workers=4) for name in ("DDP", "CDP-v1")], [link(bench, workers=4)]
    )
    assert bench.links.bars(four) == []
    assert bench.links.bars(measured(bench, 2.0, DDP=1.0, CDP_v1=1.0)) == []
    (bar,) = bench.links.bars(sixteen(bench))
    assert (bar["method"], bar["link"]) == ("CDP-v1 16-bit / DDP 16-bit", "M = 2 C")


def sixteen(bench):
    runs = [ran(bench, name, 1.0, ratio=2.0) for name in ("DDP 16-bit", "CDP-v1 16-bit")]
    return bench.links.table(runs, [link(bench, 2.0)])


# What is refused


def config(**changes):
    return OmegaConf.merge(OmegaConf.structured(schema.LinksBench), changes)


@pytest.mark.parametrize(
    ("changes", "value"),
    [
        ({"steps": 4}, "got 4 and 3"),
        ({"rounds": 0}, "bench.rounds .* 0"),
        ({"methods": ["DDP", "FSDP"]}, "bench.methods .* 'FSDP'"),
        ({"methods": ["DDP", "DDP"]}, "bench.methods"),
        ({"ratios": [1, -1]}, "bench.ratios .* -1"),
        ({"ratios": []}, "bench.ratios"),
        ({"workers": [2, 2]}, "bench.workers"),
        ({"workers": [1]}, "got 1"),
        ({"timeout": 0}, "bench.timeout .* 0"),
        ({"chunk_mb": -1}, "bench.chunk_mb .* -1"),
        ({"model": "alexnet"}, "alexnet"),
    ],
)
def test_what_is_refused(bench, changes, value):
    with pytest.raises(UserError, match=value):
        bench.links.check(config(**changes), torch.device("cpu"))
    with pytest.raises(UserError, match="cuda"):
        bench.links.check(config(), torch.device("cuda"))


# The network itself

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


def transferred(made):
    """Seconds in which a rank gets ``SIZE`` bytes from another."""
    command = [*made.inside(1), sys.executable, "-c", RECEIVE, made.address(1)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as receiver:
        try:
            assert receiver.stdout.readline() == "listens\n"
            send = [*made.inside(0), sys.executable, "-c", SEND, made.address(1), str(SIZE)]
            begin = subprocess.run(send, check=True, timeout=30, stdout=subprocess.PIPE).stdout
            size, end = receiver.communicate(timeout=30)[0].split()
        finally:
            receiver.kill()
    assert int(size) == SIZE
    return float(end) - float(begin)


@needs_root
def test_links_have_the_rate_that_they_are_given(bench):
    with bench.network.network(2) as made, bench.network.sampled(made) as sent:
        sent.mark()
        free = transferred(made)
        made.shape(RATE)
        limited = transferred(made)
        made.shape(None)
        assert transferred(made) < limited
        _, by_rank = sent.samples(time.monotonic())
    expected = 8 * SIZE / RATE
    assert free < 0.8 * expected < limited < 3 * expected  # the processor may be busy
    assert 3 * SIZE <= by_rank[-1][0] - by_rank[0][0] < 3.3 * SIZE
    assert not {*made.ranks, made.hub} & there()


@needs_root
def test_all_is_removed_after_an_exception(bench):
    names = set()

    def fail():
        with bench.network.network(2) as made:
            names.update({*made.ranks, made.hub} & there())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert len(names) == 3
    assert not names & there()


@thorough
@needs_root
def test_a_rank_that_does_not_answer_or_ends_is_named(bench, tmp_path):
    with bench.network.network(2) as made:
        with bench.rank.Ranks(made, task(bench), 60, tmp_path / "ranks.log") as ranks:
            n_bytes, same = ranks.order("hello")
            assert n_bytes == same > 10_000
            (begin, _), (_, end) = ranks.order("send", bytes=2**21, times=2)
            assert begin < end < begin + 10
        for number in (signal.SIGSTOP, signal.SIGKILL):
            with bench.rank.Ranks(made, task(bench), 20, tmp_path / "ranks.log") as ranks:
                ranks.order("hello")
                ranks._timeout = 2
                ranks._processes[1].send_signal(number)
                with pytest.raises(JobFailedError, match="hello: rank 1"):
                    ranks.order("hello")
    assert all(process.poll() is not None for process in ranks._processes)


@thorough
@needs_root
def test_a_small_one(tmp_path):
    small = ("workers=[2]", "ratios=[1,0]", "rounds=1", "steps=4", "skip=1", "model=resnet8")
    more = ("image_size=8", "batch=2", "stages=3", "methods=[DDP,CDP-v1]", "timeout=60")
    options = [f"bench.{option}" for option in (*small, *more)]
    finished = run("bench", "bench=links", *options, "device=cpu", f"hydra.run.dir={tmp_path}")
    assert finished.status in (0, 1), finished.err  # 1: a bar is missed, as may be with so little
    assert "one step of staleness lets messages travel" in finished.out
    methods = [row for row in rows(tmp_path / "bench.csv") if not row["at most"]]
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
