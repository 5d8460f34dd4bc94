"""The objects of a gang, in full: what GKE, torch_xla and a restricted namespace require."""

import json

import pytest

from tests.planner.worker_objects import Object, container, env, pod
from tests.unit.jobs import ABSENT, job_body, resolved
from tpu_training_operator.api.constants import RESERVED_ENV
from tpu_training_operator.api.validation import parse_job
from tpu_training_operator.domain.cluster_state.worker_reports import Reporting
from tpu_training_operator.domain.job.naming import WorkerId, workers
from tpu_training_operator.domain.objects.shared import WorkerNetworkPolicy, config_map
from tpu_training_operator.domain.objects.worker_pod import worker_pod

OWN_LOOP = {"spec.trainer.entrypoint": ABSENT, "spec.trainer.command": ["python", "train.py"]}


OWNER = {
    "apiVersion": "tpu-operator.dev/v1alpha1",
    "kind": "TPUTrainingJob",
    "name": "digits",
    "uid": "8b6b0c5e-1f7a-4c39-9d11-0242ac120002",
    "controller": True,
    "blockOwnerDeletion": True,
}

LEADER = "3-0.digits.default.svc"

ENV = {
    "MASTER_ADDR": LEADER,
    "MASTER_PORT": "12355",
    "TPU_WORKER_ID": "2",
    "JOB_COMPLETION_INDEX": "2",
    "TPUJOB_GLOBAL_BATCH_SIZE": "128",
    "TPUJOB_PER_REPLICA_BATCH_SIZE": "8",
    "TPUJOB_ACCUMULATION_STEPS": "1",
    "TPUJOB_TRAIN_STEPS": "300",
    "TPUJOB_LEARNING_RATE": "0.1",
    "TPUJOB_WARMUP_STEPS": "0",
    "TPUJOB_NUM_HOSTS": "4",
    "TPUJOB_HOST_INDEX": "2",
    "TPUJOB_SLICE_INDEX": "0",
    "TPUJOB_ATTEMPT": "3",
    "TPUJOB_TERMINATION_LOG": "/dev/termination-log",
    "TPUJOB_RUN_SPEC": "/etc/tpu-training/run.json",
    "HOME": "/tmp",
    "USER": "trainer",
}

ONE_HOST = {"spec.slice.acceleratorType": "v5litepod-4"}
MULTISLICE = {"spec.slice.count": 2, "spec.trainer.backend": "XLASPMD"}


# A pod on TPUs, in full.


def test_its_metadata() -> None:
    assert pod()["metadata"] == {
        "name": "digits-3-0-2",
        "namespace": "default",
        "labels": {
            "app.kubernetes.io/managed-by": "tpu-training-operator",
            "app.kubernetes.io/component": "worker",
            "tpu-operator.dev/job-name": "digits",
            "tpu-operator.dev/attempt": "3",
            "tpu-operator.dev/slice-index": "0",
            "tpu-operator.dev/host-index": "2",
        },
        "annotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"},
        "ownerReferences": [OWNER],
    }


def test_its_environment() -> None:
    assert env() == ENV | {"PJRT_DEVICE": "TPU"}


def test_its_host_list_comes_from_the_config_map() -> None:
    [hosts] = [variable for variable in container()["env"] if "valueFrom" in variable]
    reference = {"configMapKeyRef": {"name": "digits-3", "key": "hosts-0"}}
    assert hosts == {"name": "TPU_WORKER_HOSTNAMES", "valueFrom": reference}


def test_its_container_except_the_environment() -> None:
    assert {key: value for key, value in container().items() if key != "env"} == {
        "name": "trainer",
        "image": "localhost/tpu-examples:1",
        "command": ["python", "-m", "tpu_trainer"],
        "resources": {
            "requests": {"google.com/tpu": "4", "cpu": "84", "memory": "144G"},
            "limits": {"google.com/tpu": "4"},
        },
        "volumeMounts": [
            {"name": "tpu-training-shm", "mountPath": "/dev/shm"},
            {"name": "tpu-training-run", "mountPath": "/etc/tpu-training", "readOnly": True},
        ],
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }


