"""A cluster of tokens, jobs and pods, as the reviewer of the progress service asks for them; it counts questions."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.unit.jobs import job_body
from tests.unit.pods import pod
from tpu_training_operator.api.constants import PROGRESS_AUDIENCE
from tpu_training_operator.kube.cluster import Object, Resource
from tpu_training_operator.kube.errors import ApiError, NotFound

POD_NAME = "authentication.kubernetes.io/pod-name"
POD_UID = "authentication.kubernetes.io/pod-uid"

# The status.resolved of a job of 300 steps.
RESOLVED = {
    "acceleratorType": "v5litepod-16",
    "generation": "v5e",
    "topology": "4x4",
    "slices": 1,
    "hostsPerSlice": 4,
    "hosts": 4,
    "chipsPerHost": 4,
    "chips": 16,
    "replicas": 16,
    "perReplicaBatchSize": 8,
    "globalBatchSize": 128,
    "trainSteps": 300,
    "warmupSteps": 0,
    "learningRate": "0.1",
    "scaleFactor": "1",
}


def begun_job(changes: Object | None = None) -> Object:
    return job_body({"status.attempt": 2} | (changes or {}))


def token_of(body: Object, **changes: Any) -> Object:
    """The status of a TokenReview of this pod's token."""
    metadata = body["metadata"]
    user = {
        "username": f"system:serviceaccount:{metadata['namespace']}:default",
        "extra": {POD_NAME: [metadata["name"]], POD_UID: [metadata["uid"]]},
    }
    return {"authenticated": True, "audiences": [PROGRESS_AUDIENCE], "user": user} | changes


@dataclass
class ReviewingCluster:
    """`error`: raised instead of any answer. `gate`: answers wait until it is set."""

    objects: list[Object] = field(default_factory=lambda: [begun_job(), pod()])
    tokens: dict[str, Object] = field(default_factory=lambda: {"token": token_of(pod())})
    asked: Counter[str] = field(default_factory=Counter)
    error: ApiError | None = None
    gate: asyncio.Event | None = None

    async def create(self, body: Object) -> Object:
        await self._note(body["kind"])
        assert body["spec"]["audiences"] == [PROGRESS_AUDIENCE]
        return {**body, "status": self.tokens.get(body["spec"]["token"], {"user": {}, "error": "invalid bearer token"})}

    async def get(self, resource: Resource, namespace: str, name: str) -> Object:
        await self._note(resource.kind)
        wanted = (resource.kind, namespace, name)
        for body in self.objects:
            if (body["kind"], body["metadata"]["namespace"], body["metadata"]["name"]) == wanted:
                return body
        raise NotFound(404, "NotFound", f"{name} not found")

    async def _note(self, kind: str) -> None:
        self.asked[kind] += 1
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
