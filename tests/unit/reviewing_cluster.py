"""A cluster of tokens, jobs and pods, as the reviewer of the progress service asks for them."""

from collections.abc import Mapping, Sequence
from typing import Any

from tests.fakes.cluster import FakeCluster
from tests.unit.jobs import job_body
from tests.unit.pods import pod
from tpu_training_operator.api.constants import PROGRESS_AUDIENCE
from tpu_training_operator.kube.cluster import Object

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


def reviewing_cluster(
    objects: Sequence[Object] | None = None, tokens: Mapping[str, Object] | None = None
) -> FakeCluster:
    """`tokens`: the status of each token's review."""
    cluster = FakeCluster(*([begun_job(), pod()] if objects is None else objects))
    cluster.reviews = {"token": token_of(pod())} if tokens is None else dict(tokens)
    return cluster
