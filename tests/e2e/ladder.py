"""A job with one rung below it. It is also the training that nothing disturbs: a ladder changes no step of its job."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from tests.cluster.api import Object
from tests.cluster.cluster import Cluster
from tests.cluster.object_storage import ObjectStorage
from tests.e2e.chronicle import Chronicle
from tests.e2e.paced import ASCENDS
from tests.e2e.together import Story
from tests.e2e.training import Losses, started

TRIED = 40
LADDER: dict[str, Any] = {
    "rungs": [
        {
            "slice": {"acceleratorType": "v5litepod-4", "hardware": "CPU"},
            "steps": TRIED,
            "gates": {"evaluation": {"metric": "accuracy", "min": 0.2}},
        }
    ]
}


@dataclass(frozen=True)
class Ascent:
    """Says what became of a job. `pods`: at its end, name and phase. `losses`: of the job itself, if it succeeded."""

    status: Object
    told: Chronicle
    pods: dict[str, str]
    losses: Losses


def ascend(env: dict[str, str], entry: str, cluster: Cluster, storage: ObjectStorage) -> Ascent:
    with started(cluster, storage, env=env, entryCheck={"mode": entry}, ladder=LADDER) as training:
        status = training.wait_ended()
        pods = {pod["metadata"]["name"]: pod["status"]["phase"] for pod in training.pods()}
        return Ascent(status, training.chronicle, pods, training.losses() if status["state"] == "Succeeded" else {})


# Of a task that learns, and of one that follows its gradient upwards.
LEARNS, ASCENDING = "learns", "ascends"
STORIES = {
    LEARNS: Story(partial(ascend, {}, "Require"), trains=True),
    ASCENDING: Story(partial(ascend, {ASCENDS: "1"}, "Skip"), trains=True),
}
