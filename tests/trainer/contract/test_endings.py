"""How a gang ends: which exit code and which last words, on which host."""

from __future__ import annotations

import signal

import pytest

from tests.trainer.gang_processes import Launcher, run_spec
from tpu_contract.protocol import ExitCode

LONG = 10_000_000
"""More steps than any test waits for."""


def test_success_of_the_real_command_writes_the_final_numbers(launcher: Launcher) -> None:
    gang = launcher.start(run_spec(), real=True)
    assert gang.wait() == [ExitCode.Succeeded], gang.output()
    message = gang.hosts[0].message()
    assert (message["outcome"], message["step"]) == ("Succeeded", 24)
    assert message["metrics"]["loss"] == pytest.approx(gang.losses()[-1])
    assert message["examplesPerSecond"] > 0


def test_an_exception_in_the_loss_ends_its_host_with_1_and_its_peers_with_69(launcher: Launcher) -> None:
    gang = launcher.start(run_spec(hosts=2, entrypoint="tests.trainer.tasks:one_host_fails"))
    assert gang.wait() == [ExitCode.PeerLost, ExitCode.UserError], gang.output()
    peer, failed = (host.message() for host in gang.hosts)
    assert failed["message"].splitlines()[-1].startswith("ValueError: the labels")
    # Steps that are done, whether or not their losses were read.
    assert failed["step"] == 2
    assert "tests/trainer/tasks.py" in gang.hosts[1].output
    assert peer["outcome"] == "PeerLost"
    assert "a peer went away" in peer["message"]


def test_a_bad_run_spec_ends_with_78_and_one_line(launcher: Launcher) -> None:
    gang = launcher.start(run_spec(trainSteps="many"))
    assert gang.wait() == [ExitCode.BadSpec]
    (line,) = gang.hosts[0].output.splitlines()
    assert line.endswith("of at least 1, got 'many'")
    assert gang.hosts[0].message() == {"outcome": "BadSpec", "message": line.removeprefix("BadSpec: ")}


@pytest.mark.parametrize(("backend", "hosts"), [("torch", 2), ("xla", 2)])
def test_sigterm_to_one_host_stops_all_hosts_after_the_same_step(launcher: Launcher, backend: str, hosts: int) -> None:
    gang = launcher.start(run_spec(backend=backend, hosts=hosts, replicas=hosts, **batch_of(hosts), trainSteps=LONG))
    gang.hosts[0].wait_for("step 10/")
    gang.hosts[1].process.send_signal(signal.SIGTERM)
    assert gang.wait() == [ExitCode.Preempted] * hosts, gang.output()
    messages = [host.message() for host in gang.hosts]
    assert {message["outcome"] for message in messages} == {"Preempted"}
    (step,) = {message["step"] for message in messages}
    assert step == len(gang.losses())


@pytest.mark.parametrize(("victim", "hosts"), [(0, 2), (1, 3)])
def test_a_killed_host_ends_its_peers_with_69(launcher: Launcher, victim: int, hosts: int) -> None:
    gang = launcher.start(run_spec(hosts=hosts, replicas=hosts, **batch_of(hosts), trainSteps=LONG))
    gang.hosts[0].wait_for("step 10/")
    gang.hosts[victim].process.kill()
    codes = gang.wait()
    survivors = [host for index, host in enumerate(gang.hosts) if index != victim]
    assert codes.pop(victim) == -signal.SIGKILL
    assert codes == [ExitCode.PeerLost] * (hosts - 1), gang.output()
    assert {host.message()["outcome"] for host in survivors} == {"PeerLost"}


def batch_of(replicas: int) -> dict[str, dict[str, int]]:
    """A batch that any number of replicas divides."""
    return {"batch": {"global": 4 * replicas, "perReplica": 4}}


@pytest.mark.parametrize("hosts", [1, 2])
def test_no_gradient_is_alive_when_a_step_is_sent_to_the_device(launcher: Launcher, hosts: int) -> None:
    gang = launcher.start(run_spec(hosts=hosts, replicas=2), module="tests.trainer.watching_gradients")
    assert set(gang.wait()) == {ExitCode.Succeeded}, gang.output()
