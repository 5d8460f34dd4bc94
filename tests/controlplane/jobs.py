"""Jobs for the control plane tests, and queries about them to the API server."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

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
    """One namespace of the control plane: what a user does there, through kubectl, and what becomes of it."""

    def __init__(self, cluster: ControlPlane, name: str) -> None:
        self.cluster = cluster
        self.name = name
        self._path = f"namespaces/{name}"

    def kubectl(self, *args: str, **options: Any) -> str:
        return self.cluster.kubectl("--namespace", self.name, *args, **options).stdout

    def apply(self, job: Object) -> None:
        self.kubectl("apply", "-f", "-", input=yaml.safe_dump(job))

    def refusal(self, job: Object) -> str:
        """What kubectl prints if the API server refuses the job; empty if it accepts it."""
        done = self.cluster.kubectl(
            "--namespace", self.name, "create", "-f", "-", input=yaml.safe_dump(job), check=False
        )
        return done.stderr if done.returncode else ""

    # Asked again and again while a test waits: kubectl would cost a process each time.

    def job(self, name: str = "digits") -> Object:
        return self.cluster.api.call("GET", f"/apis/tpu-operator.dev/v1alpha1/{self._path}/tputrainingjobs/{name}")

    def status(self, name: str = "digits") -> Object:
        status: Object = self.job(name).get("status", {})
        return status

    def pods(self, name: str = "digits") -> list[Object]:
        found = self.cluster.api.call(
            "GET", f"/api/v1/{self._path}/pods?labelSelector=tpu-operator.dev%2Fjob-name%3D{name}"
        )
        return sorted(found["items"], key=lambda pod: str(pod["metadata"]["name"]))

    def names(self, kind: str) -> list[str]:
        """`kind`: pod, service or configmap."""
        found = self.cluster.api.call("GET", f"/api/v1/{self._path}/{kind}s")
        return [item["metadata"]["name"] for item in found["items"]]

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
