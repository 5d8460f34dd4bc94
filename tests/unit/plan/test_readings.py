"""What is remembered of specs and statuses is never out of date, and never much."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.jobs import job_body
from tpu_training_operator.api.status import Status
from tpu_training_operator.api.validation import InvalidJob
from tpu_training_operator.domain.plan import parse_cache as module
from tpu_training_operator.domain.plan.parse_cache import ParseCache

STATUS = {"attempt": 2, "state": "Running", "observedGeneration": 1}


def test_the_same_spec_is_read_once_whatever_else_changes() -> None:
    cache = ParseCache()
    first = cache.job(job_body({"metadata.resourceVersion": "7"}))
    assert (
        cache.job(job_body({"metadata.resourceVersion": "8", "metadata.labels": {"a": "b"}}) | {"status": STATUS})
        is first
    )


@pytest.mark.parametrize(
    "change", [{"spec.recipe.trainSteps": 7}, {"metadata.uid": "another"}, {"metadata.generation": 9}]
)
def test_another_spec_or_job_is_read_even_if_its_version_is_the_same(change: dict[str, Any]) -> None:
    cache = ParseCache()
    cache.job(job_body())
    found = cache.job(job_body(change))[0].job
    alone = ParseCache(0).job(job_body(change))[0].job
    assert found == alone
    assert found != cache.job(job_body())[0].job


def test_an_invalid_spec_is_refused_each_time() -> None:
    cache = ParseCache()
    for _ in range(2):
        with pytest.raises(InvalidJob):
            cache.job(job_body({"spec.recipe.trainSteps": -1}))


@pytest.mark.parametrize("body", [None, {}, STATUS, {"state": "\ud800"}, {"attempt": 2**70}])
def test_a_status_is_what_reading_it_says(body: Any) -> None:
    cache = ParseCache()
    assert [cache.status(body), cache.status(body)] == [Status.read(body)] * 2


def test_only_the_latest_are_remembered_and_nothing_large(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Any] = []
    read: Callable[[Any], Status] = Status.read
    monkeypatch.setattr(module.Status, "read", lambda body: reads.append(body) or read(body))
    cache = ParseCache(most=2)
    one, two, three = ({"attempt": number} for number in (1, 2, 3))
    for body in (one, two, one, three, one, two):
        cache.status(body)
    assert reads == [one, two, three, two]
    large = {"avoidedNodes": ["n" * 1000] * 16}
    reads.clear()
    for _ in range(2):
        cache.status(large)
    assert len(reads) == 2
