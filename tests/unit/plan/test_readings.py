"""What is remembered of specs and statuses is never out of date, and never much."""

from typing import Any

import pytest

from tests.unit.jobs import job_body
from tpu_training_operator.api.status import Status
from tpu_training_operator.domain.plan.parse_cache import read_job, read_status

STATUS = {"attempt": 2, "state": "Running", "observedGeneration": 1}


def test_the_same_spec_is_read_once_whatever_else_changes() -> None:
    changed = job_body({"metadata.resourceVersion": "8", "metadata.labels": {"a": "b"}}) | {"status": STATUS}
    assert read_job(changed) is read_job(job_body({"metadata.resourceVersion": "7"}))


@pytest.mark.parametrize(
    ("change", "read"),
    [
        ({"spec.recipe.trainSteps": 7}, lambda job: job.spec.recipe.train_steps == 7),
        ({"metadata.uid": "another"}, lambda job: job.uid == "another"),
        ({"metadata.generation": 9}, lambda job: job.metadata["generation"] == 9),
    ],
)
def test_another_spec_or_job_is_read_even_if_its_version_is_the_same(change: dict[str, Any], read: Any) -> None:
    assert not read(read_job(job_body())[0][0].job)
    assert read(read_job(job_body(change))[0][0].job)


@pytest.mark.parametrize("body", [None, {}, STATUS, {"state": "\ud800"}, {"attempt": 2**70}])
def test_a_status_is_what_reading_it_says(body: Any) -> None:
    assert [read_status(body), read_status(body)] == [Status.read(body)] * 2


def test_only_the_latest_are_remembered_and_nothing_large() -> None:
    first, large = read_status({"attempt": 1}), {"avoidedNodes": ["n" * 1000] * 16}
    assert read_status({"attempt": 1}) is first
    for attempt in range(2, 300):
        read_status({"attempt": attempt})
    assert read_status({"attempt": 1}) is not first
    assert read_status(large) is not read_status(large)
