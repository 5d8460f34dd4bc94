"""The objects of a gang, in full: what GKE, torch_xla and a restricted namespace require."""

import json
from collections.abc import Iterator
from difflib import ndiff
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.planner.worker_objects import Object, container, pod
from tests.unit.jobs import ABSENT, job, job_body, resolved
from tpu_training_operator.api.constants import SLICE_CHECK_COMMAND
from tpu_training_operator.api.validation import parse_job
from tpu_training_operator.domain.cluster_state.worker_reports import Reporting
from tpu_training_operator.domain.job.naming import WorkerId, workers
from tpu_training_operator.domain.job.options import options_of
from tpu_training_operator.domain.objects.placeholder import missing_placeholders
from tpu_training_operator.domain.objects.shared import WorkerNetworkPolicy, config_map, env_config_map, service
from tpu_training_operator.domain.objects.worker_env import shared_env
from tpu_training_operator.domain.objects.worker_pod import worker_pod

OWN_LOOP = {"spec.trainer.entrypoint": ABSENT, "spec.trainer.command": ["python", "train.py"]}
ON_CPU = {"spec.slice.hardware": "CPU"}
ONE_HOST = {"spec.slice.acceleratorType": "v5litepod-4"}
TORCH_TPU = {"device": "tpu", "collectives": "tpu_dist", "processesPerHost": 4}
GPUS = {"device": "cuda", "collectives": "nccl", "processesPerHost": 4}
MULTISLICE = {"spec.slice.count": 2, "spec.trainer.backend": "XLASPMD"}
CHECKED = {"spec.runPolicy": {"sliceCheck": "Check"}}
REPORTING = Reporting("https://operator.tpu-system.svc:8443", "-----BEGIN CERTIFICATE-----\n")
RESERVATION = {"spec.slice.provisioning": {"type": "Reservation", "reservation": "r-1"}}
JOB = parse_job(job_body())
CODE = {"uri": "secret://digits-code", "sha256": "0a" * 32}


def leaves(value: Any, path: str = "") -> Iterator[str]:
    """Every value of an object, a line each, by its path; items of a list by their names or keys."""
    if isinstance(value, dict) and value:
        for key, below in value.items():
            step = f".{key}" if key.isidentifier() else f"[{key}]"
            yield from leaves(below, path + step)
    elif isinstance(value, list) and value:
        names = [item.get("name", item.get("key")) if isinstance(item, dict) else None for item in value]
        unique = None not in names and len(set(names)) == len(names)
        for name, item in zip(names if unique else range(len(value)), value, strict=True):
            yield from leaves(item, f"{path}[{name}]")
    else:
        yield f"{path.removeprefix('.')}: {json.dumps(value)}"


def text(body: Object) -> str:
    return "\n".join(leaves(body))


def difference(plain: Object, other: Object) -> str:
    """The lines that only one of the two has."""
    lines = ndiff([*leaves(plain)], [*leaves(other)])
    return "\n".join(line for line in lines if line.startswith(("+", "-")))


def with_variables(changes: Object | None = None, **worker: int) -> Object:
    """A pod with the variables that it shares with the others."""
    return {**pod(changes, **worker), "shared": shared_env(*resolved(changes), 3)}


def test_a_pod_on_tpus(snapshot: SnapshotAssertion) -> None:
    assert text(with_variables()) == snapshot


def test_worker_0_has_a_node_pool_without_other_slices_and_its_peers_follow_it(snapshot: SnapshotAssertion) -> None:
    # With worker 0's label slice-id, a peer would be exempt from its own affinity, and could come before worker 0.
    assert difference(pod(), pod(host=0)) == snapshot


# What other jobs change in it.

