"""The pod of the operator that works gets its label back, in virtual time."""

import asyncio
from dataclasses import dataclass, field

from tests.unit.virtual_time import run
from tpu_training_operator.kube.cluster import Object, Resource
from tpu_training_operator.kube.errors import Forbidden
from tpu_training_operator.runtime.leadership import LABEL_LEADS, OwnPod


@dataclass
class OnePod:
    """The API server with one pod. `may`: whether its labels may be changed."""

    may: bool = True
    labels: Object = field(default_factory=dict)

    async def patch(self, resource: Resource, namespace: str, name: str, body: Object) -> Object:
        if not self.may:
            raise Forbidden(403, "Forbidden", "pods is forbidden")
        self.labels |= body["metadata"]["labels"]
        return body


def test_a_label_that_was_refused_or_taken_away_comes_back() -> None:
    async def story() -> list[object]:
        pod, seen = OnePod(may=False), list[object]()
        telling = asyncio.create_task(OwnPod(pod, "tpu-system", "operator-0").keep_label())
        for may in (False, True, True):
            pod.may, pod.labels = may, {}
            await asyncio.sleep(60)
            seen.append(pod.labels.get(LABEL_LEADS))
        telling.cancel()
        return seen

    assert run(story()) == [None, "true", "true"]
