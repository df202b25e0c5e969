"""A ring of ranks that pass a token, one of which fails: for test_watch.

    ring.py FAULT TIMEOUT RANK FOLDER

Every rank says what its process is, and RANK when it fails. They begin to meet when as many files
as ranks are in FOLDER, so that the time-out may be shorter than torch takes to be imported.
"""

import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from toolkit.runtime.process_group import join as world
from toolkit.runtime.process_group import shared_status
from toolkit.schedule import Action, Instruction

STEP = 300
fault, timeout = sys.argv[1], float(sys.argv[2])
faulty, folder = int(sys.argv[3]), Path(sys.argv[4])


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())  # at once: other ranks write to the same file


def disconnect() -> None:
    """Shut the connections to other ranks down, all but those to the store."""
    ours = int(os.environ["MASTER_PORT"])
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            twin = socket.socket(fileno=os.dup(fd))
        except OSError:
            continue
        try:
            if ours not in (twin.getpeername()[1], twin.getsockname()[1]):
                twin.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # not one that is connected
        finally:
            twin.close()


def fail() -> None:
    say(f"fault {time.time()}")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "launcher":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "loop":
        while True:
            pass
    elif fault == "disconnect":
        disconnect()


say(f"pid {os.getpid()}")
(folder / os.environ["RANK"]).touch()
deadline = time.monotonic() + 120
while (
    len(list(folder.iterdir())) < int(os.environ["WORLD_SIZE"])
    and time.monotonic() < deadline
):
    time.sleep(0.02)
if os.environ.get("MACHINES"):  # as if each rank had its own
    shared_status.machine = lambda: os.environ["RANK"]
here = world.join(device="cpu", timeout=timeout)
here.watch.on_failure = lambda message: say(f"reason {here.rank} {message}")
token, left, right = (
    torch.zeros(1),
    (here.rank - 1) % here.size,
    (here.rank + 1) % here.size,
)
for step in range(STEP + 3):
    backward = Instruction(0, Action.BACKWARD, here.rank, 0, step)
    here.watch.at(backward, step)
    if here.rank == faulty and step == STEP:
        fail()
    for is_send in (True, False) if here.rank == 0 else (False, True):
        action, peer = (Action.SEND, right) if is_send else (Action.RECV, left)
        i = Instruction(0, action, here.rank, 0, step, peers=(peer,))
        with here.watch.waiting(i, (peer,)):
            dist.send(token, peer) if is_send else dist.recv(token, peer)
