"""`helm test`: what it creates, and what its pod finds out with the rights that the chart gives it.

The pod itself runs in tests/e2e, where README's commands do.
"""

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
import yaml

from tests.chart.helm import CHART, FULL_NAME, NAMESPACE, RELEASE, Helm, Object, container, named, of_kind, pod
from tests.chart.switches import DIGEST
from tests.cluster.control_plane import ControlPlane
from tests.cluster.deadlines import deadline
from tests.cluster.processes import wait_until

TEST = f"{FULL_NAME}-test"
DEFINITION = "tputrainingjobs.tpu-operator.dev"


@pytest.fixture
def hooks(helm: Helm) -> list[Object]:
    """The objects that only `helm test` creates."""
    usual = helm.template()
    return [item for item in helm.template(with_test=True) if item not in usual]


def test_it_creates_a_pod_and_a_right_for_it_and_removes_both(hooks: list[Object]) -> None:
    assert [item["kind"] for item in hooks] == ["Role", "RoleBinding", "Pod"]
    for item in hooks:
        annotations = item["metadata"]["annotations"]
        assert annotations["helm.sh/hook"] == "test"
        assert {"before-hook-creation", "hook-succeeded"} <= set(annotations["helm.sh/hook-delete-policy"].split(","))


def test_its_only_additional_right_is_to_see_the_operator(hooks: list[Object]) -> None:
    (role,) = of_kind(hooks, "Role")
    deployments = {"apiGroups": ["apps"], "resources": ["deployments"], "verbs": ["get"], "resourceNames": [FULL_NAME]}
    assert role["rules"] == [deployments]


def test_who_maintains_roles_themselves_gets_none(helm: Helm) -> None:
    objects = helm.template({"rbac": {"create": False}}, with_test=True)
    assert of_kind(objects, "Role", "RoleBinding") == []


def test_its_pod_is_like_the_operators(helm: Helm) -> None:
    """The same image, account, restrictions and place, whatever the values say."""
    values = {
        "image": {"digest": DIGEST, "pullPolicy": "Always"},
        "imagePullSecrets": [{"name": "key"}],
        "nodeSelector": {"zone": "a"},
        "tolerations": [{"operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "priorityClassName": "high",
    }
    objects = helm.template(values, with_test=True)
    spec, operator = named(objects, "Pod", TEST)["spec"], pod(objects)["spec"]
    (test,) = spec["containers"]

    assert {name: spec[name] for name in operator if name != "containers"} == {
        name: value for name, value in operator.items() if name != "containers"
    }
    same = ("image", "imagePullPolicy", "securityContext")
    assert {name: test[name] for name in same} == {name: container(objects)[name] for name in same}


@pytest.mark.parametrize("name", ["", "a" * 63])
def test_the_operators_service_does_not_lead_to_it(helm: Helm, name: str) -> None:
    objects = helm.template({"nameOverride": name}, with_test=True)
    selector = of_kind(objects, "Service")[0]["spec"]["selector"]
    labels = of_kind(objects, "Pod")[0]["metadata"]["labels"]
    assert not selector.items() <= labels.items()
    assert len(labels["app.kubernetes.io/name"]) <= 63


class Installation:
    """The release in a cluster without nodes: the operator is ready when the test says so."""

    def __init__(self, plane: ControlPlane, objects: list[Object]) -> None:
        self._plane = plane
        (self._test,) = named(objects, "Pod", TEST)["spec"]["containers"]

    def kubectl(self, *arguments: str, **options: str) -> str:
        return self._plane.kubectl(*arguments, f"--namespace={NAMESPACE}", **options).stdout

    def answers(self, wait: float = 0) -> tuple[int, str]:
        """Exit code and output of the pod's command, run on this machine as the pod's account."""
        account = self._plane.service_account_kubeconfig(NAMESPACE, FULL_NAME)
        done = subprocess.run(
            [sys.executable, *self._test["command"][1:], *self._test["args"], f"--wait={wait:.0f}"],
            env={"KUBECONFIG": str(account)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stderr == ""
        return done.returncode, done.stdout

    def get_ready(self) -> None:
        """Says of the operator's pod what its kubelet would."""
        wait_until(self._pod, timeout=60, what="the operator's pod exists")
        status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
        self.kubectl("patch", self._pod(), "--subresource=status", f"--patch={json.dumps({'status': status})}")

    def _pod(self) -> str:
        return self.kubectl("get", "pods", "--output=name").strip()


@pytest.fixture(scope="module")
def installation(helm: Helm, control_plane: ControlPlane, namespaces: None) -> Iterator[Installation]:
    place = ("--namespace", NAMESPACE, f"--kubeconfig={control_plane.kubeconfig}")
    helm.run("install", RELEASE, str(CHART), *place)
    objects = helm.template(with_test=True)
    rights = [item for item in of_kind(objects, "Role", "RoleBinding") if item["metadata"]["name"] == TEST]
    control_plane.kubectl("apply", "--filename=-", input=yaml.safe_dump_all(rights))
    control_plane.wait_established(DEFINITION)
    yield Installation(control_plane, objects)
    helm.run("uninstall", RELEASE, *place)
    control_plane.kubectl("delete", f"crd/{DEFINITION}")


def test_it_fails_while_the_operator_is_not_ready(installation: Installation) -> None:
    status, told = installation.answers()
    assert status == 1
    assert f"FAILED: deployment {FULL_NAME} is not ready" in told


def test_it_passes_with_a_ready_operator_and_the_chart_s_definition(installation: Installation) -> None:
    installation.get_ready()
    status, told = installation.answers(wait=deadline(30))
    assert (status, told.count("ok: ")) == (0, 2), told


def test_it_fails_with_the_definition_of_another_version(installation: Installation) -> None:
    goodput = "/spec/versions/0/schema/openAPIV3Schema/properties/status/properties/goodput"
    patch = json.dumps([{"op": "remove", "path": goodput}])
    installation.kubectl("patch", f"crd/{DEFINITION}", "--type=json", f"--patch={patch}")
    # The API server publishes it a moment later.
    failed = (
        "FAILED: the definition of TPUTrainingJob tpu-operator.dev/v1alpha1 is another version's, without status.good"
    )
    wait_until(lambda: failed in installation.answers()[1], timeout=60, what="the difference is told")


def test_it_says_which_right_it_lacks(installation: Installation) -> None:
    installation.kubectl("delete", f"rolebinding/{TEST}")
    status, told = installation.answers()
    assert status == 1
    assert 'cannot get resource "deployments"' in told
