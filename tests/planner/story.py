"""The situations that planner tests start from, and names for what a plan does."""

from datetime import timedelta
from typing import Any

from tests.planner import kubelet
from tests.planner.model_cluster import ModelCluster
from tests.planner.operators import actions, one_pass
from tpu_training_operator.api.conditions import ConditionType, find
from tpu_training_operator.api.status import State, Status
from tpu_training_operator.domain.objects.actions import (
    Action,
    Create,
    Delete,
    Publish,
    WarnPlaceholderRefused,
)
from tpu_training_operator.domain.plan.plan import Plan
from tpu_training_operator.kube.cluster import Object

WORKERS = ["digits-1-0-0", "digits-1-0-1", "digits-1-0-2", "digits-1-0-3"]


def given_a_job(changes: dict[str, Any] | None = None, *, listens: bool = False) -> ModelCluster:
    return ModelCluster(changes, listens=listens)


def given_a_begun_attempt(changes: dict[str, Any] | None = None, *, listens: bool = False) -> ModelCluster:
    cluster = given_a_job(changes, listens=listens)
    one_pass(cluster)
    return cluster


def given_a_created_gang(changes: dict[str, Any] | None = None, *, listens: bool = False) -> ModelCluster:
    cluster = given_a_begun_attempt(changes, listens=listens)
    one_pass(cluster)
    return cluster


def given_a_running_gang(changes: dict[str, Any] | None = None, *, listens: bool = False) -> ModelCluster:
    cluster = given_a_created_gang(changes, listens=listens)
    get_ready(cluster)
    return cluster


def all_are_ready(cluster: ModelCluster) -> None:
    for pod in cluster.pods.values():
        kubelet.make_ready(cluster, pod)


def all_finish(cluster: ModelCluster) -> None:
    for pod in cluster.pods.values():
        kubelet.end(cluster, pod)


def passes(cluster: ModelCluster, seconds: float) -> None:
    cluster.now += timedelta(seconds=seconds)


def fails(cluster: ModelCluster, name: str, code: int = 137, **how: str) -> None:
    kubelet.end(cluster, cluster.pods[name], code, **how)


# What happens, with the pass of the operator that follows.


def later(cluster: ModelCluster, **time: float) -> None:
    cluster.now += timedelta(**time)
    one_pass(cluster)


def is_seen_to_fail(cluster: ModelCluster, name: str, code: int = 137, **how: str) -> None:
    fails(cluster, name, code, **how)
    one_pass(cluster)


def get_ready(cluster: ModelCluster) -> None:
    all_are_ready(cluster)
    one_pass(cluster)


def finish(cluster: ModelCluster) -> None:
    all_finish(cluster)
    one_pass(cluster)


def suspend(cluster: ModelCluster) -> None:
    cluster.edit_run_policy(suspend=True)
    one_pass(cluster)


def resume(cluster: ModelCluster) -> None:
    cluster.edit_run_policy(suspend=False)
    one_pass(cluster)


def some_passes(cluster: ModelCluster, times: int, *, seconds: float = 0) -> None:
    """After each, the kubelets work and time passes."""
    for _ in range(times):
        one_pass(cluster)
        kubelet.sweep(cluster)
        passes(cluster, seconds)


def all_passes(cluster: ModelCluster, times: int = 6) -> None:
    """After each, the kubelets work and what runs is ready."""
    for _ in range(times):
        one_pass(cluster)
        kubelet.sweep(cluster)
        all_are_ready(cluster)


def described(decided: Plan) -> list[str]:
    return [_describe(action) for action in actions(decided)]


def _describe(action: Action) -> str:
    match action:
        case Create(body):
            return f"create {body['kind']} {body['metadata']['name']}"
        case Delete(kind, name, force=force):
            return f"delete {kind} {name}" + (" by force" if force else "")
        case Publish(bodies):
            return "publish " + ", ".join(f"{body['kind']} {body['metadata']['name']}" for body in bodies)
        case WarnPlaceholderRefused():
            return "tell of growth"
        case _:
            return action.verb


def reason(status: Status, kind: ConditionType = ConditionType.READY) -> tuple[str, str]:
    condition = find(status.conditions, kind)
    return (condition.status, condition.reason) if condition else ("", "")


def ready_message(cluster: ModelCluster) -> str:
    ready = find(cluster.status.conditions, ConditionType.READY)
    return ready.message


def until_running(cluster: ModelCluster) -> list[str]:
    """Lets the gang start without trouble; returns the names of its pods."""
    for _ in range(10):
        kubelet.sweep(cluster)
        cluster.now += timedelta(minutes=10)
        one_pass(cluster)
        all_are_ready(cluster)
    assert cluster.status.state == State.RUNNING
    return gang(cluster)


def gang(cluster: ModelCluster) -> list[str]:
    """The names of the current attempt's pods."""
    return sorted(pod["metadata"]["name"] for pod in present(cluster))


def present(cluster: ModelCluster) -> list[Object]:
    """The current attempt's pods, without the one that is kept for its log."""
    return [pod for name, pod in cluster.pods.items() if name.startswith(f"digits-{cluster.status.attempt}-")]
