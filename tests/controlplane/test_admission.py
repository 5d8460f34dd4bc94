"""What the API server refuses and accepts without a running operator; `tpujob` is tested with the same tables."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.api import ApiError
from tests.cluster.control_plane import ControlPlane
from tests.cluster.namespaces import emptied_namespace
from tests.controlplane.jobs import Namespace, digits
from tests.unit.bad_jobs import DOUBLED, IMPOSSIBLE_JOBS, REFUSED_JOBS, UNDECODABLE_JOBS
from tests.unit.good_jobs import GOOD_JOBS
from tests.unit.jobs import job_body

Object = dict[str, Any]
RESERVATION = {"slice": {"provisioning": {"type": "Reservation", "reservation": "r"}}}


@pytest.fixture
def space(control_plane: ControlPlane, job_definition: None, namespace: str) -> Namespace:
    return Namespace(control_plane, namespace)


def refusal(space: Namespace, changes: Object) -> str:
    """The API server's answer to the job, sent as kubectl would (strict); empty if it is accepted."""
    body = job_body(changes)
    if isinstance(body.get("metadata"), dict):
        body["metadata"] = {**body["metadata"], "namespace": space.name}
        for name in ("uid", "generation"):
            del body["metadata"][name]
    path = f"/apis/tpu-operator.dev/v1alpha1/namespaces/{space.name}/tputrainingjobs"
    try:
        space.cluster.api.call("POST", f"{path}?dryRun=All&fieldValidation=Strict", body)
    except ApiError as error:
        if error.status not in (400, 422):
            raise
        return str(error)
    return ""


def names(message: str, field: str) -> bool:
    """Whether the message is about the field: `field: ...`, or for unknown fields `"field"` or a field below it."""
    return any(mark in message for mark in (f"{field}: ", f'"{field}"', f'"{field}.'))


def test_every_bad_job_is_refused_on_the_field_that_tpujob_names(space: Namespace) -> None:
    answers = [(field, refusal(space, changes)) for changes, field in REFUSED_JOBS]
    assert [(field, answer) for field, answer in answers if not names(answer, field)] == []


def test_what_is_there_twice_is_refused(space: Namespace) -> None:
    answers = [(field, refusal(space, changes)) for changes, field in DOUBLED]
    assert [(field, answer) for field, answer in answers if f"{field}[1]: Duplicate value: " not in answer] == []


def test_an_object_that_is_not_a_job_is_refused(space: Namespace) -> None:
    assert [changes for changes, _ in UNDECODABLE_JOBS if not refusal(space, changes)] == []


def test_every_good_job_is_accepted(space: Namespace) -> None:
    assert [answer for changes in GOOD_JOBS if (answer := refusal(space, changes))] == []


def test_a_job_that_only_arithmetic_rules_out_is_left_to_the_operator(space: Namespace) -> None:
    assert [answer for changes, _ in IMPOSSIBLE_JOBS if (answer := refusal(space, changes))] == []


def patched(space: Namespace, spec: Object, query: str = "") -> str:
    """The API server's answer if the change of the spec is refused; empty if it is accepted."""
    try:
        space.patch_spec(spec, query=query)
    except ApiError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def full(control_plane: ControlPlane, job_definition: None) -> Iterator[Namespace]:
    """A namespace with a job that has all optional fields which cannot change. A refused change leaves it as it is."""
    managed = {"managedBy": "tpu-operator.dev/tpu-training-operator"}
    with emptied_namespace(control_plane.api) as name:
        space = Namespace(control_plane, name)
        space.apply(
            digits(
                data={"uri": "gs://bucket/digits"},
                checkpoint={"uri": "gs://bucket/digits"},
                runPolicy={"restart": {"limits": [{"class": "Unknown", "max": 1}]}},
                **managed,
            )
        )
        before = space.job()
        yield space
        assert space.job() == before


