"""Writes what has come from each rank so far, every few milliseconds: python -m benchmarks.sampler

Run where every port of the hub is seen: what a port has received is what its rank has sent.
Arguments: the file to write, seconds from sample to sample, the ports. A record is a moment of
time.monotonic() and a number of bytes a port.
"""

import contextlib
import os
import re
import struct
import sys
import time

from benchmarks.network import end_with_parent

_SIZE = 1 << 16


def record(n_ports: int) -> struct.Struct:
    return struct.Struct(f"<d{n_ports}Q")


def received(table: bytes, ports: list[str]) -> list[int]:
    """The bytes that each port has received, in /proc/net/dev."""
    found = {name.decode(): int(n) for name, n in re.findall(rb"(\S+):\s*(\d+)", table)}
    return [found[port] for port in ports]


def main() -> None:
    end_with_parent()
    with contextlib.suppress(OSError):
        os.nice(-10)  # it takes little, but has to take it in time
    path, interval, *ports = sys.argv[1:]
    layout = record(len(ports))
    table = os.open("/proc/self/net/dev", os.O_RDONLY)
    output = os.open(path, os.O_WRONLY | os.O_APPEND)
    while True:
        text = os.pread(table, _SIZE, 0)
        os.write(output, layout.pack(time.monotonic(), *received(text, ports)))
        time.sleep(float(interval))


if __name__ == "__main__":
    main()
