"""How the processes of one attempt find each other: a key-value store on host 0, then the process group.

Pods of a gang start minutes apart. So each step of the rendezvous is a short wait in a loop with one deadline for all,
which a stop request ends early, and a gang that never forms is reported host by host. `gate` keeps strangers out: only
the gate listens on the host's address.
"""

from __future__ import annotations

import ipaddress
import os
import resource
import socket
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from tpu_trainer.contract.environment import WorkerEnvironment
from tpu_trainer.contract.errors import PeerLostError, PreemptedError
from tpu_trainer.contract.stop import StopFlag
from tpu_trainer.gang.backends.gate import MOST_WAITING, Gate, Tunnel, key_of
from tpu_trainer.gang.backends.group import ProcessGroup

RENDEZVOUS_SECONDS = 300.0
COLLECTIVE_SECONDS = 2400.0
"""Limits the wait for a peer whose machine fell silent; a closed connection is noticed at once."""

_POLL_SECONDS = 0.2
_ARRIVAL_SECONDS = 0.05
_MOST_POLLS = 2000
"""How often per second all processes together ask the store whether all have arrived."""

_LOOPBACK = "127.0.0.1"
_BACKLOG = 4096
_OTHER_FILES = 1024


@dataclass(frozen=True)
class Seat:
    """A process's place in the rendezvous: `number` of `count`, host by host, `per_host` on each.

    `serves`: this process runs the store. Process 0 does, or else the supervisor of host 0's processes.
    """

    number: int
    count: int
    per_host: int
    serves: bool

    @staticmethod
    def of_host(environment: WorkerEnvironment) -> Seat:
        """Returns the seat of a host that is one process."""
        return Seat(environment.host_index, environment.num_hosts, 1, serves=environment.host_index == 0)

    @staticmethod
    def of_local(environment: WorkerEnvironment, local_rank: int, per_host: int) -> Seat:
        """Returns the seat of one of a host's processes, whose supervisor runs the store."""
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
    meeting: Future[Store | None] | None = None,
) -> ProcessGroup:
    """Meets the other processes and forms their process group; a process alone gets a group of one. `meeting`: the
    meeting that has begun.

    Raises:
        PeerLostError: not all arrived within `seconds`, or one left again.
        PreemptedError: asked to stop before all had arrived.
    """
    seat = seat or Seat.of_host(environment)
    store = meet(environment, gang, stop, seat, seconds) if meeting is None else meeting.result()
    if store is None:
        return ProcessGroup(0, 1, device=device)
    limit = timedelta(seconds=COLLECTIVE_SECONDS)
    try:
        dist.init_process_group(
            collectives, store=PrefixStore("group", store), rank=seat.number, world_size=seat.count, timeout=limit
        )
    except RuntimeError as error:
        raise _failed(environment, error) from error
    return ProcessGroup(seat.number, seat.count, PrefixStore("control", store), device)


def begin_meeting(environment: WorkerEnvironment, gang: str, stop: StopFlag) -> Future[Store | None]:
    """Meets the other hosts in a thread, while this one imports what the meeting does not need. The result is that of
    `meet`. The thread does not keep the process alive."""
    meeting: Future[Store | None] = Future()

    def run() -> None:
        try:
            meeting.set_result(meet(environment, gang, stop, Seat.of_host(environment)))
        except Exception as error:
            meeting.set_exception(error)

    threading.Thread(target=run, name="meeting", daemon=True).start()
    return meeting


def meet(
    environment: WorkerEnvironment, gang: str, stop: StopFlag, seat: Seat, seconds: float = RENDEZVOUS_SECONDS
) -> Store | None:
    """Meets the other processes at MASTER_ADDR:MASTER_PORT; returns their store, None for a process alone.

    `gang` names job and attempt, so a late host of an earlier attempt cannot take a seat in this one.

    Raises:
        PeerLostError: not all arrived within `seconds`.
        PreemptedError: asked to stop before all had arrived.
    """
    if seat.count == 1:
        return None
    deadline = time.monotonic() + seconds
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback and _on_loopback(environment):
        # gloo would otherwise listen on the address of the machine's name, which the network sees, and which is often
        # not reachable on a laptop between two networks.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
    try:
        if seat.serves:
            open_store = serve(environment, gang, seat.count, seconds).store
        else:
            open_store = _reach(environment, gang, deadline, stop)
        store = PrefixStore(gang, open_store)
        _await_all(store, seat, deadline, stop)
    except (RuntimeError, OSError) as error:
        raise _failed(environment, error) from error
    return store


