"""Explains why an object cannot be created: refusals, names that are taken, pods that the cluster changes.

The API server's message about a LimitRange does not name it. A LimitRange refuses values outside its bounds, or adds
default limits that contradict the pod's requests. Its message about Pod Security names the pod's fields, not the job's.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from tpu_training_operator.api import constants
from tpu_training_operator.api.conditions import Reason
from tpu_training_operator.api.constants import LABEL_JOB_NAME
from tpu_training_operator.domain.cluster_state.ownership import Claim, Object, claim, controller, is_ours

# plugin/pkg/admission/limitranger of the API server. The text says Container, Pod or PersistentVolumeClaim.
_BOUND = re.compile(r"(minimum|maximum) (\S+) usage per (Container|Pod) is ")
_RATIO = re.compile(r"([^\s[]+) max limit to request ratio per (?:Container|Pod) is ")
_ABOVE_LIMIT = re.compile(r"must be less than or equal to (\S+) limit")
# Between two reasons of one refusal; a reason may contain a comma.
_NEXT_REASON = re.compile(
    r", (?=(?:minimum|maximum) \S+ usage per |\S+ max limit to request ratio per |(?:spec|metadata)\.)"
)
_FIELDS = {"minimum": "min", "maximum": "max"}
_POD_SECURITY = re.compile(r'violates PodSecurity "(\w+):')
# The only capability of spec.trainer.securityContext that the level baseline admits.
_BASELINE_CAPABILITIES = ["DAC_OVERRIDE"]


@dataclass(frozen=True)
class Obstacle:
    """What keeps an object from being created. It lasts until a person changes something, unless it `passes` by
    itself."""

    reason: Reason
    message: str
    passes: bool = False


def explain_taken_name(kind: str, existing: Object, job: Object) -> Obstacle | None:
    """Explains why the job cannot use the name of an existing object; None if the object is the job's own."""
    name = existing["metadata"]["name"]
    match claim(existing, job):
        case Claim.OURS:
            labels = existing["metadata"].get("labels") or {}
            if kind == "Pod" and labels.get(LABEL_JOB_NAME) != job["metadata"]["name"]:
                message = f"Pod {name} is a worker of this job but has lost its label {LABEL_JOB_NAME}; delete the pod"
                return Obstacle(Reason.NAME_CONFLICT, message)
            return None
        case Claim.GOING:
            what = "workers" if kind == "Pod" else kind
            message = f"waiting for the deleted job {job['metadata']['name']} to release its {what}"
            if is_ours(existing, job):
                message = f"{kind} {name} is being deleted and will be created again once it is gone"
            return Obstacle(Reason.WAITING_FOR_DELETED_JOB, message, passes=True)
        case Claim.FOREIGN:
            message = f"{kind} {name} already exists and does not belong to this job; delete it or rename the job"
            return Obstacle(Reason.NAME_CONFLICT, message)


def explain_change(asked: Object, created: Object) -> Obstacle | None:
    """Explains why the job cannot use a pod that the cluster has changed; None if it can.

    Without its label or owner the pod would run unseen beside its gang, and a worker that restarts in place cannot
    rejoin.
    """
    pods = (asked, created)
    label = [(pod["metadata"].get("labels") or {}).get(LABEL_JOB_NAME) for pod in pods]
    owner = [controller(pod).get("uid") for pod in pods]
    policy = [(pod.get("spec") or {}).get("restartPolicy") for pod in pods]
    lost = [
        (owner, "without its owner reference"),
        (label, f"without its label {LABEL_JOB_NAME}"),
        (policy, f"with restartPolicy {policy[1]}"),
    ]
    how = " and ".join(words for (wanted, got), words in lost if wanted != got)
    if not how:
        return None
    message = (
        f"Pod {asked['metadata']['name']} was created {how}, so the operator deleted it: a mutating admission"
        " webhook or policy of the cluster changed it; exempt the pods of TPUTrainingJobs from it"
    )
    return Obstacle(Reason.INVALID_OBJECT, message)


def in_one_order(refusal: str) -> str:
    """Returns the API server's message with its reasons sorted. It lists them in any order, and a job that is refused
    again would seem to be refused for something new."""
    what, bracket, reasons = refusal.partition(": [")
    if not reasons.endswith("]"):
        return refusal
    return f"{what}{bracket}{', '.join(sorted(_NEXT_REASON.split(reasons[:-1])))}]"


def limit_range_remedy(refusal: str, pod: Object) -> str:
    """Returns what to add to the refusal of the pod; empty if no LimitRange is the cause."""
    if bounds := _BOUND.findall(refusal):
        fields = ", ".join(sorted({_FIELDS[bound] for bound, _, _ in bounds}))
        resources = _listed(resource for _, resource, _ in bounds)
        return f"; a LimitRange of the namespace sets it ({fields}): set {resources} within it in {_resources_of(pod)}"
    if ratios := _listed(_RATIO.findall(refusal)):
        return f"; a LimitRange of the namespace sets it (maxLimitRequestRatio): set {ratios} in {_resources_of(pod)}"
    if above := set(_ABOVE_LIMIT.findall(refusal)):
        own_limits = pod["spec"]["containers"][0].get("resources", {}).get("limits", {})
        added = "; a LimitRange of the namespace adds this limit (default), because the job sets none: set "
        limits = _listed(f"{_resources_of(pod)}.limits.{resource}" for resource in above - own_limits.keys())
        return added + limits if limits else ""
    return ""


def _listed(words: Iterable[str]) -> str:
    """Returns the words in their own order: the API server names what it refuses in any."""
    return " and ".join(sorted(set(words)))


def pod_security_remedy(refusal: str, pod: Object) -> str:
    """Returns what to add to the refusal of the pod; empty if the namespace's Pod Security level is not the cause."""
    if (level := _POD_SECURITY.search(refusal)) is None:
        return ""
    spec = pod["spec"]
    container, user = spec["containers"][0].get("securityContext") or {}, spec.get("securityContext") or {}
    added = (container.get("capabilities") or {}).get("add") or []
    beyond_baseline = {
        "securityContext.privileged": container.get("privileged"),
        "securityContext.capabilities": added and added != _BASELINE_CAPABILITIES,
        "hostNetwork": spec.get("hostNetwork"),
    }
    beyond_restricted = beyond_baseline | {
        "securityContext.capabilities": added,
        "securityContext.runAsUser": user.get("runAsUser") == 0,
    }
    asked = beyond_restricted if level[1] == "restricted" else beyond_baseline
    fields = " and ".join(f"spec.trainer.{field}" for field, is_asked in asked.items() if is_asked)
    needed = "privileged" if any(beyond_baseline.values()) else "baseline"
    return (
        f"; leave out {fields}, or let an administrator label the namespace pod-security.kubernetes.io/enforce={needed}"
        if fields
        else ""
    )


def _resources_of(pod: Object) -> str:
    role = pod["metadata"]["labels"].get(constants.LABEL_ROLE)
    return f"spec.{'entryCheck' if role == constants.ROLE_ENTRY_CHECK else 'trainer'}.resources"
