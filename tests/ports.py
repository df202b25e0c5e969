"""Ports for what tests start."""

import socket


def free_port() -> int:
    """One of this machine that nothing listens on."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]
