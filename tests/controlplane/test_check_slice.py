"""`tpujob check-slice` against a real API server, with the rights and the words of the nightly example.

No operator runs, so no worker prints a table: tests/e2e/test_check_slice.py has those.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.cluster.control_plane import ControlPlane
from tests.cluster.namespaces import emptied_namespace
from tests.controlplane.jobs import Namespace
from tests.controlplane.tpujob import tpujob

EXAMPLE = Path(__file__).parents[2] / "examples" / "nightly" / "check_slice.yaml"
[CRONJOB] = (body for body in yaml.safe_load_all(EXAMPLE.read_text()) if body["kind"] == "CronJob")
POD = CRONJOB["spec"]["jobTemplate"]["spec"]["template"]["spec"]


@pytest.fixture
def space(control_plane: ControlPlane, job_definition: None) -> Iterator[Namespace]:
    """A restricted namespace in which the example was applied."""
    with emptied_namespace(control_plane.api, {"pod-security.kubernetes.io/enforce": "restricted"}) as name:
        space = Namespace(control_plane, name)
        space.kubectl("apply", "-f", str(EXAMPLE))
        yield space


def tpujob_as(space: Namespace, account: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    config = space.cluster.service_account_kubeconfig(space.name, account)
    return tpujob(*arguments, "-n", space.name, "--kubeconfig", str(config))


def test_the_rights_of_the_nightly_example_suffice(space: Namespace) -> None:
    [_, _, _, command] = POD["containers"][0]["command"]
    arguments = [*POD["containers"][0]["args"], "--timeout=5"]
    done = tpujob_as(space, POD["serviceAccountName"], command, *arguments)
    assert "forbidden" not in done.stderr
    assert (done.returncode, "no operator has seen the job" in done.stderr) == (2, True), done.stderr
    assert space.kubectl("get", "tpujob", "-o", "name") == ""


def test_without_rights_no_job_is_created_and_the_rights_are_named(space: Namespace) -> None:
    done = tpujob_as(space, "default", "check-slice", "v5litepod-16", "--image", "i")
    assert (done.returncode, "needed: create, delete" in done.stderr) == (2, True), done.stderr
    assert space.kubectl("get", "tpujob", "-o", "name") == ""


def test_the_pod_of_the_nightly_example_is_admitted_where_pods_are_restricted(space: Namespace) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "check"}, "spec": POD}
    space.kubectl("create", "--dry-run=server", "-f", "-", input=yaml.safe_dump(pod))
