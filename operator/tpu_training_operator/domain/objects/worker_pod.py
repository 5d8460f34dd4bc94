"""Builds the pod of one worker, which is one host of a slice."""

from collections.abc import Sequence
from typing import Any

from tpu_contract import protocol
from tpu_training_operator.api import constants
from tpu_training_operator.api.catalogue import MachineType
from tpu_training_operator.api.job import TPUTrainingJob
from tpu_training_operator.api.run_policy import SliceCheckPolicy
from tpu_training_operator.api.slice import Formation, Hardware
from tpu_training_operator.api.trainer import SHARED_MEMORY, SecurityContext, Trainer, mounts_shared_memory
from tpu_training_operator.domain.cluster_state.worker_reports import Reporting
from tpu_training_operator.domain.job.naming import (
    WorkerId,
    config_map_name,
    env_config_map_name,
    hostname,
    service_name,
    worker_labels,
)
from tpu_training_operator.domain.job.recipe.resolve import Resolution
from tpu_training_operator.domain.objects.shared import metadata
from tpu_training_operator.domain.objects.worker_env import worker_env
from tpu_training_operator.domain.objects.worker_nodes import affinity, node_selector, pool_labels, tolerations

Object = dict[str, Any]

_RUN_SPEC_VOLUME = "tpu-training-run"
_PROGRESS_VOLUME = "tpu-training-progress"
_SHARED_MEMORY_VOLUME = "tpu-training-shm"
_CODE_VOLUME = "tpu-training-code"
_CODE_ARCHIVE_VOLUME = "tpu-training-archive"
# The autoscaler would drain a node that looks idle, and end the whole gang.
_ANNOTATIONS = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
# The kubelet renews the token after four fifths of this time.
_TOKEN_SECONDS = 3600


def worker_pod(
    job: TPUTrainingJob,
    resolution: Resolution,
    worker: WorkerId,
    reporting: Reporting | None = None,
    avoid: Sequence[str] = (),
) -> Object:
    """Returns the worker's pod. `reporting`: where worker 0 reports to; None if the operator does not listen. `avoid`:
    names of nodes to avoid."""
    trainer = job.spec.trainer
    if (worker.slice, worker.host) != (0, 0):
        reporting = None
    labels = worker_labels(job.name, worker, resolution.option_number) | pool_labels(job, resolution, worker)
    meta = metadata(job, worker.pod_name(job.name), (trainer.pod_labels or {}) | labels)
    meta["annotations"] = _ANNOTATIONS | (trainer.pod_annotations or {})
    if job.spec.slice.formation is not Formation.NODE_POOL and job.spec.slice.hardware is Hardware.TPU:
        meta["annotations"][constants.ANNOTATION_SLICE_TOPOLOGY] = resolution.layout.shape.topology
    spec: Object = {
        "hostname": hostname(resolution.layout, worker),
        "subdomain": service_name(job.name),
        **_network(trainer),
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": trainer.termination_grace_period_seconds,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": _pod_security(trainer),
        "containers": [_container(job, resolution, worker, reporting)],
        "volumes": _volumes(job, worker, reporting),
        "nodeSelector": node_selector(job, resolution),
        "affinity": affinity(job, resolution, worker, avoid),
        "tolerations": tolerations(job),
        "imagePullSecrets": [secret.model_dump() for secret in trainer.image_pull_secrets or ()],
        "serviceAccountName": trainer.service_account_name,
        "priorityClassName": trainer.priority_class_name,
        "runtimeClassName": trainer.runtime_class_name,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": meta,
        "spec": {key: value for key, value in spec.items() if value not in (None, {}, [])},
    }


def without_package_index(pod: Object) -> Object:
    """Returns the pod of a job with trainer.code in a cluster where packages come from a wheelhouse only."""
    (container,) = pod["spec"]["containers"]
    if not any(mount["mountPath"] == constants.CODE_DIRECTORY for mount in container["volumeMounts"]):
        return pod
    source = {"name": protocol.ENV_PACKAGES, "value": protocol.PackageSource.WHEELHOUSE.value}
    return {**pod, "spec": {**pod["spec"], "containers": [{**container, "env": [source, *container["env"]]}]}}


