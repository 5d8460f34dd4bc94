"""What a worker may use of its host: CPU and memory, shared memory, users and capabilities, ports."""

import json
from typing import Any

import pytest

from tests.planner.worker_objects import Object, container, pod
from tests.unit.jobs import ABSENT
from tpu_training_operator.api.catalogue import MachineType, generations

# Resources.


def requests(changes: Object) -> dict[str, Any]:
    found: dict[str, Any] = container(changes, host=0)["resources"]["requests"]
    return {name: amount for name, amount in found.items() if name != "google.com/tpu"}


NO_TYPE = {"spec.slice.acceleratorType": ABSENT}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"spec.trainer.resources": {"requests": {"cpu": 1}}}, {"cpu": 1, "memory": "144G"}),
        ({"spec.trainer.resources": {"limits": {"memory": "64Gi"}}}, {"cpu": "84"}),
        ({"spec.trainer.resources": {"requests": {"ephemeral-storage": "1Ti"}}}, {"ephemeral-storage": "1Ti"}),
        # No source states the virtual CPUs of this one.
        (NO_TYPE | {"spec.slice.generation": "tpu7x", "spec.slice.topology": "1x1x1"}, {"memory": "180G"}),
        (
            NO_TYPE | {"spec.slice.generation": "tpu8t", "spec.slice.topology": "4x4", "spec.slice.chipsPerHost": 4},
            {},
        ),
    ],
)
def test_requests_that_the_user_omits_follow_from_the_machine(changes: Object, expected: Object) -> None:
    machines = {"cpu": "84", "memory": "144G"} if "ephemeral-storage" in expected else {}
    assert requests(changes) == machines | expected


def kept_by_gke(memory_gb: int, cpus: int) -> tuple[float, float]:
    """Memory in GB and CPUs that GKE reserves on a node (documented for all machine types)."""
    steps = [(4, 0.25), (4, 0.2), (8, 0.1), (112, 0.06), (10**6, 0.02)]
    memory, left = 0.1, float(memory_gb)
    for size, share in steps:
        memory, left = memory + share * min(size, left), left - min(size, left)
    return memory, 0.06 + 0.01 + 0.005 * 2 + 0.0025 * (cpus - 4)


MACHINES = {
    shape.machine_type.name: shape.machine_type
    for generation in generations().values()
    for shape in generation.shapes
    if shape.machine_type
}


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES.keys())
def test_the_requests_leave_room_for_gke_and_the_nodes_own_pods(machine: MachineType) -> None:
    daemons_gb, daemons_cpus = 4, 2
    assert machine.memory_gb is not None
    memory, cpus = kept_by_gke(machine.memory_gb, machine.cpus or 4)
    assert machine.memory_gb * 3 // 4 <= machine.memory_gb - memory - daemons_gb
    assert machine.cpus is None or machine.cpus * 3 // 4 <= machine.cpus - cpus - daemons_cpus


# Shared memory.


def shared_memory(changes: Object) -> list[Object]:
    mounts = [mount for mount in container(changes)["volumeMounts"] if mount["mountPath"].startswith("/dev/shm")]
    return [v["emptyDir"] for m in mounts for v in pod(changes)["spec"]["volumes"] if v["name"] == m["name"]]


def test_the_size_of_shared_memory_can_be_set() -> None:
    assert shared_memory({"spec.trainer.sharedMemory": "16Gi"}) == [{"medium": "Memory", "sizeLimit": "16Gi"}]


@pytest.mark.parametrize("path", ["/dev/shm", "/dev/shm/"])
def test_a_volume_of_the_user_replaces_it(path: str) -> None:
    own = {"medium": "Memory", "sizeLimit": "1Gi"}
    changes = {
        "spec.trainer.volumes": [{"name": "mine", "emptyDir": own}],
        "spec.trainer.volumeMounts": [{"name": "mine", "mountPath": path}],
    }
    assert shared_memory(changes) == [own]
    assert "tpu-training-shm" not in json.dumps(pod(changes))


# Security.


SECURITY = "spec.trainer.securityContext"
DROPPED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
SECCOMP = {"seccompProfile": {"type": "RuntimeDefault"}}


@pytest.mark.parametrize(
    ("given", "of_pod", "added"),
    [
        ({}, {"runAsNonRoot": True}, []),
        ({"runAsUser": 1000}, {"runAsNonRoot": True, "runAsUser": 1000}, []),
        ({"runAsUser": 0}, {"runAsNonRoot": False, "runAsUser": 0}, []),
        ({"runAsGroup": 0}, {"runAsNonRoot": True, "runAsGroup": 0}, []),
        (
            {"fsGroup": 2000, "supplementalGroups": [1, 2]},
            {
                "runAsNonRoot": True,
                "fsGroup": 2000,
                "fsGroupChangePolicy": "OnRootMismatch",
                "supplementalGroups": [1, 2],
            },
            [],
        ),
        (
            {"runAsUser": 0, "capabilities": {"add": ["IPC_LOCK", "SYS_RESOURCE"]}},
            {"runAsNonRoot": False, "runAsUser": 0},
            ["IPC_LOCK", "SYS_RESOURCE"],
        ),
    ],
)
def test_the_images_user_applies_and_may_not_be_root_unless_the_job_says_so(
    given: Object, of_pod: Object, added: list[str]
) -> None:
    changes = {SECURITY: given}
    assert pod(changes)["spec"]["securityContext"] == of_pod | SECCOMP
    capabilities = {"drop": ["ALL"]} | ({"add": added} if added else {})
    assert container(changes)["securityContext"] == DROPPED | {"capabilities": capabilities}


def test_a_worker_on_the_nodes_own_network_keeps_its_ports_for_itself() -> None:
    changes = {"spec.trainer.hostNetwork": True, "spec.trainer.backend": "XLASPMD", "spec.slice.count": 2}
    spec = pod(changes)["spec"]
    assert (spec["hostNetwork"], spec["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    ports = [(port["containerPort"], port["hostPort"]) for port in container(changes)["ports"]]
    assert ports == [(12355, 12355), (8080, 8080)]
    assert not {"hostNetwork", "dnsPolicy"} & pod()["spec"].keys()
    assert "ports" not in container()
