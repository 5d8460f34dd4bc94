"""What GitOps tools see of a job in every state, and what they do to it: Argo CD's health and actions, kstatus, Flux's
expressions, and an apply that is repeated for ever.

The scripts and expressions are those of examples/gitops. The interpreters are those that the tools embed.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.control_plane import ControlPlane
from tests.controlplane.gitops_tools import GitOpsTools, Refused, gitops_tools
from tests.controlplane.told_jobs import ARGO, JOBS, ROOT, STORIES, apply, manifest, told
from tests.unit.kstatus import kstatus
from tpu_training_operator.api.status import Status

Object = dict[str, Any]

EXAMPLES = ROOT / "examples/gitops"
KEY = "tpu-operator.dev_TPUTrainingJob"


@pytest.fixture(scope="package")
def tools() -> Iterator[GitOpsTools]:
    with gitops_tools() as running:
        yield running


def loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def shown(story: str) -> Object:
    """As `kubectl get -o yaml` showed it on a real API server."""
    job: Object = loaded(ARGO / "testdata" / f"{story}.yaml")
    return job


# Argo CD, in the layout of its own tests.

HEALTH = {Path(test["inputPath"]).stem: test["healthStatus"] for test in loaded(ARGO / "health_test.yaml")["tests"]}
ACTIONS = loaded(ARGO / "actions/action_test.yaml")


@pytest.mark.parametrize("story", STORIES)
def test_argo_cd_shows_the_health_of_every_state(tools: GitOpsTools, story: str) -> None:
    assert tools.lua(ARGO / "health.lua", shown(story)) == HEALTH[story]


@pytest.mark.parametrize("story", STORIES)
def test_the_data_of_these_tests_is_what_the_operator_writes(story: str) -> None:
    job, written = shown(story), told(story)
    expected = written.get("status", {"observedGeneration": -1})
    assert (job["metadata"]["generation"], Status.read(job["status"])) == (
        written["metadata"]["generation"],
        Status.read(expected),
    ), "out of date: run `python -m tests.controlplane.told_jobs`"


def test_only_a_training_that_has_succeeded_lets_the_next_sync_wave_begin() -> None:
    assert [story for story, health in HEALTH.items() if health["status"] == "Healthy"] == ["succeeded"]


@pytest.mark.parametrize("test", ACTIONS["discoveryTests"], ids=lambda test: Path(test["inputPath"]).stem)
def test_argo_cd_offers_the_action_that_makes_sense(tools: GitOpsTools, test: Object) -> None:
    # An empty table is an empty list in JSON.
    found = tools.lua(ARGO / "actions/discovery.lua", loaded(ARGO / "actions" / test["inputPath"])) or {}
    assert [{"name": name, **action} for name, action in found.items()] == test["result"]


@pytest.mark.parametrize("test", ACTIONS["actionTests"], ids=lambda test: str(test["action"]))
def test_an_action_changes_nothing_but_the_suspension(tools: GitOpsTools, test: Object) -> None:
    before = loaded(ARGO / "actions" / test["inputPath"])
    after = tools.lua(ARGO / "actions" / test["action"] / "action.lua", before)
    assert without_empty(after) == without_empty(loaded(ARGO / "actions" / test["expectedOutputPath"]))


def without_empty(value: Any) -> Any:
    """Lua does not tell an empty list from an empty object. Argo CD corrects that afterwards."""
    if isinstance(value, dict):
        return {key: without_empty(part) for key, part in value.items() if part not in ({}, [])}
    return [without_empty(part) for part in value] if isinstance(value, list) else value


def test_a_job_that_is_being_deleted_is_offered_no_action(tools: GitOpsTools) -> None:
    job = shown("running")
    job["metadata"]["deletionTimestamp"] = "2026-03-01T12:00:00Z"
    assert tools.lua(ARGO / "actions/discovery.lua", job) == []


def test_the_interpreter_has_no_more_libraries_than_in_production(tools: GitOpsTools) -> None:
    for library in ("string", "math", "io", "os"):
        with pytest.raises(Refused, match="attempt to index a non-table object"):
            tools.lua(f"return {{{library}.x}}", shown("running"))


def test_the_config_map_has_the_same_scripts() -> None:
    data = loaded(EXAMPLES / "argocd/argocd-cm.yaml")["data"]
    definitions = [
        {"name": name, "action.lua": (ARGO / "actions" / name / "action.lua").read_text()}
        for name in ("suspend", "resume")
    ]
    assert data[f"resource.customizations.health.{KEY}"] == (ARGO / "health.lua").read_text()
    assert yaml.safe_load(data[f"resource.customizations.actions.{KEY}"]) == {
        "discovery.lua": (ARGO / "actions/discovery.lua").read_text(),
        "definitions": definitions,
    }


# kstatus and Flux.

SEEN_BY_KSTATUS = {
    "created": "InProgress",
    "starting": "InProgress",
    "running": "Current",
    "edited": "InProgress",
    "restarting": "InProgress",
    "suspending": "InProgress",
    "suspended": "Current",
    "resumed": "InProgress",
    "blocked": "Failed",
    "invalid": "Failed",
    "failed": "Failed",
    "succeeded": "Current",
}


@pytest.mark.parametrize("story", STORIES)
def test_kstatus_reads_every_state(tools: GitOpsTools, story: str) -> None:
    assert tools.kstatus(shown(story)) == SEEN_BY_KSTATUS[story]


@pytest.mark.parametrize("story", STORIES)
def test_the_other_tests_read_a_job_as_kstatus_does(tools: GitOpsTools, story: str) -> None:
    assert kstatus(shown(story)) == tools.kstatus(shown(story))


@pytest.mark.parametrize("story", STORIES)
def test_flux_waits_until_a_job_has_trained(tools: GitOpsTools, story: str) -> None:
    kustomizations = yaml.safe_load_all((EXAMPLES / "flux/kustomizations.yaml").read_text())
    [checks] = [check for one in kustomizations for check in one["spec"].get("healthCheckExprs", ())]
    ends = {"succeeded": "Current", "failed": "Failed", "invalid": "Failed"}
    assert tools.health(checks, shown(story)) == ends.get(story, "InProgress")


# What is applied again and again.


@pytest.fixture(scope="module")
def plane(control_plane: ControlPlane, job_definition: None) -> ControlPlane:
    return control_plane


def version(plane: ControlPlane, namespace: str) -> str:
    job = plane.api.call("GET", f"{JOBS.format(namespace)}/digits")
    return str(job["metadata"]["resourceVersion"])


@pytest.mark.parametrize(
    "flags", [(), ("--server-side", "--field-manager=kustomize-controller")], ids=["client", "server"]
)
@pytest.mark.parametrize("story", ["running", "failed", "succeeded"])
def test_an_apply_that_is_repeated_changes_nothing(
    plane: ControlPlane, namespace: str, story: str, flags: tuple[str, ...]
) -> None:
    job, path = told(story), f"{JOBS.format(namespace)}/digits"
    apply(plane, namespace, manifest(job), *flags)
    plane.api.call("PUT", f"{path}/status", plane.api.call("GET", path) | {"status": job["status"]})
    before = version(plane, namespace)
    apply(plane, namespace, manifest(job), *flags)
    assert version(plane, namespace) == before
    drift = ("--namespace", namespace, "diff", *flags, "-f", "-")
    assert plane.kubectl(*drift, input=yaml.safe_dump(manifest(job))).stdout == ""


@pytest.mark.parametrize("flags", [(), ("--server-side",)], ids=["client", "server"])
def test_a_job_that_an_action_has_suspended_stays_so_while_git_does_not_say_otherwise(
    plane: ControlPlane, tools: GitOpsTools, namespace: str, flags: tuple[str, ...]
) -> None:
    job, path = told("running"), f"{JOBS.format(namespace)}/digits"
    apply(plane, namespace, manifest(job), *flags)
    suspended = tools.lua(ARGO / "actions/suspend/action.lua", plane.api.call("GET", path))
    patch = json.dumps({"spec": {"runPolicy": suspended["spec"]["runPolicy"]}})
    plane.kubectl("--namespace", namespace, "patch", "tpujob/digits", "--type=merge", f"--patch={patch}")
    apply(plane, namespace, manifest(job), *flags)
    assert plane.api.call("GET", path)["spec"]["runPolicy"]["suspend"] is True
    job["spec"]["runPolicy"] = {"suspend": False}
    apply(plane, namespace, manifest(job), *flags, *(["--force-conflicts"] if flags else []))
    assert plane.api.call("GET", path)["spec"]["runPolicy"]["suspend"] is False


def test_the_example_of_a_job_is_accepted(plane: ControlPlane, namespace: str) -> None:
    assert "created" in apply(plane, namespace, loaded(EXAMPLES / "jobs/digits.yaml"))
