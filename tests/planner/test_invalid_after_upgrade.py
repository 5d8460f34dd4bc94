"""A gang whose spec the operator can no longer use, because it was upgraded: the user is obeyed all the same."""

import copy
from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.model_cluster import ModelCluster
from tests.planner.operators import Operator, one_pass
from tests.planner.story import fails, finish, given_a_running_gang, some_passes
from tests.unit.bad_jobs import IMPOSSIBLE_JOBS, REFUSED_JOBS
from tests.unit.jobs import job_body
from tpu_training_operator.api.conditions import ConditionType, is_true
from tpu_training_operator.api.status import State
from tpu_training_operator.kube.cluster import Object


def unusable_specs() -> Iterator[Object]:
    """Each spec that is refused somewhere in the tests, as far as a definition without rules would have stored it."""
    for changes, field in [*REFUSED_JOBS, *IMPOSSIBLE_JOBS]:
        spec = job_body(changes).get("spec")
        is_stored = isinstance(spec, dict) and isinstance(spec.get("runPolicy", {}), dict)
        # Who manages a job is settled at its creation, and another manager's job is left alone.
        if (
            is_stored
            and "managedBy" not in spec
            and field.startswith("spec")
            and not field.startswith(("spec.runPolicy.suspend", "spec.entryCheck"))
        ):
            yield spec


def after_an_upgrade(spec: Object) -> ModelCluster:
    cluster = given_a_running_gang()
    cluster.job["spec"] = copy.deepcopy(spec)
    cluster.operator = Operator(cluster, cluster.inboxes)
    one_pass(cluster)
    return cluster


SPECS = list(unusable_specs())
FEW = settings(max_examples=40)


def test_the_entry_check_of_a_job_that_has_begun_cannot_make_it_invalid() -> None:
    cluster = given_a_running_gang({"spec.trainer": {"image": "localhost/own:1", "command": ["python", "loop.py"]}})
    cluster.job["spec"]["entryCheck"] = {"mode": "Require", "dataInRegion": "Sometimes"}
    one_pass(cluster)
    assert cluster.status.state is State.RUNNING
    fails(cluster, "digits-1-0-1")
    some_passes(cluster, 4, seconds=60)
    assert (cluster.status.attempt, cluster.status.last_failure is not None) == (2, True)


@FEW
@given(st.sampled_from(SPECS))
def test_the_gang_trains_on_to_its_end(spec: Object) -> None:
    cluster = after_an_upgrade(spec)
    uids = {pod["metadata"]["uid"] for pod in cluster.pods.values()}
    some_passes(cluster, 4, seconds=60)
    assert {pod["metadata"]["uid"] for pod in cluster.pods.values()} == uids
    finish(cluster)
    assert cluster.status.state is State.SUCCEEDED


@FEW
@given(st.sampled_from(SPECS))
def test_suspension_is_obeyed(spec: Object) -> None:
    cluster = after_an_upgrade(spec)
    assert cluster.status.state is State.INVALID
    cluster.edit_run_policy(suspend=True)
    some_passes(cluster, 4, seconds=60)
    assert is_true(cluster.status.conditions, ConditionType.SUSPENDED)
    assert cluster.pods == {}


@FEW
@given(st.sampled_from(SPECS))
def test_deletion_is_obeyed(spec: Object) -> None:
    cluster = after_an_upgrade(spec)
    cluster.job["metadata"]["deletionTimestamp"] = "2026-03-01T12:00:00Z"
    one_pass(cluster)
    cluster.job_is_gone = True
    cluster.collect_garbage()
    some_passes(cluster, 4, seconds=60)
    assert cluster.pods == {}
