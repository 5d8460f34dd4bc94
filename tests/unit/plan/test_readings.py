"""What is remembered of specs and statuses is never out of date, and never much."""

from typing import Any

import pytest

from tests.unit.jobs import job_body
from tpu_training_operator.api.status import Status
from tpu_training_operator.domain.plan.parse_cache import ParseCache

STATUS = {"attempt": 2, "state": "Running", "observedGeneration": 1}


def test_the_same_spec_is_read_once_whatever_else_changes() -> None:
    cache = ParseCache()
    changed = job_body({"metadata.resourceVersion": "8", "metadata.labels": {"a": "b"}}) | {"status": STATUS}
    assert cache.job(changed) is cache.job(job_body({"metadata.resourceVersion": "7"}))


@pytest.mark.parametrize(
    "change", [{"spec.recipe.trainSteps": 7}, {"metadata.uid": "another"}, {"metadata.generation": 9}]
)
def test_another_spec_or_job_is_read_even_if_its_version_is_the_same(change: dict[str, Any]) -> None:
    cache = ParseCache()
    first = cache.job(job_body())[0].job
    assert cache.job(job_body(change))[0].job == ParseCache(0).job(job_body(change))[0].job != first


@pytest.mark.parametrize("body", [None, {}, STATUS, {"state": "\ud800"}, {"attempt": 2**70}])
def test_a_status_is_what_reading_it_says(body: Any) -> None:
    cache = ParseCache()
    assert [cache.status(body), cache.status(body)] == [Status.read(body)] * 2


def test_only_the_latest_are_remembered_and_nothing_large() -> None:
    cache = ParseCache(most=2)
    one, two, three, large = {"attempt": 1}, {"attempt": 2}, {"attempt": 3}, {"avoidedNodes": ["n" * 1000] * 16}
    first, second = cache.status(one), cache.status(two)
    assert cache.status(one) is first
    cache.status(three)
    assert cache.status(one) is first
    assert cache.status(two) is not second
    assert cache.status(large) is not cache.status(large)