def test_its_spec_except_the_container_and_the_placement() -> None:
    placement = {"containers", "nodeSelector", "affinity", "tolerations"}
    items = [{"key": "run.json", "path": "run.json"}]
    assert {key: value for key, value in pod()["spec"].items() if key not in placement} == {
        "hostname": "3-2",
        "subdomain": "digits",
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 30,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "volumes": [
            {"name": "tpu-training-shm", "emptyDir": {"medium": "Memory"}},
            {"name": "tpu-training-run", "configMap": {"name": "digits-3", "items": items}},
        ],
    }


def test_its_node() -> None:
    assert pod()["spec"]["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
        "cloud.google.com/gke-tpu-topology": "4x4",
        "cloud.google.com/gke-accelerator-count": "4",
    }


def test_worker_0_has_a_node_pool_without_other_slices_and_its_peers_follow_it() -> None:
    own, key = "8b6b0c5e1f7a4c399d110242ac120002-3-0", "tpu-operator.dev/slice-id"
    same = {"key": key, "operator": "In", "values": [own]}

    def required(*terms: Object) -> Object:
        return {"requiredDuringSchedulingIgnoredDuringExecution": list(terms)}

    def term(*expressions: Object, **namespaces: Object) -> Object:
        selector = {"labelSelector": {"matchExpressions": list(expressions)}}
        return selector | {"topologyKey": "cloud.google.com/gke-nodepool"} | namespaces

    assert pod()["spec"]["affinity"] == {"podAffinity": required(term(same, namespaceSelector={}))}
    # With it, a peer would be exempt from its own affinity, and could come before worker 0.
    assert key not in pod()["metadata"]["labels"]
    leader = pod(host=0)
    assert leader["metadata"]["labels"][key] == own
    labels = {"job-name": "digits", "attempt": "3", "slice-index": "0"}
    peers = [{"key": f"tpu-operator.dev/{name}", "operator": "In", "values": [value]} for name, value in labels.items()]
    assert leader["spec"]["affinity"]["podAffinity"] == required(term(*peers))
    others = term({"key": key, "operator": "Exists"}, {**same, "operator": "NotIn"}, namespaceSelector={})
    stopping = term({"key": "tpu-operator.dev/slice-index", "operator": "Exists"}, namespaceSelector={})
    assert leader["spec"]["affinity"]["podAntiAffinity"] == required(others) | {
        "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": stopping}]
    }


@pytest.mark.parametrize(
    "spec",
    [
        {"spec.slice.hardware": "CPU"},
        ONE_HOST,
    ],
    ids=["on CPUs", "of one host"],
)
def test_a_slice_that_fills_no_node_pool_takes_none(spec: Object) -> None:
    leader = pod(spec, host=0)
    assert "tpu-operator.dev/slice-id" not in leader["metadata"]["labels"]
    assert "affinity" not in leader["spec"]


def test_it_tolerates_tpu_nodes_and_a_lost_node_for_half_a_minute() -> None:
    lost = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30}
    assert pod()["spec"]["tolerations"] == [
        {"key": "google.com/tpu", "operator": "Equal", "value": "present", "effect": "NoSchedule"},
        {"key": "node.kubernetes.io/not-ready", **lost},
        {"key": "node.kubernetes.io/unreachable", **lost},
    ]


# What other jobs change.

ON_CPU = {"spec.slice.hardware": "CPU"}


def capacity(provisioning: Object) -> tuple[Object, Object, Object]:
    """What a pod on such capacity adds: node labels, tolerations, alternatives of its affinity."""
    plain, found = pod()["spec"], pod({"spec.slice.provisioning": provisioning})["spec"]
    tolerated = {t["key"]: t["value"] for t in found["tolerations"] if t not in plain["tolerations"]}
    terms = found["affinity"].get("nodeAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution", {})
    return additions(plain["nodeSelector"], found["nodeSelector"]), tolerated, terms.get("nodeSelectorTerms", [])


