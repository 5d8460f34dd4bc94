"""What the operator keeps of other objects: the fields that the planner reads, none of a length that users choose."""

import json
from typing import Any

import pytest

from tests.unit.pods import pod
from tpu_training_operator.api import constants
from tpu_training_operator.domain.cluster_state.hosts import why_not_ready
from tpu_training_operator.domain.cluster_state.observed import WorkerPod, slim, slim_worker
from tpu_training_operator.domain.cluster_state.pod_events import explain_wait, slim_event

LONG = "x" * 1_000_000
OWNER = {"apiVersion": constants.API_VERSION, "kind": constants.KIND, "name": "digits", "uid": "1", "controller": True}


def a_pod(metadata: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    raw = pod()
    return {
        **raw,
        "metadata": {**raw["metadata"], "ownerReferences": [OWNER], **(metadata or {})},
        "spec": {**raw["spec"], **spec},
    }


def container(name: str = constants.CONTAINER_NAME, **fields: Any) -> dict[str, Any]:
    return {"name": name, **fields}


@pytest.mark.parametrize(
    "bulky",
    [
        a_pod(containers=[container(command=[*constants.TRAINER_COMMAND, LONG])]),
        a_pod(containers=[container(command=constants.TRAINER_COMMAND, env=[{"name": "A", "value": LONG}])]),
        a_pod(schedulingGates=[{"name": constants.KUEUE_POD_GATE}, {"name": LONG}]),
        a_pod({"finalizers": [LONG], "annotations": {"a": LONG}, "labels": {"a": LONG}}),
        a_pod({"ownerReferences": [OWNER, {**OWNER, "controller": False, "name": LONG}]}),
    ],
    ids=["command", "container", "gates", "metadata", "owners"],
)
def test_a_slim_pod_keeps_nothing_whose_length_a_user_chooses(bulky: dict[str, Any]) -> None:
    assert len(json.dumps(slim_worker(bulky))) < 3000


@pytest.mark.parametrize(
    ("gates", "labels", "taken"),
    [
        (["another", constants.KUEUE_POD_GATE], {}, True),
        (["another"], {}, False),
        ([constants.KUEUE_POD_GATE], {constants.LABEL_POD_GROUP: "mine"}, False),
    ],
)
def test_whether_kueue_holds_a_worker_alone_is_kept_and_said(
    gates: list[str], labels: dict[str, str], taken: bool
) -> None:
    raw = a_pod({"labels": labels}, schedulingGates=[{"name": gate} for gate in gates])
    raw["spec"].pop("nodeName", None)
    raw["status"] = {"phase": "Pending"}
    assert WorkerPod(slim(raw)).was_taken_by_kueue == taken
    assert ("integrations.externalFrameworks" in why_not_ready(WorkerPod(slim(raw)))) == taken


@pytest.mark.parametrize(
    ("name", "command", "runs_trainer"),
    [
        (constants.CONTAINER_NAME, constants.TRAINER_COMMAND, True),
        (constants.CONTAINER_NAME, ["python", "mine.py"], False),
        (constants.CONTAINER_NAME, None, False),
        ("sidecar", constants.TRAINER_COMMAND, False),
    ],
)
def test_whether_a_pod_runs_the_trainer_is_kept(name: str, command: list[str] | None, runs_trainer: bool) -> None:
    raw = a_pod(containers=[container("first"), container(name, command=command)])
    assert WorkerPod(slim(raw)).runs_trainer == WorkerPod(raw).runs_trainer == runs_trainer


@pytest.mark.parametrize("owner", [{"controller": False}, {"apiVersion": "batch/v1"}, {"kind": "Job"}])
def test_a_pod_that_no_job_controls_is_left_out(owner: dict[str, Any]) -> None:
    assert slim_worker(a_pod({"ownerReferences": [OWNER | owner]})) is None


def an_event(**fields: Any) -> dict[str, Any]:
    metadata = {"name": "e", "creationTimestamp": "2026-01-15T12:00:00Z", "annotations": {"a": LONG}}
    return {"metadata": metadata, "type": "Warning", "reason": "FailedMount", "note": "no such volume", **fields}


@pytest.mark.parametrize(
    "event",
    [
        an_event(note=f"  two\n lines {LONG}"),
        an_event(note=None),
        an_event(reason=LONG),
        an_event(reason="TriggeredScaleUp", type=LONG, series={"lastObservedTime": "2026-01-15T13:00:00Z"}),
    ],
    ids=["long note", "no note", "long reason", "long type"],
)
def test_a_slim_event_is_short_and_says_the_same(event: dict[str, Any]) -> None:
    slimmed = slim_event(event)
    assert slimmed is not None
    assert len(json.dumps(slimmed)) < 1500
    assert explain_wait([slimmed]) == explain_wait([event]) != ""


def test_an_event_that_tells_nothing_is_left_out() -> None:
    assert slim_event(an_event(type="Normal", reason="Pulled")) is None