FIRST = {"host": 0}
CHANGES: dict[str, tuple[Object, Object]] = {
    "on CPUs": (ON_CPU, {}),
    "on CPUs without torch_xla": (ON_CPU | {"spec.trainer.backend": "Torch"}, {}),
    "SPMD": ({"spec.trainer.backend": "XLASPMD"}, {}),
    "TorchTPU": ({"spec.trainer.backend": "Torch", "spec.trainer.torch": TORCH_TPU}, {}),
    "torchrun on CPUs": (ON_CPU | OWN_LOOP | {"spec.trainer.backend": "Torch"}, {}),
    "torchrun on GPUs": (ON_CPU | OWN_LOOP | {"spec.trainer.backend": "Torch", "spec.trainer.torch": GPUS}, {}),
    "one host needs neither DNS nor a node pool alone": (ONE_HOST, FIRST),
    "single hosts of a rehearsal meet through DNS": (
        ONE_HOST | ON_CPU | {"spec.slice.count": 2},
        {"slice_index": 1, "host": 0},
    ),
    **{
        f"a slice of two machine types: {chips} chips per host": (
            {"spec.slice.acceleratorType": "v5litepod-8", "spec.slice.machineType": f"ct5lp-hightpu-{chips}t"},
            FIRST,
        )
        for chips in (4, 8)
    },
    **{way: ({"spec.slice.provisioning": {"type": way}}, {}) for way in ("Spot", "FlexStart", "Queued")},
    # The autoscaler labels the nodes that it makes for a reservation; a user's own nodes have no such label.
    **{
        f"reservation {place}": ({"spec.slice.provisioning": {"type": "Reservation", "reservation": place}}, {})
        for place in (
            "r-1",
            "projects/p/reservations/r",
            "r/reservationBlocks/b",
            "projects/p-1/reservations/r/reservationBlocks/b/reservationSubBlocks/s",
        )
    },
    "a part of a larger pool": ({"spec.slice.formation": "SubSlice"}, {}),
    "a part of a larger pool, its worker 0, with a reservation": (
        RESERVATION | {"spec.slice.formation": "SubSlice"},
        FIRST,
    ),
    "a slice that GKE forms": (
        {"spec.slice": {"acceleratorType": "tpu7x-16", "formation": "DynamicSlice"}},
        FIRST,
    ),
    "a rehearsal has no formation": (ON_CPU | {"spec.slice.formation": "SubSlice"}, {}),
    "privileged": ({"spec.trainer.securityContext": {"runAsUser": 0, "privileged": True}}, {}),
    "every slice of a multislice job knows the others": (MULTISLICE, {"slice_index": 1, "host": 1}),
    "checkpoints of another job": (
        {"spec.checkpoint": {"uri": "gs://bucket/run", "resumeFrom": "gs://bucket/run/a/b"}},
        {},
    ),
    "data": ({"spec.data": {"uri": "gs://bucket/digits"}}, {}),
    "checkpoints": ({"spec.checkpoint": {"uri": "/mnt/digits/"}}, {}),
    "parameters, which the kubelet takes literally": (
        {"spec.recipe.parameters": {"hidden": "128", "drop-out.2": "0", "naïve": "1", "": "2", "text": "$(HOME) $$x"}},
        {},
    ),
    "a loop of the user's own": (OWN_LOOP | {"spec.trainer.args": ["--fast"]}, {}),
    "the user's fields of the pod; of labels the operator's own win": (
        {
            "spec.trainer.volumes": [
                {"name": "data", "persistentVolumeClaim": {"claimName": "data", "readOnly": True}},
                {"name": "shm", "emptyDir": {"medium": "Memory"}},
            ],
            "spec.trainer.volumeMounts": [
                {"name": "data", "mountPath": "/data", "subPath": "a", "readOnly": True},
                {"name": "shm", "mountPath": "/s"},
            ],
            "spec.trainer.tolerations": [{"key": "spot", "operator": "Exists", "tolerationSeconds": 0}],
            "spec.trainer.envFrom": [{"prefix": "X_", "secretRef": {"name": "s"}}, {"configMapRef": {"name": "c"}}],
            "spec.trainer.resources": {"requests": {"cpu": "0.5", "memory": "16Gi"}, "limits": {"memory": 17179869184}},
            "spec.trainer.imagePullSecrets": [{"name": "registry"}],
            "spec.trainer.imagePullPolicy": "Always",
            "spec.trainer.serviceAccountName": "trainer",
            "spec.trainer.priorityClassName": "high",
            "spec.trainer.runtimeClassName": "gvisor",
            "spec.trainer.nodeSelector": {"cloud.google.com/gke-spot": "true"},
            "spec.trainer.podAnnotations": {"gke-gcsfuse/volumes": "true"},
            "spec.trainer.podLabels": {"team": "vision", "app.kubernetes.io/component": "mine"},
            "spec.trainer.terminationGracePeriodSeconds": 0,
        },
        {},
    ),
    "a slice that is checked first": (CHECKED, {}),
    "a slice on CPUs that is checked first": (ON_CPU | CHECKED, {}),
    "a slice that is checked before a loop of the user's own": (OWN_LOOP | CHECKED | {"spec.trainer.code": CODE}, {}),
    "a slice that is only checked": (OWN_LOOP | {"spec.trainer.command": SLICE_CHECK_COMMAND}, {}),
    "code in a Secret": ({"spec.trainer.code": CODE}, {}),
    "code elsewhere": ({"spec.trainer.code": CODE | {"uri": "gs://bucket/digits/code.tar.gz"}}, {}),
    "code of a loop of the user's own": (OWN_LOOP | {"spec.trainer.code": CODE}, {}),
}


@pytest.mark.parametrize(("changes", "worker"), CHANGES.values(), ids=CHANGES)
def test_what_a_job_changes(changes: Object, worker: Object, snapshot: SnapshotAssertion) -> None:
    assert difference(with_variables(**worker), with_variables(changes, **worker)) == snapshot


def test_a_placeholder_needs_a_node_that_a_worker_could_take() -> None:
    changed = job({"spec.trainer.runtimeClassName": "gvisor", "spec.trainer.nodeSelector": {"pool": "p"}})
    (option,) = options_of(changed)
    (placeholder, *_) = (create.body["spec"] for create in missing_placeholders(option, 0, ()))
    worker = worker_pod(changed, option.resolution, WorkerId(1, 0, 0))["spec"]
    for field in ("runtimeClassName", "nodeSelector", "tolerations"):
        assert placeholder[field] == worker[field]


