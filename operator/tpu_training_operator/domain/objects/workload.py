"""Builds the Workload of a job in a queue, and adds Kueue's answer to the job's pods.

Its one pod set comprises all workers of all slices, because they all request the same. It holds only what Kueue's
decision depends on: no environment, no volumes, no names.
"""

import hashlib
from typing import Any

import orjson

from tpu_training_operator.api import constants
from tpu_training_operator.api.job import TPUTrainingJob
from tpu_training_operator.domain.cluster_state.workload import (
    POD_SET,
    PodSettings,
    Priority,
    Queue,
    conflict,
    workload_name,
)
from tpu_training_operator.domain.job.naming import job_labels
from tpu_training_operator.domain.job.recipe.resolve import Resolution
from tpu_training_operator.domain.objects.shared import metadata

Object = dict[str, Any]

_CONTAINER = ("name", "image", "resources")
# Fields that decide a Workload's place in line, in either version of the API.
_TURN = ("queueName", "priority", "priorityClassRef", "priorityClassName", "priorityClassSource")
_SPEC = ("nodeSelector", "tolerations", "restartPolicy", "priorityClassName", "serviceAccountName")


def workload(job: TPUTrainingJob, resolution: Resolution, queue: Queue, worker: Object, number: int = 0) -> Object:
    """Returns the job's Workload. `worker`: the pod of any worker, before Kueue adds to it. `number`: the slice's
    number among those of the job."""
    pod_sets = [{"name": POD_SET, "count": resolution.layout.hosts, "template": _template(job, worker)}]
    spec: Object = {"queueName": queue.name, "active": True, "podSets": pod_sets}
    if queue.priority is not None:
        spec |= _priority(queue.priority, queue.version)
    meta = metadata(job, workload_name(job.name, job.uid, number), _labels(job))
    digest = hashlib.sha256(orjson.dumps(pod_sets, option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]
    meta["annotations"] = {constants.ANNOTATION_WORKERS: digest}
    return {"apiVersion": queue.version, "kind": "Workload", "metadata": meta, "spec": spec}


def is_for_other_workers(body: Object, asked: Object) -> bool:
    """Tells whether the Workload `body` was made for other workers than `asked`. It compares digests, because Kueue and
    the API server complete pod sets."""
    made, wanted = (workload["metadata"].get("annotations") or {} for workload in (body, asked))
    digest = made.get(constants.ANNOTATION_WORKERS)
    return digest is not None and digest != wanted[constants.ANNOTATION_WORKERS]


def _template(job: TPUTrainingJob, worker: Object) -> Object:
    """Returns the template of the pod set, without the affinity to a node pool, which differs between slices."""
    spec = worker["spec"]
    chosen: Object = {name: spec[name] for name in _SPEC if name in spec}
    chosen["containers"] = [
        {name: container[name] for name in _CONTAINER if name in container} for container in spec["containers"]
    ]
    if node_affinity := (spec.get("affinity") or {}).get("nodeAffinity"):
        chosen["affinity"] = {"nodeAffinity": node_affinity}
    return {"metadata": {"labels": job_labels(job.name)}, "spec": chosen}


def with_priority(body: Object, priority: Priority) -> Object:
    return {**body, "spec": {**body["spec"], **_priority(priority, str(body["apiVersion"]))}}


def with_queue_of(body: Object, present: Object) -> Object:
    """Returns the Workload `body` in the queue and with the priority of the Workload `present`. With a higher priority,
    or from a queue that lends to that of `present`, Kueue would evict the job to admit it."""
    unchanged = {name: value for name, value in body["spec"].items() if name not in _TURN}
    return {**body, "spec": unchanged | {name: present["spec"][name] for name in _TURN if name in present["spec"]}}


def adopt(job: TPUTrainingJob, body: Object) -> Object:
    """Returns the Workload `body`, which had no owner, with the job as its owner: it is watched, and deleted with the
    job."""
    meta = body["metadata"]
    owned = metadata(job, meta["name"], {**(meta.get("labels") or {}), **_labels(job)})
    others = list(meta.get("ownerReferences") or ())
    return {**body, "metadata": {**meta, **owned, "ownerReferences": [*others, *owned["ownerReferences"]]}}


def explain_misfit(job: TPUTrainingJob, resolution: Resolution, body: Object, worker: Object) -> str:
    """Explains why a Workload that was made elsewhere is not for this job; empty if it is. Without this check, a job
    could use more than Kueue counts for it."""
    name, hosts = body["metadata"]["name"], resolution.layout.hosts
    pod_sets: list[Object] = list(body["spec"].get("podSets") or ())
    if [(pods.get("name"), pods.get("count")) for pods in pod_sets] != [(POD_SET, hosts)]:
        counts = ", ".join(f"{pods.get('name')}: {pods.get('count')}" for pods in pod_sets)
        return f"Workload {name} is for other workers ({counts or 'none'}) than the {hosts} of this job"
    wanted, counted = _limits(_template(job, worker)), _limits(pod_sets[0].get("template") or {})
    if any(counted.get(resource) != amount for resource, amount in wanted.items()):
        return f"Workload {name} is for workers with {counted or 'no limits'}; those of this job have {wanted}"
    return ""


def _limits(template: Object) -> dict[str, str]:
    containers = (template.get("spec") or {}).get("containers") or ()
    limits = ((container.get("resources") or {}).get("limits") or {} for container in containers)
    return {resource: str(amount) for amounts in limits for resource, amount in amounts.items()}


def _labels(job: TPUTrainingJob) -> dict[str, str]:
    return {**job_labels(job.name), f"{constants.KUEUE_GROUP}/job-uid": job.uid}


def _priority(priority: Priority, version: str) -> Object:
    is_own = priority.group == constants.KUEUE_GROUP
    if version.endswith("/v1beta1"):
        source = f"{priority.group}/{'workloadpriorityclass' if is_own else 'priorityclass'}"
        return {"priority": priority.value, "priorityClassName": priority.name, "priorityClassSource": source}
    kind = "WorkloadPriorityClass" if is_own else "PriorityClass"
    return {
        "priority": priority.value,
        "priorityClassRef": {"group": priority.group, "kind": kind, "name": priority.name},
    }


def with_pod_settings(pod: Object, settings: PodSettings) -> Object:
    """Returns the worker's pod with what Kueue adds. The pod's own values stay: see `conflicts`."""
    meta, spec = dict(pod["metadata"]), dict(pod["spec"])
    for name, values in (("labels", settings.labels), ("annotations", settings.annotations)):
        meta[name] = {key: value for key, (value, _) in values.items()} | (meta.get(name) or {})
    selector = {key: value for key, (value, _) in settings.node_selector.items()} | (spec.get("nodeSelector") or {})
    if selector:
        spec["nodeSelector"] = selector
    known = list(spec.get("tolerations") or ())
    spec["tolerations"] = [*known, *(toleration for toleration in settings.tolerations if toleration not in known)]
    return {**pod, "metadata": meta, "spec": spec}


def conflicts(pod: Object, settings: PodSettings) -> list[str]:
    """Describes the values that Kueue and the job both set and that differ, each with its origin."""
    by_field = {
        "labels": (pod["metadata"].get("labels") or {}, settings.labels),
        "annotations": (pod["metadata"].get("annotations") or {}, settings.annotations),
        "nodeSelector": (pod["spec"].get("nodeSelector") or {}, settings.node_selector),
    }
    differences = [
        conflict(name, key, (has[key], "the job"), asked)
        for name, (has, wanted) in by_field.items()
        for key, asked in wanted.items()
        if key in has and has[key] != asked[0]
    ]
    return [*settings.conflicts, *differences]
