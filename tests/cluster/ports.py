"""Free ports for the servers of a test cluster."""

import os
import random
import socket
from collections import deque
from pathlib import Path

LOOPBACK = "127.0.0.1"
LOWEST = 10_000
# Whoever has asked for these may not listen yet.
_RECENT: deque[int] = deque(maxlen=1000)
_LANES = 2


def free_port() -> int:
    """A TCP port that nothing listens on at 127.0.0.1, below the range that outgoing connections use.

    A port that the kernel chooses (bind to 0) lies inside that range (net.ipv4.ip_local_port_range). While the
    API server restarts, a client that keeps connecting to it can then be given the server's port as its own,
    connect to itself, and keep the server from binding.

    Tests that run side by side, as workers of pytest-xdist, draw from different ports.
    """
    lane = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _LANES
    first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(LOWEST + lane, first_outgoing, _LANES)
        if port in _RECENT:
            continue
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
            _RECENT.append(port)
            return port
