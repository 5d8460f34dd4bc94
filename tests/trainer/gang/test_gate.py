"""The gate in front of the gang's store: who is let through, and what strangers cost."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion
from torch.distributed import TCPStore

from tests.cluster.ports import free_port
from tests.cluster.processes import wait_until
from tpu_trainer.contract.environment import WorkerEnvironment
from tpu_trainer.gang.backends import gate
from tpu_trainer.gang.backends.gate import StrangerError, Tunnel, key_of
from tpu_trainer.gang.backends.rendezvous import Seat, ServedStore, meet, serve

GANG = "3f0c9d4e-uid/1"
DEADLINE = 120.0


def environment(index: int = 0, of: int = 2, port: int = 0) -> WorkerEnvironment:
    return WorkerEnvironment(Path("run.json"), index, of, "127.0.0.1", port)


@pytest.fixture
def kept() -> ServedStore:
    return serve(environment(), GANG, count=2)


@pytest.fixture
def tunnels(kept: ServedStore) -> Iterator[Callable[[str], Tunnel]]:
    """Makes tunnels that know the key of a gang."""
    made: list[Tunnel] = []

    def make(gang: str) -> Tunnel:
        made.append(Tunnel(("127.0.0.1", kept.port), key_of(gang)))
        return made[-1]

    yield make
    for tunnel in made:
        tunnel.close()


def client(tunnel: Tunnel) -> TCPStore:
    limit = timedelta(seconds=DEADLINE)
    return TCPStore("127.0.0.1", tunnel.port, is_master=False, wait_for_workers=False, timeout=limit)


def stranger(kept: ServedStore) -> socket.socket:
    return socket.create_connection(("127.0.0.1", kept.port), timeout=DEADLINE)


def is_cut_off(connection: socket.socket) -> bool:
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


def test_a_peer_with_the_key_uses_the_store_as_if_there_were_no_gate(
    kept: ServedStore, tunnels: Callable[[str], Tunnel]
) -> None:
    first, second = client(tunnels(GANG)), client(tunnels(GANG))
    large = b"\0\xff" * (1 << 20)
    first.set("a", large)
    assert second.get("a") == large == kept.store.get("a")
    assert [store.add("n", 1) for store in (first, second, kept.store)] == [1, 2, 3]


@pytest.mark.parametrize("gang", ["3f0c9d4e-uid/2", "another/1"], ids=["an earlier attempt", "another job"])
def test_a_peer_with_another_key_learns_that_it_reached_another_gang(
    gang: str, tunnels: Callable[[str], Tunnel], snapshot: SnapshotAssertion
) -> None:
    with pytest.raises(StrangerError) as caught:
        tunnels(gang).probe(DEADLINE)
    assert str(caught.value) == snapshot


def test_a_server_that_is_not_a_gate_is_not_trusted(snapshot: SnapshotAssertion) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as other:
        tunnel = Tunnel(server.getsockname(), key_of(GANG))
        probing = other.submit(tunnel.probe, DEADLINE)
        with server.accept()[0] as guest:
            guest.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
            with pytest.raises(StrangerError) as caught:
                probing.result(DEADLINE)
            assert str(caught.value) == snapshot
        tunnel.close()


def test_a_stranger_is_cut_off_and_nothing_it_sends_is_kept(kept: ServedStore) -> None:
    sent = 0
    for _ in range(60):
        with stranger(kept) as connection:
            try:
                while sent < 60 * 7 << 20:
                    sent += connection.send(bytes(1 << 16))
            except ConnectionError:
                continue
            pytest.fail("nobody hung up")
    assert kept.store.num_keys() <= 1


def test_a_store_client_without_the_key_is_cut_off(kept: ServedStore) -> None:
    with stranger(kept) as connection:
        # What TCPStore's client begins with.
        connection.sendall(bytes.fromhex("3c85f7ce") + bytes(60))
        assert is_cut_off(connection)


def test_silent_strangers_do_not_keep_the_gang_out(
    kept: ServedStore, tunnels: Callable[[str], Tunnel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "MOST_WAITING", 8)
    strangers = [stranger(kept) for _ in range(40)]
    tunnels(GANG).probe(DEADLINE)
    assert all(is_cut_off(connection) for connection in strangers[:32])
    for connection in strangers:
        connection.close()


def test_a_slow_stranger_is_cut_off(kept: ServedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "PROOF_SECONDS", 0.2)
    with stranger(kept) as connection:
        connection.sendall(b"x")
        assert is_cut_off(connection)


def test_the_gate_ends_with_its_store() -> None:
    kept = serve(environment(), GANG, count=2)
    port = kept.port
    del kept

    def is_closed() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) != 0

    wait_until(is_closed, timeout=DEADLINE, what="nobody listens")


def test_hosts_meet_through_the_gate_in_any_order() -> None:
    port, count = free_port(), 4
    with ThreadPoolExecutor(count) as hosts:
        join = partial(meet, gang=GANG, stop=lambda: False, seconds=DEADLINE)
        places = [environment(index, count, port) for index in reversed(range(count))]
        meeting = [hosts.submit(join, place, seat=Seat.of_host(place)) for place in places]
        stores = [joined.result(DEADLINE) for joined in meeting]
    assert sorted(store.add("n", 1) for store in stores) == [1, 2, 3, 4]
