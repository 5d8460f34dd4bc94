"""The pod that tries a job on a CPU before it asks for its slice.

It is a worker's pod without the slice: the same image, environment, volumes, service account and rights, but no
privilege, no chips, no TPU node, no peers and no reports. It has its own ConfigMap, with the run spec of an attempt 0.
"""

from collections.abc import Mapping
from typing import Any

from tpu_contract import protocol
from tpu_training_operator.api import constants
from tpu_training_operator.api.entry_check import CompileCheck
from tpu_training_operator.api.job import TPUTrainingJob
from tpu_training_operator.api.slice import Hardware
from tpu_training_operator.api.trainer import Resources
from tpu_training_operator.domain.job import naming
from tpu_training_operator.domain.job.naming import WorkerId
from tpu_training_operator.domain.job.options import SliceOption
from tpu_training_operator.domain.job.recipe.resolve import Resolution
from tpu_training_operator.domain.objects.shared import config_map, metadata
from tpu_training_operator.domain.objects.worker_env import literal_variables, shared_env
from tpu_training_operator.domain.objects.worker_pod import container_security, worker_pod

Object = dict[str, Any]

REPLICA_ZERO = WorkerId(0, 0, 0)

_REQUESTS = {"cpu": "500m", "memory": "2Gi"}
_REQUESTS_TO_COMPILE = {"cpu": "2", "memory": "8Gi"}
# The limit unless the compile check is required: the job can start without an answer.
_MOST_SECONDS_TO_COMPILE = 300
# Protects a node's other pods from a model that is larger than the node.
_LIMITS = {"memory": "16Gi"}
# Variables about the slice and the other slices of a gang, by their beginnings.
_OF_A_SLICE = ("MEGASCALE_", "TPU_TOPOLOGY", "TPU_ACCELERATOR_TYPE", "TPU_HOST_BOUNDS", "TPU_CHIPS_PER_HOST_BOUNDS")
_ON_A_CPU = {"PJRT_DEVICE": "CPU", "MASTER_ADDR": "localhost", "TPU_WORKER_HOSTNAMES": "localhost"}
_MARK = {"name": "TPUJOB_ENTRY_CHECK", "value": "true"}
# Prefixes of labels and annotations about capacity: Kueue would count the pod, and a ProvisioningRequest bring TPU
# nodes.
_OF_CAPACITY = (f"{constants.KUEUE_GROUP}/", "autoscaling.x-k8s.io/", constants.ANNOTATION_SLICE_TOPOLOGY)
_WHERE = "topology.kubernetes.io/"


def entry_check_config_map(option: SliceOption) -> Object:
    """Returns the pod's ConfigMap: the run spec of the slice, and no host names."""
    body = config_map(option.job, option.resolution, REPLICA_ZERO.attempt)
    return {**body, "data": {constants.RUN_SPEC_FILE: body["data"][constants.RUN_SPEC_FILE]}}


def compile_seconds(job: TPUTrainingJob) -> int | None:
    """Returns how long the pod may compile the step; None if it does not compile."""
    spec, check = job.spec, job.spec.entry_check
    if check.compile is CompileCheck.SKIP or not spec.trainer.is_traceable:
        return None
    if check.compile is CompileCheck.REQUIRE:
        return check.deadline_seconds
    return min(_MOST_SECONDS_TO_COMPILE, check.deadline_seconds) if spec.slice.hardware is Hardware.TPU else None


def entry_check_pod(job: TPUTrainingJob, resolution: Resolution) -> Object:
    """Returns the pod, which ends at its deadline even while no operator runs."""
    body = worker_pod(job, resolution, REPLICA_ZERO)
    worker_metadata = body["metadata"]
    labels = _without_capacity(job.spec.trainer.pod_labels or {}) | naming.entry_check_labels(job.name)
    meta = metadata(job, naming.entry_check_pod_name(job.name), labels)
    meta["annotations"] = _without_capacity(worker_metadata["annotations"])
    (container,) = body["spec"]["containers"]
    spec = {key: value for key, value in body["spec"].items() if key not in ("hostname", "subdomain", "hostNetwork")}
    spec.pop("dnsPolicy", None)
    spec |= {
        "containers": [_container(job, resolution, container)],
        "activeDeadlineSeconds": job.spec.entry_check.deadline_seconds,
        **_nodes(job, spec),
    }
    return {**body, "metadata": meta, "spec": {key: value for key, value in spec.items() if value not in ({}, [])}}


def _container(job: TPUTrainingJob, resolution: Resolution, container: Object) -> Object:
    """Returns the container. All variables are in the pod itself, because it is the only one that they are for."""
    fields = {key: value for key, value in container.items() if key not in ("ports", "envFrom")}
    if user_sources := container["envFrom"][:-1]:
        fields["envFrom"] = user_sources
    seconds = compile_seconds(job)
    compiles = [] if seconds is None else [{"name": protocol.ENV_COMPILE_SECONDS, "value": str(seconds)}]
    own = {variable["name"] for variable in container["env"]}
    shared = shared_env(job, resolution, REPLICA_ZERO.attempt)
    variables = literal_variables({name: value for name, value in shared.items() if name not in own})
    env = [*compiles, *_env([*variables, *container["env"]])]
    fields["securityContext"] = container_security(job.spec.trainer, may_be_privileged=False)
    return {**fields, "command": constants.CHECK_COMMAND, "env": env, "resources": _resources(job)}


def _env(worker_variables: list[Object]) -> list[Object]:
    """Returns the worker's variables for the check, in their order: later ones may refer to earlier ones."""
    variables = [variable for variable in worker_variables if not variable["name"].startswith(_OF_A_SLICE)]
    replaced = {name: {"name": name, "value": value} for name, value in _ON_A_CPU.items()}
    return [_MARK, *(replaced.get(variable["name"], variable) for variable in variables)]


def _resources(job: TPUTrainingJob) -> Object:
    """Returns the user's resources and defaults, except where a default request or limit could contradict the
    user's."""
    resources = job.spec.entry_check.resources or Resources()
    requests, limits = dict(resources.requests or {}), dict(resources.limits or {})
    must_compile = job.spec.entry_check.compile is CompileCheck.REQUIRE
    usual = _REQUESTS_TO_COMPILE if must_compile else _REQUESTS
    return {
        "requests": {name: amount for name, amount in usual.items() if name not in limits} | requests,
        "limits": {name: amount for name, amount in _LIMITS.items() if name not in requests} | limits,
    }


def _nodes(job: TPUTrainingJob, worker: Object) -> Object:
    """Returns fields that select any node without TPUs, in the slice's zone or region if the job names it.

    The user's tolerations stay, because they only add nodes.
    """
    selector = dict(job.spec.trainer.node_selector or {})
    if job.spec.slice.hardware is Hardware.CPU:
        return {"nodeSelector": selector, "affinity": {}}
    tolerations = [t for t in worker["tolerations"] if t.get("key") != constants.TPU_RESOURCE]
    no_tpus = {"matchExpressions": [{"key": constants.NODE_LABEL_ACCELERATOR, "operator": "DoesNotExist"}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [no_tpus]}}
    return {
        "nodeSelector": {key: value for key, value in selector.items() if key.startswith(_WHERE)},
        "affinity": {"nodeAffinity": required},
        "tolerations": tolerations,
    }


def _without_capacity(texts: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in texts.items() if not key.startswith(_OF_CAPACITY)}
