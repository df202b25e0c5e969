"""The pacer: what it holds back, what goes first, and that it ends."""

import threading
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from toolkit.runtime import pacing
from toolkit.runtime.pacing import Pacer

CPU = torch.device("cpu")
SECONDS = 20  # in which all must be over, on whatever machine


@pytest.fixture
def clock(monkeypatch):
    """The pacer's clock, from 0: time passes only as somebody waits, and waits end at once."""
    found = SimpleNamespace(now=0.0)
    found.monotonic = found.perf_counter = lambda: found.now

    class Event(threading.Event):
        def wait(self, timeout):
            found.now += timeout
            return self.is_set()

    monkeypatch.setattr(pacing, "time", found)
    replaced = SimpleNamespace(Event=Event, Thread=threading.Thread)
    monkeypatch.setattr(pacing, "threading", replaced)
    return found


@pytest.fixture
def pacer(clock):
    found = Pacer(CPU)
    yield found
    found.close()


@pytest.fixture
def sent(clock):
    """(name, time) of each chunk as it begins."""
    return []


def send(pacer, sent, name, sizes, urgency=0, before=None):
    """Put a message of chunks that note when they begin; ``before`` is called with the first."""

    def begin(k):
        if before is not None and k == 0:
            before()
        sent.append((f"{name}{k}", pacing.time.monotonic()))
        return f"{name}{k}"

    chunks = [lambda k=k: begin(k) for k in range(len(sizes))]
    return pacer.put(chunks, sizes, urgency)


def begin_all(*arguments, **options):
    return send(*arguments, **options).result(SECONDS)


def names(sent):
    return [name for name, _ in sent]


def gaps(sent):
    """Seconds from each chunk to the next."""
    times = [when for _, when in sent]
    return [b - a for a, b in pairwise(times)]


class Gate:
    """A message that holds the pacer up until others have been put."""

    def __init__(self, pacer):
        self.entered, self.opened = threading.Event(), threading.Event()
        self.begun = pacer.put([self._begin], [0], -1)
        assert self.entered.wait(SECONDS)

    def _begin(self):
        self.entered.set()
        assert self.opened.wait(SECONDS)

    def open(self):
        self.opened.set()
        self.begun.result(SECONDS)


def test_rate_is_that_of_the_shortest_step(pacer, clock, sent):
    """Of any program; the time between two programs is not a step. At first nothing waits."""
    pacer.begin(1000)
    assert begin_all(pacer, sent, "a", [10**6] * 3) == ["a0", "a1", "a2"]
    pacer.end_step()
    begin_all(pacer, sent, "b", [10**6] * 3)
    assert (gaps(sent), pacer.rate) == ([0] * 5, None)
    for seconds, rate in ((10, 125), (20, 125), (5, 250)):
        clock.now += seconds
        pacer.end_step()
        assert pacer.rate == pytest.approx(rate)
    pacer.begin(2000)
    # 2000 bytes in the shortest step, of 5 s.
    for seconds, rate in ((0.001, 250), (20, 500)):
        clock.now += seconds
        pacer.end_step()
        assert pacer.rate == pytest.approx(rate)


def test_no_rate_without_bytes(pacer, clock, sent):
    pacer.begin(0)
    for _ in range(2):
        clock.now += 10
        pacer.end_step()
    begin_all(pacer, sent, "a", [0] * 3)
    assert (gaps(sent), pacer.rate) == ([0, 0], None)


def test_chunks_begin_at_the_rate(pacer, clock, sent):
    """Each when the one before it would be through, whatever message it is of.

    After any pause two chunks go at once, and no more.
    """
    pacer.rate = 125.0
    begin_all(pacer, sent, "a", [125, 250, 50])
    begin_all(pacer, sent, "b", [125, 125])
    assert gaps(sent) == pytest.approx([0, 2, 0.4, 1])
    clock.now += 1000
    begin_all(pacer, sent, "c", [125] * 4)
    assert gaps(sent)[5:] == pytest.approx([0, 1, 1])


def test_most_urgent_goes_first(pacer, sent):
    """The smallest number; of equals the one that came first; a message's chunks in order."""
    gate = Gate(pacer)
    urgencies = {"a": 5, "b": 3, "c": 5, "d": 1}
    begun = [send(pacer, sent, name, [1, 1], k) for name, k in urgencies.items()]
    gate.open()
    for future, name in zip(begun, urgencies, strict=True):
        assert future.result(SECONDS) == [f"{name}0", f"{name}1"]
    assert names(sent) == ["d0", "d1", "b0", "b1", "a0", "a1", "c0", "c1"]


def test_an_urgent_message_comes_between_chunks(pacer, sent):
    """The other message continues where it stopped, and has begun with its last chunk."""
    begun = []

    def interrupt():
        begun.append(send(pacer, sent, "urgent", [1, 1], 1))

    assert begin_all(pacer, sent, "a", [1] * 3, 7, interrupt) == ["a0", "a1", "a2"]
    assert begun[0].result(SECONDS) == ["urgent0", "urgent1"]
    assert names(sent) == ["a0", "urgent0", "urgent1", "a1", "a2"]


def test_an_error_reaches_its_message_only(pacer, sent):
    """The rest of that message is not sent, others are."""

    def broken():
        raise RuntimeError("no connection")

    gate = Gate(pacer)
    future = send(pacer, sent, "a", [1] * 3, before=broken)
    other = send(pacer, sent, "b", [1, 1], 1)
    gate.open()
    with pytest.raises(RuntimeError, match="no connection"):
        future.result(SECONDS)
    assert other.result(SECONDS) == ["b0", "b1"]
    assert names(sent) == ["b0", "b1"]


def test_close_sends_nothing_more(clock, sent):
    pacer = Pacer(CPU)
    gate = Gate(pacer)
    future = send(pacer, sent, "a", [1, 1], -2)
    closing = threading.Thread(target=pacer.close)
    closing.start()
    while not pacer._closed.is_set():
        time.sleep(0.001)
    gate.open()
    closing.join(SECONDS)
    alive = closing.is_alive() or pacer._thread.is_alive()
    assert (alive, future.done(), sent) == (False, False, [])


@pytest.mark.parametrize("n_sent", [0, 2])
def test_close_wakes_the_thread(n_sent):
    """By the real clock: idle, or an hour before the next chunk may begin."""
    pacer, sent = Pacer(CPU), []
    pacer.rate = 1.0
    if n_sent:
        future = send(pacer, sent, "a", [3600] * 3)
        while len(sent) < n_sent:
            time.sleep(0.001)
    before = time.monotonic()
    pacer.close()
    assert time.monotonic() - before < SECONDS
    assert not pacer._thread.is_alive()
    assert len(sent) == n_sent
    assert not n_sent or not future.done()
