"""How kstatus reads an object; with it kubectl, Flux and Argo CD decide whether a job is well."""

from typing import Any


def kstatus(job: dict[str, Any]) -> str:
    """What kstatus computes, in the order in which it looks (cli-utils, pkg/kstatus/status)."""
    status = job.get("status", {})
    conditions = {condition["type"]: condition["status"] for condition in status.get("conditions", ())}
    if "deletionTimestamp" in job["metadata"]:
        return "Terminating"
    if status.get("observedGeneration", job["metadata"]["generation"]) != job["metadata"]["generation"]:
        return "InProgress"
    if conditions.get("Reconciling") == "True":
        return "InProgress"
    if conditions.get("Stalled") == "True":
        return "Failed"
    return "Current" if conditions.get("Ready", "True") == "True" else "InProgress"
