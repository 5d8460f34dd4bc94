"""The example job on real data: the recipe of one host, scaled to four."""

from __future__ import annotations

from tests.trainer.gang_processes import Launcher, run_spec


def test_digits_reach_95_percent_on_four_hosts(launcher: Launcher) -> None:
    gang = launcher.start(
        run_spec(
            hosts=4,
            replicas=16,
            entrypoint="examples.digits:task",
            batch={"global": 128, "perReplica": 8},
            trainSteps=300,
            warmupSteps=20,
            optimizer="digits",
            parameters={"hidden": "128"},
        )
        | {"optimizer": {"name": "sgd", "learningRate": "0.2", "momentum": "0.9", "weightDecay": "0.0001"}}
    )
    assert gang.wait() == [0] * 4, gang.output()
    metrics = gang.hosts[3].message()["metrics"]
    assert metrics["accuracy"] >= 0.95
