"""A valid job as plain data, and copies of it with single fields changed."""

import copy
from collections.abc import Mapping
from typing import Any

from tpu_training_operator.api.job import Spec, TPUTrainingJob
from tpu_training_operator.api.validation import parse_job
from tpu_training_operator.domain.job.recipe.resolve import Resolution, resolve


def restart_limits(limits: Mapping[str, int]) -> list[dict[str, Any]]:
    return [{"class": name, "max": limit} for name, limit in limits.items()]


class _Absent:
    def __repr__(self) -> str:
        return "ABSENT"


ABSENT = _Absent()

_JOB: dict[str, Any] = {
    "apiVersion": "tpu-operator.dev/v1alpha1",
    "kind": "TPUTrainingJob",
    "metadata": {
        "name": "digits",
        "namespace": "default",
        "uid": "8b6b0c5e-1f7a-4c39-9d11-0242ac120002",
        "generation": 1,
    },
    "spec": {
        "slice": {"acceleratorType": "v5litepod-16"},
        "trainer": {"image": "localhost/tpu-examples:1", "entrypoint": "examples.digits:task"},
        "recipe": {
            "globalBatchSize": 128,
            "trainSteps": 300,
            "optimizer": {"name": "sgd", "learningRate": 0.1},
        },
        # Most tests begin with the first attempt; those of the entry check switch it on.
        "entryCheck": {"mode": "Skip"},
    },
}


def job_body(changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """A valid job on four hosts of v5litepod-16, with `changes`: values (or ABSENT) by path ("spec.slice.count")."""
    body = copy.deepcopy(_JOB)
    for path, value in (changes or {}).items():
        *above, last = path.split(".")
        place = body
        for part in above:
            place = place.setdefault(part, {})
        if value is ABSENT:
            del place[last]
        else:
            place[last] = copy.deepcopy(value)
    return body


def job(changes: dict[str, Any] | None = None) -> TPUTrainingJob:
    return parse_job(job_body(changes))


def resolved(changes: dict[str, Any] | None = None) -> tuple[TPUTrainingJob, Resolution]:
    parsed = job(changes)
    return parsed, resolve(parsed.spec)


def spec(changes: dict[str, Any] | None = None) -> Spec:
    return job({f"spec.{path}": value for path, value in (changes or {}).items()}).spec