@dataclass(frozen=True)
class ServedStore:
    """A store that serves the gang; it and its gate end with the last reference. `port`: the gate's."""

    store: TCPStore
    port: int


def serve(environment: WorkerEnvironment, gang: str, count: int, seconds: float = RENDEZVOUS_SECONDS) -> ServedStore:
    """Opens the store for `count` processes, behind its gate at MASTER_PORT.

    Raises:
        PeerLostError: the port is taken.
    """
    try:
        door = _listen(environment)
        inside = socket.create_server((_LOOPBACK, 0), backlog=_BACKLOG)
        _allow_connections(count)
        port = inside.getsockname()[1]
        store = TCPStore(
            _LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=seconds),
            master_listen_fd=inside.detach(),
        )
        return ServedStore(store, Gate(door, key_of(gang), port).port)
    except (RuntimeError, OSError) as error:
        raise _failed(environment, error) from error


def _reach(environment: WorkerEnvironment, gang: str, deadline: float, stop: StopFlag) -> TCPStore:
    """Connects to the store on host 0 through its gate. Before the gate is open, the host's name may not resolve, or
    may still belong to another pod."""
    tunnel = Tunnel((environment.master_addr, environment.master_port), key_of(gang))
    try:
        while True:
            try:
                tunnel.probe(seconds=2.0)
                break
            except OSError as error:
                reason = error.strerror or str(error) or "it sends nothing"
            if stop():
                raise PreemptedError("stopped before host 0 could be reached")
            if time.monotonic() > deadline:
                raise PeerLostError(f"rendezvous: host 0 did not answer at {_place(environment)}: {reason}")
            time.sleep(_POLL_SECONDS)
    except BaseException:
        tunnel.close()
        raise
    limit = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    return TCPStore(_LOOPBACK, tunnel.port, is_master=False, wait_for_workers=False, timeout=limit)


def _await_all(store: Store, seat: Seat, deadline: float, stop: StopFlag) -> None:
    """Returns once all processes have arrived. They count up one small value, whatever the size of the gang."""
    store.set(f"seat/{seat.number}", "taken")
    present = store.add("present", 1)
    pause = max(_ARRIVAL_SECONDS, seat.count / _MOST_POLLS)
    while present < seat.count:
        if stop():
            # If the last process has arrived meanwhile, the gang has formed and the others rely on it: then this
            # process counts itself again, and the stop travels with the first step instead.
            if store.add("present", -1) + 1 < seat.count:
                raise PreemptedError("stopped before all hosts had arrived")
            store.add("present", 1)
            return
        if time.monotonic() > deadline:
            raise _not_arrived(store, seat)
        time.sleep(pause)
        present = store.add("present", 0)


def _not_arrived(store: Store, seat: Seat) -> PeerLostError:
    empty = [number for number in range(seat.count) if not store.check([f"seat/{number}"])]
    hosts = sorted({number // seat.per_host for number in empty})
    processes = "" if seat.per_host == 1 else " with all of their processes"
    numbers = ", ".join(map(str, hosts))
    text = f"{len(hosts)} of {seat.count // seat.per_host} hosts did not arrive{processes}: host {numbers}"
    return PeerLostError(f"rendezvous: {text}", absent=hosts)


def _listen(environment: WorkerEnvironment) -> socket.socket:
    """Listens on all addresses, since a pod's own name may not resolve before it is ready; only on loopback if the
    hosts are processes of one machine."""
    port, address = environment.master_port, environment.master_addr
    if _on_loopback(environment):
        return socket.create_server((_LOOPBACK if address == "localhost" else address, port), backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    return socket.create_server(("", port), backlog=_BACKLOG)


def _allow_connections(count: int) -> None:
    """Raises the limit of open files: each process takes two of the gate and one of the store."""
    wanted = 3 * count + MOST_WAITING + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else hard, hard))


def _on_loopback(environment: WorkerEnvironment) -> bool:
    try:
        return environment.master_addr == "localhost" or ipaddress.ip_address(environment.master_addr).is_loopback
    except ValueError:
        return False


def _place(environment: WorkerEnvironment) -> str:
    return f"{environment.master_addr}:{environment.master_port}"


def _failed(environment: WorkerEnvironment, error: RuntimeError | OSError) -> PeerLostError:
    reason = str(error).partition("\n")[0]
    return PeerLostError(f"rendezvous at {_place(environment)} failed: {reason}")
