"""How the processes of one attempt find each other: a key-value store on host 0, then the process group.

Pods of a gang start minutes apart, so each step of the meeting is a short wait in a loop that ends at one
deadline and lets a stop request through, and a gang that never forms is named host by host.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from tpu_trainer.backends.group import Group
from tpu_trainer.environment import WorkerEnvironment
from tpu_trainer.errors import PeerLostError, PreemptedError
from tpu_trainer.stop import StopFlag

RENDEZVOUS_SECONDS = 300.0
COLLECTIVE_SECONDS = 2400.0
"""A peer that closed its connection is noticed at once; this is for one whose machine fell silent."""

_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Seat:
    """A process's place in the meeting: `number` of `count`, host by host, `per_host` to each.

    `serves`: this process keeps the store. Otherwise it is kept by process 0, or by the supervisor of host 0's
    processes.
    """

    number: int
    count: int
    per_host: int
    serves: bool

    @staticmethod
    def of_host(environment: WorkerEnvironment) -> Seat:
        """The place of a host that is one process."""
        return Seat(environment.host_index, environment.num_hosts, 1, serves=environment.host_index == 0)

    @staticmethod
    def of_local(environment: WorkerEnvironment, local_rank: int, per_host: int) -> Seat:
        """The place of one of a host's processes, whose supervisor keeps the store."""
        number = environment.host_index * per_host + local_rank
        return Seat(number, environment.num_hosts * per_host, per_host, serves=False)


def join(
    environment: WorkerEnvironment,
    gang: str,
    stop: StopFlag,
    seconds: float = RENDEZVOUS_SECONDS,
    seat: Seat | None = None,
    device: str = "cpu",
    collectives: str = "gloo",
) -> Group:
    """Meets the other processes and forms the process group of `collectives` on `device`; left out, gloo between hosts.

    A process alone has nobody to meet.

    Raises:
        PeerLostError: not all came within `seconds`, or one left again.
        PreemptedError: told to stop before all had come.
    """
    seat = seat or Seat.of_host(environment)
    store = meet(environment, gang, stop, seat, seconds)
    if store is None:
        return Group(0, 1, device=device)
    limit = timedelta(seconds=COLLECTIVE_SECONDS)
    try:
        dist.init_process_group(
            collectives, store=PrefixStore("group", store), rank=seat.number, world_size=seat.count, timeout=limit
        )
    except RuntimeError as error:
        raise _failed(environment, error) from error
    return Group(seat.number, seat.count, PrefixStore("control", store), device)


def meet(
    environment: WorkerEnvironment, gang: str, stop: StopFlag, seat: Seat, seconds: float = RENDEZVOUS_SECONDS
) -> Store | None:
    """Meets the other processes at MASTER_ADDR:MASTER_PORT; None for a process alone.

    `gang` names job and attempt, so that a late host of an earlier attempt cannot take a place in this one.

    Raises:
        PeerLostError: not all came within `seconds`.
        PreemptedError: told to stop before all had come.
    """
    if seat.count == 1:
        return None
    deadline = time.monotonic() + seconds
    _stay_on_loopback(environment.master_addr)
    try:
        store = PrefixStore(gang, _open_store(environment, seat.serves, deadline, stop))
        _gather(store, seat, deadline, stop)
    except RuntimeError as error:
        raise _failed(environment, error) from error
    return store


def serve(environment: WorkerEnvironment) -> TCPStore:
    """The store alone, for processes of which none keeps it. It ends with its last reference.

    Raises:
        PeerLostError: the address is not this host's, or taken.
    """
    try:
        return _store(environment, is_master=True, seconds=RENDEZVOUS_SECONDS)
    except RuntimeError as error:
        raise _failed(environment, error) from error


def _open_store(environment: WorkerEnvironment, serves: bool, deadline: float, stop: StopFlag) -> TCPStore:
    if not serves:
        _wait_for_master(environment, deadline, stop)
    return _store(environment, serves, max(1.0, deadline - time.monotonic()))


def _store(environment: WorkerEnvironment, is_master: bool, seconds: float) -> TCPStore:
    return TCPStore(
        environment.master_addr,
        environment.master_port,
        is_master=is_master,
        wait_for_workers=False,
        timeout=timedelta(seconds=seconds),
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


def _gather(store: Store, seat: Seat, deadline: float, stop: StopFlag) -> None:
    """Returns once all processes have come; the count is one small value, whatever the size of the gang."""
    store.set(f"seat/{seat.number}", "taken")
    present = store.add("present", 1)
    while present < seat.count:
        if stop():
            # Taking oneself off the count fails if the last process has come meanwhile: then the gang has
            # formed, the others rely on it, and the stop travels with the first step instead.
            if store.add("present", -1) + 1 < seat.count:
                raise PreemptedError("stopped before all hosts had come")
            store.add("present", 1)
            return
        if time.monotonic() > deadline:
            raise PeerLostError(f"rendezvous: {_absent(store, seat)}")
        time.sleep(_POLL_SECONDS)
        present = store.add("present", 0)


def _absent(store: Store, seat: Seat) -> str:
    empty = [number for number in range(seat.count) if not store.check([f"seat/{number}"])]
    hosts = sorted({number // seat.per_host for number in empty})
    whole = "" if seat.per_host == 1 else " with all of their processes"
    named = ", ".join(map(str, hosts))
    return f"{len(hosts)} of {seat.count // seat.per_host} hosts did not come{whole}: host {named}"


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


def _failed(environment: WorkerEnvironment, error: RuntimeError) -> PeerLostError:
    reason = str(error).partition("\n")[0]
    return PeerLostError(f"rendezvous at {_place(environment)} failed: {reason}")
