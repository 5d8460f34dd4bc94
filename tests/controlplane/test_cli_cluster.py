"""`tpujob status`, `watch` and `logs` against a real API server, with the operator at work.

Logs need a kubelet: tests/e2e/test_cli.py.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
import yaml

from tests.cluster.control_plane import ControlPlane
from tests.cluster.kwok import add_cpu_nodes, remove_nodes
from tests.cluster.processes import wait_until
from tests.controlplane.jobs import Namespace, digits
from tests.controlplane.operator_process import OperatorProcess

PROGRAM = "from tpu_training_operator.cli.main import main; main()"
# The rights that `tpujob` documents.
RIGHTS = [
    {"apiGroups": ["tpu-operator.dev"], "resources": ["tputrainingjobs"], "verbs": ["get", "list", "watch"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]},
    {"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]},
]


@pytest.fixture(scope="module")
def nodes(control_plane: ControlPlane) -> Iterator[None]:
    pool = add_cpu_nodes(control_plane, 4)
    yield
    remove_nodes(control_plane, pool)


@pytest.fixture
def space(control_plane: ControlPlane, job_definition: None, nodes: None, namespace: str) -> Namespace:
    return Namespace(control_plane, namespace)


@pytest.fixture
def operator(control_plane: ControlPlane, space: Namespace) -> Iterator[OperatorProcess]:
    process = OperatorProcess(control_plane, space.name)
    process.start()
    yield process
    process.stop()


@pytest.fixture
def reader(control_plane: ControlPlane, space: Namespace) -> Path:
    """The kubeconfig of a user who has exactly the rights that `tpujob` documents."""
    meta = {"name": "reader", "namespace": space.name}
    rbac = "rbac.authorization.k8s.io"
    subject = {"kind": "ServiceAccount", **meta}
    objects = [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta},
        {"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": meta, "rules": RIGHTS},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "RoleBinding",
            "metadata": meta,
            "roleRef": {"apiGroup": rbac, "kind": "Role", "name": "reader"},
            "subjects": [subject],
        },
    ]
    space.kubectl("apply", "-f", "-", input=yaml.safe_dump_all(objects))
    return control_plane.service_account_kubeconfig(space.name, "reader")


def command(space: Namespace, kubeconfig: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-c", PROGRAM, *arguments, "-n", space.name, "--kubeconfig", str(kubeconfig)]


def tpujob(space: Namespace, kubeconfig: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(space, kubeconfig, *arguments), capture_output=True, text=True, check=False)


class Watch:
    """A running `tpujob watch digits`, and what it has printed so far."""

    def __init__(self, space: Namespace, kubeconfig: Path) -> None:
        self.output = ""
        self._process = subprocess.Popen(
            command(space, kubeconfig, "watch", "digits"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            bufsize=1,
        )
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._thread.join()
        self._process.wait()

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.output, timeout=60, what=f"tpujob watch prints {text!r}")

    def exit_status(self) -> int:
        status = self._process.wait(timeout=60)
        self._thread.join()
        return status

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self.output += line


def finish_all(space: Namespace, attempt: int = 1) -> None:
    for host in range(4):
        space.finish(f"digits-{attempt}-0-{host}")


def test_a_job_is_watched_to_its_end_over_a_restart_of_the_gang(
    space: Namespace, operator: OperatorProcess, reader: Path
) -> None:
    space.apply(digits())
    space.wait(lambda: bool(space.status()), "an operator has seen the job")
    with Watch(space, reader) as watch:
        watch.wait_for("digits: Running, attempt 1, v5litepod-16, 4/4 hosts")
        space.finish("digits-1-0-2", exit_code=137)
        watch.wait_for("failure: Infrastructure (Killed, exit code 137): slice 0 host 2 on cpu-")
        watch.wait_for("digits: Running, attempt 2, v5litepod-16, 4/4 hosts")
        finish_all(space, attempt=2)
        assert watch.exit_status() == 0
    assert "digits: Succeeded, attempt 2, v5litepod-16" in watch.output


def test_a_watch_outlives_the_api_server(
    control_plane: ControlPlane, space: Namespace, operator: OperatorProcess, reader: Path
) -> None:
    space.apply(digits())
    space.wait_for_state("Running")
    with Watch(space, reader) as watch:
        watch.wait_for("digits: Running")
        control_plane.restart_apiserver()
        watch.wait_for("connection lost, trying again: ")
        finish_all(space)
        assert watch.exit_status() == 0
    assert "digits: Succeeded" in watch.output


def test_a_watch_ends_with_1_when_the_job_fails(space: Namespace, operator: OperatorProcess, reader: Path) -> None:
    space.apply(digits())
    space.wait_for_state("Running")
    with Watch(space, reader) as watch:
        watch.wait_for("digits: Running")
        space.finish("digits-1-0-3", exit_code=1, message={"outcome": "UserError", "message": "ValueError: no digit"})
        assert watch.exit_status() == 1
    assert "ValueError: no digit" in watch.output
    failed = tpujob(space, reader, "status", "digits").stdout
    assert "The job has failed for good." in failed
    assert "docs/failures.md#usererror" in failed


def test_a_watch_ends_with_1_when_the_job_is_deleted(space: Namespace, operator: OperatorProcess, reader: Path) -> None:
    space.apply(digits())
    space.wait_for_state("Running")
    with Watch(space, reader) as watch:
        watch.wait_for("digits: Running")
        space.kubectl("delete", "tpujob", "digits")
        assert watch.exit_status() == 1
    assert watch.output.splitlines()[-1] == "tpujob: digits was deleted"


def test_the_status_says_who_is_ready_and_where_the_time_went(
    space: Namespace, operator: OperatorProcess, reader: Path
) -> None:
    space.apply(digits())
    space.wait_for_state("Running")
    told = tpujob(space, reader, "status", "digits")
    assert told.returncode == 0, told.stderr
    lines = [line.rstrip() for line in told.stdout.splitlines()]
    assert lines[0] == f"digits: Running, attempt 1, v5litepod-16 (namespace {space.name})"
    assert " hosts      4/4 ready" in lines

    found = json.loads(tpujob(space, reader, "status", "digits", "-o", "json").stdout)
    assert found["status"] == space.status()
    assert found["hosts"]["ready"] == 4
    parts = ("queue", "start", "productive", "wasted", "recovery", "suspended")
    created = datetime.fromisoformat(space.job()["metadata"]["creationTimestamp"])
    life = datetime.fromisoformat(found["time"]) - created
    assert sum(found["goodputNow"][f"{part}Seconds"] for part in parts) == life.total_seconds()

    table = tpujob(space, reader, "status").stdout.splitlines()
    assert [line.split()[:5] for line in table[1:]] == [["digits", "Running", "v5litepod-16", "4", "1"]]


def test_a_job_that_no_operator_has_seen_is_shown_all_the_same(space: Namespace, reader: Path) -> None:
    space.apply(digits())
    told = tpujob(space, reader, "status", "digits").stdout
    assert told.startswith("digits: not seen by an operator yet")
    assert "No operator has looked at this job yet." in told


def test_the_server_says_which_right_is_missing(control_plane: ControlPlane, space: Namespace) -> None:
    space.apply(digits())
    stranger = control_plane.service_account_kubeconfig(space.name, "default")
    for arguments in (["status"], ["status", "digits"], ["watch", "digits"], ["logs", "digits"]):
        told = tpujob(space, stranger, *arguments)
        assert told.returncode == 2
        assert 'cannot list resource "tputrainingjobs"' in told.stderr or 'cannot get resource "tpu' in told.stderr
        assert "needed: get, list and watch tputrainingjobs.tpu-operator.dev and pods; get pods/log" in told.stderr


def test_a_name_that_is_nearly_right_is_answered_with_the_right_one(space: Namespace, reader: Path) -> None:
    space.apply(digits())
    told = tpujob(space, reader, "watch", "digit")
    assert told.returncode == 2
    assert told.stderr == f"tpujob: there is no job 'digit' in namespace '{space.name}'; nearest: digits\n"


def test_the_log_of_a_worker_that_has_no_pod_is_explained(
    space: Namespace, operator: OperatorProcess, reader: Path
) -> None:
    space.apply(digits(runPolicy={"suspend": True}))
    space.wait_for_state("Suspended")
    told = tpujob(space, reader, "logs", "digits")
    assert told.returncode == 1
    assert "digits has no workers yet" in told.stderr
