"""Which refusals of a pod come from a LimitRange, and what to do about it.

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
    """What to add to the refusal of the pod; empty if no LimitRange is the cause."""
    role = pod["metadata"]["labels"].get(constants.LABEL_ROLE)
    of_job = f"spec.{'preflight' if role == constants.ROLE_PREFLIGHT else 'trainer'}.resources"
    bounds = _BOUND.findall(refusal)
    if bounds:
        fields = ", ".join(dict.fromkeys(_FIELDS[bound] for bound, _, _ in bounds))
        resources = " and ".join(dict.fromkeys(resource for _, resource, _ in bounds))
        return f"; a LimitRange of the namespace says so ({fields}): set {resources} within it in {of_job}"
    if ratios := " and ".join(_RATIO.findall(refusal)):
        return f"; a LimitRange of the namespace says so (maxLimitRequestRatio): set {ratios} in {of_job}"
    given = pod["spec"]["containers"][0].get("resources", {}).get("limits", {})
    added = [resource for resource in dict.fromkeys(_ABOVE_LIMIT.findall(refusal)) if resource not in given]
    if not added:
        return ""
    limits = " and ".join(f"{of_job}.limits.{resource}" for resource in added)
    return f"; a LimitRange of the namespace adds this limit (default), because the job sets none: set {limits}"
