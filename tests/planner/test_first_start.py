"""What it takes to start a job: one look decides on the attempt, another one on its pods."""

from typing import Any

import pytest

from tests.planner.model_cluster import ModelCluster
from tests.planner.operators import Operator
from tpu_training_operator.domain.plan.planner import plan
from tpu_training_operator.runtime import reconciler


@pytest.mark.parametrize("has_heard_all", [True, False])
def test_a_first_attempt_needs_two_evaluations_of_the_plan(
    monkeypatch: pytest.MonkeyPatch, *, has_heard_all: bool
) -> None:
    turns: list[str] = []

    def counted(*args: Any, **options: Any) -> Any:
        decided = plan(*args, **options)
        turns.append(decided.turn.name)
        return decided

    monkeypatch.setattr(reconciler, "plan", counted)
    cluster = ModelCluster()
    operator = Operator(cluster)
    while not cluster.pods:
        operator.work(has_heard_all=has_heard_all)
    assert turns == ["ATTEMPT", "NONE"]
