"""The pod of one worker: one host of the slice. Called by the planner and by `tpujob plan`."""

from collections.abc import Sequence
from typing import Any

from tpu_training_operator.api import constants
from tpu_training_operator.api.job import TPUTrainingJob
from tpu_training_operator.api.slice import Hardware, Provisioning
from tpu_training_operator.api.trainer import Trainer
from tpu_training_operator.domain.gang import metadata
from tpu_training_operator.domain.naming import (
    WorkerId,
    config_map_name,
    service_name,
    slice_id,
    worker_labels,
)
from tpu_training_operator.domain.report import Reporting
from tpu_training_operator.domain.resolve import Resolution
from tpu_training_operator.domain.worker_env import worker_env

Object = dict[str, Any]

_RUN_SPEC_VOLUME = "tpu-training-run"
_PROGRESS_VOLUME = "tpu-training-progress"
_ENTRYPOINT_COMMAND = ["python", "-m", "tpu_trainer"]
# Kubernetes' default is five minutes, in which a lost host holds up the whole slice.
_NODE_LOSS_SECONDS = 30
# The kubelet has it replaced when four fifths of it are over.
_TOKEN_SECONDS = 3600


def worker_pod(
    job: TPUTrainingJob,
    resolution: Resolution,
    worker: WorkerId,
    reporting: Reporting | None = None,
    avoid: Sequence[str] = (),
) -> Object:
    """`reporting`: where the job's first worker reports to, None where nobody listens. `avoid`: nodes by name that the
    pod must not be placed on."""
    trainer = job.spec.trainer
    if (worker.slice, worker.host) != (0, 0):
        reporting = None
    name = worker.pod_name(job.name)
    meta = metadata(job, name, (trainer.pod_labels or {}) | worker_labels(job.name, job.uid, worker))
    if trainer.pod_annotations:
        meta["annotations"] = dict(trainer.pod_annotations)
    spec: Object = {
        "hostname": name,
        "subdomain": service_name(job.name),
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": trainer.termination_grace_period_seconds,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [_container(job, resolution, worker, reporting)],
        "volumes": _volumes(job, worker, reporting),
        "nodeSelector": _node_selector(job, resolution),
        "affinity": _pool_affinity(job, resolution, worker) | _node_affinity(avoid),
        "tolerations": _tolerations(job),
        "imagePullSecrets": [secret.model_dump() for secret in trainer.image_pull_secrets or ()],
        "serviceAccountName": trainer.service_account_name,
        "priorityClassName": trainer.priority_class_name,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": meta,
        "spec": {key: value for key, value in spec.items() if value not in (None, {}, [])},
    }