@pytest.mark.parametrize(("way", "name"), [("Spot", "spot"), ("FlexStart", "flex-start"), ("Queued", "queued")])
def test_nodes_of_a_capacity_are_found_by_their_label_and_tolerated_with_it(way: str, name: str) -> None:
    label = {f"cloud.google.com/gke-{name}": "true"}
    assert capacity({"type": way}) == (label, label, [])


def test_nodes_on_demand_are_asked_for_as_if_nothing_had_been_said() -> None:
    assert capacity({"type": "OnDemand"}) == ({}, {}, [])


SPECIFIC = [
    {"matchExpressions": [{"key": "cloud.google.com/reservation-affinity", "operator": "In", "values": ["specific"]}]},
    {"matchExpressions": [{"key": "cloud.google.com/reservation-affinity", "operator": "DoesNotExist"}]},
]


@pytest.mark.parametrize(
    ("given", "labels"),
    [
        ("r-1", {"name": "r-1"}),
        ("projects/p/reservations/r", {"name": "r", "project": "p"}),
        ("r/reservationBlocks/b", {"name": "r", "blocks": "b"}),
        (
            "projects/p-1/reservations/r/reservationBlocks/b/reservationSubBlocks/s",
            {"name": "r", "project": "p-1", "blocks": "b", "subblocks": "s"},
        ),
    ],
)
def test_a_reservations_nodes_are_found_whether_the_autoscaler_or_a_user_made_them(
    given: str, labels: dict[str, str]
) -> None:
    asked, tolerated, alternatives = capacity({"type": "Reservation", "reservation": given})
    assert asked == {f"cloud.google.com/reservation-{name}": value for name, value in labels.items()}
    assert tolerated == {"cloud.google.com/reservation-name": labels["name"]}
    assert alternatives == SPECIFIC


