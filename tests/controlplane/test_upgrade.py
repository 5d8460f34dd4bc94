"""Jobs that an older definition accepted, under the present one: whoever may change or delete them still can."""

import copy
from typing import Any

import pytest
import yaml

from tests.cluster.api import ApiError
from tests.cluster.control_plane import ControlPlane
from tests.controlplane.told_jobs import JOBS, ROOT
from tests.unit.bad_jobs import IMPOSSIBLE_JOBS, REFUSED_JOBS
from tests.unit.jobs import job_body

Object = dict[str, Any]

DEFINITION = ROOT / "crds" / "tputrainingjobs.yaml"
# Not minimum: no definition was without these bounds, and rules divide by the numbers.
_CHECKS = {"x-kubernetes-validations", "pattern", "enum", "maximum", "minLength", "maxLength", "minItems", "maxItems"}


def without_checks(schema: Any) -> Any:
    """The same fields and types, but any value."""
    if isinstance(schema, list):
        return [without_checks(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: part for key, part in schema.items() if key not in _CHECKS}
    return {
        key: {name: without_checks(child) for name, child in part.items()}
        if key == "properties"
        else without_checks(part)
        for key, part in kept.items()
    }


@pytest.fixture
def stored(control_plane: ControlPlane, job_definition: None, namespace: str) -> list[tuple[str, Object]]:
    """Jobs that the present definition refuses, by the field at fault, created when it did not yet."""
    definition = yaml.safe_load(DEFINITION.read_text())
    older = copy.deepcopy(definition)
    (version,) = older["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    del schema["x-kubernetes-validations"]
    schema["properties"]["spec"] = without_checks(schema["properties"]["spec"])
    path = JOBS.format(namespace)
    try:
        replace_definition(control_plane, older)
        jobs = []
        for number, (changes, field) in enumerate([*REFUSED_JOBS, *IMPOSSIBLE_JOBS]):
            body = job_body(changes)
            if not isinstance(body.get("metadata"), dict) or not isinstance(body.get("spec"), dict):
                continue
            body["metadata"] = {"name": f"job-{number}", "namespace": namespace}
            try:
                jobs.append((field, control_plane.api.call("POST", path, body)))
            except ApiError as error:
                # Of the wrong type, which no definition has ever accepted.
                if error.status not in (400, 422):
                    raise
    finally:
        replace_definition(control_plane, definition)
    return jobs


def replace_definition(cluster: ControlPlane, definition: Object) -> None:
    cluster.kubectl("replace", "-f", "-", input=yaml.safe_dump(definition))


def test_every_stored_job_can_be_suspended_and_deleted_and_takes_a_status(
    control_plane: ControlPlane, namespace: str, stored: list[tuple[str, Object]]
) -> None:
    refused = []
    for field, job in stored:
        path = f"{JOBS.format(namespace)}/{job['metadata']['name']}"
        for request in (write_a_status, suspend, delete):
            try:
                request(control_plane, path)
            except ApiError as error:
                refused.append((field, request.__name__, str(error)))
    assert refused == []
    assert len(stored) > 100


def write_a_status(cluster: ControlPlane, path: str) -> None:
    cluster.api.call("PUT", f"{path}/status", cluster.api.call("GET", path) | {"status": {"attempt": 1}})


def delete(cluster: ControlPlane, path: str) -> None:
    cluster.api.call("DELETE", path)


def suspend(cluster: ControlPlane, path: str) -> None:
    job = cluster.api.call("GET", path)
    policy = job["spec"].get("runPolicy")
    job["spec"]["runPolicy"] = {**(policy if isinstance(policy, dict) else {}), "suspend": True}
    cluster.api.call("PUT", path, job)
