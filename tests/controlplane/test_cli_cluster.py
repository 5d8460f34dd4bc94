"""`tpujob status`, `watch` and `logs` against a real API server, with the operator at work.

Logs need a kubelet: tests/e2e/test_cli.py. The stories are told at the same time, each in a namespace of its own.
"""

import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

import pytest
import yaml

from tests.cluster.control_plane import ControlPlane
from tests.cluster.deadlines import deadline
from tests.cluster.kwok import cpu_nodes_for
from tests.cluster.namespaces import emptied_namespace
from tests.cluster.processes import wait_until
from tests.controlplane.jobs import Namespace, digits
from tests.controlplane.operator_process import OperatorProcess
from tests.controlplane.tpujob import start, tpujob
from tests.stories import Group, Stories, selected, told_together
from tests.trainer.fork_server import ForkedProcess

# The rights that `tpujob` documents.
RIGHTS = [
    {"apiGroups": ["tpu-operator.dev"], "resources": ["tputrainingjobs"], "verbs": ["get", "list", "watch"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]},
    {"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]},
]


@dataclass(frozen=True)
class Reading:
    """A namespace, and the kubeconfig of a user who has exactly the rights there that `tpujob` documents."""

    space: Namespace
    kubeconfig: Path

    @classmethod
    def of(cls, cluster: ControlPlane, namespace: str) -> "Reading":
        meta = {"name": "reader", "namespace": namespace}
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
        cluster.kubectl("apply", "-f", "-", input=yaml.safe_dump_all(objects))
        return cls(Namespace(cluster, namespace), cluster.service_account_kubeconfig(namespace, "reader"))

    def tpujob(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return tpujob(*arguments, *self._where())

    def watch(self) -> "Watch":
        return Watch(start({}, "watch", "digits", *self._where()))

    def _where(self) -> tuple[str, ...]:
        return ("-n", self.space.name, "--kubeconfig", str(self.kubeconfig))


class Watch:
    """A running `tpujob watch digits`, and what it has printed so far."""

    def __init__(self, process: ForkedProcess) -> None:
        self.output = ""
        self._process = process
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
        status = self._process.wait(timeout=deadline(60))
        self._thread.join()
        return status

    def _read(self) -> None:
        with self._process.stdout as lines:
            for line in lines:
                self.output += line


def finish_all(space: Namespace, attempt: int = 1) -> None:
    for host in range(4):
        space.finish(f"digits-{attempt}-0-{host}")


def a_job_is_watched_to_its_end_over_a_restart_of_the_gang(reading: Reading) -> None:
    space = reading.space
    space.apply(digits())
    space.wait(lambda: bool(space.status()), "an operator has seen the job")
    with reading.watch() as watch:
        watch.wait_for("digits: Running, attempt 1, v5litepod-16, 4/4 hosts")
        space.finish("digits-1-0-2", exit_code=137)
        watch.wait_for("failure: Infrastructure (Killed, exit code 137): slice 0 host 2 on cpu-")
        watch.wait_for("digits: Running, attempt 2, v5litepod-16, 4/4 hosts")
        finish_all(space, attempt=2)
        assert watch.exit_status() == 0
    assert "digits: Succeeded, attempt 2" in watch.output


def the_status_says_who_is_ready_and_where_the_time_went(reading: Reading) -> None:
    space = reading.space
    space.apply(digits())
    space.wait_for_state("Running")
    told = reading.tpujob("status", "digits")
    assert told.returncode == 0, told.stderr
    lines = [line.rstrip() for line in told.stdout.splitlines()]
    assert lines[0].startswith("digits: Running, attempt 1")
    assert space.name in lines[0]
    assert " hosts      4/4 ready" in lines

    found = json.loads(reading.tpujob("status", "digits", "-o", "json").stdout)
    assert found["status"] == space.status()
    assert found["hosts"]["ready"] == 4
    parts = ("queue", "start", "productive", "wasted", "recovery", "suspended")
    created = datetime.fromisoformat(space.job()["metadata"]["creationTimestamp"])
    life = datetime.fromisoformat(found["time"]) - created
    assert sum(found["goodputNow"][f"{part}Seconds"] for part in parts) == life.total_seconds()

    table = reading.tpujob("status").stdout.splitlines()
    assert [line.split()[:5] for line in table[1:]] == [["digits", "Running", "v5litepod-16", "4", "1"]]


STORIES = {
    story.__name__: story
    for story in (
        a_job_is_watched_to_its_end_over_a_restart_of_the_gang,
        the_status_says_who_is_ready_and_where_the_time_went,
    )
}


def test_a_job_that_no_operator_has_seen_is_shown_all_the_same(
    control_plane: ControlPlane, job_definition: None, namespace: str
) -> None:
    """Comes first: no operator runs yet."""
    reading = Reading.of(control_plane, namespace)
    space = reading.space
    space.apply(digits())
    told = reading.tpujob("status", "digits").stdout
    assert told.startswith("digits: not seen by an")
    assert "has looked at this job yet." in told


@pytest.fixture(scope="module")
def stories(
    control_plane: ControlPlane, served_everywhere: OperatorProcess, request: pytest.FixtureRequest
) -> Iterator[Stories]:
    def tell(story: Callable[[Reading], None]) -> None:
        with emptied_namespace(control_plane.api) as name:
            story(Reading.of(control_plane, name))

    chosen = {name: partial(tell, STORIES[name]) for name in selected(request, STORIES)}
    with cpu_nodes_for(control_plane, 4), told_together(Group(chosen, at_once=len(STORIES))) as told:
        yield told


@pytest.mark.parametrize("story", STORIES)
def test_with_an_operator(story: str, stories: Stories) -> None:
    stories.end_of(story)


def test_a_watch_outlives_the_api_server(
    control_plane: ControlPlane, namespace: str, operator: OperatorProcess, stories: Stories
) -> None:
    stories.wait()
    reading = Reading.of(control_plane, namespace)
    space = reading.space
    space.apply(digits())
    space.wait_for_state("Running")
    with reading.watch() as watch:
        watch.wait_for("digits: Running")
        control_plane.restart_apiserver()
        watch.wait_for("connection lost, trying again: ")
        finish_all(space)
        assert watch.exit_status() == 0
    assert "digits: Succeeded" in watch.output
