"""Worker pods at the API server and the scheduler: the restricted level, and nodes to avoid."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cluster.api import ApiError
from tests.cluster.control_plane import ControlPlane
from tests.cluster.kwok import TPU_TAINT
from tests.cluster.namespaces import emptied_namespace
from tests.cluster.processes import wait_until
from tests.controlplane.jobs import digits
from tests.controlplane.places import FOUR_HOSTS, a_place
from tpu_training_operator.api.job import TPUTrainingJob
from tpu_training_operator.api.validation import parse_job
from tpu_training_operator.domain.cluster_state.obstacles import limit_range_remedy, pod_security_remedy
from tpu_training_operator.domain.cluster_state.worker_reports import Reporting
from tpu_training_operator.domain.job.naming import WorkerId
from tpu_training_operator.domain.job.options import options_of
from tpu_training_operator.domain.job.recipe.resolve import resolve
from tpu_training_operator.domain.objects.entry_check_pod import entry_check_pod
from tpu_training_operator.domain.objects.placeholder import missing_placeholders
from tpu_training_operator.domain.objects.shared import config_map
from tpu_training_operator.domain.objects.worker_pod import worker_pod

Object = dict[str, Any]

FIRST = WorkerId(1, 0, 0)
REPORTING = Reporting("https://operator.tpu-system.svc:8443", "-----BEGIN CERTIFICATE-----\n")
RESTRICTED = {
    "pod-security.kubernetes.io/enforce": "restricted",
    "pod-security.kubernetes.io/enforce-version": "latest",
}
OWN_LOOP = {"image": "registry.example/digits:1", "command": ["python", "train.py"]}


def job_on_tpus(
    namespace: str, trainer: Object | None = None, on: Object | None = None, nodes: Object | None = None
) -> TPUTrainingJob:
    """`nodes`: their labels."""
    body = digits(slice={"acceleratorType": "v5litepod-16", "hardware": "TPU", **(on or {})})
    body["spec"]["trainer"] = (trainer or body["spec"]["trainer"]) | ({"nodeSelector": nodes} if nodes else {})
    body["metadata"] |= {"namespace": namespace, "uid": "00000000-0000-0000-0000-000000000000"}
    return parse_job(body)


def objects(
    namespace: str,
    *avoid: str,
    trainer: Object | None = None,
    on: Object | None = None,
    nodes: Object | None = None,
) -> tuple[Object, Object]:
    """The ConfigMap and the first pod of a job on four TPU hosts."""
    job = job_on_tpus(namespace, trainer, on, nodes)
    resolution = resolve(job.spec)
    made = config_map(job, resolution, 1, REPORTING), worker_pod(job, resolution, FIRST, REPORTING, avoid)
    for each in made:
        # Their job does not exist: the garbage collector would delete them at once.
        del each["metadata"]["ownerReferences"]
    return made


@pytest.mark.parametrize(
    ("limits", "trainer", "check"),
    [
        (
            {"default": {"cpu": "1", "memory": "2Gi"}},
            "adds this limit (default), because the job sets none: set spec.trainer.resources.limits.cpu and"
            " spec.trainer.resources.limits.memory",
            None,
        ),
        (
            {"max": {"memory": "8Gi"}},
            "adds this limit (default), because the job sets none: set spec.trainer.resources.limits.memory",
            "sets it (max): set memory within it in spec.entryCheck.resources",
        ),
        (
            {"min": {"cpu": "100"}},
            "sets it (min): set cpu within it in spec.trainer.resources",
            "sets it (min): set cpu within it in spec.entryCheck.resources",
        ),
        (
            {"maxLimitRequestRatio": {"memory": "2"}},
            "sets it (maxLimitRequestRatio): set memory in spec.trainer.resources",
            "sets it (maxLimitRequestRatio): set memory in spec.entryCheck.resources",
        ),
    ],
    ids=["default", "max", "min", "ratio"],
)
def test_a_pod_that_a_limit_range_refuses_says_so_with_the_remedy(
    control_plane: ControlPlane, limits: Object, trainer: str, check: str | None
) -> None:
    with emptied_namespace(control_plane.api) as namespace:
        body = {"metadata": {"name": "small"}, "spec": {"limits": [{"type": "Container", **limits}]}}
        control_plane.api.call("POST", f"/api/v1/namespaces/{namespace}/limitranges", body)
        _, worker = objects(namespace)
        job = job_on_tpus(namespace)
        for pod, words in ((worker, trainer), (entry_check_pod(job, resolve(job.spec)), check)):
            refused = refusal(control_plane, namespace, pod)
            remedy = limit_range_remedy(refused, pod)
            assert remedy == (f"; a LimitRange of the namespace {words}" if words else ""), refused


def test_a_limit_of_the_jobs_own_is_no_matter_of_a_limit_range(control_plane: ControlPlane) -> None:
    resources = {"requests": {"cpu": "4"}, "limits": {"cpu": "2"}}
    with emptied_namespace(control_plane.api) as namespace:
        _, worker = objects(namespace, trainer=OWN_LOOP | {"resources": resources})
        refused = refusal(control_plane, namespace, worker)
    assert "than or equal to cpu limit" in refused
    assert limit_range_remedy(refused, worker) == ""


def refusal(cluster: ControlPlane, namespace: str, pod: Object) -> str:
    """What the API server says; empty if it accepts the pod."""
    try:
        cluster.api.call("POST", f"/api/v1/namespaces/{namespace}/pods?dryRun=All", pod)
    except ApiError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("trainer", [None, OWN_LOOP], ids=["an entrypoint", "a loop of one's own"])
def test_a_restricted_namespace_admits_a_worker_that_reports(
    control_plane: ControlPlane, trainer: Object | None
) -> None:
    with emptied_namespace(control_plane.api, RESTRICTED) as namespace:
        for kind, body in zip(("configmaps", "pods"), objects(namespace, "node-a", trainer=trainer), strict=True):
            stored = control_plane.api.call("POST", f"/api/v1/namespaces/{namespace}/{kind}?dryRun=All", body)
    (volume,) = (v for v in stored["spec"]["volumes"] if v["name"] == "tpu-training-progress")
    # The API server drops what it does not understand.
    assert volume["projected"] == next(v for v in body["spec"]["volumes"] if v["name"] == volume["name"])["projected"]


def admitted(control_plane: ControlPlane, level: str, trainer: Object) -> tuple[str, str]:
    """What Pod Security at this level refuses in the first worker, empty if it admits the pod, and the remedy."""
    labels = RESTRICTED | {"pod-security.kubernetes.io/enforce": level}
    with emptied_namespace(control_plane.api, labels) as namespace:
        (_, pod) = objects(namespace, trainer=OWN_LOOP | trainer)
        refused = refusal(control_plane, namespace, pod)
        return refused, pod_security_remedy(refused, pod)


AS_ROOT = {"runAsUser": 0}
LOCKS = AS_ROOT | {"capabilities": {"add": ["IPC_LOCK", "SYS_RESOURCE"]}}
READS_ALL = AS_ROOT | {"capabilities": {"add": ["DAC_OVERRIDE"]}}
PRIVILEGED = AS_ROOT | {"privileged": True}
GROUPS = {"runAsUser": 1000, "runAsGroup": 0, "fsGroup": 0, "supplementalGroups": [0, 44]}


RUN_AS, CAPABILITIES = "spec.trainer.securityContext.runAsUser", "spec.trainer.securityContext.capabilities"


@pytest.mark.parametrize(
    ("trainer", "refused_by", "remedies"),
    [
        ({"sharedMemory": "16Gi"}, {}, {}),
        ({"securityContext": GROUPS}, {}, {}),
        ({"securityContext": AS_ROOT}, {"restricted": "runAsUser=0"}, {"restricted": (RUN_AS, "baseline")}),
        (
            {"securityContext": READS_ALL},
            {"restricted": "unrestricted capabilities"},
            {"restricted": (f"{CAPABILITIES} and {RUN_AS}", "baseline")},
        ),
        (
            {"securityContext": LOCKS},
            {"restricted": "unrestricted capabilities", "baseline": "non-default capabilities"},
            {"restricted": (f"{CAPABILITIES} and {RUN_AS}", "privileged"), "baseline": (CAPABILITIES, "privileged")},
        ),
        (
            {"securityContext": PRIVILEGED},
            {"restricted": "must not set securityContext.privileged=true", "baseline": "privileged (container"},
            {
                "restricted": (f"spec.trainer.securityContext.privileged and {RUN_AS}", "privileged"),
                "baseline": ("spec.trainer.securityContext.privileged", "privileged"),
            },
        ),
        (
            {"hostNetwork": True},
            {"restricted": "host namespaces", "baseline": "host namespaces"},
            dict.fromkeys(("restricted", "baseline"), ("spec.trainer.hostNetwork", "privileged")),
        ),
    ],
    ids=["shared memory", "groups", "root", "root that reads all", "root that locks memory", "privileged", "network"],
)
def test_pod_security_decides_on_what_a_job_may_ask_for(
    control_plane: ControlPlane, trainer: Object, refused_by: dict[str, str], remedies: dict[str, tuple[str, str]]
) -> None:
    for level in ("restricted", "baseline", "privileged"):
        answer, remedy = admitted(control_plane, level, trainer)
        assert refused_by.get(level, "") in answer
        assert bool(answer) == (level in refused_by), answer
        fields, label = remedies.get(level, ("", ""))
        said = f"; leave out {fields}, or let an administrator label the namespace"
        assert remedy == (f"{said} pod-security.kubernetes.io/enforce={label}" if fields else "")


def test_only_the_workers_of_a_privileged_job_are_privileged(control_plane: ControlPlane) -> None:
    """A namespace that refuses privilege admits the entry check and the placeholders."""
    labels = RESTRICTED | {"pod-security.kubernetes.io/enforce": "baseline"}
    with emptied_namespace(control_plane.api, labels) as namespace:
        job = job_on_tpus(namespace, {"image": "i", "entrypoint": "m:f", "securityContext": PRIVILEGED})
        resolution = resolve(job.spec)
        assert "privileged" in refusal(control_plane, namespace, worker_pod(job, resolution, FIRST))
        assert refusal(control_plane, namespace, entry_check_pod(job, resolution)) == ""
        (option, *_) = options_of(job)
        assert refusal(control_plane, namespace, missing_placeholders(option, 0, ())[0].body) == ""


RESERVATION_LABELS = {
    "a pool that the autoscaler made": {
        "cloud.google.com/reservation-name": "r",
        "cloud.google.com/reservation-affinity": "specific",
    },
    "a pool that a user made": {"cloud.google.com/reservation-name": "r"},
}
TAINT = {"key": "cloud.google.com/reservation-name", "value": "r", "effect": "NoSchedule"}


@pytest.mark.parametrize("labels", RESERVATION_LABELS.values(), ids=RESERVATION_LABELS.keys())
def test_a_worker_finds_the_nodes_of_its_reservation(control_plane: ControlPlane, labels: dict[str, str]) -> None:
    with a_place(control_plane) as place:
        pool, space = place.add(FOUR_HOSTS), place.space.name
        reserved = {"provisioning": {"type": "Reservation", "reservation": "r"}}
        (_, pod) = objects(space, on=reserved, nodes=place.own)
        path = f"/api/v1/namespaces/{space}/pods"
        control_plane.api.call("POST", path, pod)
        name = pod["metadata"]["name"]

        def found() -> Object:
            return control_plane.api.call("GET", f"{path}/{name}")

        def waits() -> bool:
            return any(c["reason"] == "Unschedulable" for c in found()["status"].get("conditions", []))

        wait_until(waits, timeout=60, what="the pod waits for a node of the reservation")
        patch = json.dumps({"metadata": {"labels": labels}, "spec": {"taints": [TPU_TAINT, TAINT]}})
        control_plane.kubectl("patch", "node", pool.nodes[1], "--type=merge", f"--patch={patch}")
        wait_until(lambda: found()["spec"].get("nodeName"), timeout=60, what="the pod has a node")
        assert found()["spec"]["nodeName"] == pool.nodes[1]


def test_the_scheduler_places_no_pod_on_an_avoided_node(control_plane: ControlPlane) -> None:
    with a_place(control_plane) as place:
        pool, space = place.add(FOUR_HOSTS), place.space.name
        pods = f"/api/v1/namespaces/{space}/pods"
        for index, free in enumerate(pool.nodes):
            (_, pod) = objects(space, *(node for node in pool.nodes if node != free), nodes=place.own)
            pod["metadata"]["name"] = f"only-there-{index}"
            control_plane.api.call("POST", pods, pod)

        def nodes() -> list[str | None]:
            found = control_plane.api.call("GET", pods)["items"]
            return [pod["spec"].get("nodeName") for pod in sorted(found, key=lambda pod: str(pod["metadata"]["name"]))]

        wait_until(lambda: None not in nodes(), timeout=60, what="all pods have nodes")
        assert nodes() == list(pool.nodes)