def _container(job: TPUTrainingJob, resolution: Resolution, worker: WorkerId, reporting: Reporting | None) -> Object:
    trainer = job.spec.trainer
    container: Object = {
        "name": constants.CONTAINER_NAME,
        "image": trainer.image,
        "imagePullPolicy": trainer.image_pull_policy,
        "command": _command(job),
        "args": trainer.args,
        "env": worker_env(job, resolution, worker, reporting),
        # Of two sources with the same variable the last one counts.
        "envFrom": [
            *(source.model_dump(by_alias=True, exclude_none=True) for source in trainer.env_from or ()),
            {"configMapRef": {"name": env_config_map_name(job.name, worker.attempt)}},
        ],
        "resources": _resources(job, resolution),
        "volumeMounts": _volume_mounts(trainer, reporting),
        "terminationMessagePath": constants.TERMINATION_LOG,
        # A loop of the user's own writes no message, so the end of its log has to say why it failed.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "ports": _ports(trainer, resolution),
        "securityContext": container_security(trainer),
    }
    return {key: value for key, value in container.items() if value not in (None, {}, [])}


def _command(job: TPUTrainingJob) -> list[str]:
    """Returns the container's command. The trainer itself unpacks the code for its entrypoint."""
    trainer, checks = job.spec.trainer, job.spec.run_policy.slice_check is SliceCheckPolicy.CHECK
    if trainer.command is None:
        return constants.FAST_SLICE_CHECK_COMMAND if checks else constants.TRAINER_COMMAND
    first = constants.FAST_SLICE_CHECK_COMMAND if checks else []
    return [*first, *(constants.CODE_COMMAND if trainer.code is not None else []), *trainer.command]


