"""The order of what threads do on a simulated GPU."""

import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from toolkit.runtime.pacing import Pacer
from toolkit.runtime.streams import after_marks, finish_stream, mark, own_stream

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
def used():
    """Each stream as a thread enters it."""
    return []


@pytest.fixture
def done(monkeypatch, used):
    """What is done on the GPU, in order."""
    found, here = [], threading.local()

    @contextmanager
    def entered(stream):
        found.append(f"on {stream.name}")
        used.append(stream)
        here.stream = stream
        yield

    ops = Stream(found, "ops")
    monkeypatch.setattr(
        "torch.cuda.current_stream", lambda device: getattr(here, "stream", ops)
    )
    monkeypatch.setattr(
        "torch.cuda.Stream", lambda device, priority: Stream(found, "own")
    )
    monkeypatch.setattr("toolkit.runtime.streams._spare", defaultdict(list))
    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda.stream", entered)
    monkeypatch.setattr("torch.cuda.set_device", lambda device: found.append(device))
    return found


def in_threads(n, work):
    """What ``n`` threads make of ``work``, all at the same time."""
    together = threading.Barrier(n)
    with ThreadPoolExecutor(n) as pool:
        return [*pool.map(lambda _: work(together), range(n))]


def test_a_thread_takes_its_device_before_all_else(done):
    """Whatever is done on another device makes a context there."""
    end = mark(GPU)

    def work(together):
        with own_stream(GPU):
            for _ in range(2):
                with after_marks(GPU, [end, None]):
                    done.append("work")

    in_threads(1, work)
    each = ["ops is through", "work", "own is through"]
    assert done == [GPU, "on own", *each, *each]


def test_no_thread_has_the_stream_of_another_and_all_are_used_again(done, used):
    """Torch has 32 streams; a later one would be NCCL's, or that of another thread."""

    def work(together):
        with own_stream(GPU):
            together.wait()

    for _ in range(20):
        in_threads(3, work)
        in_threads(2, work)
    assert len(used) == 100
    assert len({*map(id, used)}) == 3
    assert all(len({*map(id, used[k : k + 3])}) == 3 for k in range(0, 100, 5))
    with pytest.raises(ConnectionError), own_stream(GPU):
        raise ConnectionError  # the stream may wait for its message for ever
    in_threads(3, work)
    assert used[100] not in used[101:]


def test_the_pacer_is_on_the_device_of_its_rank_before_it_begins_a_chunk(done):
    pacer = Pacer(GPU)
    pacer.put([lambda: done.append("begun")], [1], 0).result(20)
    pacer.close()
    assert done == [GPU, "on own", "begun"]


def test_on_the_cpu_there_is_nothing_to_do(done):
    with own_stream(torch.device("cpu")), after_marks(torch.device("cpu"), [None]):
        done.append("work")
    assert done == ["work"]


def test_a_thread_waits_for_what_it_has_given(done):
    """Not for the streams of others."""
    finish_stream(GPU)
    assert done == ["ops is through"]
