"""Free ports for the servers of a test cluster."""

import fcntl
import os
import random
import socket
from collections import deque
from functools import cache
from pathlib import Path

from tests.cluster import directories

LOOPBACK = "127.0.0.1"
LOWEST = 10_000
# Whoever has asked for these may not listen yet.
_GIVEN: deque[int] = deque()
_MOST_GIVEN = 1000


def free_port() -> int:
    """A TCP port that nothing listens on at 127.0.0.1, below the range that outgoing connections use.

    A port that the kernel chooses (bind to 0) lies inside that range (net.ipv4.ip_local_port_range). While the
    API server restarts, a client that keeps connecting to it can then be given the server's port as its own,
    connect to itself, and keep the server from binding.

    No other process gets it until this one ends or has asked for a thousand more.
    """
    first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(LOWEST, first_outgoing)
        if port not in _GIVEN and _take(port):
            if _nothing_listens(port):
                _GIVEN.append(port)
                if len(_GIVEN) > _MOST_GIVEN:
                    _give_back(_GIVEN.popleft())
                return port
            _give_back(port)


@cache
def _taken() -> int:
    """A file of which each byte stands for a port. This process must not open it twice: closing either would give all
    of its ports back (fcntl_locking(2))."""
    path = directories.cache_root() / "ports"
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)


def _take(port: int) -> bool:
    """Locks the port's byte, unless another process has it. The kernel unlocks it when this process ends."""
    try:
        fcntl.lockf(_taken(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except OSError:
        return False
    return True


def _give_back(port: int) -> None:
    fcntl.lockf(_taken(), fcntl.LOCK_UN, 1, port)


def _nothing_listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True
