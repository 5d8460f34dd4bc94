"""Complex weights, weighted losses and skipped steps on the devices: as in eager replicas, which test files of their
own compare with plain PyTorch."""

from __future__ import annotations

import pytest

from tests.trainer import demanding
from tests.trainer.gang_processes import Launcher, run_spec, start_replicas
from tests.trainer.whole_runs import run


@pytest.mark.parametrize(("kind", "alike"), [("xla", 2), ("chips", 2), ("xla-spmd", 1)])
def test_a_demanding_task_trains_as_on_eager_replicas(launcher: Launcher, kind: str, alike: int) -> None:
    """`alike`: how many eager replicas normalise over the same parts of a batch."""
    recipe = {"trainSteps": 24, "warmupSteps": 5, "onNotFinite": "Skip"}
    gang = start_replicas(launcher, kind, 2, optimizer="adamw", entrypoint="tests.trainer.demanding:task", **recipe)
    adamw = run_spec(optimizer="adamw")["optimizer"]
    expected = run(lambda hp, rank: demanding.task(hp), alike, recipe=adamw, **recipe)
    assert set(gang.wait()) == {0}, gang.output()
    assert expected.outcome.message.endswith("or gradients were not finite")
    assert "6 steps" in expected.outcome.message
    message = gang.hosts[0].message()
    assert message["message"].endswith("or gradients were not finite")
    assert "6 steps" in message["message"]
    losses = [None if bad else loss for loss in expected.losses for bad in [loss == float("inf")]]
    assert gang.losses() == [None if loss is None else pytest.approx(loss, abs=1e-4) for loss in losses]
    for name, found in (("mean", expected.outcome.metrics["mean"]), ("batches", 18)):
        assert message["metrics"][name] == pytest.approx(found, rel=1e-3)
