"""Jobs for the control plane tests, and queries about them to the API server."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.api import APPLY, MERGE_PATCH
from tests.cluster.control_plane import ControlPlane
from tests.cluster.kwok import finish_pod
from tests.cluster.processes import wait_until

Object = dict[str, Any]

DIGITS: Object = yaml.safe_load((Path(__file__).parents[2] / "examples" / "digits.yaml").read_text())
# kwok's nodes run no check to its end.
DIGITS["spec"]["entryCheck"] = {"mode": "Skip"}
# A large slice would need more examples for one batch.
del DIGITS["spec"]["recipe"]["datasetSize"]


def digits(**spec: Any) -> Object:
    """The example with some fields of its spec replaced or added; a mapping is merged into the existing one."""
    job = copy.deepcopy(DIGITS)
    for name, value in spec.items():
        old = job["spec"].get(name)
        job["spec"][name] = old | value if isinstance(old, dict) and isinstance(value, dict) else value
    return job


class Namespace:
    """One namespace of the control plane: what a user does there and what becomes of it."""

    def __init__(self, cluster: ControlPlane, name: str) -> None:
        self.cluster = cluster
        self.name = name
        self._path = f"namespaces/{name}"
        self._jobs = f"/apis/tpu-operator.dev/v1alpha1/{self._path}/tputrainingjobs"

    def kubectl(self, *args: str, **options: Any) -> str:
        return self.cluster.kubectl("--namespace", self.name, *args, **options).stdout

    # What tests do most, or ask again and again while they wait: kubectl would cost a process each time.

    def apply(self, job: Object) -> None:
        """Does what `kubectl apply --server-side --force-conflicts` does."""
        self._patch(f"{job['metadata']['name']}?fieldManager=user&force=true", job, APPLY)

    def patch_spec(self, spec: Object, name: str = "digits", query: str = "") -> None:
        """Does what `kubectl patch --type=merge` does."""
        self._patch(f"{name}?{query}", {"spec": spec}, MERGE_PATCH)

    def _patch(self, name: str, body: Object, content_type: str) -> None:
        path = f"{self._jobs}/{name}&fieldValidation=Strict"
        self.cluster.api.call("PATCH", path, body, content_type=content_type)

    def job(self, name: str = "digits") -> Object:
        return self.cluster.api.call("GET", f"{self._jobs}/{name}")

    def status(self, name: str = "digits") -> Object:
        status: Object = self.job(name).get("status", {})
        return status

    def pods(self, name: str = "digits") -> list[Object]:
        found = self.cluster.api.call(
            "GET", f"/api/v1/{self._path}/pods?labelSelector=tpu-operator.dev%2Fjob-name%3D{name}"
        )
        return sorted(found["items"], key=lambda pod: str(pod["metadata"]["name"]))

    def all(self, kinds: str, group: str = "api/v1") -> list[Object]:
        """`kinds`, `group`: as in the path of the kind."""
        found: list[Object] = self.cluster.api.call("GET", f"/{group}/{self._path}/{kinds}")["items"]
        return found

    def names(self, kinds: str, group: str = "api/v1") -> list[str]:
        return [item["metadata"]["name"] for item in self.all(kinds, group)]

    def wait(self, condition: Callable[[], bool], what: str, timeout: float = 60) -> None:
        wait_until(condition, timeout=timeout, what=what)

    def wait_for_state(
        self, state: str, name: str = "digits", attempt: int | None = None, timeout: float = 60
    ) -> Object:
        def reached() -> bool:
            status = self.status(name)
            return status.get("state") == state and attempt in (None, status.get("attempt"))

        try:
            self.wait(reached, f"job {name} is {state}", timeout)
        except TimeoutError as late:
            raise TimeoutError(f"{late}\n{self._why_not(name)}") from None
        return self.status(name)

    def _why_not(self, name: str) -> str:
        """The job's status, and of each pod where it is and what keeps it from there."""
        lines = [yaml.safe_dump(self.status(name))]
        for pod in self.pods(name):
            found, status = pod["metadata"]["name"], pod["status"]
            waits = {
                item["type"]: item.get("message") for item in status.get("conditions", ()) if item["status"] != "True"
            }
            lines.append(f"{found} on {pod['spec'].get('nodeName')}: {status.get('phase')} {waits}")
        return "\n".join(lines)

    def finish(self, pod: str, exit_code: int = 0, message: Object | None = None, reason: str | None = None) -> None:
        # The trainer leaves last words with exit code 0; after a failure they may be missing.
        said = message or ({} if exit_code else {"outcome": "Succeeded", "message": ""})
        finish_pod(self.cluster, self.name, pod, exit_code, json.dumps(said) if said else "", reason)


def condition(status: Object, kind: str) -> Object:
    return next((c for c in status.get("conditions", []) if c["type"] == kind), {})
