"""The operator dies after each of its effects in turn, and the next one takes over: the story has the same end."""

from collections.abc import Callable
from datetime import timedelta

import pytest

from tests.planner import kubelet
from tests.planner.model_cluster import Crash, ModelCluster, actions, one_pass
from tpu_training_operator.api.conditions import ConditionType, is_true
from tpu_training_operator.api.status import State

ENOUGH_PASSES = 20


class Operator:
    """Passes over one job. The process dies when it has had `lives_for` effects, and is started again."""

    def __init__(self, lives_for: int) -> None:
        self.left: int | None = lives_for
        self.effects = 0

    def work_on(self, cluster: ModelCluster) -> None:
        try:
            decided = one_pass(cluster, effects=self.left)
        except Crash:
            self.left = None
            return
        # The status is an effect like the others: dying right after it is dying before the next pass.
        count = len(actions(decided)) + (decided.status is not None)
        self.effects += count
        self.left = None if self.left is None or self.left <= count else self.left - count
        cluster.now += decided.again or timedelta(0)


def a_restart(cluster: ModelCluster) -> None:
    if cluster.status.attempt == 1 and is_true(cluster.status.conditions, ConditionType.GANG_READY):
        kubelet.end(cluster, cluster.pods["digits-1-0-1"], 137)


def a_suspension(cluster: ModelCluster) -> None:
    suspended = cluster.job["spec"].get("runPolicy", {}).get("suspend")
    if suspended is None and is_true(cluster.status.conditions, ConditionType.GANG_READY):
        cluster.edit_run_policy(suspend=True)
    elif suspended and cluster.status.state is State.SUSPENDED and not cluster.pods:
        cluster.edit_run_policy(suspend=False)


def told(lives_for: int, trouble: Callable[[ModelCluster], None]) -> tuple[ModelCluster, Operator]:
    """The gang runs, `trouble` befalls it, it runs again and finishes."""
    cluster, operator = ModelCluster(), Operator(lives_for)
    for _ in range(ENOUGH_PASSES):
        operator.work_on(cluster)
        trouble(cluster)
        kubelet.sweep(cluster)
        if cluster.status.attempt == 2 and is_true(cluster.status.conditions, ConditionType.GANG_READY):
            for pod in cluster.pods.values():
                kubelet.end(cluster, pod)
        for pod in cluster.pods.values():
            kubelet.make_ready(cluster, pod)
    return cluster, operator


@pytest.mark.parametrize("trouble", [a_restart, a_suspension])
def test_dying_after_any_effect_changes_nothing_about_the_end(trouble: Callable[[ModelCluster], None]) -> None:
    undisturbed, operator = told(10**6, trouble)
    assert undisturbed.status.state is State.SUCCEEDED
    ends = {}
    for effect in range(operator.effects + 1):
        cluster, _ = told(effect, trouble)
        ends[effect] = (cluster.status.state, cluster.status.attempt, cluster.status.restarts.by_class)
    end = (State.SUCCEEDED, 2, undisturbed.status.restarts.by_class)
    assert {effect: found for effect, found in ends.items() if found != end} == {}
