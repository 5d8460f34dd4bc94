"""The Workload of a job in a queue, and what Kueue's answer adds to the job's pods.

Its one pod set is all workers of all slices: they need the same, so one line of a quota counts them. It holds what
Kueue decides by, and nothing else of a worker: no environment, no volumes, no names.
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
# What decides when it is its turn, in either version of the API.
_TURN = ("queueName", "priority", "priorityClassRef", "priorityClassName", "priorityClassSource")
_SPEC = ("nodeSelector", "tolerations", "restartPolicy", "priorityClassName", "serviceAccountName")


def workload(job: TPUTrainingJob, resolution: Resolution, queue: Queue, worker: Object, number: int = 0) -> Object:
    """`worker`: the pod of any worker, as it is without Kueue. `number`: of the slice among those of the job."""
    pod_sets = [{"name": POD_SET, "count": resolution.layout.hosts, "template": _template(job, worker)}]
    spec: Object = {"queueName": queue.name, "active": True, "podSets": pod_sets}
    if queue.priority is not None:
        spec |= _priority(queue.priority, queue.version)
    meta = metadata(job, workload_name(job.name, job.uid, number), _labels(job))
    digest = hashlib.sha256(orjson.dumps(pod_sets, option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]
    meta["annotations"] = {constants.ANNOTATION_WORKERS: digest}
    return {"apiVersion": queue.version, "kind": "Workload", "metadata": meta, "spec": spec}


def is_for_others(body: Object, asked: Object) -> bool:
    """Whether the Workload `body` was made for other workers than `asked`. Its pod sets do not tell, because Kueue and
    the API server complete them."""
    made, wanted = (each["metadata"].get("annotations") or {} for each in (body, asked))
    digest = made.get(constants.ANNOTATION_WORKERS)
    return digest is not None and digest != wanted[constants.ANNOTATION_WORKERS]


def _template(job: TPUTrainingJob, worker: Object) -> Object:
    """Without the affinity of slices to node pools, which is another one for each slice."""
    spec = worker["spec"]
    chosen: Object = {name: spec[name] for name in _SPEC if name in spec}
    chosen["containers"] = [
        {name: container[name] for name in _CONTAINER if name in container} for container in spec["containers"]
    ]
    if node_affinity := (spec.get("affinity") or {}).get("nodeAffinity"):
        chosen["affinity"] = {"nodeAffinity": node_affinity}
    return {"metadata": {"labels": job_labels(job.name)}, "spec": chosen}


def with_priority(body: Object, priority: Priority) -> Object:
    """The Workload `body` with another priority."""
    return {**body, "spec": {**body["spec"], **_priority(priority, str(body["apiVersion"]))}}


def beside(body: Object, present: Object) -> Object:
    """The Workload `body` in the queue and with the priority of the Workload `present`. With a higher one, or from a
    queue that lends to that of `present`, Kueue would evict the job to admit it."""
    own = {name: value for name, value in body["spec"].items() if name not in _TURN}
    return {**body, "spec": own | {name: present["spec"][name] for name in _TURN if name in present["spec"]}}


def taken_over(job: TPUTrainingJob, body: Object) -> Object:
    """The Workload `body`, which nobody owns, as the job's own: it is deleted with the job, and watched."""
    meta = body["metadata"]
    own = metadata(job, meta["name"], {**(meta.get("labels") or {}), **_labels(job)})
    others = list(meta.get("ownerReferences") or ())
    return {**body, "metadata": {**meta, **own, "ownerReferences": [*others, *own["ownerReferences"]]}}


def misfit(job: TPUTrainingJob, resolution: Resolution, body: Object, worker: Object) -> str:
    """Why a Workload that somebody else has made is not for this job; empty if it is. Without this check, a job could
    use more than Kueue counts for it."""
    name, hosts = body["metadata"]["name"], resolution.layout.hosts
    pod_sets: list[Object] = list(body["spec"].get("podSets") or ())
    if [(each.get("name"), each.get("count")) for each in pod_sets] != [(POD_SET, hosts)]:
        counts = ", ".join(f"{each.get('name')}: {each.get('count')}" for each in pod_sets)
        return f"Workload {name} is for other workers ({counts or 'none'}) than the {hosts} of this job"
    wanted, counted = _limits(_template(job, worker)), _limits(pod_sets[0].get("template") or {})
    if any(counted.get(resource) != amount for resource, amount in wanted.items()):
        return f"Workload {name} is for workers with {counted or 'no limits'}; those of this job have {wanted}"
    return ""


def _limits(template: Object) -> dict[str, str]:
    """What a worker may use, as quota counts it."""
    containers = (template.get("spec") or {}).get("containers") or ()
    limits = ((container.get("resources") or {}).get("limits") or {} for container in containers)
    return {resource: str(amount) for each in limits for resource, amount in each.items()}


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


def placed(pod: Object, placement: PodSettings) -> Object:
    """The worker's pod with what Kueue adds. Where it has a value of its own, that one stays: see `conflicts`."""
    meta, spec = dict(pod["metadata"]), dict(pod["spec"])
    for name, values in (("labels", placement.labels), ("annotations", placement.annotations)):
        meta[name] = {key: value for key, (value, _) in values.items()} | (meta.get(name) or {})
    selector = {key: value for key, (value, _) in placement.node_selector.items()} | (spec.get("nodeSelector") or {})
    if selector:
        spec["nodeSelector"] = selector
    known = list(spec.get("tolerations") or ())
    spec["tolerations"] = [*known, *(each for each in placement.tolerations if each not in known)]
    return {**pod, "metadata": meta, "spec": spec}


def conflicts(pod: Object, placement: PodSettings) -> list[str]:
    """Values that Kueue and the job ask for and that differ, each with who asks for it."""
    own = {
        "labels": (pod["metadata"].get("labels") or {}, placement.labels),
        "annotations": (pod["metadata"].get("annotations") or {}, placement.annotations),
        "nodeSelector": (pod["spec"].get("nodeSelector") or {}, placement.node_selector),
    }
    found = [
        conflict(name, key, (has[key], "the job"), asked)
        for name, (has, wanted) in own.items()
        for key, asked in wanted.items()
        if key in has and has[key] != asked[0]
    ]
    return [*placement.conflicts, *found]