def test_the_users_variables_come_last_and_unchanged() -> None:
    given = [
        {"name": "ADDRESS", "value": "$(MASTER_ADDR):1"},
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "token", "key": "t", "optional": True}}},
        {"name": "HOME", "value": "/home/me"},
    ]
    found = container({"spec.trainer.env": given})["env"]
    assert found[-3:] == given
    assert [variable["name"] for variable in found].count("HOME") == 1


def test_the_operators_variables_win_over_the_users_sources_and_the_users_own_over_defaults() -> None:
    """Of two sources the kubelet takes the last one, and a variable of the pod wins over both."""
    users = {"configMapRef": {"name": "mine"}}
    changes = {"spec.trainer.envFrom": [users], "spec.trainer.env": [{"name": "HOME", "value": "/home/me"}]}
    found = container(changes)
    assert found["envFrom"] == [users, {"configMapRef": {"name": "digits-3-env"}}]
    shared = env_config_map(*resolved(changes), 3)["data"]
    assert {variable["name"] for variable in found["env"]} & shared.keys() == {"HOME"}


@pytest.mark.parametrize("changes", [{}, OWN_LOOP, ON_CPU], ids=["an entrypoint", "a loop of one's own", "on CPU"])
def test_the_first_worker_of_the_job_gets_a_token_a_certificate_and_the_address(
    changes: Object, snapshot: SnapshotAssertion
) -> None:
    plain, reporting = (worker_pod(*resolved(changes), WorkerId(3, 0, 0), where) for where in (None, REPORTING))
    assert difference(plain, reporting) == snapshot


@pytest.mark.parametrize("worker", [WorkerId(3, 0, 1), WorkerId(3, 1, 0)])
def test_the_other_workers_are_the_same_with_and_without_reporting(worker: WorkerId) -> None:
    job = resolved(MULTISLICE)
    assert worker_pod(*job, worker, REPORTING) == worker_pod(*job, worker)


@pytest.mark.parametrize("changes", [{}, RESERVATION, ON_CPU, ONE_HOST], ids=["TPU", "reservation", "CPU", "one host"])
def test_nodes_are_avoided_in_every_alternative(changes: Object, snapshot: SnapshotAssertion) -> None:
    plain, careful = (
        worker_pod(*resolved(changes), WorkerId(3, 0, 0), avoid=avoid) for avoid in ((), ("node-a", "node-b"))
    )
    assert difference(plain, careful) == snapshot


def test_nodes_on_demand_are_asked_for_as_if_nothing_had_been_said() -> None:
    assert pod({"spec.slice.provisioning": {"type": "OnDemand"}}) == pod()


def test_a_rehearsal_requests_no_capacity() -> None:
    assert pod(ON_CPU | RESERVATION) == pod(ON_CPU)


def test_every_attempt_mounts_the_same_code() -> None:
    job, resolution = resolved({"spec.trainer.code": CODE})
    first, second = (worker_pod(job, resolution, WorkerId(attempt, 0, 1))["spec"]["volumes"] for attempt in (1, 2))
    assert first[-2:] == second[-2:]
    assert resolution.resolved.code_sha256 == CODE["sha256"]


def test_no_pod_lists_the_hosts() -> None:
    assert "3-3.digits" not in json.dumps(pod(host=1))


def test_the_size_of_a_gangs_objects_is_linear_in_its_hosts() -> None:
    def bytes_of(accelerator_type: str) -> tuple[int, int]:
        job, resolution = resolved(
            {"spec.slice.acceleratorType": accelerator_type, "spec.recipe.globalBatchSize": 4096}
        )
        pods = [worker_pod(job, resolution, worker) for worker in workers(resolution.layout, 1)]
        shared = config_map(job, resolution, 1), env_config_map(job, resolution, 1)
        return len(pods), len(json.dumps([*shared, *pods]))

    (few, small), (many, large) = bytes_of("v4-128"), bytes_of("v4-4096")
    assert (few, many) == (16, 512)
    assert large / many < 1.05 * small / few


# What the workers of a gang share.


def test_only_the_workers_of_a_job_can_reach_each_other(snapshot: SnapshotAssertion) -> None:
    assert text(WorkerNetworkPolicy().network_policy(JOB)) == snapshot


def test_the_operators_settings_let_others_in() -> None:
    scrape = {"from": [{"namespaceSelector": {}}], "ports": [{"port": 8431}]}
    assert WorkerNetworkPolicy((scrape,)).network_policy(JOB)["spec"]["ingress"][1:] == [scrape]


def test_nobody_but_the_operator_writes_the_addresses_behind_the_service(snapshot: SnapshotAssertion) -> None:
    assert text(service(JOB)) == snapshot


@pytest.mark.parametrize(
    ("changes", "reporting"),
    [(MULTISLICE, None), (ONE_HOST, REPORTING)],
    ids=["hosts of every slice in the order of their ids", "one host has no list, and the certificate"],
)
def test_the_config_map(changes: Object, reporting: Reporting | None, snapshot: SnapshotAssertion) -> None:
    made = config_map(*resolved(changes), 3, reporting)
    # tests/contract has it in full.
    assert made["data"].pop("run.json")
    assert text(made) == snapshot
