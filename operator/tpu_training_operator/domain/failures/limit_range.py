"""Recognizes refusals of a pod that come from a LimitRange, and says what to do about them.

The API server's words do not name it: one refuses what is outside of its bounds, and one adds default limits, with
which the pod contradicts itself.
"""

import re
from typing import Any

from tpu_training_operator.api import constants

Object = dict[str, Any]

# plugin/pkg/admission/limitranger of the API server. The text says Container, Pod or PersistentVolumeClaim.
_BOUND = re.compile(r"(minimum|maximum) (\S+) usage per (Container|Pod) is ")
_RATIO = re.compile(r"(\S+) max limit to request ratio per (?:Container|Pod) is ")
_ABOVE_LIMIT = re.compile(r"must be less than or equal to (\S+) limit")
_FIELDS = {"minimum": "min", "maximum": "max"}


def limit_range_remedy(refusal: str, pod: Object) -> str:
    """Returns what to add to the refusal of the pod; empty if no LimitRange is the cause."""
    if bounds := _BOUND.findall(refusal):
        fields = ", ".join(dict.fromkeys(_FIELDS[bound] for bound, _, _ in bounds))
        resources = " and ".join(dict.fromkeys(resource for _, resource, _ in bounds))
        return f"; a LimitRange of the namespace says so ({fields}): set {resources} within it in {_resources_of(pod)}"
    if ratios := " and ".join(_RATIO.findall(refusal)):
        return f"; a LimitRange of the namespace says so (maxLimitRequestRatio): set {ratios} in {_resources_of(pod)}"
    if above := dict.fromkeys(_ABOVE_LIMIT.findall(refusal)):
        given = pod["spec"]["containers"][0].get("resources", {}).get("limits", {})
        limits = " and ".join(f"{_resources_of(pod)}.limits.{resource}" for resource in above if resource not in given)
        added = "; a LimitRange of the namespace adds this limit (default), because the job sets none: set "
        return added + limits if limits else ""
    return ""


def _resources_of(pod: Object) -> str:
    role = pod["metadata"]["labels"].get(constants.LABEL_ROLE)
    return f"spec.{'entryCheck' if role == constants.ROLE_ENTRY_CHECK else 'trainer'}.resources"
