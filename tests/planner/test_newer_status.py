"""A status that a newer operator has written, after a rollback: no pass raises, and the user is still obeyed.

A newer version of the same API may add fields and words, lengthen texts and lists, and no longer write a field. Each of
these is done to statuses that this operator has written, at any place.
"""

import copy
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.planner.model_cluster import ModelCluster
from tests.planner.operators import Operator
from tests.planner.story import later, some_passes
from tests.unit import seen_jobs
from tpu_training_operator.api.conditions import ConditionType, is_true
from tpu_training_operator.api.status import Status

Place = tuple[Any, Any]

STORIES: dict[str, Callable[[], ModelCluster]] = {
    "starting": seen_jobs.starting,
    "running": seen_jobs.running,
    "restarting": seen_jobs.restarting,
    "suspended": seen_jobs.suspended,
    "blocked": seen_jobs.blocked,
    "failed": seen_jobs.failed,
    "succeeded": seen_jobs.succeeded,
}
# What a word may have become; and a time, which stays one.
NEW_TEXTS = ["Migrating", "x" * 5000, ""]
NEW_TIME = "2026-03-01T12:00:00.123456789+05:30"
# Every condition of every version has these.
OF_A_CONDITION = {"lastTransitionTime", "reason", "conditions"}


@cache
def told(name: str) -> Any:
    """The status at the end of the story."""
    return STORIES[name]().job["status"]


def places(value: Any) -> Iterator[Place]:
    """Every place of a document: the object or list that it is in, and its key."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inside:
        yield value, key
        yield from places(part)


def renew(status: dict[str, Any], where: int, how: str, text: str) -> None:
    """One difference. Which attempt it is, and whether the job has ended, any version says in the same way."""
    kept = {"attempt", "completionTime", "type", "status", "observedGeneration"}
    found = [place for place in places(status) if place[1] not in kept]
    inside, key = found[where % len(found)]
    match how:
        case "a new field" if isinstance(inside[key], dict):
            inside[key]["newerField"] = {"deep": [1, {"text": text}]}
        case "no longer written" if key not in OF_A_CONDITION and not isinstance(key, int):
            del inside[key]
        case "another word" if isinstance(inside[key], str):
            inside[key] = NEW_TIME if inside[key].startswith("2026-") else text
        case "a longer list" if isinstance(inside[key], list) and inside[key]:
            more = [copy.deepcopy(inside[key][0]) for _ in range(100)]
            for number, one in enumerate(more):
                if isinstance(one, dict) and "type" in one:
                    one["type"] = f"Newer{number}"
            inside[key] = [*more, *inside[key]]


RENEWALS = st.lists(
    st.tuples(
        st.integers(0, 500),
        st.sampled_from(["a new field", "no longer written", "another word", "a longer list"]),
        st.sampled_from(NEW_TEXTS),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(name=st.sampled_from(sorted(STORIES)), renewals=RENEWALS)
# Of more conditions than fit, one that must be cut as well.
@example(name="failed", renewals=[(377, "another word", "x" * 5000), (362, "a longer list", "Migrating")])
def test_what_decides_is_read_whatever_else_a_newer_operator_has_written(
    name: str, renewals: list[tuple[int, str, str]]
) -> None:
    body = copy.deepcopy(told(name))
    for renewal in renewals:
        renew(body, *renewal)
    before, after = Status.read(told(name)), Status.read(body)
    ends = [ConditionType.SUCCEEDED, ConditionType.FAILED, ConditionType.SUSPENDED]
    decides = [(one.attempt, [is_true(one.conditions, kind) for kind in ends]) for one in (before, after)]
    assert decides[0] == decides[1]


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(name=st.sampled_from(sorted(STORIES)), renewals=RENEWALS)
def test_no_pass_raises_and_suspension_is_obeyed(name: str, renewals: list[tuple[int, str, str]]) -> None:
    cluster = STORIES[name]()
    for renewal in renewals:
        renew(cluster.job["status"], *renewal)
    # The process that comes after a rollback.
    cluster.operator = Operator(cluster, cluster.inboxes)
    for seconds in (0, 5, 400):
        later(cluster, seconds=seconds)
    cluster.edit_run_policy(suspend=True)
    some_passes(cluster, 4, seconds=60)
    has_ended = cluster.status.completion_time is not None
    assert has_ended or is_true(cluster.status.conditions, ConditionType.SUSPENDED)
    assert not [pod for pod in cluster.pods.values() if pod["status"]["phase"] in ("Pending", "Running")]
