"""What the API server refuses and accepts without a running operator; `tpujob` is tested with the same tables."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.api import ApiError
from tests.cluster.control_plane import ControlPlane
from tests.cluster.namespaces import fresh_namespace
from tests.controlplane.jobs import Namespace, digits
from tests.unit.bad_jobs import IMPOSSIBLE_JOBS, REFUSED_JOBS, UNDECODABLE_JOBS
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
    answers = [(field, refusal(space, changes)) for changes, field, _ in REFUSED_JOBS]
    assert [(field, answer) for field, answer in answers if not names(answer, field)] == []


def test_an_object_that_is_not_a_job_is_refused(space: Namespace) -> None:
    assert [changes for changes, _, _ in UNDECODABLE_JOBS if not refusal(space, changes)] == []


def test_every_good_job_is_accepted(space: Namespace) -> None:
    assert [answer for changes in GOOD_JOBS if (answer := refusal(space, changes))] == []


def test_a_job_that_only_arithmetic_rules_out_is_left_to_the_operator(space: Namespace) -> None:
    assert [answer for changes, _, _ in IMPOSSIBLE_JOBS if (answer := refusal(space, changes))] == []


def patched(space: Namespace, spec: Object) -> str:
    """What kubectl prints if the change of the spec is refused; empty if it is accepted."""
    patch = json.dumps({"spec": spec})
    done = space.cluster.kubectl(
        "--namespace", space.name, "patch", "tpujob", "digits", "--type=merge", "-p", patch, check=False
    )
    return done.stderr if done.returncode else ""


@pytest.fixture(scope="module")
def full(control_plane: ControlPlane, job_definition: None) -> Iterator[Namespace]:
    """A namespace with a job that has all optional fields which cannot change. A refused change leaves it as it is."""
    managed = {"managedBy": "tpu-operator.dev/tpu-training-operator"}
    with fresh_namespace(control_plane.api) as name:
        space = Namespace(control_plane, name)
        space.apply(
            digits(data={"uri": "gs://bucket/digits"}, runPolicy={"restart": {"limits": {"Unknown": 1}}}, **managed)
        )
        before = space.job()
        yield space
        assert space.job() == before


@pytest.fixture(scope="module")
def bare(control_plane: ControlPlane, job_definition: None) -> Iterator[Namespace]:
    """A namespace with a job that has none of them."""
    with fresh_namespace(control_plane.api) as name:
        space = Namespace(control_plane, name)
        space.apply(digits())
        before = space.job()
        yield space
        assert space.job() == before


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("spec.slice", {"slice": {"acceleratorType": "v5litepod-32"}}),
        ("spec.slice", {"slice": {"count": 2}}),
        ("spec.slice", {"slice": {"hardware": "TPU"}}),
        ("spec.slice", RESERVATION),
        ("spec.placement.alternatives", {"placement": {"alternatives": [{"slice": {"acceleratorType": "v4-16"}}]}}),
        ("spec.placement.count", {"placement": {"count": {"min": 1}}}),
        ("spec.trainer", {"trainer": {"image": "localhost/tpu-examples:2"}}),
        ("spec.trainer", {"trainer": {"env": [{"name": "A", "value": "b"}]}}),
        ("spec.recipe", {"recipe": {"trainSteps": 1201}}),
        ("spec.recipe", {"recipe": {"tunedOn": None}}),
        ("spec.recipe", {"recipe": {"scaling": {"betas": True}}}),
        ("spec.data", {"data": {"uri": "gs://bucket/other"}}),
        ("spec.data", {"data": None}),
        ("spec.runPolicy.restart", {"runPolicy": {"restart": {"limits": {"Infrastructure": 21}}}}),
        ("spec.runPolicy.restart", {"runPolicy": {"restart": {"backoff": {"maxSeconds": 1}}}}),
        ("spec.runPolicy.restart", {"runPolicy": {"restart": None}}),
        ("spec.runPolicy.restart", {"runPolicy": None}),
        ("spec.managedBy", {"managedBy": None}),
        ("spec.managedBy", {"managedBy": "kueue.x-k8s.io/multikueue"}),
    ],
)
def test_an_immutable_field_cannot_change(full: Namespace, field: str, change: Object) -> None:
    answer = patched(full, change)
    assert f"{field}: " in answer
    assert "the job and create it again" in answer


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("spec.data", {"data": {"uri": "gs://bucket/digits"}}),
        ("spec.runPolicy.restart", {"runPolicy": {"restart": {"limits": {"Unknown": 1}}}}),
        ("spec.managedBy", {"managedBy": "kueue.x-k8s.io/multikueue"}),
    ],
)
def test_an_immutable_field_cannot_be_added_later(bare: Namespace, field: str, change: Object) -> None:
    assert f"{field}: " in patched(bare, change)


@pytest.mark.parametrize("before", [{}, {"runPolicy": {"restart": {"limits": {"Unknown": 1}}}}])
@pytest.mark.parametrize("policy", [{"suspend": True}, {"suspend": False}, {"startDeadlineSeconds": 60}])
def test_suspension_and_deadlines_can_change(space: Namespace, policy: Object, before: Object) -> None:
    space.apply(digits(**before))
    assert patched(space, {"runPolicy": policy}) == ""


@pytest.mark.parametrize("check", [{"mode": "Require"}, {"dataInRegion": "Require"}, {"compile": "Require"}])
def test_an_update_must_not_break_a_rule_either(space: Namespace, check: Object) -> None:
    space.apply(digits(trainer={"entrypoint": None, "command": ["python", "loop.py"]}))
    assert "need trainer.entrypoint" in patched(space, {"entryCheck": check})
    assert patched(space, {"entryCheck": {"deadlineSeconds": 60}}) == ""
