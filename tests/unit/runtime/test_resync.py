"""Which jobs the resync looks at, and that one namespace or job that cannot be read does nothing to the others."""

import logging
from collections.abc import Mapping
from typing import Any

import pytest

from tests.fakes.cluster import FakeCluster
from tests.unit.jobs import job_body
from tests.unit.pods import NOON, time_at
from tpu_training_operator.api.constants import LABEL_QUEUE
from tpu_training_operator.api.status import State
from tpu_training_operator.kube.cluster import JobKey, Object
from tpu_training_operator.kube.errors import Forbidden
from tpu_training_operator.runtime.metrics import Metrics
from tpu_training_operator.runtime.resync import jobs_to_reconcile, slim_job


def ttl(seconds: int) -> dict[str, Any]:
    return {"spec.runPolicy": {"ttlSecondsAfterFinished": seconds}}


def true(condition: str) -> Object:
    return {"type": condition, "status": "True", "reason": "", "lastTransitionTime": time_at(0)}


def a_job(name: str, changes: dict[str, Any] | None = None, **status: Any) -> Object:
    return job_body({"metadata.name": name, "status": status} | (changes or {}))


def finished(name: str, changes: dict[str, Any] | None = None, *, at: str) -> Object:
    return a_job(name, changes, state="Succeeded", completionTime=at, conditions=[true("Succeeded")])


def suspended(name: str, changes: dict[str, Any] | None = None, *conditions: Object) -> Object:
    seen = {"metadata.generation": 2, "spec.runPolicy": {"suspend": True}} | (changes or {})
    return a_job(name, seen, state="Suspended", observedGeneration=2, conditions=[true("Ready"), *conditions])


def cluster_of(*jobs: Object) -> FakeCluster:
    """Its lists return of each job what the operator keeps."""
    return FakeCluster(*(job | slim_job(job) for job in jobs))


async def looked_at(*jobs: Object) -> set[str]:
    return {key.name for key in await jobs_to_reconcile(cluster_of(*jobs), (), lambda: NOON)}


async def test_finished_jobs_are_left_alone_until_their_ttl_expires() -> None:
    jobs = [
        a_job("new"),
        a_job("running", state="Running"),
        a_job("unreadable", attempt="many"),
        finished("kept", at=time_at(-(10**6))),
        finished("not-yet-due", ttl(60), at=time_at(-59)),
        finished("never-due", ttl(10**18), at=time_at(-60)),
        finished("due", ttl(60), at=time_at(-60)),
    ]
    assert await looked_at(*jobs) == {"new", "running", "unreadable", "due"}


async def test_suspended_jobs_are_left_alone_unless_something_is_due() -> None:
    jobs = [
        suspended("at-rest"),
        suspended("changed", {"metadata.generation": 3}),
        suspended("resumed", {"spec.runPolicy": {"suspend": False}}),
        suspended("going", {"metadata.deletionTimestamp": time_at(0)}),
        suspended("queued", {"metadata.labels": {LABEL_QUEUE: "team"}}),
        suspended("stopping", None, true("Reconciling")),
        suspended("out-of-budget", {"spec.runPolicy": {}}),
    ]
    assert await looked_at(*jobs) == {"changed", "resumed", "going", "queued", "stopping", "out-of-budget"}


@pytest.mark.parametrize("time", ["9999-12-31T23:59:59Z", "0001-01-01T00:00:00Z", "2026-03-01T12:00:00", "never"])
async def test_a_nonsensical_time_does_not_affect_other_jobs(time: str) -> None:
    assert "new" in await looked_at(finished("odd", ttl(60), at=time), a_job("new"))


class Counted(Metrics):
    def __init__(self) -> None:
        super().__init__()
        self.states: list[Mapping[JobKey, State | None]] = []

    def jobs_listed(self, states: Mapping[JobKey, State | None]) -> None:
        self.states.append(states)


async def test_a_namespace_that_cannot_be_listed_does_not_affect_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = cluster_of(a_job("one", {"metadata.namespace": "team-a"}), a_job("two", {"metadata.namespace": "team-c"}))
    cluster.faults["list TPUTrainingJob in team-b"] = Forbidden(403, "Forbidden", "tputrainingjobs is forbidden")
    counted = Counted()
    with caplog.at_level(logging.WARNING):
        keys = await jobs_to_reconcile(cluster, ("team-a", "team-b", "team-c"), lambda: NOON, counted)
    assert [key.name for key in keys] == ["one", "two"]
    assert "namespace team-b could not be" in caplog.text
    assert counted.states == [], "half a count would look like jobs that are gone"


async def test_finished_jobs_are_counted_too_and_those_of_other_controllers_are_not() -> None:
    others = a_job("of-others", {"spec.managedBy": "example.com/other"})
    cluster, counted = cluster_of(a_job("new"), finished("kept", at=time_at(-60)), others), Counted()
    await jobs_to_reconcile(cluster, (), lambda: NOON, counted)
    assert counted.states == [{JobKey("default", "new"): None, JobKey("default", "kept"): State.SUCCEEDED}]
