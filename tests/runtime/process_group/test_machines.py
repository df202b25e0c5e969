"""Hosts join though strangers call at the same port."""

import os
import socket
import struct
import sys
import threading
import time
from contextlib import ExitStack, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from types import ModuleType, SimpleNamespace

import pytest

from toolkit.runtime.process_group import processes
from toolkit.runtime.process_group.machines import accept_host

KEY = b"k" * 32
HOST = "127.0.0.1"


class FakeRay(ModuleType):
    """As much of Ray as starts a task on a host: here in a thread, after strangers have called."""

    def __init__(self):
        super().__init__("ray")
        self.util = SimpleNamespace(get_node_ip_address=lambda: HOST)
        self.threads = []
        self.strangers = []

    def init(self, *_, **options):
        pass

    def nodes(self):
        return [{"NodeManagerAddress": HOST, "NodeID": "here", "Alive": True}]

    def remote(self, function):
        def call_and_serve(address, *arguments):
            for call in STRANGERS.values():
                self.strangers.append(call(address))
            offer_wrong_key(address)
            function(address, *arguments)

        def start(*arguments):
            self.threads.append(threading.Thread(target=call_and_serve, args=arguments))
            self.threads[-1].start()

        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=start))


def connect(address, first_bytes=b""):
    stranger = socket.create_connection(address)
    stranger.sendall(first_bytes)
    return stranger


def reset(address):
    stranger = connect(address)
    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stranger.close()
    return stranger


def offer_wrong_key(address):
    with suppress(AuthenticationError, EOFError, OSError):
        Client(address, authkey=b"w" * 32).close()


def threads_end():
    """Whether no thread still waits for a stranger's answer."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        if not any("authenticate" in thread.name for thread in threading.enumerate()):
            return True
        time.sleep(0.01)
    return False


STRANGERS = {
    "silent": connect,
    "reset": reset,
    "http": lambda address: connect(address, b"GET / HTTP/1.1\r\n\r\n"),
    "huge": lambda address: connect(address, struct.pack("!iQ", -1, 2**62)),
    "negative length": lambda address: connect(address, struct.pack("!i", -7)),
}


def test_hosts_join_after_strangers_of_every_kind():
    hosts = []
    with socket.create_server(("127.0.0.1", 0)) as listening, ExitStack() as strangers:
        address = listening.getsockname()

        def join():
            for connect_stranger in STRANGERS.values():
                strangers.enter_context(connect_stranger(address))
            offer_wrong_key(address)
            hosts.append(Client(address, authkey=KEY))

        for _ in range(2):  # a connection serves as usual after each of two arrivals
            start = time.monotonic()
            arrival = threading.Thread(target=join)
            arrival.start()
            with accept_host(listening, KEY, 30) as connection:
                arrival.join()
                with hosts.pop() as host:
                    host.send(["ranks"] * 10**5)
                    assert connection.recv() == ["ranks"] * 10**5
                    time.sleep(0.2)  # a read waits; it has no time-out of its own
                    threading.Timer(0.3, host.send, ["late"]).start()
                    assert connection.recv() == "late"
            assert time.monotonic() - start < 10
    assert threads_end()


def test_ranks_of_ray_start_though_strangers_call(monkeypatch):
    ray = FakeRay()
    strategies = SimpleNamespace(
        NodeAffinitySchedulingStrategy=lambda *_, **options: None
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.util", ray.util)
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategies)
    monkeypatch.setattr(processes, "check_installed", lambda *_: None)
    with ExitStack() as strangers, processes.Processes(2, hosts=[HOST, HOST]) as ranks:
        assert ranks.call(lambda: os.environ["RANK"]) == ["0", "1"]
        assert len(ray.strangers) == 2 * len(STRANGERS)
        for stranger in ray.strangers:
            strangers.enter_context(stranger)
    for thread in ray.threads:
        thread.join(30)
        assert not thread.is_alive()


@pytest.mark.parametrize("kind", [*STRANGERS, "wrong key"])
def test_strangers_alone_end_the_wait_in_time(kind):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = listening.getsockname()
        strangers = []
        call = STRANGERS.get(kind, offer_wrong_key)
        arrival = threading.Thread(target=lambda: strangers.append(call(address)))
        start = time.monotonic()
        arrival.start()
        with pytest.raises(TimeoutError):
            accept_host(listening, KEY, 0.5)
        assert time.monotonic() - start < 2
        arrival.join()
        assert threads_end()
        if strangers[0] is not None:
            strangers[0].close()
