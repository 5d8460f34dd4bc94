"""What the workers of a `ModelCluster` train, example by example.

A gang trains when all its workers run, as collectives want it, each its own share of every step's batch. The numbers
are those of the run spec that the operator wrote for the attempt. A gang begins where the newest checkpoint is, and
what it has not saved is lost with it.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from tests.planner.model_cluster import ModelCluster
from tpu_training_operator.api.constants import LABEL_HOST_INDEX, LABEL_SLICE_INDEX
from tpu_training_operator.kube.cluster import Object

Segment = tuple[int, int]


@dataclass
class ModelTrainer:
    """`kept`: the examples, from and to, that each checkpoint added to the one before it."""

    kept: list[Segment] = field(default_factory=list)
    _runs: dict[int, dict[str, Any]] = field(default_factory=dict)
    _begun: dict[int, int] = field(default_factory=dict)
    _at: dict[int, int] = field(default_factory=dict)

    @property
    def saved(self) -> int:
        return self.kept[-1][1] if self.kept else 0

    def trains(self, cluster: ModelCluster, attempt: int, pods: list[Object], steps: int | None = None) -> bool:
        """So many steps, or all that are left. False if these are not the whole gang."""
        run = self._run(cluster, attempt)
        if run is None or "endAfterSteps" in run or not _is_whole(run, pods):
            return False
        self._begun.setdefault(attempt, self.saved)
        at, batch = self._at.get(attempt, self.saved), run["batch"]["global"]
        assert run["checkpoint"]["uri"] == "gs://bucket/jobs/default/digits", "checkpoints in another place"
        left = run["trainSteps"] - at // batch
        for _ in range(left if steps is None else min(steps, left)):
            at = _step(run, pods, at)
        self._at[attempt] = at
        return True

    def saves(self, attempt: int) -> None:
        begun, at = self._begun[attempt], self._at[attempt]
        assert begun == self.saved, "examples between these two are trained twice, or never"
        if at > begun:
            self.kept.append((begun, at))
        self._begun[attempt] = at

    def _run(self, cluster: ModelCluster, attempt: int) -> dict[str, Any] | None:
        """The run spec that the workers mounted when they started."""
        config_map = cluster.others.get(f"ConfigMap/digits-{attempt}")
        if attempt not in self._runs and config_map is not None:
            self._runs[attempt] = json.loads(config_map["data"]["run.json"])
        return self._runs.get(attempt)


def _is_whole(run: dict[str, Any], pods: list[Object]) -> bool:
    hosts, slices = run["slice"]["hosts"], run["slice"]["slices"]
    expected = {(slice_, host) for slice_ in range(slices) for host in range(hosts // slices)}
    return len(pods) == hosts and {_place(pod) for pod in pods} == expected


def _place(pod: Object) -> tuple[int, int]:
    labels = pod["metadata"]["labels"]
    return int(labels[LABEL_SLICE_INDEX]), int(labels[LABEL_HOST_INDEX])


def _step(run: dict[str, Any], pods: list[Object], at: int) -> int:
    """Where the training is after one step, if the shares of all replicas are the batch."""
    batch, replicas = run["batch"], run["slice"]["replicas"]
    share = batch["perReplica"] * batch["accumulation"] * (replicas // len(pods))
    assert share * len(pods) == batch["global"], "the shares are not the batch"
    return at + share * len(pods)
