"""Gangs that do not form: who is missing, and that a request to stop is heard."""

from __future__ import annotations

from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.cluster.ports import free_port
from tpu_trainer.contract.environment import WorkerEnvironment
from tpu_trainer.contract.errors import PeerLostError, PreemptedError
from tpu_trainer.gang.backends.rendezvous import begin_meeting, join


def host(index: int, of: int) -> WorkerEnvironment:
    return WorkerEnvironment(Path("run.json"), index, of, "127.0.0.1", free_port())


def test_host_0_names_the_missing_hosts(snapshot: SnapshotAssertion) -> None:
    with pytest.raises(PeerLostError) as caught:
        join(host(0, of=3), "uid/1", stop=lambda: False, seconds=0.3)
    assert "2 of 3" in str(caught.value)
    assert "host 1" in str(caught.value)
    assert str(caught.value) == snapshot


def test_another_host_says_where_it_looked_for_host_0() -> None:
    waiting = host(1, of=2)
    with pytest.raises(PeerLostError, match=f"host 0 did not answer at 127.0.0.1:{waiting.master_port}"):
        join(waiting, "uid/1", stop=lambda: False, seconds=0.3)


@pytest.mark.parametrize("index", [0, 1])
def test_a_host_told_to_stop_while_it_waits_for_the_others_leaves(index: int) -> None:
    with pytest.raises(PreemptedError):
        join(host(index, of=2), "uid/1", stop=lambda: True, seconds=60.0)


@pytest.mark.parametrize("index", [0, 1])
def test_a_meeting_in_the_background_fails_as_one_in_the_foreground(index: int) -> None:
    waiting = host(index, of=2)
    meeting = begin_meeting(waiting, "uid/1", stop=lambda: True)
    with pytest.raises(PreemptedError):
        join(waiting, "uid/1", stop=lambda: True, meeting=meeting)


def test_a_single_host_needs_no_meeting() -> None:
    assert join(host(0, of=1), "uid/1", stop=lambda: False).size == 1
