"""The order of what threads do on a simulated GPU."""

import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from toolkit.runtime.pacing import Pacer
from toolkit.runtime.streams import Streams, finish_stream, own_stream

GPU = torch.device("cuda", 3)


class Stream:
    """Notes what is done with it."""

    def __init__(self, done, name):
        self.done, self.name = done, name

    def record_event(self, event):
        event.done, event.name = self.done, self.name
        return event


class Event:
    """Notes that it is waited for."""

    def __init__(self, *, blocking):
        assert blocking  # or who waits would keep a core busy

    def synchronize(self):
        self.done.append(f"{self.name} is through")


@pytest.fixture
def done(monkeypatch):
    """What is done on the GPU, in order."""
    found = []

    @contextmanager
    def entered(stream):
        found.append(f"on {stream.name}")
        yield

    monkeypatch.setattr("torch.cuda.current_stream", lambda device: Stream(found, "ops"))
    monkeypatch.setattr("torch.cuda.Stream", lambda device, priority: Stream(found, "own"))
    monkeypatch.setattr("toolkit.runtime.streams._spare", defaultdict(list))
    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda.stream", entered)
    monkeypatch.setattr("torch.cuda.set_device", lambda device: found.append(device))
    return found


def test_a_thread_takes_its_device_before_all_else(done):
    """Once. Whatever is done on another device makes a context there."""
    streams = Streams(GPU)
    mark = streams.mark()

    def work():
        for _ in range(2):
            with streams.after([mark, None]):
                done.append("work")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    each = ["ops is through", "on own", "work", "own is through"]
    assert done == [GPU, *each, *each]


def in_threads(n, work):
    """What ``n`` threads make of ``work``, all at the same time."""
    together = threading.Barrier(n)
    with ThreadPoolExecutor(n) as pool:
        return [*pool.map(lambda _: work(together), range(n))]


def test_no_thread_has_the_stream_of_another_and_all_are_used_again(done, monkeypatch):
    """Torch has 32 streams; a later one would be NCCL's, or that of another thread."""
    used = []

    @contextmanager
    def entered(stream):
        used.append(stream)
        yield

    monkeypatch.setattr("torch.cuda.stream", entered)
    for _ in range(20):
        streams = Streams(GPU)

        def work(together, streams=streams):
            with streams.after():
                together.wait()

        in_threads(3, work)
        streams.close()

        def alone(together):
            with own_stream(GPU):
                together.wait()

        in_threads(2, alone)
    assert len(used) == 100
    assert len({*map(id, used)}) == 3
    assert all(len({*map(id, used[k : k + 3])}) == 3 for k in range(0, 100, 5))


def test_the_pacer_is_on_the_device_of_its_rank_before_it_begins_a_chunk(done):
    pacer = Pacer(GPU)
    pacer.put([lambda: done.append("begun")], [1], 0).result(20)
    pacer.close()
    assert done == [GPU, "on own", "begun"]


def test_on_the_cpu_there_is_nothing_to_do(done):
    with Streams(torch.device("cpu")).after([None]):
        done.append("work")
    assert done == ["work"]


def test_a_thread_waits_for_what_it_has_given(done):
    """Not for the streams of others."""
    finish_stream(GPU)
    assert done == ["ops is through"]
