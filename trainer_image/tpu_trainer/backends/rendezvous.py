"""How the hosts of one attempt find each other: a key-value store on host 0, then the process group.

Pods of a gang start minutes apart, so each step of the meeting is a short wait in a loop that ends at one
deadline and lets a stop request through, and a gang that never forms is named host by host.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from tpu_trainer.backends.group import Group
from tpu_trainer.environment import WorkerEnvironment
from tpu_trainer.errors import PeerLostError, PreemptedError
from tpu_trainer.stop import StopFlag

RENDEZVOUS_SECONDS = 300.0
COLLECTIVE_SECONDS = 600.0
"""A peer that closed its connection is noticed at once; this is for one whose machine fell silent."""

_POLL_SECONDS = 0.2


def join(environment: WorkerEnvironment, gang: str, stop: StopFlag, seconds: float = RENDEZVOUS_SECONDS) -> Group:
    """Meets the other hosts at MASTER_ADDR:MASTER_PORT; a single host has nobody to meet.

    `gang` names job and attempt, so that a late host of an earlier attempt cannot take a place in this one.

    Raises:
        PeerLostError: not all hosts came within `seconds`, or one left again.
        PreemptedError: told to stop before all hosts had come.
    """
    rank, size = environment.host_index, environment.num_hosts
    if size == 1:
        return Group(0, 1)
    deadline = time.monotonic() + seconds
    _stay_on_loopback(environment.master_addr)
    try:
        store = PrefixStore(gang, _open_store(environment, deadline, stop))
        _gather(store, rank, size, deadline, stop)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=COLLECTIVE_SECONDS)
        )
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise PeerLostError(f"rendezvous at {_place(environment)} failed: {reason}") from error
    return Group(rank, size)


def _open_store(environment: WorkerEnvironment, deadline: float, stop: StopFlag) -> TCPStore:
    is_master = environment.host_index == 0
    if not is_master:
        _wait_for_master(environment, deadline, stop)
    return TCPStore(
        environment.master_addr,
        environment.master_port,
        is_master=is_master,
        wait_for_workers=False,
        timeout=timedelta(seconds=max(1.0, deadline - time.monotonic())),
    )


def _wait_for_master(environment: WorkerEnvironment, deadline: float, stop: StopFlag) -> None:
    """Until something listens there. TCPStore would print a native stack trace per failed attempt."""
    while True:
        try:
            socket.create_connection((environment.master_addr, environment.master_port), timeout=2.0).close()
            return
        except OSError as error:
            reason = error.strerror or str(error)
        if stop():
            raise PreemptedError("stopped before host 0 could be reached")
        if time.monotonic() > deadline:
            raise PeerLostError(f"rendezvous: host 0 did not answer at {_place(environment)}: {reason}")
        time.sleep(_POLL_SECONDS)


def _gather(store: Store, rank: int, size: int, deadline: float, stop: StopFlag) -> None:
    """Returns once all hosts have come; the count is one small value, whatever the size of the gang."""
    store.set(f"host/{rank}", "here")
    present = store.add("present", 1)
    while present < size:
        if stop():
            # Taking oneself off the count fails if the last host has come meanwhile: then the gang has
            # formed, the others rely on it, and the stop travels with the first step instead.
            if store.add("present", -1) + 1 < size:
                raise PreemptedError("stopped before all hosts had come")
            store.add("present", 1)
            return
        if time.monotonic() > deadline:
            absent = [str(host) for host in range(size) if not store.check([f"host/{host}"])]
            raise PeerLostError(f"rendezvous: {len(absent)} of {size} hosts did not come: host {', '.join(absent)}")
        time.sleep(_POLL_SECONDS)
        present = store.add("present", 0)


def _stay_on_loopback(master_addr: str) -> None:
    """Hosts that are processes of one machine meet on its loopback interface.

    gloo would otherwise listen on whatever address the machine's own name resolves to: visible to the
    network, and on a laptop between two networks often not reachable at all.
    """
    if master_addr != "localhost" and not _is_loopback(master_addr):
        return
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if names:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _place(environment: WorkerEnvironment) -> str:
    return f"{environment.master_addr}:{environment.master_port}"