def test_a_node_is_avoided_in_every_alternative() -> None:
    job = resolved({"spec.slice.provisioning": {"type": "Reservation", "reservation": "r"}})
    careful = worker_pod(*job, WorkerId(3, 0, 2), avoid=["node-a"])["spec"]["affinity"]["nodeAffinity"]
    fields = {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["node-a"]}]}
    terms = careful["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert terms == [term | fields for term in SPECIFIC]


def test_a_rehearsal_requests_no_capacity() -> None:
    spec = pod(ON_CPU | {"spec.slice.provisioning": {"type": "Reservation", "reservation": "r"}})["spec"]
    assert not {"nodeSelector", "affinity"} & spec.keys()
    assert [t for t in spec["tolerations"] if "google" in t["key"]] == []


def test_a_rehearsal_is_the_same_pod_without_tpus() -> None:
    tpu, cpu = pod(), pod(ON_CPU)
    assert env(ON_CPU) == ENV | {"PJRT_DEVICE": "CPU"}
    assert "resources" not in cpu["spec"]["containers"][0]
    assert "nodeSelector" not in cpu["spec"]
    assert "affinity" not in cpu["spec"]
    assert [t["key"] for t in cpu["spec"]["tolerations"]] == [
        "node.kubernetes.io/not-ready",
        "node.kubernetes.io/unreachable",
    ]
    placement = {"containers", "nodeSelector", "affinity", "tolerations"}
    assert {k: v for k, v in cpu["spec"].items() if k not in placement} == {
        k: v for k, v in tpu["spec"].items() if k not in placement
    }


def test_without_torch_xla_there_is_no_pjrt_device() -> None:
    assert env(ON_CPU | {"spec.trainer.backend": "Torch"}) == ENV


def test_a_slice_of_one_host_needs_no_dns() -> None:
    found = env(ONE_HOST, host=0)
    assert (found["TPU_WORKER_HOSTNAMES"], found["MASTER_ADDR"]) == ("localhost", "localhost")
    assert "hosts-0" not in config_map(*resolved(ONE_HOST), 3)["data"]


def test_single_hosts_of_a_rehearsal_meet_through_dns() -> None:
    found = env(ONE_HOST | ON_CPU | {"spec.slice.count": 2}, slice_index=1, host=0)
    assert (found["TPU_WORKER_HOSTNAMES"], found["MASTER_ADDR"]) == ("localhost", LEADER)


@pytest.mark.parametrize(("machine_type", "chips"), [("ct5lp-hightpu-4t", "4"), ("ct5lp-hightpu-8t", "8")])
def test_chips_per_host_distinguish_two_machine_types_of_one_shape(machine_type: str, chips: str) -> None:
    changes = {"spec.slice.acceleratorType": "v5litepod-8", "spec.slice.machineType": machine_type}
    found = pod(changes, host=0)
    assert found["spec"]["nodeSelector"]["cloud.google.com/gke-accelerator-count"] == chips
    assert found["spec"]["containers"][0]["resources"]["limits"] == {"google.com/tpu": chips}


def test_every_slice_of_a_multislice_job_knows_the_others() -> None:
    several = env(MULTISLICE, slice_index=1, host=1)
    assert {name: value for name, value in several.items() if name.startswith("MEGASCALE_")} == {
        "MEGASCALE_COORDINATOR_ADDRESS": LEADER,
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_PORT": "8080",
        "MEGASCALE_SLICE_ID": "1",
    }
    assert several["MASTER_ADDR"] == LEADER
    assert (several["TPU_WORKER_ID"], several["TPUJOB_HOST_INDEX"], several["TPUJOB_NUM_HOSTS"]) == ("1", "5", "8")
    assert several["TPUJOB_SLICE_INDEX"] == "1"


def test_the_operator_sets_only_variables_that_users_may_not() -> None:
    names = {variable["name"] for variable in container(MULTISLICE | {"spec.data": {"uri": "gs://b"}})["env"]}
    free = {name for name in names if name not in RESERVED_ENV and not name.startswith("TPUJOB_")}
    assert free == {"HOME", "USER"}


def test_what_torch_xla_sets_for_each_of_its_processes_is_left_to_it() -> None:
    per_process = {
        "TPU_PROCESS_BOUNDS",
        "TPU_CHIPS_PER_PROCESS_BOUNDS",
        "TPU_VISIBLE_CHIPS",
        "CLOUD_TPU_TASK_ID",
        "TPU_PROCESS_ADDRESSES",
        "TPU_PROCESS_PORT",
    }
    assert per_process & {variable["name"] for variable in container()["env"]} == set()


def test_the_data_is_named_in_the_environment() -> None:
    changes = {"spec.data": {"uri": "gs://bucket/digits"}}
    assert env(changes)["TPUJOB_DATA_URI"] == "gs://bucket/digits"


def test_the_checkpoints_are_named_in_the_environment() -> None:
    told = env({"spec.checkpoint": {"uri": "/mnt/digits/"}})["TPUJOB_CHECKPOINT_URI"]
    assert told == "/mnt/digits/default/digits"


@pytest.mark.parametrize(
    ("parameter", "variable"),
    [
        ("hidden", "TPUJOB_PARAMETER_HIDDEN"),
        ("drop-out.2", "TPUJOB_PARAMETER_DROP_OUT_2"),
        ("naïve", "TPUJOB_PARAMETER_NA_VE"),
        ("", "TPUJOB_PARAMETER_"),
    ],
)
def test_every_parameter_is_a_variable(parameter: str, variable: str) -> None:
    assert env({"spec.recipe.parameters": {parameter: "128"}})[variable] == "128"


def test_a_parameter_that_looks_like_a_reference_reaches_the_worker_unchanged() -> None:
    found = env({"spec.recipe.parameters": {"pattern": "$(HOME) $$x"}})["TPUJOB_PARAMETER_PATTERN"]
    assert found == "$$(HOME) $$$$x", "the kubelet makes one dollar sign of two"


# The network policy.

JOB = parse_job(job_body())


def test_only_the_workers_of_a_job_can_reach_each_other() -> None:
    own = {"podSelector": {"matchLabels": {"tpu-operator.dev/job-name": "digits"}}}
    assert WorkerNetworkPolicy().network_policy(JOB) == {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {
            "name": "digits",
            "namespace": "default",
            "labels": {
                "app.kubernetes.io/managed-by": "tpu-training-operator",
                "app.kubernetes.io/component": "worker",
                "tpu-operator.dev/job-name": "digits",
            },
            "ownerReferences": [OWNER],
        },
        "spec": {**own, "policyTypes": ["Ingress"], "ingress": [{"from": [own]}]},
    }


def test_the_operators_settings_let_others_in() -> None:
    scrape = {"from": [{"namespaceSelector": {}}], "ports": [{"port": 8431}]}
    assert WorkerNetworkPolicy((scrape,)).network_policy(JOB)["spec"]["ingress"][1:] == [scrape]


# What the reporting worker has in addition.

REPORTING = Reporting("https://operator.tpu-system.svc:8443", "-----BEGIN CERTIFICATE-----\n")


def additions(plain: Object, other: Object) -> Object:
    """What `other` has and `plain` lacks; lists only grow at the end."""
    found: Object = {}
    for key, value in other.items():
        before = plain.get(key)
        if isinstance(before, dict):
            found |= {key: more} if (more := additions(before, value)) else {}
        elif isinstance(before, list):
            assert value[: len(before)] == before
            found |= {key: value[len(before) :]} if value[len(before) :] else {}
        elif value != before:
            found[key] = value
    return found


@pytest.mark.parametrize("changes", [{}, OWN_LOOP, ON_CPU], ids=["an entrypoint", "a loop of one's own", "on CPU"])
def test_the_first_worker_of_the_job_gets_a_token_a_certificate_and_the_address(changes: Object) -> None:
    first = WorkerId(3, 0, 0)
    plain, reporting = (worker_pod(*resolved(changes), first, where) for where in (None, REPORTING))
    [before], [after] = plain["spec"].pop("containers"), reporting["spec"].pop("containers")
    place, files = "https://operator.tpu-system.svc:8443/apis", "/var/run/secrets/tpu-operator.dev/progress"
    told = {
        "TPUJOB_PROGRESS_URL": (
            f"{place}/tpu-operator.dev/v1alpha1/namespaces/default/tputrainingjobs/digits/progress"
        ),
        "TPUJOB_PROGRESS_TOKEN_FILE": f"{files}/token",
        "TPUJOB_PROGRESS_CA_FILE": f"{files}/ca.crt",
        "KUBEFLOW_TRAINER_SERVER_URL": (
            f"{place}/trainer.kubeflow.org/v1alpha1/namespaces/default/trainjobs/digits/status"
        ),
        "KUBEFLOW_TRAINER_SERVER_TOKEN": f"{files}/token",
        "KUBEFLOW_TRAINER_SERVER_CA_CERT": f"{files}/ca.crt",
    }
    usual = before.pop("env")
    assert {v["name"]: v["value"] for v in after.pop("env") if v not in usual} == told
    assert additions(before, after) == {
        "volumeMounts": [{"name": "tpu-training-progress", "mountPath": files, "readOnly": True}]
    }
    token = {"path": "token", "audience": "tpu-operator.dev/progress", "expirationSeconds": 3600}
    certificate = {"name": "digits-3", "items": [{"key": "ca.crt", "path": "ca.crt"}], "optional": True}
    sources = [{"serviceAccountToken": token}, {"configMap": certificate}]
    volume = {"name": "tpu-training-progress", "projected": {"defaultMode": 0o444, "sources": sources}}
    assert additions(plain, reporting) == {"spec": {"volumes": [volume]}}


@pytest.mark.parametrize("worker", [WorkerId(3, 0, 1), WorkerId(3, 1, 0)])
def test_the_other_workers_are_the_same_with_and_without_reporting(worker: WorkerId) -> None:
    job = resolved(MULTISLICE)
    assert worker_pod(*job, worker, REPORTING) == worker_pod(*job, worker)


def test_the_certificate_is_in_the_config_map() -> None:
    plain, reporting = (config_map(*resolved(), 3, where) for where in (None, REPORTING))
    assert additions(plain, reporting) == {"data": {"ca.crt": REPORTING.ca_certificate}}


# What avoided nodes change.


def test_an_avoided_node_is_a_requirement_beside_the_slices_own() -> None:
    plain, careful = (worker_pod(*resolved(), WorkerId(3, 0, 2), None, avoid) for avoid in ((), ("node-a", "node-b")))

    def other_than(node: str) -> Object:
        return {"key": "metadata.name", "operator": "NotIn", "values": [node]}

    terms = {"nodeSelectorTerms": [{"matchFields": [other_than("node-a"), other_than("node-b")]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    assert additions(plain, careful) == {"spec": {"affinity": affinity}}


def test_a_rehearsal_and_a_single_host_avoid_a_node_too() -> None:
    for changes in (ON_CPU, {"spec.slice.acceleratorType": "v5litepod-4"}):
        careful = worker_pod(*resolved(changes), WorkerId(3, 0, 0), avoid=["node-a"])
        assert list(careful["spec"]["affinity"]) == ["nodeAffinity"]


# What the user decides.


def test_a_users_own_loop_gets_the_numbers_and_the_run_spec_without_an_entrypoint() -> None:
    changes = OWN_LOOP | {"spec.trainer.args": ["--fast"]}
    own = container(changes)
    assert (own["command"], own["args"]) == (["python", "train.py"], ["--fast"])
    assert env(changes) == ENV | {"PJRT_DEVICE": "TPU"}
    assert [mount["mountPath"] for mount in own["volumeMounts"]] == ["/dev/shm", "/etc/tpu-training"]
    assert [volume["name"] for volume in pod(changes)["spec"]["volumes"]] == ["tpu-training-shm", "tpu-training-run"]
    assert "entrypoint" not in json.loads(config_map(*resolved(changes), 3)["data"]["run.json"])


def test_the_users_variables_come_last_and_unchanged() -> None:
    given = [
        {"name": "ADDRESS", "value": "$(MASTER_ADDR):1"},
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "token", "key": "t", "optional": True}}},
        {"name": "HOME", "value": "/home/me"},
    ]
    found = container({"spec.trainer.env": given})["env"]
    assert found[-3:] == given
    assert [variable["name"] for variable in found].count("HOME") == 1


def test_the_users_pod_fields_pass_through() -> None:
    volumes = [
        {"name": "data", "persistentVolumeClaim": {"claimName": "data", "readOnly": True}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    mounts = [
        {"name": "data", "mountPath": "/data", "subPath": "a", "readOnly": True},
        {"name": "shm", "mountPath": "/s"},
    ]
    tolerations = [{"key": "spot", "operator": "Exists", "tolerationSeconds": 0}]
    found = pod(
        {
            "spec.trainer.volumes": volumes,
            "spec.trainer.volumeMounts": mounts,
            "spec.trainer.tolerations": tolerations,
            "spec.trainer.envFrom": [{"prefix": "X_", "secretRef": {"name": "s"}}, {"configMapRef": {"name": "c"}}],
            "spec.trainer.resources": {"requests": {"cpu": "0.5", "memory": "16Gi"}, "limits": {"memory": 17179869184}},
            "spec.trainer.imagePullSecrets": [{"name": "registry"}],
            "spec.trainer.imagePullPolicy": "Always",
            "spec.trainer.serviceAccountName": "trainer",
            "spec.trainer.priorityClassName": "high",
            "spec.trainer.nodeSelector": {"cloud.google.com/gke-spot": "true"},
            "spec.trainer.podAnnotations": {"gke-gcsfuse/volumes": "true"},
            "spec.trainer.podLabels": {"team": "vision", "app.kubernetes.io/component": "mine"},
            "spec.trainer.terminationGracePeriodSeconds": 0,
        }
    )
    spec, [only] = found["spec"], found["spec"]["containers"]
    assert spec["volumes"][:2] == volumes
    assert only["volumeMounts"][:2] == mounts
    assert spec["tolerations"][0] == tolerations[0]
    assert only["envFrom"] == [{"prefix": "X_", "secretRef": {"name": "s"}}, {"configMapRef": {"name": "c"}}]
    assert only["resources"] == {
        "requests": {"cpu": "0.5", "memory": "16Gi", "google.com/tpu": "4"},
        "limits": {"memory": 17179869184, "google.com/tpu": "4"},
    }
    assert only["imagePullPolicy"] == "Always"
    assert (spec["imagePullSecrets"], spec["serviceAccountName"]) == ([{"name": "registry"}], "trainer")
    assert (spec["priorityClassName"], spec["terminationGracePeriodSeconds"]) == ("high", 0)
    assert spec["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert found["metadata"]["annotations"] == {
        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
        "gke-gcsfuse/volumes": "true",
    }
    assert found["metadata"]["labels"]["team"] == "vision"
    assert found["metadata"]["labels"]["tpu-operator.dev/attempt"] == "3", "the operator's own labels win"


def test_no_pod_lists_the_hosts() -> None:
    assert "3-3.digits" not in json.dumps(pod(host=1))


def test_the_size_of_a_gangs_objects_is_linear_in_its_hosts() -> None:
    def bytes_of(accelerator_type: str) -> tuple[int, int]:
        job, resolution = resolved(
            {"spec.slice.acceleratorType": accelerator_type, "spec.recipe.globalBatchSize": 4096}
        )
        pods = [worker_pod(job, resolution, worker) for worker in workers(resolution.layout, 1)]
        return len(pods), len(json.dumps([config_map(job, resolution, 1), *pods]))

    (few, small), (many, large) = bytes_of("v4-128"), bytes_of("v4-4096")
    assert (few, many) == (16, 512)
    assert large / many < 1.05 * small / few


# A job with code.

CODE = {"uri": "secret://digits-code", "sha256": "0a" * 32}


@pytest.mark.parametrize("attempt", [1, 2])
def test_every_attempt_mounts_the_same_code(attempt: int) -> None:
    job, resolution = resolved({"spec.trainer.code": CODE})
    spec = worker_pod(job, resolution, WorkerId(attempt, 0, 1))["spec"]
    items = [{"key": "code.tar.gz", "path": "code.tar.gz"}]
    assert spec["volumes"][-2:] == [
        {"name": "tpu-training-code", "emptyDir": {}},
        {"name": "tpu-training-archive", "secret": {"secretName": "digits-code", "items": items}},
    ]
    assert spec["containers"][0]["volumeMounts"][-2:] == [
        {"name": "tpu-training-code", "mountPath": "/tpu-training/code"},
        {"name": "tpu-training-archive", "mountPath": "/tpu-training/archive", "readOnly": True},
    ]
    assert json.loads(config_map(job, resolution, attempt)["data"]["run.json"])["code"] == CODE
    assert resolution.resolved.code_sha256 == CODE["sha256"]


def test_code_elsewhere_needs_no_secret() -> None:
    code = CODE | {"uri": "gs://bucket/digits/code.tar.gz"}
    assert [volume["name"] for volume in pod({"spec.trainer.code": code})["spec"]["volumes"]] == [
        "tpu-training-shm",
        "tpu-training-run",
        "tpu-training-code",
    ]
    assert "TPUJOB_CODE_ARCHIVE" not in env({"spec.trainer.code": code})


def test_the_trainer_unpacks_the_code_before_a_command_starts() -> None:
    assert container({"spec.trainer.code": CODE})["command"] == ["python", "-m", "tpu_trainer"]
    started = container(OWN_LOOP | {"spec.trainer.code": CODE})["command"]
    assert started == ["python", "-m", "tpu_trainer", "run-command", "python", "train.py"]
