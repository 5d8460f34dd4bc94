"""Jobs in every state, written by the operator itself in stories of the planner's tests, on the real API server.

`python -m tests.controlplane.told_jobs` writes them again as `kubectl get -o yaml` shows them, for Argo CD's tests of
health and actions in examples/gitops. `test_gitops` says when that is due.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.control_plane import ControlPlane
from tests.cluster.namespaces import emptied_namespace
from tests.planner.model_cluster import ModelCluster
from tests.planner.operators import one_pass
from tests.planner.story import given_a_job, resume
from tests.unit import seen_jobs
from tests.unit.bad_jobs import IMPOSSIBLE_JOBS

Object = dict[str, Any]

ROOT = Path(__file__).parents[2]
ARGO = ROOT / "examples/gitops/argocd/resource_customizations/tpu-operator.dev/TPUTrainingJob"
JOBS = "/apis/tpu-operator.dev/v1alpha1/namespaces/{}/tputrainingjobs"


def suspending() -> ModelCluster:
    cluster = seen_jobs.running()
    cluster.edit_run_policy(suspend=True)
    for _ in range(2):
        one_pass(cluster)
    return cluster


def resumed() -> ModelCluster:
    cluster = seen_jobs.suspended()
    resume(cluster)
    return cluster


def edited() -> ModelCluster:
    """The operator has not seen the last edit yet."""
    cluster = seen_jobs.running()
    cluster.edit_run_policy(startDeadlineSeconds=600)
    return cluster


def invalid() -> ModelCluster:
    changes, _ = IMPOSSIBLE_JOBS[0]
    cluster = given_a_job(changes)
    one_pass(cluster)
    return cluster


STORIES: dict[str, Callable[[], ModelCluster]] = {
    "created": given_a_job,
    "starting": seen_jobs.starting,
    "running": seen_jobs.running,
    "edited": edited,
    "restarting": seen_jobs.restarting,
    "suspending": suspending,
    "suspended": seen_jobs.suspended,
    "resumed": resumed,
    "blocked": seen_jobs.blocked,
    "invalid": invalid,
    "failed": seen_jobs.failed,
    "succeeded": seen_jobs.succeeded,
}

# Argo CD's tests of actions have data of their own.
STORIES_WITH_ACTIONS = ("running", "suspended", "failed", "succeeded")
# What an action makes of a job: the story and the value of suspend that it sets, and the name of the result's file.
AFTER_ACTIONS = {("running", True): "running-suspended", ("suspended", False): "suspended-resumed"}


def told(story: str) -> Object:
    """The job at the end of its story, as the model has it."""
    job = STORIES[story]().job
    job["spec"]["trainer"]["image"] = "registry.example/digits:1"
    return job


def manifest(job: Object) -> Object:
    """What a user would write."""
    return {
        "apiVersion": job["apiVersion"],
        "kind": job["kind"],
        "metadata": {"name": job["metadata"]["name"]},
        "spec": job["spec"],
    }


def put(cluster: ControlPlane, namespace: str, job: Object) -> Object:
    """Applies the job, edits it as often as in its story, and writes its status as the operator does."""
    written = manifest(job)
    first = copy.deepcopy(written)
    edits = job["metadata"]["generation"] - 1
    if edits:
        del first["spec"]["runPolicy"]
    apply(cluster, namespace, first)
    path = f"{JOBS.format(namespace)}/{job['metadata']['name']}"
    for edit in range(edits):
        policy = job["spec"]["runPolicy"] if edit == edits - 1 else {"suspend": True}
        found = cluster.api.call("GET", path)
        found["spec"]["runPolicy"] = policy
        cluster.api.call("PUT", path, found)
    found = cluster.api.call("GET", path)
    assert found["metadata"]["generation"] == job["metadata"]["generation"]
    if "status" in job:
        found = cluster.api.call("PUT", f"{path}/status", found | {"status": job["status"]})
    return found


def apply(cluster: ControlPlane, namespace: str, job: Object, *flags: str) -> str:
    done = cluster.kubectl("--namespace", namespace, "apply", *flags, "-f", "-", input=yaml.safe_dump(job))
    return done.stdout.strip()


def write_testdata(cluster: ControlPlane) -> None:
    for story in STORIES:
        with emptied_namespace(cluster.api) as namespace:
            created = put(cluster, namespace, told(story))["metadata"]["creationTimestamp"]
            shown = cluster.kubectl("--namespace", namespace, "get", "tpujob", "digits", "-o", "yaml").stdout
        shown = shown.replace(namespace, "team-a").replace(created, told(story)["metadata"]["creationTimestamp"])
        (ARGO / "testdata" / f"{story}.yaml").write_text(shown)
        if story in STORIES_WITH_ACTIONS:
            _write_action(f"{story}.yaml", shown)
        for (before, suspend), after in AFTER_ACTIONS.items():
            if before == story:
                job = yaml.safe_load(shown)
                job["spec"].setdefault("runPolicy", {})["suspend"] = suspend
                _write_action(f"{after}.yaml", yaml.safe_dump(job))


def _write_action(name: str, text: str) -> None:
    (ARGO / "actions" / "testdata" / name).write_text(text)


if __name__ == "__main__":
    with ControlPlane() as plane:
        plane.kubectl("apply", "-f", str(ROOT / "crds" / "tputrainingjobs.yaml"))
        plane.wait_established("tputrainingjobs.tpu-operator.dev")
        write_testdata(plane)