def set_status(space: Namespace, state: str, *true: str, attempt: int = 1) -> None:
    """`true`: the conditions."""
    conditions = [
        {"type": kind, "status": "True", "reason": "Told", "lastTransitionTime": "2026-01-01T00:00:00Z"}
        for kind in true
    ]
    status = {"observedGeneration": 1, "state": state, "attempt": attempt, "conditions": conditions}
    job = space.job() | {"status": status}
    path = f"/apis/tpu-operator.dev/v1alpha1/namespaces/{space.name}/tputrainingjobs/digits"
    space.cluster.api.call("PUT", f"{path}/status", job)


@pytest.fixture(scope="module")
def resting(control_plane: ControlPlane, job_definition: None, full: Namespace) -> Iterator[Namespace]:
    """A namespace with the same job, suspended. No change stays."""
    with emptied_namespace(control_plane.api) as name:
        space = Namespace(control_plane, name)
        spec = full.job()["spec"]
        space.apply(digits(**spec | {"runPolicy": spec["runPolicy"] | {"suspend": True}}))
        set_status(space, "Suspended", "Ready")
        before = space.job()
        yield space
        assert space.job() == before


@pytest.fixture(scope="module")
def bare(control_plane: ControlPlane, job_definition: None) -> Iterator[Namespace]:
    """A namespace with a job that has none of them."""
    with emptied_namespace(control_plane.api) as name:
        space = Namespace(control_plane, name)
        space.apply(digits())
        before = space.job()
        yield space
        assert space.job() == before


IMMUTABLE_CHANGES = [
    ("spec.slice.acceleratorType", {"slice": {"acceleratorType": "v5litepod-32"}}),
    ("spec.slice.count", {"slice": {"count": 2}}),
    ("spec.slice.hardware", {"slice": {"hardware": "TPU"}}),
    ("spec.slice.machineType", {"slice": {"machineType": "ct5lp-hightpu-8t"}}),
    ("spec.slice.chipsPerHost", {"slice": {"chipsPerHost": 8}}),
    ("spec.slice.devicesPerChip", {"slice": {"devicesPerChip": 2}}),
    ("spec.placement.alternatives", {"placement": {"alternatives": [{"slice": {"acceleratorType": "v4-16"}}]}}),
    ("spec.placement.count", {"placement": {"count": {"min": 1}}}),
    ("spec.trainer.entrypoint", {"trainer": {"entrypoint": "other:task"}}),
    ("spec.trainer.backend", {"trainer": {"backend": "Torch"}}),
    ("spec.recipe", {"recipe": {"trainSteps": 1201}}),
    ("spec.recipe", {"recipe": {"tunedOn": None}}),
    ("spec.recipe", {"recipe": {"scaling": {"betas": True}}}),
    ("spec.checkpoint.uri", {"checkpoint": {"uri": "gs://bucket/other"}}),
    ("spec.checkpoint.initFrom", {"checkpoint": {"initFrom": {"uri": "gs://bucket/other"}}}),
    ("spec.checkpoint.uri", {"checkpoint": None}),
    ("spec.managedBy", {"managedBy": None}),
    ("spec.managedBy", {"managedBy": "kueue.x-k8s.io/multikueue"}),
]
CHANGES_AT_REST = [
    ("spec.slice.provisioning", RESERVATION),
    ("spec.trainer", {"trainer": {"image": "localhost/tpu-examples:2"}}),
    ("spec.trainer", {"trainer": {"env": [{"name": "A", "value": "b"}]}}),
    ("spec.trainer", {"trainer": {"tolerations": [{"key": "team", "operator": "Exists"}]}}),
    ("spec.trainer", {"trainer": {"priorityClassName": "high"}}),
    ("spec.trainer", {"trainer": {"imagePullSecrets": [{"name": "key"}]}}),
    ("spec.trainer", {"trainer": {"resources": {"limits": {"memory": "9Gi"}}}}),
    ("spec.data", {"data": {"uri": "gs://bucket/other"}}),
    ("spec.data", {"data": None}),
    ("spec.checkpoint", {"checkpoint": {"everySteps": 7}}),
    ("spec.runPolicy.restart", {"runPolicy": {"restart": {"backoff": {"maxSeconds": 1}}}}),
    ("spec.runPolicy.restart", {"runPolicy": {"restart": None}}),
]