def _network(trainer: Trainer) -> Object:
    """Returns the network fields. On the node's network a pod would use the node's DNS, which does not know workers, so
    dnsPolicy is set, too."""
    return {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"} if trainer.host_network else {}


def _ports(trainer: Trainer, resolution: Resolution) -> list[Object]:
    """Returns host ports on the node's network, so that the scheduler places no two such pods on one node."""
    if not trainer.host_network:
        return []
    ports = [constants.RENDEZVOUS_PORT, *((constants.MEGASCALE_PORT,) if resolution.layout.slices > 1 else ())]
    return [{"containerPort": port, "hostPort": port, "protocol": "TCP"} for port in ports]


def _pod_security(trainer: Trainer) -> Object:
    security = trainer.security_context or SecurityContext()
    context: Object = {
        "runAsNonRoot": security.run_as_user != 0,
        "runAsUser": security.run_as_user,
        "runAsGroup": security.run_as_group,
        "fsGroup": security.fs_group,
        # Changing the owner of a large volume takes long, and is needed only once.
        "fsGroupChangePolicy": None if security.fs_group is None else "OnRootMismatch",
        "supplementalGroups": security.supplemental_groups,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    return {key: value for key, value in context.items() if value is not None}


def container_security(trainer: Trainer, *, may_be_privileged: bool = True) -> Object:
    security = trainer.security_context
    if security and security.privileged and may_be_privileged:
        # The API server refuses this beside allowPrivilegeEscalation: false.
        return {"privileged": True}
    added = [str(name) for name in security.capabilities.add] if security and security.capabilities else []
    capabilities: Object = {"drop": ["ALL"], **({"add": added} if added else {})}
    return {"allowPrivilegeEscalation": False, "capabilities": capabilities}


def _resources(job: TPUTrainingJob, resolution: Resolution) -> Object:
    user_resources = job.spec.trainer.resources
    resources: Object = user_resources.model_dump(exclude_none=True) if user_resources else {}
    if job.spec.slice.hardware is Hardware.TPU:
        # A pod takes the whole host, because the device plugin refuses a part of its chips.
        chips = {constants.TPU_RESOURCE: str(resolution.layout.shape.chips_per_host)}
        resources = {kind: {**resources.get(kind, {}), **chips} for kind in ("requests", "limits")}
        # Without a request the limit counts as one.
        machine = _share_of_machine(resolution.layout.shape.machine_type)
        resources["requests"] |= {
            name: amount
            for name, amount in machine.items()
            if name not in resources["requests"] and name not in resources["limits"]
        }
    return resources


def _share_of_machine(machine: MachineType | None) -> dict[str, str]:
    """Returns three quarters of the machine's CPUs and memory.

    That is enough for the worker not to be evicted first, and leaves room for what GKE reserves (up to a tenth of the
    memory of the smallest machine) and for the node's own pods.
    """
    if machine is None:
        return {}
    amounts = {
        "cpu": machine.cpus and str(machine.cpus * 3 // 4),
        "memory": machine.memory_gb and f"{machine.memory_gb * 3 // 4}G",
    }
    return {name: amount for name, amount in amounts.items() if amount}


def _volumes(job: TPUTrainingJob, worker: WorkerId, reporting: Reporting | None) -> list[Object]:
    volumes = [v.model_dump(by_alias=True, exclude_none=True) for v in job.spec.trainer.volumes or ()]
    shared = config_map_name(job.name, worker.attempt)
    if not mounts_shared_memory(job.spec.trainer):
        volumes.append({"name": _SHARED_MEMORY_VOLUME, "emptyDir": _shared_memory(job.spec.trainer)})
    items = [{"key": constants.RUN_SPEC_FILE, "path": constants.RUN_SPEC_FILE}]
    volumes.append({"name": _RUN_SPEC_VOLUME, "configMap": {"name": shared, "items": items}})
    if (code := job.spec.trainer.code) is not None:
        # An emptyDir is writable for every user, in every image.
        volumes.append({"name": _CODE_VOLUME, "emptyDir": {}})
        if code.secret is not None:
            items = [{"key": constants.CODE_ARCHIVE_KEY, "path": constants.CODE_ARCHIVE_KEY}]
            volumes.append({"name": _CODE_ARCHIVE_VOLUME, "secret": {"secretName": code.secret, "items": items}})
    if reporting is not None:
        volumes.append({"name": _PROGRESS_VOLUME, "projected": _progress_files(shared)})
    return volumes


def _shared_memory(trainer: Trainer) -> Object:
    """Returns a volume in memory, because the 64 MiB of a container's own /dev/shm are too little for loader processes.

    Without a limit it may grow to the pod's memory limit or to the node's memory. Its content counts as the container's
    memory.
    """
    limit = {} if trainer.shared_memory is None else {"sizeLimit": trainer.shared_memory}
    return {"medium": "Memory", **limit}


def _progress_files(shared: str) -> Object:
    """Returns the token that identifies the reporting pod, and the certificate to trust.

    If the pod names a user or an fsGroup, the kubelet lets only that one read the token. Otherwise it does not know the
    image's user, so the mode lets every user read it. The certificate is optional: an operator that did not listen yet
    may have created the ConfigMap, and then the worker trains without reporting.
    """
    token = {"path": "token", "audience": constants.PROGRESS_AUDIENCE, "expirationSeconds": _TOKEN_SECONDS}
    items = [{"key": constants.CA_CERTIFICATE_KEY, "path": "ca.crt"}]
    certificate = {"name": shared, "items": items, "optional": True}
    return {"defaultMode": 0o444, "sources": [{"serviceAccountToken": token}, {"configMap": certificate}]}


def _volume_mounts(trainer: Trainer, reporting: Reporting | None) -> list[Object]:
    mounts = [mount.model_dump(by_alias=True, exclude_none=True) for mount in trainer.volume_mounts or ()]
    if not mounts_shared_memory(trainer):
        mounts.append({"name": _SHARED_MEMORY_VOLUME, "mountPath": SHARED_MEMORY})
    mounts.append({"name": _RUN_SPEC_VOLUME, "mountPath": constants.RUN_SPEC_DIRECTORY, "readOnly": True})
    if trainer.code is not None:
        mounts.append({"name": _CODE_VOLUME, "mountPath": constants.CODE_DIRECTORY})
        if trainer.code.secret is not None:
            archive = {"name": _CODE_ARCHIVE_VOLUME, "mountPath": constants.CODE_ARCHIVE_DIRECTORY, "readOnly": True}
            mounts.append(archive)
    if reporting is not None:
        mounts.append({"name": _PROGRESS_VOLUME, "mountPath": constants.PROGRESS_DIRECTORY, "readOnly": True})
    return mounts