def _container(job: TPUTrainingJob, resolution: Resolution, worker: WorkerId, reporting: Reporting | None) -> Object:
    trainer = job.spec.trainer
    container: Object = {
        "name": constants.CONTAINER_NAME,
        "image": trainer.image,
        "imagePullPolicy": trainer.image_pull_policy,
        "command": trainer.command or _ENTRYPOINT_COMMAND,
        "args": trainer.args,
        "env": worker_env(job, resolution, worker, reporting),
        "envFrom": [source.model_dump(by_alias=True, exclude_none=True) for source in trainer.env_from or ()],
        "resources": _resources(job, resolution),
        "volumeMounts": _volume_mounts(trainer, reporting),
        "terminationMessagePath": constants.TERMINATION_LOG,
        # A loop of the user's own writes no message; the end of its log says why it failed.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    return {key: value for key, value in container.items() if value not in (None, {}, [])}


def _resources(job: TPUTrainingJob, resolution: Resolution) -> Object:
    given = job.spec.trainer.resources
    resources: Object = given.model_dump(exclude_none=True) if given else {}
    if job.spec.slice.hardware is Hardware.TPU:
        # A pod takes the whole host: the device plugin refuses a part of its chips.
        chips = {constants.TPU_RESOURCE: str(resolution.layout.shape.chips_per_host)}
        resources = {kind: {**resources.get(kind, {}), **chips} for kind in ("requests", "limits")}
    return resources


def _volumes(job: TPUTrainingJob, worker: WorkerId, reporting: Reporting | None) -> list[Object]:
    volumes = [v.model_dump(by_alias=True, exclude_none=True) for v in job.spec.trainer.volumes or ()]
    shared = config_map_name(job.name, worker.attempt)
    items = [{"key": constants.RUN_SPEC_FILE, "path": constants.RUN_SPEC_FILE}]
    volumes.append({"name": _RUN_SPEC_VOLUME, "configMap": {"name": shared, "items": items}})
    if reporting is not None:
        volumes.append({"name": _PROGRESS_VOLUME, "projected": _progress_files(shared)})
    return volumes


def _progress_files(shared: str) -> Object:
    """The token that says which pod reports, and the certificate to trust.

    The kubelet keeps a token to its owner only where the pod names a user or an fsGroup; these pods leave the user to
    the image, so the mode alone lets it read. The certificate is optional: without it nothing can be reported, and the
    training runs all the same (an attempt whose ConfigMap is of an operator that did not listen yet).
    """
    token = {"path": "token", "audience": constants.PROGRESS_AUDIENCE, "expirationSeconds": _TOKEN_SECONDS}
    items = [{"key": constants.CA_CERTIFICATE_KEY, "path": "ca.crt"}]
    certificate = {"name": shared, "items": items, "optional": True}
    return {"defaultMode": 0o444, "sources": [{"serviceAccountToken": token}, {"configMap": certificate}]}


def _volume_mounts(trainer: Trainer, reporting: Reporting | None) -> list[Object]:
    mounts = [mount.model_dump(by_alias=True, exclude_none=True) for mount in trainer.volume_mounts or ()]
    mounts.append({"name": _RUN_SPEC_VOLUME, "mountPath": constants.RUN_SPEC_DIRECTORY, "readOnly": True})
    if reporting is not None:
        mounts.append({"name": _PROGRESS_VOLUME, "mountPath": constants.PROGRESS_DIRECTORY, "readOnly": True})
    return mounts


def _node_selector(job: TPUTrainingJob, resolution: Resolution) -> dict[str, str]:
    selector = dict(job.spec.trainer.node_selector or {})
    shape = resolution.layout.shape
    if job.spec.slice.hardware is Hardware.TPU and shape.machine_type is not None:
        selector |= {
            constants.NODE_LABEL_ACCELERATOR: shape.machine_type.label,
            constants.NODE_LABEL_TOPOLOGY: shape.topology,
            # Two hosts of 4 chips and one of 8 carry the same two labels above (2x4 on v5e and v6e).
            constants.NODE_LABEL_CHIPS_PER_HOST: str(shape.chips_per_host),
            **_capacity(job.spec.slice.provisioning),
        }
    return selector


def _capacity(provisioning: Provisioning | None) -> dict[str, str]:
    """GKE's node labels for the way the chips are paid for; its autoscaler makes such nodes for pods that ask."""
    if provisioning is None:
        return {}
    labels = {
        constants.NODE_LABEL_SPOT: "true" if provisioning.spot else None,
        constants.NODE_LABEL_RESERVATION: provisioning.reservation,
        constants.NODE_LABEL_FLEX_START: "true" if provisioning.flex_start else None,
        constants.NODE_LABEL_QUEUED: "true" if provisioning.queued else None,
    }
    return {label: value for label, value in labels.items() if value is not None}


def _pool_affinity(job: TPUTrainingJob, resolution: Resolution, worker: WorkerId) -> Object:
    """One slice, one node pool: chips of two pools have no interconnect, and a pool is exactly one slice.

    Every worker wants the pool of its own slice and none where another slice's workers are; the scheduler lets
    the first one pass its own affinity.
    """
    if job.spec.slice.hardware is Hardware.CPU or resolution.layout.hosts_per_slice == 1:
        return {}
    own = slice_id(job.uid, worker)
    return {
        "podAffinity": _required({"key": constants.LABEL_SLICE_ID, "operator": "In", "values": [own]}),
        "podAntiAffinity": _required(
            {"key": constants.LABEL_SLICE_ID, "operator": "Exists"},
            {"key": constants.LABEL_SLICE_ID, "operator": "NotIn", "values": [own]},
        ),
    }


def _node_affinity(avoid: Sequence[str]) -> Object:
    """A field can be compared with one value only, so there is a requirement per node; a term wants all of them."""
    if not avoid:
        return {}
    others = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in avoid]
    terms = {"nodeSelectorTerms": [{"matchFields": others}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}


def _required(*expressions: Object) -> Object:
    term = {
        "labelSelector": {"matchExpressions": list(expressions)},
        "namespaceSelector": {},
        "topologyKey": constants.NODE_LABEL_NODE_POOL,
    }
    return {"requiredDuringSchedulingIgnoredDuringExecution": [term]}


def _tolerations(job: TPUTrainingJob) -> list[Object]:
    given = [t.model_dump(by_alias=True, exclude_none=True) for t in job.spec.trainer.tolerations or ()]
    lost = [
        {
            "key": f"node.kubernetes.io/{state}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": _NODE_LOSS_SECONDS,
        }
        for state in ("not-ready", "unreachable")
    ]
    tpu = [{"key": constants.TPU_RESOURCE, "operator": "Equal", "value": "present", "effect": "NoSchedule"}]
    if job.spec.slice.hardware is Hardware.CPU:
        return [*given, *lost]
    # GKE taints these nodes with their own label.
    capacity = [
        {"key": label, "operator": "Equal", "value": value, "effect": "NoSchedule"}
        for label, value in _capacity(job.spec.slice.provisioning).items()
        if label != constants.NODE_LABEL_RESERVATION
    ]
    return [*given, *tpu, *capacity, *lost]
