"""The namespace of a team, as the example makes it, on a real API server: who may do what there, and how much."""

import copy
from collections.abc import Iterator

import pytest
import yaml

from tests.chart.cluster import DEFINITION, Cluster
from tests.chart.helm import CHART, FULL_NAME, NAMESPACE, REPOSITORY, Object
from tests.cluster import kueue
from tests.cluster.processes import wait_until

TEAM, GROUP = "research", "research@example.com"
EXAMPLE = REPOSITORY / "examples" / "team" / "namespace.yaml"
JOB: Object = yaml.safe_load((REPOSITORY / "examples" / "slice.yaml").read_text())


@pytest.fixture
def team(cluster: Cluster) -> Iterator[Cluster]:
    """The chart and the example are installed, and their quota and policy count."""
    cluster.plane.kubectl("apply", "--server-side", "-f", str(kueue.definition("localqueues")))
    cluster.plane.wait_established("localqueues.kueue.x-k8s.io")
    cluster.helm("install", str(CHART))
    cluster.plane.wait_established(DEFINITION.removeprefix("crd/"))
    cluster.kubectl("apply", "--server-side", "--filename", str(EXAMPLE))
    wait_until(lambda: "budget" in refusal(cluster, JOB), timeout=60, what="the policy counts")
    quota = ("get", "resourcequota/tpus", f"--namespace={TEAM}", "--output=jsonpath={.status.used}")
    wait_until(lambda: "google.com/tpu" in cluster.kubectl(*quota), timeout=60, what="the quota counts")
    yield cluster
    cluster.kubectl("delete", "--wait=false", "--filename", str(EXAMPLE))


def refusal(cluster: Cluster, body: Object, *flags: str) -> str:
    """Returns what the API server says against the object; empty if it would take it."""
    place = ("create", "--dry-run=server", f"--namespace={TEAM}", "--filename=-", *flags)
    done = cluster.plane.kubectl(*place, input=yaml.safe_dump(body), check=False)
    return done.stderr if done.returncode else ""


def with_budget(hours: int) -> Object:
    job = copy.deepcopy(JOB)
    job["spec"]["runPolicy"] = {"budget": {"chipHours": hours}}
    return job


def pod(chips: int, **security: object) -> Object:
    """A pod with the security of a default worker, and further fields of it."""
    context = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}} | security
    tpus = {"google.com/tpu": str(chips)}
    container = {"name": "c", "image": "i", "securityContext": context, "resources": {"limits": tpus}}
    outer = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p"},
        "spec": {"securityContext": outer, "containers": [container]},
    }


def test_the_team_can_train_within_its_limits(team: Cluster) -> None:
    member = ("--as=ada", f"--as-group={GROUP}")
    assert refusal(team, with_budget(1000), *member) == ""
    assert "at most 1000 chip-hours" in refusal(team, with_budget(1001), *member)
    assert "forbidden" in refusal(team, with_budget(1), "--as=eve")
    assert not team.may("ada", "update", "resourcequotas", TEAM)

    assert refusal(team, pod(chips=64)) == ""
    assert "exceeded quota: tpus" in refusal(team, pod(chips=65))
    assert "violates PodSecurity" in refusal(team, pod(chips=4, privileged=True, allowPrivilegeEscalation=True))

    other = with_budget(9999)
    other["metadata"]["namespace"] = NAMESPACE
    assert team.plane.kubectl("create", "--dry-run=server", "-f", "-", input=yaml.safe_dump(other)).stderr == ""
    assert FULL_NAME in team.kubectl("get", "deployments", "--namespace", NAMESPACE, "--output=name")
