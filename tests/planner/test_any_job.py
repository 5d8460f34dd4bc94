"""For any job that the API server accepts, no pass raises and no status is refused, at any stage of its life."""

from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import jsonschema
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.planner import kubelet
from tests.planner.any_job import any_job
from tests.planner.gang import SOAK
from tests.planner.mishaps import ENDINGS, LOSSES, STARTS, Mishap
from tests.planner.model_cluster import ModelCluster
from tests.planner.operators import actions, one_pass
from tests.planner.story import all_are_ready, all_finish
from tests.unit.jobs import job_body
from tpu_contract.protocol import ReportPhase
from tpu_training_operator.api.crd import structural_schema
from tpu_training_operator.api.status import State, Status
from tpu_training_operator.api.validation import InvalidJob, parse_job
from tpu_training_operator.cli.common.job_file import JobFile
from tpu_training_operator.cli.plan.summary import print_summary
from tpu_training_operator.domain.job.options import options_of
from tpu_training_operator.domain.job.recipe.cost import StepTime, cost_of
from tpu_training_operator.domain.job.recipe.resolve import resolve
from tpu_training_operator.domain.objects.actions import Create
from tpu_training_operator.kube.encoding import decode, encode

_STATUS = jsonschema.Draft7Validator(structural_schema(Status))
_INT64 = 2**63
_LARGEST_CONFIG_MAP = 2**20

# How running gangs end, and gangs that do not start.
MISHAPS: dict[str, Mishap] = {**ENDINGS, **LOSSES, **STARTS}
FEW = settings(
    max_examples=5000 if SOAK else 150,
    derandomize=not SOAK,
    suppress_health_check=list(HealthCheck),
    database=None,
)
FEWER = FEW if SOAK else settings(FEW, max_examples=60)
"""Of whole lives, each as long as many plans."""


def look(cluster: ModelCluster) -> timedelta:
    """One pass; returns when the next is due. The definition must allow what the pass wrote."""
    decided = one_pass(cluster)
    _check_status(cluster)
    for action in actions(decided):
        if isinstance(action, Create) and action.body["kind"] == "ConfigMap":
            assert sum(len(k) + len(v) for k, v in action.body["data"].items()) <= _LARGEST_CONFIG_MAP
    return decided.again or timedelta(0)


def _check_status(cluster: ModelCluster) -> None:
    _check(encode(cluster.job.get("status", {})))


@lru_cache(1)
def _check(written: bytes) -> None:
    """Most passes write no status."""
    status = decode(written)
    assert [error.message[:300] for error in _STATUS.iter_errors(status)] == []
    assert all(abs(number) < _INT64 for number in _integers(status)), status


def _integers(value: Any) -> list[int]:
    if isinstance(value, dict):
        return [number for item in value.values() for number in _integers(item)]
    if isinstance(value, list):
        return [number for item in value for number in _integers(item)]
    return [value] if isinstance(value, int) else []


def goes_on(cluster: ModelCluster, passes: int = 6) -> None:
    """Kubelets work and time passes, until the operator's next pass is due."""
    for _ in range(passes):
        kubelet.sweep(cluster)
        all_are_ready(cluster)
        wait = look(cluster)
        cluster.now += max(wait, timedelta(seconds=1))


def a_life(body: dict[str, Any], mishaps: list[str]) -> ModelCluster:
    cluster = ModelCluster(listens=True)
    cluster.job = {**body, "metadata": {**cluster.job["metadata"]}}
    look(cluster)
    look(cluster)
    goes_on(cluster)
    for name in mishaps:
        if cluster.status.state is State.RUNNING:
            kubelet.report(cluster, 1, ReportPhase.TRAINING)
            look(cluster)
            kubelet.report(cluster, 2**53, ReportPhase.CHECKPOINTING, checkpoint_step=2**53)
            look(cluster)
        if cluster.pods:
            MISHAPS[name](cluster, next(iter(cluster.pods.values())))
        look(cluster)
        goes_on(cluster)
    cluster.edit_run_policy(suspend=True)
    goes_on(cluster)
    cluster.edit_run_policy(suspend=False)
    goes_on(cluster)
    all_finish(cluster)
    goes_on(cluster, passes=4)
    return cluster


def with_spec(**fields: Any) -> dict[str, Any]:
    return job_body({f"spec.{path.replace('__', '.')}": value for path, value in fields.items()})


@FEWER
@given(any_job(), st.lists(st.sampled_from(sorted(MISHAPS)), min_size=1, max_size=2))
@example(with_spec(runPolicy__restart__windowSeconds=2**31 - 1), ["exit code 137"])
def test_every_job_can_run_to_its_end(body: dict[str, Any], mishaps: list[str]) -> None:
    cluster = a_life(body, mishaps)
    assert cluster.status.state is not None or cluster.job_is_gone


ONE = {"acceleratorType": "v5litepod-1"}
HUGE = {"generation": "tpu8t", "topology": "9973x9967x16", "chipsPerHost": 4}
LARGE = {"generation": "tpu8t", "topology": "100x200", "chipsPerHost": 4}
MILESTONES = [2**52 - i for i in range(32)]
SCALED = {"ema": True, "betas": True, "weightDecay": True}


@FEW
@given(any_job(most_hosts=5000))
@example(
    with_spec(
        recipe__schedule={"name": "Step", "milestones": MILESTONES}, recipe__tunedOn=ONE, recipe__globalBatchSize=1
    )
)
@example(with_spec(slice=LARGE, recipe__tunedOn=ONE, recipe__emaDecay="0.0000001", recipe__scaling=SCALED))
@example(
    # A regression: rounds were once tried one by one, up to one and a half billion.
    with_spec(
        slice=ONE,
        recipe__tunedOn=HUGE,
        recipe__globalBatchSize=9973 * 9967 * 16,
        recipe__scaling={"batch": "GlobalConstant"},
    )
)
def test_every_job_can_be_planned_by_the_cli(body: dict[str, Any]) -> None:
    """`tpujob plan` computes and prints it."""
    job = parse_job(body)
    try:
        resolution = resolve(job.spec)
    except InvalidJob:
        return
    assert resolution.resolved
    file = JobFile(Path("job.yaml"), body, options_of(job))
    print_summary(file, list(resolution.warnings), cost_of(resolution, [StepTime.of(resolution, 0.4, "measured on")]))