@pytest.mark.parametrize(("field", "change"), IMMUTABLE_CHANGES)
def test_an_immutable_field_cannot_change_in_a_job_that_runs_or_rests(
    full: Namespace, resting: Namespace, field: str, change: Object
) -> None:
    for space in (full, resting):
        answer = patched(space, change)
        assert f"{field}: " in answer
        assert "cannot change once the job exists; delete the job and create it again" in answer


@pytest.mark.parametrize(("field", "change"), CHANGES_AT_REST)
def test_what_the_next_attempt_may_have_changes_only_in_a_job_that_rests(
    full: Namespace, resting: Namespace, field: str, change: Object
) -> None:
    answer = patched(full, change)
    assert f"{field}: " in answer
    assert "can change only while the job is suspended and none of its workers runs" in answer
    assert patched(resting, change, "dryRun=All") == ""


@pytest.mark.parametrize(
    ("suspend", "status", "may_change"),
    [
        (True, None, True),
        (True, ["Suspended", "Ready", "Suspended"], True),
        (True, ["Suspended", "Suspended"], False),
        (True, ["Running", "Ready"], False),
        (True, ["Succeeded", "Ready"], False),
        (True, ["Invalid"], False),
        (True, ["Invalid", "Suspended"], True),
        (False, None, False),
        (False, ["Suspended", "Ready", "Suspended"], False),
    ],
    ids=[
        *("not seen yet", "at rest", "stopping", "not stopped yet", "over", "it trains", "made invalid"),
        *("to be started", "over budget"),
    ],
)
def test_a_job_rests_if_it_is_to_be_suspended_and_no_worker_is_left(
    space: Namespace, suspend: bool, status: list[str] | None, may_change: bool
) -> None:
    space.apply(digits(runPolicy={"suspend": suspend}))
    if status is not None:
        set_status(space, *status)
    answer = patched(space, {"trainer": {"priorityClassName": "high"}, "runPolicy": {"suspend": False}})
    assert (answer == "") == may_change, answer


def test_what_changes_at_rest_must_still_be_right(resting: Namespace) -> None:
    selector = {"cloud.google.com/gke-tpu-topology": "4x4"}
    tpu = {"slice": {"hardware": "TPU"}}
    with emptied_namespace(resting.cluster.api) as name:
        space = Namespace(resting.cluster, name)
        space.apply(digits(runPolicy={"suspend": True}, **tpu))
        assert "spec.trainer.nodeSelector: " in patched(space, {"trainer": {"nodeSelector": selector}})


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("spec.data", {"data": {"uri": "gs://bucket/digits"}}),
        ("spec.runPolicy.restart", {"runPolicy": {"restart": {"backoff": {"maxSeconds": 2}}}}),
        ("spec.managedBy", {"managedBy": "kueue.x-k8s.io/multikueue"}),
        ("spec.checkpoint.uri", {"checkpoint": {"uri": "gs://bucket/digits"}}),
    ],
)
def test_a_field_that_cannot_change_cannot_be_added_later(bare: Namespace, field: str, change: Object) -> None:
    assert f"{field}: " in patched(bare, change)


@pytest.mark.parametrize("before", [{}, {"runPolicy": {"restart": {"limits": [{"class": "Unknown", "max": 1}]}}}])
@pytest.mark.parametrize("policy", [{"suspend": True}, {"suspend": False}, {"startDeadlineSeconds": 60}])
def test_suspension_and_deadlines_can_change(space: Namespace, policy: Object, before: Object) -> None:
    space.apply(digits(**before))
    assert patched(space, {"runPolicy": policy}) == ""


@pytest.mark.parametrize("check", [{"mode": "Require"}, {"dataInRegion": "Require"}, {"compile": "Require"}])
def test_an_update_must_not_break_a_rule_either(space: Namespace, check: Object) -> None:
    job = digits(trainer={"command": ["python", "loop.py"]})
    del job["spec"]["trainer"]["entrypoint"]
    space.apply(job)
    assert "need trainer.entrypoint" in patched(space, {"entryCheck": check})
    assert patched(space, {"entryCheck": {"deadlineSeconds": 60}}) == ""
